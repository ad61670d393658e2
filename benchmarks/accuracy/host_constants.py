"""What a host takes for a call of Python, a kernel and a product, fitted to real iterations.

``python -m benchmarks.accuracy.host_constants [--write]``

The constants are those of ``runtime/recorder/python_calls.py``, of a host of index 0.7.  Rows are
the functional tests of ``results/without_gpu.json.gz`` on NVIDIA's faster hosts (index 0.6), but
those with CUDA graphs, and its jobs of one GPU in two sittings, whose host's index is fitted, too.
Each row is replayed from slices of tier ``meta``.  The sum of the errors' absolute logarithms is
least for the constants that are found; errors below 2 % count as squares, so that no row decides
alone.  Prints the constants, each row's error, and the errors of rows that were left out, by the
slopes at the constants found.

``--write``: give the kept slices the host's time by today's constants.  The file says by which
constants it was made.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import megatron_prism as prism
from benchmarks.accuracy import kept
from megatron_prism.core.programs.ops import CODE, PHASE_NAMES, STEPS
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.programs.program_text import dump, parse
from megatron_prism.replay.costs.host import MODELLED_INDEX
from megatron_prism.runtime.recorder import python_calls

KINDS = ("call", "kernel", "loop", "product", "unseen")
TODAY = (
    python_calls.CALL_NS,
    python_calls.KERNEL_NS,
    python_calls.LOOP_NS,
    python_calls.PRODUCT_NS,
    python_calls.UNSEEN_NS,
)
_KERNEL = re.compile(r"(?:^|; )(\w+)\([^)]*\)\w*:\d+:\d+(?:\*(\d+))?")
_LOOPED = ("fp8_", "fill_empty")  # as the recorder counts them
# index of the host, at first; the first word is the machine
_SITTINGS = {"h100": 1.0, "h200": 1.2, "h200, second sitting": 1.2}
_SMALL = 0.02  # errors below count as squares
_STEP = 1.1  # of a constant, for the slopes
_ROUNDS = 4
# how far a constant may go in a round: what the rows leave open stays where it is
HOLD = np.array([0.5, 0.5, 3.0, 3.0, 0.5, 0.1, 0.1, 0.1])


@dataclass(frozen=True)
class Row:
    """A job beside its real iteration.

    Attributes:
        name: of the job, and its sitting.
        programs: slices of tier meta.
        counts: of each program, calls, kernels by Python, looped kernels, products and products of
            varying shapes of each op; float64 [5, ops].
        real_ns: its iteration.
        sitting: machine of the replay, and which of its sittings.
        index: of its host; None if it is fitted.
    """

    name: str
    programs: Programs
    counts: tuple[np.ndarray, ...]
    real_ns: float
    sitting: str
    index: float | None

    def iteration_ns(self, constants: np.ndarray, index: float) -> int:
        """Replay the job on a host of an index."""
        factor = index / MODELLED_INDEX
        priced = []
        for program, counts in zip(self.programs.programs, self.counts, strict=True):
            priced.append(with_constants(program, counts, constants * factor))
        programs = dataclasses.replace(self.programs, programs=tuple(priced))
        machine, _, _ = self.sitting.partition(",")
        return prism.replay(programs, machine=machine).iteration_ns


def with_constants(program: Program, counts: np.ndarray, constants: np.ndarray) -> Program:
    """Give the segments of a program the host's time by constants."""
    ops = program.ops.copy()
    whole_ns = np.rint(constants @ counts).astype(np.int64)
    kernels = counts[1] + counts[2] + counts[3]
    first_ns = (whole_ns / np.maximum(kernels, 1)).astype(np.int64)
    is_counted = kernels > 0
    ops["host"] = np.where(is_counted, whole_ns, ops["host"])
    ops["lead"] = np.where(is_counted, first_ns, ops["lead"])
    ops["kernels"] = np.where(is_counted, kernels, ops["kernels"])
    return dataclasses.replace(program, ops=ops)


def counted(program: Program, stored: Mapping[str, Any], made_by: Sequence[float]) -> np.ndarray:
    """Say what each segment's host does: calls of Python follow from the rest, which has the starts
    of backwards where they were counted.

    Args:
        program: of slices of tier meta.
        stored: of the job: ``local_experts`` of a rank, and ``unseen_share`` of their products.
        made_by: constants that the host's time in the program is by.

    Returns:
        float64 [5, ops], in the order of ``KINDS``; 0 of ops that are no segments.
    """
    experts = stored.get("local_experts", 1)
    counts = np.zeros((len(KINDS), len(program.ops)))
    for place, op in enumerate(program.ops):
        if op["name"] != CODE["compute"] or op["host"] < 0 or op["kernels"] <= 0:
            continue
        looped = grouped = 0
        for name, times in _KERNEL.findall(program.strings[op["note"]]):
            if name.startswith(_LOOPED):
                looped += int(times or 1)
            if name == "grouped_gemm":
                grouped += int(times or 1)
        # before products were counted, a grouped one was a kernel
        has_products = made_by[3] > 0
        products = grouped * (experts - 1)
        kernels = int(op["kernels"])
        if has_products:
            kernels -= products
        if PHASE_NAMES[op["phase"]] not in STEPS:
            looped = kernels
        unseen = grouped * experts * stored.get("unseen_share", 0.0)
        others = np.array([0, kernels - looped, looped, products, unseen], dtype=float)
        rest_ns = int(op["host"]) - others @ np.array(made_by, dtype=float)
        calls = round(rest_ns / made_by[0])
        counts[:, place] = (calls, *others[1:])
    return counts


