"""Damaged copies of every kind of file and text that others hand us, and what reads them.

``PARSERS`` has a row for each kind: good examples, how they are damaged, what reads one.  Damage
knows the structure: a text, an archive and a file of records are trees too, whose values are
replaced, removed, nested and aliased; now and then bytes are flipped.  ``tests/corpus`` has what
once failed.
"""

import contextlib
import dataclasses
import io
import json
import pickle
import re
import struct
import tempfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import yaml
from helpers import random_hangs
from helpers.programs import WORLDS, healthy

from megatron_prism.core import foreign, units
from megatron_prism.core.errors import PrismError
from megatron_prism.core.jobs import job_settings, recipe
from megatron_prism.core.programs import (
    program,
    program_text,
    slices,
)
from megatron_prism.core.world import World
from megatron_prism.features.calibrate import nccl_tests
from megatron_prism.features.guard import baseline
from megatron_prism.features.hang import analyze, dumps, export, fault_plan
from megatron_prism.features.hang import planting as fault_planting
from megatron_prism.features.hang.diagnose import diagnose
from megatron_prism.features.predict.variability import read_variability
from megatron_prism.graph import stall, world_graph
from megatron_prism.memory import allocator, nccl_buffers, peak_changes
from megatron_prism.memory.job_peaks import peak_memory
from megatron_prism.replay import network
from megatron_prism.replay.costs import (
    kernels,
    machine,
    nccl_settings,
)
from megatron_prism.replay.costs.collectives import read_calibration
from megatron_prism.replay.costs.host_index import read_host_index
from megatron_prism.replay.priced_graph import price, replay

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests" / "corpus"
MOST_S = 10

WORDS = [
    "", "0", "-1", "1e400", "-1e400", "nan", "inf", "99999999999999999999", "9" * 400, "0x10",
    "None", "null", "true", "~", "x" * 300, "\x1b[2J", "\x00", "\u202e", "a=b", "=", ",", "-", "..",
    "[0]", "{}", "&a", "*a", "${x}", "${oc.env:HOME}", "!!python/object:os.system", "0,0",
    "2097152", "67108864", "1/0", "8 GiB", "é", "all_reduce", "send", "recv", "rank=0", "1F0", "#",
    "0-9", "%", "1_0",
]  # fmt: skip
VALUES = [
    None, True, 0, -1, 1, 1.5, 1e308, 1 << 62, 1 << 70, -(1 << 63), "", "x", "9" * 400, "\x1b[2J",
    [], {}, [[]], [0, 0], {"": 0}, {"ranks": 1}, [None], ["a"], [1 << 40], "[0, 1]", "[0, 0]",
    "2.10", "nccl:send 9->9", "all_reduce", 10**400, -0.0,
]  # fmt: skip


# -- damage ---------------------------------------------------------------------------------------
def flipped(rng, data):
    data = bytearray(data or b"x")
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.randrange(3) == 0:
        del data[rng.randrange(len(data)) :]
    if rng.randrange(8) == 0:
        place = rng.randrange(len(data) + 1)
        data[place:place] = data[:64] * rng.randint(1, 50)
    return bytes(data)


def damaged(rng, value, depth=0):
    """A copy of a tree with one place changed."""
    if isinstance(value, dict | list) and value and (depth < 1 or rng.randrange(10) < 7):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key, copy = rng.choice(keys), value.copy()
        how = rng.randrange(12)
        if how == 0:
            del copy[key]
        elif how == 1 and isinstance(copy, list):
            copy.insert(key, copy[rng.choice(keys)])
        elif how == 1:
            copy[rng.choice(["x", "", 5, key * 2 if isinstance(key, str) else "y"])] = copy[key]
        elif how == 2:
            copy[key] = copy[rng.choice(keys)]
        else:
            copy[key] = damaged(rng, copy[key], depth + 1)
        return copy
    if rng.randrange(12) == 0:
        for _ in range(rng.choice([2, 8, 40])):  # aliases: a few bytes that mean many
            value = [value] * rng.choice([1, 10])
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.randrange(2):
        return rng.choice([value + 1, -value, value * 1000, str(value), 0, value - 1])
    if isinstance(value, bytes):
        return rng.choice([value[: rng.randrange(300)], value * 2, bytes(1 << 24), b""])
    if isinstance(value, np.ndarray):
        return column(rng, value)
    return rng.choice(WORDS if isinstance(value, str) and rng.randrange(2) else VALUES)


