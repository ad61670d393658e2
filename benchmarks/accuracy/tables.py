"""Tables of docs/measurements.md reckoned from ``benchmarks/results`` and shipped data alone.

``python -m benchmarks.accuracy.tables NAME``

captured    : kept slices of ranks that were captured alone (``kept.py``), beside real iterations
without_gpu : kept slices of tier ``meta``, beside real iterations of others
halves      : whether one half of a stored real job's iterations tells the distribution of the
              other; first of all whether the job was stationary: the halves' own KS distance
              against that of 500 shuffles (p), its drift, the correlation of neighbours
layouts     : whether predictions put layouts of one model in the order of the stored real jobs (by
              time per sample, ranks captured on the same GPUs; batches of layouts differ)
pairs       : of two jobs on one machine, which is said to be faster, and whether it was
network     : modelled calls between nodes (NCCL's own estimate on the rates of ``machine=h100``,
              nothing fitted) beside nccl-tests that others published (``h100_nccl_tests.json``)
rooflines   : every time of the shipped op tables, predicted by the roofline of the same machine
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

from benchmarks.accuracy import kept
from benchmarks.accuracy.jobs import COMMON, EVERY, MORE
from benchmarks.report import RESULTS
from megatron_prism.features.predict.distributions import fit
from megatron_prism.replay.costs.collectives import Shape, modelled
from megatron_prism.replay.costs.kernels import OpTable, parts_of, read
from megatron_prism.replay.costs.machine import machine
from megatron_prism.replay.uncertainty.differences import UncertainTime, drawn


def stored(name: str) -> Any:
    """``benchmarks/results/NAME.json``."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def signed(part: float, digits: int) -> str:
    """``−1.6 %``."""
    return f"{100 * part:+.{digits}f} %".replace("-", "−")


# -- kept slices ----------------------------------------------------------------------------------
def beside(rows: Sequence[kept.Found], digits: int) -> None:
    for one in rows:
        ms = (f"{ns / 1e6:,.0f}" for ns in (one.real, one.predicted, one.low, one.high))
        real, predicted, low, high = ms
        inside = "" if one.holds else " **outside**"
        print(f"| {one.job} | {one.where} | {real} ms | {predicted} ms, "
              f"{signed(one.error, digits)} | {low} to {high} ms{inside} | "
              f"{one.host:.0%} |")  # fmt: skip


def captured() -> None:
    rows = list(kept.captured())
    beside(rows, 1)
    errors = [abs(one.error) for one in rows if one.where == "second sitting"]
    mean = statistics.fmean(errors)
    print(f"second sitting: mean {100 * mean:.1f} %, most {100 * max(errors):.1f} %")


def without_gpu() -> None:
    for hosts in ("faster", "slower", "earlier"):
        rows = sorted(kept.functional_tests(hosts, named=True), key=lambda one: -abs(one.error))
        errors = [one.error for one in rows]
        mean, median = statistics.mean(map(abs, errors)), statistics.median(errors)
        width = statistics.median(one.width for one in rows)
        print(f"{len(rows)} functional tests, {hosts} hosts: mean error {100 * mean:.0f} %, median "
              f"{100 * median:+.0f} %, worst {100 * errors[0]:+.0f} % ({rows[0].job}); "
              f"{sum(one.holds for one in rows)} inside intervals {100 * width:.0f} % "
              "wide")  # fmt: skip
        beside(rows[:10], 0)
    print("CUDA graphs of jobs of one GPU:")
    beside(list(kept.graphs()), 1)


# -- stored iterations of real jobs ---------------------------------------------------------------
SKIPPED, FEWEST, SHUFFLES, BOUND = 4, 40, 500, 0.15


def iterations(value: object, name: str) -> Iterator[tuple[str, np.ndarray]]:
    """(name, ms) of every list of iterations."""
    if isinstance(value, dict):
        times = value.get("iterations_ms")
        if isinstance(times, list) and len(times) >= FEWEST:
            yield f"{name} {value.get('config', '')}", np.array(times[SKIPPED:], dtype=float)
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from iterations(inner, name)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """KS distance of two samples."""
    at = np.concatenate([one, other])
    below = [np.searchsorted(np.sort(x), at, side="right") / len(x) for x in (one, other)]
    return float(np.abs(below[0] - below[1]).max())