def rows() -> list[Row]:
    """List the jobs that the constants are fitted to."""
    file = kept.read(kept.WITHOUT_GPU)
    made_by = [file["constants"][kind] for kind in KINDS]
    found = []
    for name, stored in sorted(file["tests"].items()):
        # its host launches graphs, in no time that one of these constants is of
        if "cudagraph" in name or "faster" not in stored["seconds"]:
            continue
        programs = parse(stored["program"])
        counts = tuple(counted(program, stored, made_by) for program in programs.programs)
        real_ns = 1e9 * stored["seconds"]["faster"]
        found.append(Row(name, programs, counts, real_ns, "h100", kept.FASTER))
    for name, stored in sorted(file["one_gpu"].items()):
        programs = parse(stored["program"])
        counts = tuple(counted(program, stored, made_by) for program in programs.programs)
        for sitting, iterations_ms in stored["real_ms"].items():
            real_ns = 1e6 * statistics.median(iterations_ms)
            found.append(Row(f"{name}, {sitting}", programs, counts, real_ns, sitting, None))
    return found


def predicted(jobs: Sequence[Row], values: np.ndarray) -> np.ndarray:
    """Logarithm of the predicted by the real iteration of each job.

    Args:
        jobs: the rows.
        values: the constants, then the index of each sitting.
    """
    index_of_sitting = dict(zip(_SITTINGS, values[len(KINDS) :].tolist(), strict=True))
    errors = []
    for job in jobs:
        index = job.index
        if index is None:
            index = index_of_sitting[job.sitting]
        errors.append(np.log(job.iteration_ns(values[: len(KINDS)], index) / job.real_ns))
    return np.array(errors)


def slopes(jobs: Sequence[Row], values: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """Logarithms of iterations by logarithms of values: float64 [jobs, values]."""
    columns = []
    for place in range(len(values)):
        changed = values.copy()
        changed[place] *= _STEP
        columns.append((predicted(jobs, changed) - errors) / np.log(_STEP))
    return np.stack(columns, axis=1)


def best_step(gradient: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """Find the step of the logarithms that makes the errors least, by reweighted squares."""
    step = np.zeros(gradient.shape[1])
    for _ in range(60):
        left = errors + gradient @ step
        weights = 1 / np.maximum(np.abs(left), _SMALL)
        normal = gradient.T @ (weights[:, None] * gradient) + np.diag(HOLD)
        step = np.linalg.solve(normal, -gradient.T @ (weights * errors))
    return np.clip(step, -0.5, 0.5)


def fit(jobs: Sequence[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the constants: (values, errors, slopes) there."""
    values = np.array([*TODAY, *_SITTINGS.values()], dtype=float)
    for _ in range(_ROUNDS):
        errors = predicted(jobs, values)
        values = values * np.exp(best_step(slopes(jobs, values, errors), errors))
    errors = predicted(jobs, values)
    return values, errors, slopes(jobs, values, errors)


def left_out(errors: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Errors of each job by the constants of all others, as logarithms."""
    found = []
    for place in range(len(errors)):
        others = np.arange(len(errors)) != place
        step = best_step(gradient[others], errors[others])
        found.append(errors[place] + gradient[place] @ step)
    return np.array(found)


def reprice(file: dict[str, Any]) -> None:
    """Give the kept slices of a file the host's time by today's constants."""
    made_by = [file["constants"][kind] for kind in KINDS]
    constants = np.array(TODAY, dtype=float)
    kept_jobs = [*file["tests"].values(), *file["one_gpu"].values(), *file["graphs"].values()]
    for stored in kept_jobs:
        programs = parse(stored["program"])
        priced = []
        for program in programs.programs:
            counts = counted(program, stored, made_by)
            priced.append(with_constants(program, counts, constants))
        stored["program"] = dump(dataclasses.replace(programs, programs=tuple(priced)))
    file["constants"] = dict(zip(KINDS, TODAY, strict=True))


def main() -> None:
    """Fit and print, or write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="reprice the kept slices")
    if parser.parse_args().write:
        file = kept.read(kept.WITHOUT_GPU)
        reprice(file)
        text = json.dumps(file, indent=1, sort_keys=True).encode()
        kept.WITHOUT_GPU.write_bytes(gzip.compress(text, mtime=0))
        return
    jobs = rows()
    values, errors, gradient = fit(jobs)
    others = left_out(errors, gradient)
    names = (*KINDS, *(f"index, {sitting}" for sitting in _SITTINGS))
    for name, value in zip(names, values.tolist(), strict=True):
        print(f"{name:12} {value:,.2f}")
    for job, error, other in zip(jobs, np.expm1(errors), np.expm1(others), strict=True):
        print(f"{job.name:100.100} {error:+.1%}, left out {other:+.1%}")
    for title, part in (("fitted", errors), ("left out", others)):
        print(f"{title}: mean {np.abs(np.expm1(part)).mean():.1%}")


if __name__ == "__main__":
    main()
