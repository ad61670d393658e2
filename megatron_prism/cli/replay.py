"""``prism replay``: when everything happens, and what the iteration's time is made of.

Prints a page of text or JSON, and writes an HTML page and a trace for ui.perfetto.dev on request.
Without torch, but for other numbers of microbatches, whose order is Megatron's.
"""

from __future__ import annotations

import argparse
import os
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

from megatron_prism.cli import arguments
from megatron_prism.cli.output import (
    check_outputs,
    print_table,
    warn_without_times,
    write_data,
    write_outputs,
)
from megatron_prism.core.errors import UnitError, UnsupportedError, UsageError
from megatron_prism.core.units import parse_bytes

if TYPE_CHECKING:
    from megatron_prism.core.program import Programs
    from megatron_prism.replay.priced_graph import WhatIf
    from megatron_prism.replay.timeline import Timeline

_MOST_ITERATIONS = 100
_SIZES = ("tp", "cp", "pp", "ep", "etp", "vpp")
_OWN = ("machine", "calibration", "iterations", "dp", "slow", "faster", "moved", "host", "nccl",
        "network", "sends", "slow_rail", "microbatches")  # fmt: skip
_HOW = ("machine", "calibration", "iterations")  # arguments of replay; the others are of a what-if


def replay(args: argparse.Namespace) -> int:
    """Replay an iteration of the whole world: its time, bubble, critical path and their provenance.

    prism replay DIR
    prism replay DIR machine=h200 calibration=h200x4.json iterations=2
    prism replay DIR --html page.html --trace trace.json     a page; a trace for ui.perfetto.dev

    machine= is the name of a shipped one or a JSON file like it.  calibration= is what prism
    calibrate wrote; its measured calls come before the machine's model, and computing and calls
    that run at once slow each other as it measured.

    What if (any of them together; those with … more than once):
      dp=64                     64 replicas of the model, each with the microbatches it has now
      slow=517:1.2 …            ranks compute 1.2 times as long; slow=pp=3,tp=0:3/2; 517:0.5 in half
      faster=all_reduce:2 …     calls twice as fast; faster=GROUP:2, faster=all_reduce@GROUP:1/2
      moved=b200                programs measured on machine=, run on another one; calibration= is
                                then that one's
      host=1.4                  on hosts of this index; host=HOST.json: on that one (prism calibrate
                                --host); host=0.6x: hosts take 0.6 times as long
      nccl=NCCL_ALGO=Ring …     a setting of NCCL that the captured job had not; also NCCL_PROTO,
                                NCCL_NVLS_ENABLE, NCCL_MAX_NCHANNELS, …
      sends=buffered            sends end without their receivers while NCCL's buffers hold them: as
                                many bytes as the calibration measured, with which this is the
                                default, else 32 MiB, or 8 times NCCL_BUFFSIZE; sends=buffered:8MiB;
                                sends=buffered:0: all wait
      network=rails             calls of a rank share its NIC and its NVLinks; network=fat-tree:4:
                                and those above leaf switches, a fourth as many (4 to 1
                                oversubscribed); network=none: not even if the recipe says so
      slow_rail=3:0.5 …         the NICs of place 3 of every node have half the bandwidth
      tp=4 pp=2 …               says which slices that needs: ranks of other sizes run other kernels
      microbatches=32           captured steps in the order of Megatron's scheduler

    prism replay DIR --against DIR,slow=517:1.2 --html page.html      two replays side by side

    Where the difference is, by what a mean rank does; OTHER is slices and what differs for them.
    """
    from megatron_prism.core.slices import open_programs
    from megatron_prism.replay import whatif
    from megatron_prism.replay.plausibility import check_plausible
    from megatron_prism.replay.priced_graph import replay as replay_programs
    from megatron_prism.report.replay import render_html

    settings = _settings(args.settings)
    how = {key: settings.pop(key) for key in _HOW if key in settings}
    check_outputs([args.html, args.trace], args.force, [args.programs])
    against = None if args.against is None else _with(args.against)

    def timeline_of(path: str, settings: dict[str, Any]) -> Timeline:
        programs = open_programs(path)
        warn_without_times(programs)
        here = {**how, **{key: settings.pop(key) for key in _HOW if key in settings}}
        sizes = {key: settings.pop(key) for key in _SIZES if key in settings}
        wanted = settings.pop("microbatches", None)
        whatif.check_sizes(programs, sizes, settings.get("dp"), wanted)
        found = replay_programs(programs, what_if=_what_if(**settings), **here)
        if wanted is None:
            return found
        other = _with_microbatches(programs, wanted)
        after = replay_programs(other, what_if=_what_if(**settings), **here)
        check_plausible(after, found)
        return after

    timeline = timeline_of(args.programs, settings)
    other = None if against is None else timeline_of(*against)
    names = " ".join([args.programs, *args.settings]), args.against or ""
    both = () if other is None else (names[0], (names[1], other))
    write_outputs(args.force, (args.html, lambda: render_html(timeline, *both)),
                  (args.trace, timeline.to_chrome_trace))  # fmt: skip
    metrics = timeline.to_json() if args.json or args.csv else {}
    value: dict[str, object] = dict(metrics)
    if other is not None:
        from megatron_prism.replay.differences import difference, of_sources

        second: dict[str, Any] = other.to_json() if metrics else {}
        value = {"first": metrics, "second": second}
        if metrics:
            pair = [of_sources(one["iteration_ns"], one["uncertainties"])
                    for one in (cast("dict[str, Any]", metrics), second)]  # fmt: skip
            value["difference"] = vars(difference(*pair))
    if write_data(args, value, cast("list[dict[str, object]]", metrics.get("classes"))):
        pass
    elif other is not None:
        _show_pair((names[0], timeline), (names[1], other))
    else:
        print(timeline.to_text(verbose=args.verbose), end="")
    return 0


