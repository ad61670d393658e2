"""Tables of answer times that nobody built from a job: random terms, or one interaction alone."""

import numpy as np

from megatron_prism.features.pacing.answer_times import AnswerTimes


def random_table(member, of, local=(0,), seed=3, most=4, weights=100_000):
    """Up to ``most`` terms for each interaction that ``of`` names, to earlier interactions or into
    the last iteration; seat i is of interaction ``of[i]`` and the local rank ``member[i]``."""
    rng, count = np.random.default_rng(seed), max(of) + 1
    start, cause, back, weight = [0], [], [], []
    for j in range(count):
        for _ in range(int(rng.integers(0, most + 1))):
            earlier = j > 0 and rng.random() < 0.7
            cause.append(int(rng.integers(0, j if earlier else count)))
            back.append(0 if earlier else 1)
            weight.append(int(rng.integers(0, weights)))
        start.append(len(cause))
    member, of, cause, back = (np.array(a, np.int32) for a in (member, of, cause, back))
    own = rng.integers(1_000, 60_000, count)
    op, weight = np.arange(len(of), dtype=np.int32), np.array(weight, np.int64)
    return AnswerTimes(local, member, op, of, own, 0, np.array(start), cause, back, weight)


def one_interaction(own):
    """Of ``own`` ns."""
    one, none = np.zeros(1, np.int32), np.zeros(0, np.int32)
    ends = np.zeros(2, np.int64)
    return AnswerTimes((0,), one, one, one, np.array([own]), 0, ends, none, none, none)
