"""``prism schedule``: a pipeline schedule as a chart, and how much of it is bubble.

In : ``key=value`` words.  Out: stages x time as text, programs as a file, or JSON.  The order is
recorded from Megatron's scheduler (``emulate.schedule``); times are units
(``replay.timeline``).
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megatron_prism.cli import arguments
from megatron_prism.cli.output import console, write_data
from megatron_prism.core import units
from megatron_prism.core.errors import UnitError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from rich.text import Text

    from megatron_prism.core.program import Programs
    from megatron_prism.replay.timeline import ScheduleStep, ScheduleTimeline

_MOST_STAGES = 4096  # longer pipelines take minutes to play
_MOST_STEPS = 500_000  # forwards of all stages that are recorded: about a gigabyte
_FORWARD, _BACKWARD, _IDLE = "green", "cyan", "dim"
_ODD = "bold"  # chunks
GAP = " … "


def schedule(args: argparse.Namespace) -> int:
    """Draw a pipeline schedule, recorded from Megatron's own scheduler without a model.

    prism schedule pp=8 vpp=2 microbatches=32
    prism schedule pp=4 microbatches=16 -o FILE.prism      for prism show, classes and check

    A forward takes 1, a backward 2; 3f is microbatch 3's forward, 3B its backward, with chunks 3a
    and 3A, 3b and 3B, and so on.  Keys: pp vpp microbatches group_size overlap warmup_flush
    forward_only align_grad_reduce ep_overlap delay_wgrad variable_lengths shape=4096x1x8192 dtype,
    and what chunks are made of: layers layout first_layers last_layers mtp.
    """
    from megatron_prism.core import program
    from megatron_prism.replay.timeline import schedule_timeline

    settings = parse_settings(args.settings)
    out = Path(args.out) if args.out else None
    if out is not None and out.exists() and not args.force:  # before the work, not after
        raise UsageError(f"{out} exists and is not overwritten", fix="--force, or another name")
    recorded = megatron_schedule().schedules(**settings)
    times = schedule_timeline(recorded)
    if out is not None:
        program.save(recorded, out, force=args.force)
    rows = [
        {"stage": number, "step": step.label, "start": float(step.start), "end": float(step.end)}
        for number, steps in enumerate(times.stages)
        for step in steps
    ]
    if write_data(args, _as_json(recorded, times), rows):
        return 0
    to = console()
    to.print(_title(recorded, times))
    for line in chart(times, to.width):
        to.print(_coloured(line), soft_wrap=True)
    for line in _contents(recorded):
        to.print(line)
    if out is not None:
        console(stderr=True).print(f"wrote {out}")
    return 0


# -- settings --------------------------------------------------------------------------------------
def _switch(text: str) -> bool:
    if text.lower() not in ("true", "false", "on", "off", "1", "0", "yes", "no"):
        raise UnitError(f"{text!r} is neither true nor false", fix="true or false")
    return text.lower() in ("true", "on", "1", "yes")


def _shape(text: str) -> tuple[int, ...]:
    sizes = tuple(units.parse_count(part) for part in text.split("x"))
    if len(sizes) != 3 or min(sizes) < 1:
        raise UnitError(f"{text!r} is no shape", fix="tokens x micro-batch x hidden: 4096x1x8192")
    return sizes


_COUNTS = ("pp", "vpp", "microbatches", "group_size", "layers", "first_layers", "last_layers")
_SWITCHES = ("overlap", "warmup_flush", "forward_only", "align_grad_reduce", "ep_overlap")
_KEYS: dict[str, Callable[[str], object]] = {
    **dict.fromkeys((*_COUNTS, "mtp"), units.parse_count),
    **dict.fromkeys((*_SWITCHES, "delay_wgrad", "variable_lengths"), _switch),
    "layout": str,
    "shape": _shape,
    "dtype": str,
}


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments of ScheduleSettings out of key=value words.  UsageError with the fix."""
    found = arguments.read(words, _KEYS, "schedule")
    if "overlap" in found:
        found["overlap_p2p"] = found.pop("overlap")
    for key in ("pp", "microbatches"):
        if key not in found:
            raise UsageError(f"a schedule needs {key}", fix="pp=8 vpp=2 microbatches=32")
    steps = found["pp"] * (found.get("vpp") or 1) * found["microbatches"]
    if found["pp"] > _MOST_STAGES:
        raise UsageError(f"{found['pp']:,} stages are too many to draw", fix=f"pp={_MOST_STAGES}")
    if steps > _MOST_STEPS:
        raise UsageError(
            f"{steps:,} forwards are too many to record and draw (at most {_MOST_STEPS:,})",
            fix="fewer microbatches: a schedule repeats itself",
        )
    return found


