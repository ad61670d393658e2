"""Write docs/measurements.md from ``benchmarks/results``: ``python -m benchmarks.measurements``.

``--check`` compares instead, and exits 1 where the page differs.  ``results/tables/`` has a file
for each section: its heading and its tables, each with a note of one sentence, command, machine,
date and file of results.  A table either has its rows there, as its command printed them or as they
were measured by hand, or names in ``rows_by`` the function below that computes them from the file
of results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy import functional_tests, published, summaries
from benchmarks.report import RESULTS, ROOT
from megatron_prism.replay.costs.collectives import Shape, modelled
from megatron_prism.replay.costs.machine import machine

PAGE = ROOT / "docs" / "measurements.md"
TABLES = RESULTS / "tables"
SECTIONS = (
    "peak_memory_one_gpu",
    "peak_memory_without_gpu",
    "functional_tests",
    "device_memory",
    "iteration_time",
    "layouts",
    "what_ifs",
    "estimates",
    "hosts",
    "intervals",
    "published_jobs",
    "segments",
    "calls",
    "imported_traces",
    "tails",
    "hangs",
    "verification",
    "recordings",
    "robustness",
    "costs",
)
HEAD = """\
<!-- written by benchmarks/measurements.py -->

# Measurements

The tables behind [accuracy](accuracy.md): what was compared, by which command, on which machine and
day. The worst row of a table is bold. Nothing is fitted to real runs unless a note says so.
Commands run from a checkout; `benchmarks/README.md` says what each needs. Files are those of
`benchmarks/results/`. SCRIPTS is a folder with the scripts of the real 4-GPU jobs.
"""


@dataclass(frozen=True)
class Table:
    """One table of the page.

    Args:
        title: heading below that of the section; "": none.
        note: a sentence on what is compared.
        command: what repeats it, or "by hand".
        where: machines and releases.
        date: of the measurement.
        data: files in ``benchmarks/results``.
        columns: titles; of a table with ``rows_by`` the function gives them.
        rows: cells.
        rows_by: key of ``COMPUTED``, for rows that follow from ``data``.
    """

    title: str = ""
    note: str = ""
    command: str = ""
    where: str = ""
    date: str = ""
    data: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    rows_by: str = ""

    def markdown(self) -> str:
        """Title, note, source and table."""
        blocks = []
        if self.title:
            blocks.append(f"### {self.title}")
        if self.note:
            blocks.append(self.note)
        source = self.source()
        if source:
            blocks.append(source)
        if self.rows_by:
            blocks.append(COMPUTED[self.rows_by]())
        else:
            blocks.append(as_table(self.columns, self.rows))
        return "\n\n".join(blocks)

    def source(self) -> str:
        """Command, machine, date and files, in one line."""
        parts = []
        if self.command in ("by hand", "the same"):
            parts.append(self.command)
        elif self.command:
            parts.append(f"`{self.command}`")
        parts += [part for part in (self.where, self.date) if part]
        parts += [f"`{name}`" for name in self.data.split(", ") if name]
        return " · ".join(parts)


def as_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [row_of(columns), "|" + "---|" * len(columns)]
    lines += [row_of(row) for row in rows]
    return "\n".join(lines)


def row_of(cells: Sequence[str]) -> str:
    """A line of a table."""
    return "| " + " | ".join(cells) + " |"


def percent(part: float, digits: int) -> str:
    """``−1.6 %``."""
    return f"{100 * part:+.{digits}f} %".replace("-", "−")


def stored(name: str) -> Any:
    """The contents of ``benchmarks/results/NAME``."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


# -- rows that follow from files of results --------------------------------------------------------
JOBS = {  # name in the files -> what the page calls it
    "tp2pp2": "tp2 pp2, local layers",
    "pp4": "pp4, local layers",
    "dp4ov": "dp4, overlapped, local layers",
    "te_tp4sp": "tp4 sp, Transformer Engine",
    "te_tp2pp2vp2": "tp2 pp2 vpp2 sp, Transformer Engine",
    "te_moe_ep4": "MoE ep4, Transformer Engine, `mirror` values",
}


def real_jobs_without_a_gpu() -> str:
    """Errors of allocated, reserved and device bytes of the 24 ranks of six real jobs."""
    real = stored("h200_x4_real_peaks.json")
    levels = (("allocated", "peaks", 3), ("reserved", "reserved", 1), ("device", "device", 1))
    rows = []
    for job, name in JOBS.items():
        emulated = [rank for rank in stored("meta_memory.json")["ranks"] if rank["config"] == job]
        cells = [name]
        for level, real_level, digits in levels:
            errors = []
            for rank in emulated:
                real_bytes = real[real_level][job][rank["rank"]]
                errors.append(percent(rank[level] / real_bytes - 1, digits))
            cells.append(", ".join(errors).replace(" %,", ","))
        rows.append(cells)
    return as_table(["job", "allocated: ranks 0 to 3", "reserved", "device"], rows)


