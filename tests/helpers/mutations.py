"""Damaged copies of a dump."""

import pickle

from helpers.programs import healthy
from helpers.random_hangs import WORLDS

from megatron_prism.graph import stall
from megatron_prism.hang import export

WORLD = WORLDS[0]
STATE = stall.run_until_stalled(healthy(WORLD), {5: stall.RankFault(host=6)})


# -- fuzzing --------------------------------------------------------------------------------------
DUMPS = [
    {r: export.dump_of(STATE, r, active_only=active) for r in range(16)} for active in (False, True)
]
FILES = [{r: pickle.dumps(v, protocol=2) for r, v in dumps.items()} for dumps in DUMPS]
ODD = [None, -1, 1 << 70, "", "x", [], {}, [[]], 1.5, True, b"x", "[0, 1]", "nccl:send 9->9"]


def mutated(rng):
    """Damaged bytes, or a well-formed file with wrong values."""
    which = rng.randrange(2)
    files = dict(FILES[which])
    for rank in rng.sample(range(16), rng.randrange(4)):
        del files[rank]
    for rank in rng.sample(sorted(files), rng.randint(1, 3)):
        if rng.random() < 0.5:
            data = bytearray(files[rank])
            for _ in range(rng.randint(1, 8)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            files[rank] = bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
        else:
            files[rank] = pickle.dumps(spoilt(rng, DUMPS[which][rank]))
    return files


def spoilt(rng, value, depth=0):
    """A copy in which something is something else."""
    if isinstance(value, dict | list) and value and (depth < 2 or rng.random() < 0.7):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key, copy = rng.choice(keys), value.copy()
        if rng.random() < 0.1:
            del copy[key]
        else:
            copy[key] = spoilt(rng, copy[key], depth + 1)
        return copy
    return rng.choice(ODD)