def column(rng, array):
    """Values of it exchanged, its end cut, another type."""
    how = rng.randrange(4)
    if how == 0:
        return array[: rng.randrange(len(array) + 1)] if array.ndim else array
    if how == 1 and not array.dtype.names:
        return array.astype(rng.choice(["<i8", "f8", "U3", "?", "<i2", ">i4"]))
    array = array.copy().reshape(-1)
    for _ in range(rng.randint(1, 3) if array.size else 0):
        field = array[rng.choice(array.dtype.names)] if array.dtype.names else array
        if field.dtype.kind in "iu":
            low, high = np.iinfo(field.dtype).min, np.iinfo(field.dtype).max
            field[rng.randrange(len(field))] = rng.choice([low, high, max(low, -1), 0, 1, 7])
    return array


def more(rng, change, value):
    for _ in range(rng.choice([1, 1, 2, 4])):
        value = change(rng, value)
    return value


def as_tree(write, read):
    """Damage of what ``read`` makes a tree of, and of its bytes."""

    def change(rng, data):
        if rng.randrange(5) == 0:
            return flipped(rng, data)
        try:
            return write(more(rng, damaged, read(data)))
        except (RecursionError, ValueError, TypeError, AttributeError, yaml.YAMLError, MemoryError):
            return flipped(rng, data)  # it cannot be written

    return change


class Plain(yaml.SafeDumper):
    """Writes aliases for what is there twice."""


def to_yaml(value):
    foreign.expanded_size(value, 1 << 20)
    return yaml.dump(value, Dumper=Plain).encode(errors="surrogateescape")


def to_json(value):
    foreign.expanded_size(value, 1 << 20)
    return json.dumps(value).encode()


_WORD = re.compile(r"([\s=,:@;()/|-]+)")


def to_text(lines):
    foreign.expanded_size(lines, 1 << 14)

    def joined(value):
        return "".join(map(joined, value)) if isinstance(value, list) else str(value)

    return "\n".join(map(joined, lines)).encode(errors="replace")


def of_text_lines(data):
    return [_WORD.split(line) for line in data.decode(errors="replace").split("\n")]


