"""Two jobs side by side, as text of a terminal's width and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_prism.core import job_settings
from megatron_prism.core.columns import columns, folded
from megatron_prism.core.groups import with_short_names
from megatron_prism.core.rendering import Renderer, renders
from megatron_prism.core.units import format_bytes, format_change, format_ns, format_share
from megatron_prism.features.compare.compare import Comparison, Setting
from megatron_prism.memory.peak_changes import Change
from megatron_prism.report import replay
from megatron_prism.report.memory_tables import KINDS, PARTS, module_of

_NAMES = {**PARTS, "device": "= device"}
_SETTINGS, _CLASSES, _ORIGINS, _SCALE = 12, 8, 6, 24  # shown of each


def render_text(found: Comparison) -> str:
    """Ends in a newline."""
    parts = [_settings(found), _times(found), _memory(found), _ops(found)]
    head = []
    for index, letter in enumerate("AB"):
        text = found.names[index]
        # which machine and host its times are of
        if found.headlines:
            text += f"  {found.headlines[index].assumes}"
        head += folded(f"{letter}  {text}", 3)
    return "\n\n".join("\n".join(lines) for lines in (head, *map(list, parts)) if lines) + "\n"


def render_html(found: Comparison) -> str:
    """Both timelines, one above the other."""
    assert found.timelines is not None
    a, b = found.timelines
    tables: list[tuple[str, Sequence[str], Sequence[object]]]
    tables = [(rows[0][0], ("", *rows[0][1:]), rows[1:]) for rows in [_memory_rows(found)]
              if found.memory is not None]  # fmt: skip
    settings = [(one.name, *_values(one)) for one in found.settings]
    if settings:
        tables.append(("what differs between the jobs", ("", "A", "B"), settings))
    names = [f"{letter}: {name}" for letter, name in zip("AB", found.names, strict=True)]
    notes = [*_sure(found), *_precision(found)]
    return replay.render_html(a, names[0], (names[1], b), tables, notes)


def _settings(found: Comparison) -> Iterator[str]:
    if found.settings:
        yield "what differs between the jobs"
    for one in found.settings[:_SETTINGS]:
        a, b = _values(one)
        yield from folded(f"  {one.name}: {a} -> {b}", 4)
    if len(found.settings) > _SETTINGS:
        yield f"  and {len(found.settings) - _SETTINGS} more: --json has all"


def _values(one: Setting) -> tuple[str, str]:
    a, b = ("not given" if text is None else job_settings.short(text) for text in (one.a, one.b))
    return a, b


def _signed(ns: float) -> str:
    return f"{'+' if ns > 0 else ''}{format_ns(round(ns))}"


def _times(found: Comparison) -> Iterator[str]:
    if found.iterations is None or found.difference is None:
        yield from folded(f"times are not compared: {found.untimed}")
        return
    rows = [["time of a mean rank", "A", "B", "B - A"]]
    for one in found.times:
        times = (format_ns(round(one.a)), format_ns(round(one.b)), _signed(one.b - one.a))
        rows += [[with_short_names(one.what), *times]]
    a, b = found.iterations
    rows.append(["= iteration", format_ns(a), format_ns(b), _signed(b - a)])
    for speed in found.speeds:
        more = format_change(speed.b / speed.a - 1) if speed.a else ""
        rows.append([speed.what, f"{speed.a:,.0f}", f"{speed.b:,.0f}", more])
    yield from columns(rows)
    for letter, first in zip("AB", found.headlines, strict=False):
        if first.host_decides:
            yield from folded(f"{letter} takes {first.text}", 2)
    for line in (*_sure(found), *_precision(found)):
        yield from folded(line, 2)


def _sure(found: Comparison) -> list[str]:
    """How sure the difference of the times is, and which job is faster.

    Iterations of other batches do another amount of work: tokens per second decide there, and
    those of a GPU where numbers of GPUs differ, too.
    """
    sure = found.difference
    if sure is None:
        return [found.untimed]
    between = f"from {_signed(sure.low_ns)} to {_signed(sure.high_ns)} with 95 %"
    letter, chance = _first(sure.first_faster)
    shorter = f"{letter} is faster with {format_share(chance)}"
    if found.batches_differ is not False:
        shorter = f"{letter}'s iteration is shorter with {format_share(chance)}"
    if sure.low_ns == sure.high_ns == 0:
        shorter = "both take as long"
    lines = [f"B - A: {_signed(sure.ns)}, {between}; {shorter}: what is unknown of the machine is "
             "the same for both"]  # fmt: skip
    if found.batches_differ is None:
        lines.append("one of them does not say how many tokens an iteration has, so nobody knows "
                     "which trains faster")  # fmt: skip
    for speed in found.speeds:
        decides = found.gpus_differ if speed.of_a_gpu else found.batches_differ
        if decides:
            letter, chance = _first(speed.first_faster)
            lines.append(f"by {speed.what}: {letter} is faster with {format_share(chance)}")
    return lines


def _first(first_faster: float) -> tuple[str, float]:
    """The likelier of A and B, and how likely it is."""
    if first_faster >= 0.5:
        return "A", first_faster
    return "B", 1 - first_faster


def _precision(found: Comparison) -> Iterator[str]:
    """What a job without --bf16 has to be asked."""
    for letter, rates in zip("AB", found.rates or (), strict=False):
        if rates.precision:
            yield f"{letter} {rates.precision}"


def _memory(found: Comparison) -> Iterator[str]:
    if found.memory is None:
        yield "memory is not compared: one of them recorded none"
        return
    yield from columns(_memory_rows(found))
    for change in found.changes[:_CLASSES]:
        yield from _change(change)


def _memory_rows(found: Comparison) -> list[list[str]]:
    """A head, and a row for every part of the device's bytes."""
    rows = [["memory of a rank that needs most", "A", "B", "B - A"]]
    for one in found.kinds:
        a, b = int(one.a), int(one.b)
        more = f"{'+' if b > a else ''}{format_bytes(b - a)}"
        rows.append([_NAMES[one.what], format_bytes(a), format_bytes(b), more])
    return rows


def _change(change: Change) -> Iterator[str]:
    a, b = (None if size is None else format_bytes(size) for size in (change.before, change.after))
    more = (change.after or 0) - (change.before or 0)
    moved = f"; peak moved {change.moved}" if change.moved else ""
    yield from folded(f"{change.name}: {a or 'absent'} -> {b or 'absent'} allocated "
                      f"({more:+,} B){moved}", 2)  # fmt: skip
    for one in sorted(change.origins, key=lambda one: -abs(one.num_bytes))[:_ORIGINS]:
        text = f"{one.num_bytes:+,} B  {KINDS[one.kind]}: {module_of(one.module)} {one.site}"
        yield from folded(f"  {text}".rstrip(), 6)


def _ops(found: Comparison) -> Iterator[str]:
    if found.scale:
        yield "what changes with scale"
    for change in found.scale[:_SCALE]:
        yield from folded(f"  {with_short_names(str(change))}", 4)
    if len(found.scale) > _SCALE:
        yield f"  and {len(found.scale) - _SCALE} more: --json has all"
    if found.first is None:
        return
    if not found.first:
        yield "every op of the ranks that both have is alike"
    for one in found.first[:1]:
        yield from one.to_text().splitlines()
    if len(found.first) > 1:
        yield f"and {len(found.first) - 1} more captured ranks differ: --json has all"


@renders(Comparison)
class ComparisonRenderer(Renderer):
    """Writes two jobs side by side."""

    text = staticmethod(render_text)
    page = staticmethod(render_html)