def segments(file: str) -> str:
    """Errors of the op table by phase, without the rest of an iteration; the worst is bold."""
    kept = [row for row in stored(file)["rows"] if row["phase"] != "rest"]
    errors = [row["table_ms"] / row["measured_ms"] - 1 for row in kept]
    worst = max(errors, key=abs)
    rows = []
    for row, error in zip(kept, errors, strict=True):
        shown = percent(error, 1)
        if error == worst:
            shown = f"**{shown}**"
        rows.append(
            [row["job"], str(row["rank"]), row["phase"], f"{row['measured_ms']:.1f} ms", shown]
        )
    return as_table(["job", "rank", "phase", "measured", "op table"], rows)


def network() -> str:
    """Modelled all-reduces between nodes beside published ones, by bytes."""
    hardware = machine("h100")
    rows = []
    for cluster in stored("h100_nccl_tests.json")["tables"]:
        for row in cluster["rows"]:
            ranks = row["nodes"] * hardware.gpus_per_node
            shape = Shape(ranks, hardware.gpus_per_node)
            us = modelled(row["op"], shape, row["bytes"], hardware) / 1e3
            size = f"{row['bytes'] / (1 << 20):,.0f} MiB"
            error = percent(us / row["us"] - 1, 0)
            rows.append([cluster["where"], size, f"{row['us']:,.0f} us", f"{us:,.0f} us", error])
    return as_table(["two nodes of 8 x H100", "bytes", "published", "modelled", "error"], rows)


def estimates() -> str:
    """Estimates from few layers against the answers behind them, the worst of each in bold."""
    results = stored("estimates.json")
    errors: dict[str, list[float]] = {}  # job -> of memory, of time
    for job, result in results.items():
        pairs = zip(result["estimate"], result["answer"], strict=True)
        errors[job] = [estimate / answer - 1 for estimate, answer in pairs]
    worst = [max(abs(error[level]) for error in errors.values()) for level in range(2)]
    rows = []
    for job, result in results.items():
        few, more, whole = result["layers"]
        num_bytes, ns = result["answer"]
        cells = []
        for error, most in zip(errors[job], worst, strict=True):
            text = percent(error, 1)
            cells.append(f"**{text}**" if abs(error) == most else text)
        answers = [f"{num_bytes / (1 << 30):.1f} GiB", f"{ns / 1e9:.3g} s"]
        rows.append([job, f"{few} and {more} of {whole}", *answers, *cells])
    head = ["job", "layers a chunk", "answer: device", "iteration"]
    return as_table([*head, "estimate: memory", "time"], rows)


def of_functional_tests(release: str) -> str:
    """Outcomes and worst errors of one release's tests; the page has its own heading."""
    text = functional_tests.table([RESULTS / f"functional_tests_{release}.csv"])
    without_heading = text.partition("\n")[2]
    return without_heading.strip()


COMPUTED: dict[str, Callable[[], str]] = {
    "real_jobs_without_a_gpu": real_jobs_without_a_gpu,
    "functional_tests_0190": lambda: of_functional_tests("core_v0.19.0"),
    "functional_tests_main": lambda: of_functional_tests("main"),
    "published": lambda: published.table(stored("published_h100.json")["rows"]),
    "summaries": lambda: summaries.table(stored("published_summaries.json")),
    "segments_h200": lambda: segments("h200_segments.json"),
    "segments_h100": lambda: segments("h100_segments.json"),
    "network": network,
    "estimates": estimates,
}


# -- the page --------------------------------------------------------------------------------------
def page() -> str:
    """The whole of docs/measurements.md."""
    parts = [HEAD]
    for name in SECTIONS:
        section = json.loads((TABLES / f"{name}.json").read_text(encoding="utf-8"))
        parts.append(f"## {section['heading']}\n")
        for fields in section["tables"]:
            parts.append(Table(**fields).markdown() + "\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare the page with the results")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    text = page()
    if not options.check:
        options.page.write_text(text, encoding="utf-8")
    elif options.page.read_text(encoding="utf-8") != text:
        sys.exit("docs/measurements.md differs\n  fix: python -m benchmarks.measurements")


if __name__ == "__main__":
    main()