def to_archive(members):
    """As ``numpy.savez`` writes; what is no column is JSON."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name twice
        for name, value in members:
            stored = io.BytesIO()
            array = isinstance(value, np.ndarray)
            np.save(stored, value if array else np.frombuffer(to_json(value), dtype=np.uint8))
            archive.writestr(f"{name}.npy", stored.getvalue())
    return file.getvalue()


def of_archive_members(data):
    with np.load(io.BytesIO(data)) as archive:
        arrays = [[name, archive[name]] for name in archive.files]
    return [[n, json.loads(a.tobytes()) if n == "head" else a] for n, a in arrays]


def to_payloads(records):
    """Heads and data as ``PayloadRecorder`` writes them."""
    parts = [(to_json(head), zlib.compress(data, 1)) for head, data in records]
    return b"".join(struct.pack("<II", len(h), len(d)) + h + d for h, d in parts)


def of_payload_records(data):
    records, at = [], 0
    while at < len(data):
        text, packed = struct.unpack_from("<II", data, at)
        head = json.loads(data[at + 8 : at + 8 + text])
        at += 8 + text + packed
        records.append([head, zlib.decompress(data[at - packed : at])])
    return records


of_json = as_tree(to_json, json.loads)
of_yaml = as_tree(to_yaml, yaml.safe_load)
of_pickle = as_tree(lambda value: pickle.dumps(value, protocol=4), pickle.loads)
of_text = as_tree(to_text, of_text_lines)
of_archive = as_tree(to_archive, of_archive_members)
of_payloads = as_tree(to_payloads, of_payload_records)


# -- what reads them -------------------------------------------------------------------------------
def use(programs):
    """What commands do with programs, of a world small enough to be replayed at once."""
    if programs.world.size > 64 or sum(map(len, programs.programs)) > 2000:
        return
    assert program_text.parse(program_text.dump(programs), "") == programs
    for step in (
        lambda: str(world_graph.build(programs).check()[:1]),
        lambda: str(diagnose(programs=programs)),
        lambda: replay(programs).to_text(),
        lambda: peak_memory(programs),
    ):
        with contextlib.suppress(PrismError):
            step()


SMALL = healthy(WORLDS[1])
WORLD = random_hangs.WORLDS[0]
STATE = stall.run_until_stalled(healthy(WORLD), {5: stall.RankFault(host=6)})
DUMPS = [
    {r: export.dump_of(STATE, r, active_only=active) for r in range(16)} for active in (False, True)
]


GOOD = {r: dumps.parse(pickle.dumps(v), r) for r, v in DUMPS[0].items() if r != 3}


def dump_set(path):
    """A damaged dump beside good ones."""
    found, broken = {**GOOD}, {}
    try:
        found[3] = dumps.parse(path.read_bytes(), 3)
    except PrismError as error:
        broken[3] = error.message
    verdict = analyze.diagnose_dumps(dumps.DumpSet(found, broken))
    json.dumps(verdict.to_json(), allow_nan=False)
    assert str(verdict)


def plan(path):
    fault_planting.plant(SMALL, fault_plan.load_plan(path), 0)


def one_fault(path):
    fault_planting.plant(SMALL, [fault_plan.parse(path.read_bytes().decode(errors="replace"))], 0)


def calibrated(path):
    price(SMALL, calibration=read_calibration(path)).timeline.to_text()


def on_machine(path):
    price(SMALL, machine=str(path)).timeline.to_text()


def nccl_output(path):
    json.dumps(nccl_tests.calibration([nccl_tests.read(path)]), allow_nan=False)


def compared(path):
    found = baseline.load(path)
    list(map(str, peak_changes.compare(MEASURED, found, any_job=True, limit=1)))


def words(path):
    """Every little language of the command line."""
    text = path.read_bytes().decode(errors="replace")
    errors = []
    for read in (
        units.parse_ns, units.parse_bytes, units.parse_count,
        nccl_settings.parse, SMALL.world.select, lambda t: network.read_topology(t, H200),
        allocator.Settings.parse, lambda t: job_settings.differences("x", t, t),
        lambda t: recipe.load("tiny-gpt_1cpu", [t]),
    ):  # fmt: skip
        try:
            read(text)
        except PrismError as error:
            errors.append(str(error))
    assert all(len(error) < 5000 + 2 * len(text) for error in errors)


def recorded(path):
    from megatron_prism.runtime.recorded_values import ValueReplayer

    folder = path.parent / "recording"
    folder.mkdir(exist_ok=True)
    (folder / "rank-000000.npz").write_bytes(path.read_bytes())
    ValueReplayer(folder, 0, {})


def payloads_of(path):
    """The records of a run's payloads, and what each of them delivers."""
    import torch

    from megatron_prism.features.debugger.payloads import PayloadReplayer, file_of

    folder = path.parent / "payloads"
    folder.mkdir(exist_ok=True)
    file_of(folder, 0).write_bytes(path.read_bytes())
    replayer = PayloadReplayer(folder, 0, {})
    for key, dtype in zip(KEYS, (torch.float32, torch.int64), strict=True):
        replayer._fill(key, torch.zeros(4, 8, dtype=dtype))


def folder_of_slices(path):
    folder = path.parent / "slices"
    folder.mkdir(exist_ok=True)
    (folder / "slice-000000.prism").write_bytes(path.read_bytes())
    use(slices.open_programs(folder))


