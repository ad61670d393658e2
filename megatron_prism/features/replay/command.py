"""``prism replay``: when everything happens, and what the iteration's time is made of."""

from __future__ import annotations

import argparse
from typing import cast

from megatron_prism.cli import arguments, what_ifs
from megatron_prism.cli.command import (
    CALIBRATION,
    MACHINE,
    PROGRAMS,
    VERBOSE,
    WHAT_IFS,
    Command,
    HelpGroup,
    file_option,
    option,
)
from megatron_prism.cli.file_answers import answer_about_files
from megatron_prism.cli.job_slices import timeline_note
from megatron_prism.cli.output import Answer, Row
from megatron_prism.core.errors import UsageError


def replay(args: argparse.Namespace) -> Answer:
    """Replay an iteration of the whole world: its time, bubble, critical path and their provenance.

    prism replay DIR
    prism replay DIR --machine h200 --calibration h200x4.json
    prism replay DIR --html page.html --trace trace.json     a page; a trace for ui.perfetto.dev

    --machine is the name of a shipped machine, or a JSON file like it.  --calibration is a file of
    prism calibrate: its measured calls replace modelled ones, and its factors say how computing and
    calls that run at once slow each other.  prism compare compares two replays.

    What-ifs (any of them together; those with … may be repeated):
      dp=64                     64 replicas of the model, each with unchanged microbatches
      slow=517:1.2 …            ranks compute 1.2 times as long; slow=pp=3,tp=0:3/2; 517:0.5 in half
      faster=all_reduce:2 …     calls twice as fast; faster=GROUP:2, faster=all_reduce@GROUP:1/2
      moved=b200                programs measured on --machine, run on b200; --calibration is then
                                of b200
      host=1.4                  on hosts of this index; host=HOST.json: on a measured one (prism
                                calibrate --host); host=TRACES: on the host of a run's
                                torch.profiler traces; host=0.6x: hosts take 0.6 times as long
      nccl=NCCL_ALGO=Ring …     a setting of NCCL that the captured job lacked; also NCCL_PROTO,
                                NCCL_NVLS_ENABLE, NCCL_MAX_NCHANNELS, …
      network=rails             calls of a rank share its NIC and its NVLinks; network=fat-tree:4:
                                also the links above leaf switches, a fourth as many (4 to 1
                                oversubscribed); network=none: no sharing, whatever the recipe says
      lengths=FILE capture=DIR  samples of other lengths in each of many iterations, as prism
                                uneven has them: step times, and which dp rank waits for which
      microbatches=32           captured steps in the order of Megatron's scheduler
    """
    answer = answer_about_files("replay", args, [args.programs], [args.settings])
    if answer is not None:
        return answer
    if (args.iterations or 0) > _MOST_ITERATIONS:
        raise UsageError(
            f"--iterations {args.iterations:,} of one kind: the last one is shown, and later ones "
            "are like it",
            fix="--iterations 2 is settled",
        )
    how = {
        "machine": args.machine,
        "calibration": args.calibration,
        "iterations": args.iterations or _ITERATIONS,
    }
    programs = what_ifs.open_job(args.programs)
    timeline = what_ifs.priced(programs, args.settings, "replay", **how).timeline
    note = what_ifs.machine_note(programs, args.machine)
    # an estimate is of the job as captured
    if args.line and not args.settings:
        note += timeline_note(args.programs, timeline)
    return Answer(
        timeline.to_json,
        lambda: print(timeline.to_text(verbose=args.verbose) + note, end=""),
        lambda: cast("list[Row]", timeline.to_json()["classes"]),
        next=f"prism fit {args.programs}",
        html=timeline.to_html,
        trace=timeline.to_chrome_trace,
    )


_MOST_ITERATIONS = 100  # of which the last is shown
_ITERATIONS = 2  # one behind another: settled

COMMANDS = {
    "replay": Command(
        replay,
        (
            PROGRAMS,
            WHAT_IFS,
            MACHINE,
            CALIBRATION,
            option(
                "iterations",
                arguments.count(1, 1_000_000, "--iterations 2 is settled"),
                "N",
                "number of iterations in a row, of which the last is shown (2); with lengths= "
                "how many are drawn (200)",
            ),
            file_option("--html", "page to write, for any browser"),
            file_option("--trace", "trace to write, for ui.perfetto.dev"),
            VERBOSE,
        ),
        group=HelpGroup.ASK,
        programs=0,
        shows_progress=True,
    ),
}
