"""``prism compare``: two jobs; files of other kinds are of the features that read them."""

from __future__ import annotations

import argparse

from megatron_prism.cli import arguments, what_ifs
from megatron_prism.cli.command import (
    CALIBRATION,
    MACHINE,
    Command,
    HelpGroup,
    file_option,
    option,
    switch,
)
from megatron_prism.cli.file_answers import answer_about_files
from megatron_prism.cli.output import Answer
from megatron_prism.core.errors import UnitError, UsageError


def compare(args: argparse.Namespace) -> Answer:
    """What differs between A and B: time with its interval, memory by part, sizes, ops.

    prism compare A B                       slices or programs of two jobs, releases, layouts
    prism compare A slow=517:1.2            A without and with what-ifs, as prism replay has them
    prism compare A,dp=64 B,dp=32           what-ifs of each
    prism compare A moved=b200              on two machines
    prism compare A moved=b200 --price 2.5,4        with what a GPU of each costs for an hour
    prism compare A torchrun --nnodes 128 … pretrain_gpt.py …     a launch line, captured now
    prism compare memory.json A             a baseline of prism memory and the peaks of now
    prism compare rank*.json.gz A           traces of a real job and its slices
    prism compare SNAPSHOT A                a memory snapshot of a real process and its slices
    prism compare EARLIER … LATER           snapshots of one process: what grows each time, by line
    prism compare RANKS/ A                  a folder with a snapshot of each rank, of both kinds
    prism compare job/ alone/ --norm 1e-3   recordings (--prism-payload): what calls delivered, by
                                            norm; without --norm bit by bit

    A machine's unknowns (host, kernels, calls) are the same for both sides, so the interval of the
    difference is narrower than those of the times.  For traces: the share of paired calls and, from
    95 % on, the parts of every traced rank's iteration, predicted and real.  --exit-code ends
    with status 1 if anything differs.
    """
    paths, words = list[str](), list[list[str]]()
    for word in args.paths:
        path, own_words = what_ifs.split(word)
        if not path and len(paths) == 1 and not words[0]:
            path = paths[0]  # the same job without and with them
        if path or not paths:
            paths.append(path)
            words.append(own_words)
        # further what-ifs of the job before
        else:
            words[-1] += own_words
    if len(paths) < 2 or "" in paths:
        raise UsageError("compare what with what?", fix="prism compare A B")
    # files of other kinds: a feature compares them
    answer = answer_about_files("compare", args, paths, words)
    if answer is not None:
        # left out silently, a price would seem to be part of the answer
        if args.price is not None:
            raise UsageError(
                "--price is of two jobs that train", fix="prism compare A B --price 2.5"
            )
        return answer
    return _jobs(args, paths, words)


def _jobs(args: argparse.Namespace, paths: list[str], words: list[list[str]]) -> Answer:
    """Compare two jobs, each with its what-ifs."""
    from megatron_prism.core.programs.program import Programs
    from megatron_prism.features.compare.compare import compare as compare_jobs
    from megatron_prism.replay.priced_graph import PricedGraph

    # several snapshots of one process were answered before: of jobs there are two sides alone
    if len(paths) > 2:
        raise UsageError(f"{len(paths)} jobs are too many to compare", fix="prism compare A B")
    machine, calibration = args.machine, args.calibration
    a = what_ifs.open_side(paths[0], words[0], machine, calibration)
    b = what_ifs.open_side(paths[1], words[1], machine, calibration)
    names = " ".join([paths[0], *words[0]]), " ".join([paths[1], *words[1]])
    prices = args.price
    comparison = compare_jobs(
        a, b, names=names, machine=machine, calibration=calibration, prices=prices
    )

    def page() -> None:
        print(comparison.to_text(), end="")
        programs = b.graph.programs if isinstance(b, PricedGraph) else b
        # a report of memory is of no machine
        if isinstance(programs, Programs):
            print(what_ifs.machine_note(programs, machine), end="")

    return Answer(
        comparison.to_json,
        page,
        comparison.to_rows,
        next=f"prism fit {paths[-1]}",
        status=int(args.exit_code and not comparison.same),
        html=comparison.to_html,
    )


def _prices(text: str) -> tuple[float, float]:
    """Read the price of a GPU of A and of B; one number is that of both."""
    # A and B may be of different GPUs
    read = arguments.number("--price 2.5, --price 2.5,4")
    prices = [read(word) for word in text.split(",")]
    if len(prices) > 2 or min(prices) <= 0:
        raise UnitError("a price is above 0, and there are two jobs", fix="--price 2.5,4")
    return prices[0], prices[-1]


COMMANDS = {
    "compare": Command(
        compare,
        (
            (
                ("paths",),
                {"metavar": "PATH|key=value", "nargs": "+", "help": "the two sides, A then B"},
            ),
            MACHINE,
            CALIBRATION,
            option(
                "norm",
                arguments.number("--norm 1e-3"),
                "1e-3",
                "tolerance between norms of recordings",
                default=0.0,
            ),
            option("price", _prices, "2.5", "price of a GPU for an hour; 2.5,4: of A's and of B's"),
            switch("--exit-code", "exit status 1 if anything differs"),
            file_option("--html", "page to write, for any browser"),
            file_option("--trace", "write a trace of both sides, for ui.perfetto.dev"),
        ),
        group=HelpGroup.ASK,
        programs=1,
        shows_progress=True,
        formerly=("memory diff", "diff"),
    ),
}