def halves() -> None:
    """A distribution is fitted to one half, as ``predict`` fits a step, and held against the other:
    the first against the second half, then every other iteration."""
    rng, found = np.random.default_rng(0), []

    def told(known: np.ndarray, other: np.ndarray) -> float:
        made = fit((known / known.mean()).tolist(), "an iteration", FEWEST)
        return distance(made.at(rng.standard_normal(20_000)) * known.mean(), other)

    print("job | iterations | p of the halves | drift | correlation | KS 1st to 2nd | every other")
    for path in sorted(RESULTS.glob("*.json")):
        for name, ms in iterations(stored(path.stem), path.stem):
            half = len(ms) // 2
            own = distance(ms[:half], ms[half:])
            shuffles = [rng.permutation(ms) for _ in range(SHUFFLES)]
            p = statistics.fmean(distance(s[:half], s[half:]) >= own for s in shuffles)
            at = np.arange(len(ms)) - (len(ms) - 1) / 2
            drift = float((at * ms).sum() / (at * at).sum()) * len(ms) / float(ms.mean())
            near = float(np.corrcoef(ms[:-1], ms[1:])[0, 1])
            first, other = told(ms[:half], ms[half:]), told(ms[::2], ms[1::2])
            found.append((p, first, other))
            print(f"{name} | {len(ms)} | {p:.3f} | {100 * drift:+.1f} % | {near:.2f} | {first:.3f} "
                  f"| {other:.3f}")  # fmt: skip
    steady = [first for p, first, _ in found if p >= 0.05]
    median = statistics.median(steady) if steady else float("nan")
    print(f"stationary (p at least 0.05): {len(steady)} of {len(found)} jobs, median KS "
          f"{median:.3f}\n(the bound is {BOUND})\nevery other iteration: median KS "
          f"{statistics.median(other for *_, other in found):.3f}")  # fmt: skip


# -- the order of layouts -------------------------------------------------------------------------
SITTINGS = {4: ("nine", "between", "iteration_time", "paced", "turns"),
            2: ("again", "behind", "between", "links", "pauses", "steady")}  # fmt: skip
MODEL = ("--num-layers", "--hidden-size", "--ffn-hidden-size", "--seq-length", "--num-experts",
         "--transformer-impl", "--fp8-format")  # fmt: skip


def flags(config: str, more: str | None, gpus: int) -> dict[str, str]:
    """Flag -> its value; the last one counts."""
    words = shlex.split(f"{COMMON} {(EVERY[gpus] | MORE)[config]} {more or ''}")
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {a: "" if b.startswith("--") else b for a, b in pairs if a.startswith("--")}


def scores(name: str, gpus: int) -> dict[tuple[str, ...], list[tuple[float, float]]]:
    """(real, predicted) ms a sample of the layouts of each model in one sitting; the mean of a
    layout's repetitions."""
    found: dict[tuple[str, ...], dict[str, list[tuple[float, float]]]] = {}
    for row in stored(name)["rows"]:
        given = flags(row["config"], row.get("more"), gpus)
        batch = int(given["--global-batch-size"])
        model = tuple(given.get(flag, "") for flag in MODEL)
        layout = found.setdefault(model, {}).setdefault(row["config"], [])
        layout.append((row["real_ms"] / batch, row["predicted_ms"] / batch))
    return {
        model: [(statistics.mean(real), statistics.mean(said))
                for real, said in (zip(*each, strict=True) for each in layouts.values())]
        for model, layouts in found.items() if len(layouts) > 1
    }  # fmt: skip


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """tau-b of two scores of the same things: 1 the same order, -1 the opposite one.

    Source: Kendall, The treatment of ties in ranking problems, Biometrika 33 (1945), 239-251.
    """
    both = ties_one = ties_other = pairs = 0
    for i in range(len(one)):
        for j in range(i):
            a = (one[i] > one[j]) - (one[i] < one[j])
            b = (other[i] > other[j]) - (other[i] < other[j])
            both += a * b
            ties_one += a == 0
            ties_other += b == 0
            pairs += 1
    scale = ((pairs - ties_one) * (pairs - ties_other)) ** 0.5
    return both / scale if scale else 0.0


