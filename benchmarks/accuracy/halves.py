"""Does one half of a real job's iterations tell the distribution of the other?

``python -m benchmarks.accuracy.halves``

Every stored real job of 40 iterations or more (``iterations_ms`` in benchmarks/results), without
its first four.  A distribution is fitted to one half (``predict.distributions.fit``, as ``predict``
fits a step) and held against the other, once the first against the second half, once every other
iteration.  First of all, whether the job was stationary: the halves' own KS distance against that
of 500 shuffles (p), the trend over the run, and the correlation of neighbouring iterations.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_prism.predict.distributions import fit

RESULTS = Path(__file__).parents[1] / "results"
SKIPPED, FEWEST, SHUFFLES, BOUND = 4, 40, 500, 0.15


def jobs(value: object, name: str) -> Iterator[tuple[str, np.ndarray]]:
    """(name, ms) of every list of iterations."""
    if isinstance(value, dict):
        times = value.get("iterations_ms")
        if isinstance(times, list) and len(times) >= FEWEST:
            yield f"{name} {value.get('config', '')}", np.array(times[SKIPPED:], dtype=float)
        for inner in value.values():
            yield from jobs(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from jobs(inner, name)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """KS distance of two samples."""
    at = np.concatenate([one, other])
    below = [np.searchsorted(np.sort(x), at, side="right") / len(x) for x in (one, other)]
    return float(np.abs(below[0] - below[1]).max())


def predicted(known: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> float:
    """KS distance of what is fitted to ``known`` to ``other``."""
    made = fit((known / known.mean()).tolist(), "an iteration", FEWEST)
    return distance(made.at(rng.standard_normal(20_000)) * known.mean(), other)


def main() -> None:
    """Print the table."""
    rng, found = np.random.default_rng(0), []
    print("job | iterations | p of the halves | drift | correlation | KS 1st to 2nd | every other")
    for path in sorted(RESULTS.glob("*.json")):
        for name, ms in jobs(json.loads(path.read_text()), path.stem):
            half = len(ms) // 2
            own = distance(ms[:half], ms[half:])
            shuffles = [rng.permutation(ms) for _ in range(SHUFFLES)]
            p = statistics.fmean(distance(s[:half], s[half:]) >= own for s in shuffles)
            at = np.arange(len(ms)) - (len(ms) - 1) / 2
            drift = float((at * ms).sum() / (at * at).sum()) * len(ms) / float(ms.mean())
            near = float(np.corrcoef(ms[:-1], ms[1:])[0, 1])
            first, other = predicted(ms[:half], ms[half:], rng), predicted(ms[::2], ms[1::2], rng)
            found.append((p, first, other))
            print(f"{name} | {len(ms)} | {p:.3f} | {100 * drift:+.1f} % | {near:.2f} | {first:.3f} "
                  f"| {other:.3f}")  # fmt: skip
    steady = [first for p, first, _ in found if p >= 0.05]
    median = statistics.median(steady) if steady else float("nan")
    print(
        f"stationary (p at least 0.05): {len(steady)} of {len(found)} jobs, median KS {median:.3f}"
    )
    print(f"(the bound is {BOUND})")
    print(f"every other iteration: median KS {statistics.median(o for _, _, o in found):.3f}")


if __name__ == "__main__":
    main()