# -- good examples --------------------------------------------------------------------------------
H200 = machine.machine("h200")
MEASURED = peak_memory(
    device=None,
    programs=program_text.parse(
        "prism-program 1\nworld size=1\nprogram rank=0\n- alloc storage=1 bytes=5MiB note=x\n"
        "0F0 compute ns=5us\nO compute ns=1us\n- free storage=1 bytes=5MiB\n"
    ),
)
TEXT = """prism-program 1
world size=4 tp=2 pp=2
source megatron_core=0.16.1 tier=meta
group MINE 0,1;2,3
program rank=0 ranks=0-1
0F0 compute ns=412us kernels=9 host=3us lead=1us flops=100 traffic=7 note="mm(4x8,8x4)bfloat16:9:9"
- alloc storage=3 bytes=5MiB note=weight
0F0 all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=4096 reduce=sum @mappings.py:31
0F0 send PIPELINE_MODEL_PARALLEL_GROUP bf16 in=4096 peer=1 handle=3 batch=1
0F0 wait handle=3
- free storage=3 bytes=5MiB
O all_reduce MINE fp32 n=1 reduce=max stream=s1
program rank=2 ranks=2-3
0F0 recv PIPELINE_MODEL_PARALLEL_GROUP bf16 out=4096 peer=-1 batch=1
0F0 compute ns=1ms
0F0 all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=4096 reduce=sum
O all_reduce MINE fp32 n=1 reduce=max stream=s1
"""
PLAN = """- drop@rank=3,group=tp,nth=2
- kind: drop
  at: {rank: 5, group: tp, nth: 1}
"""
NCCL = """# nccl-tests version 2.17.9 nccl-headers=22809 nccl-library=22809
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 1024 maxBytes 1048576 step: 2(factor) warmup iters: 1 iters: 20
# Using devices
#  Rank  0 Group  0 Pid   100 on      node0 device  0 [0000:00:00] NVIDIA H200
#  Rank  1 Group  0 Pid   101 on      node0 device  1 [0000:01:00] NVIDIA H200
#  size count type redop root time algbw busbw #wrong time algbw busbw #wrong
 1048576 262144 float sum -1 30.00 34.95 34.95 0 30.00 34.95 34.95 0
 134217728 33554432 float sum -1 700.00 191.74 191.74 0 700.00 191.74 191.74 0
# Avg bus bandwidth    : 100.1
"""
NCCL_JSON = {
    "version": 1, "args": ["./all_reduce_perf", "-g", "2"], "nccl_version": "2.28.9",
    "config": {"devices": [{"rank": r, "hostname": "n", "device_info": "H200"} for r in (0, 1)]},
    "results": [{"size": 1048576, "count": 4, "out_of_place": {"time": 30.0, "alg_bw": 34.95,
                 "bus_bw": 34.95, "nwrong": "0"}, "in_place": {"time": 30.0, "alg_bw": 34.95,
                 "bus_bw": 34.95, "nwrong": "0"}}],
}  # fmt: skip
HOST = {
    "host_index": {"version": 1, "index": 1.0, "spread": 0.1, "parts": {"a": 1.0}, "source": "x"}
}
WORDS_OF_COMMANDS = [
    "1.5 GiB", "412us", "400Gbit/s", "70.6B", "NCCL_ALGO=Ring NCCL_PROTO=^LL", "pp=1,tp=0", "0-3,7",
    "any:1", "rails", "fat-tree:2", "expandable_segments:True,max_split_size_mb:64",
    "roundup_power2_divisions:[256:1,512:2,>:4]", "lr=1e-4", "num_layers=4",
    '{"given":{"--a":"1"},"others":{}}',
]  # fmt: skip
FAULTS = [
    "drop@rank=3,group=tp,nth=2", "slow@rank=0:factor=2", "delay@rank=any:2,iter=0:ms=5",
    "dtype@rank=2,op=all_reduce,site=mapp.*", "drop@rank=node=0/4,nth=2",
    "nic@rank=0:bw_factor=0.5", "drop@rank=rail=1/4,nth=2", "shape@rank=pp=1,nth=3",
]  # fmt: skip


def saved(programs):
    with tempfile.TemporaryDirectory() as folder:
        return program.save(programs, Path(folder, "x.prism")).read_bytes()


def stored_baseline():
    with tempfile.TemporaryDirectory() as folder:
        return baseline.save(MEASURED, Path(folder, "x.json")).read_bytes()


RECORDING = to_archive(
    [
        ("head", {"format": 3, "rank": 0, "arguments": "x"}),
        ("1 gather tp#0", np.arange(4)),
        ("1 route 1#0", np.zeros((2, 1), np.uint8)),
    ]
)
KEYS = "2 1F0 all_reduce tp #1.0", "gather #1.0"
PAYLOADS = to_payloads(
    [
        ({"format": 1, "rank": 0}, b""),
        ({"arguments": "x"}, b""),
        (
            {"key": "2 1F0 all_reduce tp #1.0", "shape": [4, 8], "dtype": "torch.float32"},
            bytes(128),
        ),
        ({"key": "gather #1.0", "shape": [4, 8], "dtype": "torch.int64"}, bytes(256)),
    ]
)