def layouts() -> None:
    """tau of every group, and of all pairs together."""
    right = pairs = 0
    for name, gpus in ((f"h200_x{n}_{s}", n) for n, each in SITTINGS.items() for s in each):
        for model, group in scores(name, gpus).items():
            count = len(group) * (len(group) - 1) // 2
            tau = kendall_tau(*zip(*group, strict=True))
            pairs, right = pairs + count, right + round((tau + 1) / 2 * count)
            print(f"{name} {' '.join(filter(None, model))}: {len(group)} layouts, tau {tau:.2f}")
    print(f"{right} of {pairs} pairs in the real order, tau {(2 * right - pairs) / pairs:.2f}")


def pairs() -> None:
    """Of all pairs of jobs of one kind: which is faster, and by how much."""
    rows: dict[str, list[tuple[float, UncertainTime]]] = defaultdict(list)
    for one in (*kept.captured(), *kept.functional_tests()):
        assert one.estimate is not None, "their slices are kept"
        rows[one.where].append((one.real, one.estimate))
    for kind, jobs in rows.items():
        said = Counter[str]()
        for (real, one), (other_real, other) in combinations(jobs, 2):
            times = drawn([one, other])
            low, high = np.quantile(times[:, 1] / times[:, 0], [0.025, 0.975])
            right = (low > 1) == (other_real > real)
            said["equal" if low <= 1 <= high else "right" if right else "wrong"] += 1
            said["inside"] += low <= other_real / real <= high
        print(f"| {kind} | {math.comb(len(jobs), 2)} | {said['right']} | {said['wrong']} "
              f"| {said['equal']} | {said['inside'] / math.comb(len(jobs), 2):.0%} |")  # fmt: skip


# -- the cost model's own parts -------------------------------------------------------------------
def network() -> None:
    here = machine("h100")
    print("| cluster | bytes | published | modelled | error |\n|---|---|---|---|---|")
    for table in stored("h100_nccl_tests")["tables"]:
        for row in table["rows"]:
            shape = Shape(row["nodes"] * here.gpus_per_node, here.gpus_per_node)
            us = modelled(row["op"], shape, row["bytes"], here) / 1e3
            print(f"| {table['where']} | {row['bytes'] / (1 << 20):,.0f} MiB | {row['us']:,.0f} us "
                  f"| {us:,.0f} us | {signed(us / row['us'] - 1, 0)} |")  # fmt: skip


def measured(table: OpTable) -> Iterator[tuple[str, str, float]]:
    """(kind, kernel as the recorder writes it, ns)."""
    for key, grid in table.grids.items():
        name, how, *_ = words = key.split()
        sizes = [np.exp(axis).round().astype(int).tolist() for axis in grid.axes]
        for at in product(*map(range, grid.ns.shape)):
            a, b, c = (size[i] for size, i in zip(sizes, at, strict=True))
            ns = math.exp(grid.ns[at]) if not math.isnan(grid.ns[at]) else 0.0
            if not ns or words[-1] != "bfloat16" or name == "bmm" or how == "flash2":
                continue
            if name == "gemm":
                work, moved = 2 * a * b * c, 2 * (a * c + c * b + a * b)
                yield "products", f"mm({a}x{c},{c}x{b})bfloat16:{work}:{moved}", ns
            else:
                work = (2 if name == "attention" else 5) * a * b * b * c
                yield name, f"{name}({b}x1x{a}x{c})bfloat16:{work}:0", ns
    for key, (sizes, times) in table.kernels.items():
        name, dtype = key.rsplit(maxsplit=1)
        for size, ns in zip(sizes.tolist(), times.tolist(), strict=True):
            yield "others, by bytes", f"{name.replace(' ', '_')}(){dtype}:0:{round(size)}", ns


def rooflines() -> None:
    """How far off the median is, and the root of the mean square of the logarithms."""
    for name in ("h100", "h200"):
        bare = dataclasses.replace(machine(name), ops="")
        errors = defaultdict(list)
        for kind, kernel, ns in measured(read(name)):
            errors[kind].append(math.log(parts_of(kernel, 0, 0, 0, bare, None).roof / ns))
        for kind, all_ in errors.items():
            off = np.array(all_)
            print(f"| {kind}, {name.upper()} | {len(off)} | {np.exp(np.median(off)) - 1:+.0%} | "
                  f"{np.sqrt((off * off).mean()):.2f} |")  # fmt: skip


TABLES = {
    one.__name__: one for one in (captured, without_gpu, halves, layouts, pairs, network, rooflines)
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=list(TABLES))
    TABLES[parser.parse_args().name]()