def megatron_schedule() -> ModuleType:
    """``emulate.schedule``.  UnsupportedError without Megatron."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that Megatron would rather have
            from megatron_prism.emulate import schedule
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("megatron", "torch"):
            raise
        raise UnsupportedError(
            f"schedules are Megatron's, and there is no {error.name} here",
            fix="pip install megatron-core torch",
        ) from error
    return schedule


# -- output ----------------------------------------------------------------------------------------
def _title(recorded: Programs, times: ScheduleTimeline) -> str:
    from megatron_prism.replay.timeline import cost_of

    costs = ", ".join(f"{phase} {cost}" for phase, cost in cost_of(recorded).items())
    said = {**recorded.source}
    release, made_by = said.pop("megatron_core"), said.pop("made_by")
    words = " ".join(f"{key}={value}" for key, value in said.items())
    return (
        f"{words}\n{units.format_share(float(times.bubble), 2)} bubble, "
        f"{_number(times.total)} units ({costs}, transfers 0)\n"
        f"megatron-core {release}; {made_by}\n"
    )


def _contents(recorded: Programs) -> Iterator[str]:
    """What the chunks are made of, where that was said: the notes before a stage's first step."""
    for number, program in enumerate(recorded.programs):
        notes = list(itertools.takewhile(lambda op: op.name == "mark", program))
        if notes:
            texts = (op.note if op.chunk < 0 else f"{_name(op.chunk)}: {op.note}" for op in notes)
            yield f"{'' if number else chr(10)}stage {number}  {'; '.join(texts)}"


def _name(chunk: int) -> str:
    return chr(ord("a") + chunk % 26)


def _number(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else f"{float(value):.2f}"


def _as_json(recorded: Programs, times: ScheduleTimeline) -> dict[str, object]:
    from megatron_prism.replay.timeline import cost_of

    stages = [
        {
            "stage": number,
            "busy": float(times.busy[number]),
            "ops": len(recorded.of(number)),
            "steps": [[step.label, float(step.start), float(step.end)] for step in steps],
        }
        for number, steps in enumerate(times.stages)
    ]
    return {
        "source": dict(recorded.source),
        "cost": dict(cost_of(recorded)),
        "total": float(times.total),
        "bubble": float(times.bubble),
        "stages": stages,
    }


def chart(times: ScheduleTimeline, width: int) -> list[str]:
    """One line per stage (two where forwards and backwards overlap), at most ``width`` wide.

    A unit is as wide as its longest name; a chart that is too wide loses its middle.
    """
    most = max((step.microbatch for steps in times.stages for step in steps), default=0)
    unit = len(str(most)) + 1
    rows: list[tuple[str, list[ScheduleStep]]] = []
    for number, steps in enumerate(times.stages):
        if _overlap(steps):
            rows.append((f"stage {number} F", [s for s in steps if s.phase == "forward"]))
            rows.append((f"stage {number} B", [s for s in steps if s.phase == "backward"]))
        else:
            rows.append((f"stage {number}", list(steps)))
    margin = max(len(name) for name, _ in rows) + 2
    cells = max(int(times.total * unit), 1)
    lines = [_line(steps, unit, cells) for _, steps in rows]
    room = max(width - margin, 2 * unit + len(GAP))
    last = ""
    if cells > room:
        side = (room - len(GAP)) // 2 // unit * unit
        lines = [line[:side] + GAP + line[-side:] for line in lines]
        hidden = (cells - 2 * side) // unit
        last = f"{'':{margin}}…: {hidden} of {_number(times.total)} units not shown"
    shown = [f"{name:{margin}}{line}" for (name, _), line in zip(rows, lines, strict=True)]
    return [*shown, last] if last else shown


def _overlap(steps: Sequence[ScheduleStep]) -> bool:
    return any(b.start < a.end for a, b in zip(steps, steps[1:], strict=False))


def _line(steps: Sequence[ScheduleStep], unit: int, cells: int) -> str:
    line = ["."] * cells
    for step in steps:
        begin, end = round(step.start * unit), round(step.end * unit)
        text = f"{step.microbatch}{_letter(step)}".ljust(end - begin, "-")
        line[begin:end] = text[: end - begin]
    return "".join(line)


def _letter(step: ScheduleStep) -> str:
    """f and B without chunks; a b c … and A B C … with them."""
    forward = step.phase == "forward"
    if step.chunk < 0:
        return "f" if forward else "B"
    letter = _name(step.chunk)
    return letter if forward else letter.upper()


def _coloured(line: str) -> Text:
    """The line with forwards, backwards and bubbles told apart, for terminals that can."""
    from rich.text import Text

    text = Text(line)
    text.highlight_regex(r"\d+[a-z]-*", _FORWARD)
    text.highlight_regex(r"\d+[A-Z]-*", _BACKWARD)
    text.highlight_regex(r"\d+[bdfhjlnprtvxz]-*|\d+[BDFHJLNPRTVXZ]-*", _ODD)
    text.highlight_regex(r"\.+", _IDLE)
    text.highlight_regex(r"^stage \d+( [FB])?", "default")
    return text