def _with_microbatches(programs: Programs, wanted: int) -> Programs:
    """``emulate.schedule.with_microbatches``.  UnsupportedError without Megatron."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that Megatron would rather have
            from megatron_prism.emulate.schedule import with_microbatches
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("megatron", "torch"):
            raise
        what = f"the order of microbatches is Megatron's, and there is no {error.name} here"
        raise UnsupportedError(what, fix="pip install megatron-core torch") from error
    return with_microbatches(programs, wanted)


def _with(word: str) -> tuple[str, dict[str, Any]]:
    """(path, settings) of ``DIR,slow=517:1.2``; a comma before a key that is none of ours, as in
    ``slow=pp=3,tp=0:2``, belongs to the value."""
    path, *words = (
        [word] if os.path.exists(word) else re.split(rf",(?=(?:{'|'.join(_OWN)})=)", word)
    )
    if not path:
        raise UsageError(f"--against {word!r} names no slices", fix="--against DIR,slow=517:1.2")
    return path, _settings(words)


def _show_pair(one: tuple[str, Timeline], other: tuple[str, Timeline]) -> None:
    """Two iterations by what a mean rank does, the largest difference first."""
    from megatron_prism.replay.differences import difference, of_sources
    from megatron_prism.replay.timeline import mean_parts
    from megatron_prism.report.metrics import timeline_metrics

    metrics = [timeline_metrics(timeline) for _, timeline in (one, other)]
    a, b = (mean_parts(map(vars, each.classes)) for each in metrics)
    ns = [("iteration", float(one[1].iteration_ns), float(other[1].iteration_ns))]
    whats = sorted({**a, **b}, key=lambda what: -abs(a.get(what, 0) - b.get(what, 0)))
    ns += [(what, a.get(what, 0), b.get(what, 0)) for what in whats if a.get(what) or b.get(what)]
    print(f"first   {one[0]}\nsecond  {other[0]}\n")
    rows = [(what, *(f"{x / 1e6:,.1f} ms" for x in (p, q)), f"{(q - p) / 1e6:+,.1f} ms")
            for what, p, q in ns]  # fmt: skip
    print_table(("mean rank", "first", "second", "second - first"), rows)
    found = difference(*(of_sources(each.iteration_ns, map(vars, each.uncertainties))
                         for each in metrics))  # fmt: skip
    ends = f"{found.low_ns / 1e6:+,.1f} to {found.high_ns / 1e6:+,.1f} ms"
    print(f"\nsecond - first: {found.ns / 1e6:+,.1f} ms ({ends}, 95 %); the first is faster with "
          f"{found.first_faster:.1%}, whatever is unknown of the machine")  # fmt: skip


def _settings(words: Sequence[str]) -> dict[str, Any]:
    """Arguments of ``replay`` and of a what-if."""
    keys: dict[str, Callable[[str], Any]] = {
        "machine": arguments.name,
        "calibration": arguments.name,
        "iterations": arguments.count(1, _MOST_ITERATIONS, "iterations=2 is settled"),
        "dp": arguments.count(1, 1 << 24, "dp=64"),
        "slow": _slow,
        "faster": _faster,
        "moved": arguments.name,
        "host": arguments.name,
        "nccl": arguments.name,
        "network": arguments.name,
        "oversubscription": _oversubscription,
        "sends": _sends,
        "slow_rail": _slow_rail,
        **dict.fromkeys(_SIZES, arguments.count(1, 1 << 20, "tp=4")),
        "microbatches": arguments.count(1, 1 << 24, "microbatches=32"),
    }
    return arguments.read(words, keys, "replay", several=("slow", "faster", "nccl", "slow_rail"))


def _slow(text: str) -> tuple[str, str]:
    """``ranks:factor``; a range of ranks may have a step, which is not the factor."""
    ranks, colon, factor = text.rpartition(":")
    if not colon or not ranks:
        raise UnitError("it needs ranks and a factor", fix="slow=517:1.2, slow=pp=3,tp=0:1.2")
    return ranks, factor


def _sends(text: str) -> int:
    """``buffered`` or ``buffered:BYTES``; -1: as many bytes as NCCL's settings say."""
    word, colon, size = text.partition(":")
    if word != "buffered":
        raise UnitError(f"sends are buffered, or not: {text}", fix="sends=buffered")
    if colon and parse_bytes(size) < 0:
        raise UnitError(f"buffers of {size}", fix="sends=buffered:8MiB")
    return parse_bytes(size) if colon else -1