def shorter(path):
    """A JSON file of ours with a few rows of its lists of rows."""
    stored = json.loads(Path(path).read_text())
    for key, value in stored.items():
        if isinstance(value, list):
            stored[key] = value[:3]
    stored["grids"] = {"gemm tn bfloat16": {"axes": [[1, 2], [4]], "ns": [3.0, None]}}
    stored["kernels"] = dict(list(stored.get("kernels", {}).items())[:2])
    stored["sustained"] = [{"shape": [1.0, 4.0], "points": [[0.5, 1.0], [1.0, 1.1]]}]
    return json.dumps(stored).encode()


@dataclasses.dataclass(frozen=True)
class Parser:
    """One kind of foreign file."""

    read: Callable
    damage: Callable
    examples: list


def lines_of(texts):
    return [text.encode() for text in texts]


PACKAGE = ROOT / "megatron_prism"
RECIPES = [
    path.read_bytes().replace(b"data_path: data/lighthouse.txt", b"mock_data: true")
    for path in sorted((ROOT / "recipes").glob("*.yaml"))
]
PARSERS = {
    "dump, pickle": Parser(
        dump_set, of_pickle, [pickle.dumps(one[3], protocol=4) for one in DUMPS]
    ),
    "dump, JSON": Parser(dump_set, of_json, [json.dumps(one[3]).encode() for one in DUMPS]),
    "plan of faults": Parser(plan, of_yaml, [PLAN.encode()]),
    "plan of faults, text": Parser(plan, of_text, [PLAN.encode()]),
    "fault": Parser(one_fault, of_text, lines_of(FAULTS)),
    "recipe": Parser(recipe.load, of_yaml, RECIPES),
    "recipe, text": Parser(recipe.load, of_text, RECIPES),
    "programs": Parser(lambda path: use(program.load(path)), of_archive,
                       [saved(SMALL), saved(program_text.parse(TEXT))]),
    "slices": Parser(folder_of_slices, of_archive, [saved(healthy(World(1)))]),
    "programs, text": Parser(lambda path: use(slices.open_programs(path)), of_text,
                             [TEXT.encode(), program_text.dump(SMALL).encode()]),
    "calibration": Parser(calibrated, of_json,
                          [(ROOT / "tests/golden/calibration.json").read_bytes()]),
    "host index": Parser(read_host_index, of_json, [json.dumps(HOST).encode()]),
    "nccl-tests, text": Parser(nccl_output, of_text, [NCCL.encode()]),
    "nccl-tests, JSON": Parser(nccl_output, of_json, [json.dumps(NCCL_JSON).encode()]),
    "machine": Parser(on_machine, of_json, [p.read_bytes() for p in machine.machines().values()]),
    "op table": Parser(kernels.read, of_json, [shorter(PACKAGE / "replay/costs/ops/h200.json")]),
    "variability": Parser(read_variability, of_json,
                          [(PACKAGE / "features/predict/variability/public.json").read_bytes()]),
    "NCCL buffers": Parser(nccl_buffers.read, of_json,
                           [(PACKAGE / "memory/device_memory/h200.json").read_bytes()]),
    "baseline": Parser(compared, of_json, [stored_baseline()]),
    "recording": Parser(recorded, of_archive, [RECORDING]),
    "payloads": Parser(payloads_of, of_payloads, [PAYLOADS]),
    "words": Parser(words, of_text, lines_of(WORDS_OF_COMMANDS)),
}  # fmt: skip


# -- trying ----------------------------------------------------------------------------------------
def attempt(parser, data, folder):
    """Read ``data``: "read" or "refused"; whatever is not ours comes through, slowness as well."""
    path = Path(folder, "file")
    path.write_bytes(data)
    begin = time.process_time()
    try:
        with foreign.bounded_memory(0):
            parser.read(path)
        said = "read"
    except PrismError:
        said = "refused"
    took = time.process_time() - begin
    assert took < MOST_S, f"{took:.1f} s"
    return said