def _oversubscription(text: str) -> NoReturn:
    raise UnitError("the network has it, above its leaves", fix=f"network=fat-tree:{text}")


def _slow_rail(text: str) -> tuple[int, float]:
    """``place:factor``."""
    place, _, part = text.partition(":")
    try:
        found = int(place), float(part)
    except ValueError:
        found = -1, 0.0
    if found[0] < 0 or not 0 < found[1] <= 1:
        raise UnitError("it needs a place in the node and a part of 1", fix="slow_rail=3:0.5")
    return found


def _faster(text: str) -> tuple[str, str]:
    """``calls:factor``; calls are a collective, a group or ``collective@group``."""
    what, colon, factor = text.rpartition(":")
    if not colon:
        raise UnitError("it needs calls and a factor", fix="faster=all_reduce@default_pg:2")
    return what, factor


def _what_if(
    slow: Sequence[tuple[str, str]] = (),
    faster: Sequence[tuple[str, str]] = (),
    nccl: Sequence[str] = (),
    sends: int | None = None,
    slow_rail: Sequence[tuple[int, float]] = (),
    **others: Any,
) -> WhatIf:
    from megatron_prism.replay.priced_graph import WhatIf

    return WhatIf(
        slow=tuple(slow),
        faster=tuple(faster),
        nccl=tuple(nccl),
        slow_rails=tuple(slow_rail),
        buffered=sends,
        **others,
    )
