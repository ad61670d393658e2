"""Two jobs side by side, as text of a terminal's width and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_prism.core.columns import columns, folded
from megatron_prism.core.groups import with_short_names
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.rendering import Renderer, renders
from megatron_prism.core.units import format_bytes, format_change, format_ns, format_share
from megatron_prism.features.compare.compare import Comparison
from megatron_prism.memory.peak_changes import Change
from megatron_prism.report import replay
from megatron_prism.report.memory_tables import KINDS, PARTS, module_of

_NAMES = {**PARTS, "device": "= device"}
_MAX_SETTINGS = 12
_MAX_CLASSES = 8
_MAX_ORIGINS = 6
_MAX_SCALE_CHANGES = 24


def render_text(comparison: Comparison) -> str:
    """Write the comparison, ending in a newline."""
    head: list[str] = []
    for index, letter in enumerate("AB"):
        text = comparison.names[index]
        # which machine and host its times are of
        if comparison.headlines:
            text += f"  {comparison.headlines[index].assumes}"
        head += folded(f"{letter}  {text}", 3)
    parts = (
        head,
        list(_settings(comparison)),
        list(_times(comparison)),
        list(_memory(comparison)),
        list(_ops(comparison)),
    )
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def render_html(comparison: Comparison) -> str:
    """Write a page with both timelines, one above the other."""
    assert comparison.timelines is not None
    a, b = comparison.timelines
    tables: list[tuple[str, Sequence[str], Sequence[object]]] = []
    # beside the timelines: memory by part, and settings
    if comparison.memory is not None:
        head, *rows = _memory_rows(comparison)
        tables.append((head[0], ("", *head[1:]), rows))
    settings: list[tuple[str, str, str]] = []
    for setting in comparison.settings:
        settings.append((setting.name, _value(setting.a), _value(setting.b)))
    if settings:
        tables.append(("what differs between the jobs", ("", "A", "B"), settings))
    name_of_a, name_of_b = comparison.names
    notes = [*_certainty(comparison), *_precision(comparison)]
    return replay.render_html(a, f"A: {name_of_a}", (f"B: {name_of_b}", b), tables, notes)


def _settings(comparison: Comparison) -> Iterator[str]:
    if comparison.settings:
        yield "what differs between the jobs"
    for setting in comparison.settings[:_MAX_SETTINGS]:
        yield from folded(f"  {setting.name}: {_value(setting.a)} -> {_value(setting.b)}", 4)
    if len(comparison.settings) > _MAX_SETTINGS:
        yield f"  and {len(comparison.settings) - _MAX_SETTINGS} more: --json has all"


def _value(text: str | None) -> str:
    """Write what one job says of a setting."""
    return "not given" if text is None else job_settings.short(text)


def _signed(ns: float) -> str:
    return f"{'+' if ns > 0 else ''}{format_ns(round(ns))}"


def _times(comparison: Comparison) -> Iterator[str]:
    if comparison.iterations is None or comparison.difference is None:
        yield from folded(f"times are not compared: {comparison.untimed}")
        return
    rows = [["time of a mean rank", "A", "B", "B - A"]]
    for part in comparison.times:
        name = with_short_names(part.what)
        difference = _signed(part.b - part.a)
        rows.append([name, format_ns(round(part.a)), format_ns(round(part.b)), difference])
    a, b = comparison.iterations
    rows.append(["= iteration", format_ns(a), format_ns(b), _signed(b - a)])
    for speed in comparison.speeds:
        change = format_change(speed.b / speed.a - 1) if speed.a else ""
        rows.append([speed.what, f"{speed.a:,.0f}", f"{speed.b:,.0f}", change])
    cost = comparison.cost
    if cost is not None:
        change = format_change(cost.b / cost.a - 1)
        rows.append(["cost of 10^9 tokens", f"{cost.a:,.2f}", f"{cost.b:,.2f}", change])
    yield from columns(rows)
    # on other hosts the iteration takes another time
    for letter, first in zip("AB", comparison.headlines, strict=False):
        if first.host_decides:
            yield from folded(f"{letter} takes {first.text}", 2)
    for line in (*_certainty(comparison), *_precision(comparison)):
        yield from folded(line, 2)


def _certainty(comparison: Comparison) -> list[str]:
    """Say how sure the difference of the times is, and which job is faster.

    Iterations of other batches do another amount of work: tokens per second decide there, and
    those of a GPU where numbers of GPUs differ, too.
    """
    difference = comparison.difference
    if difference is None:
        return [comparison.untimed]
    letter, chance = _likelier(difference.first_faster)
    answer = f"{letter} is faster with {format_share(chance)}"
    # iterations of unequal work, or of work that nobody knows
    if comparison.batches_differ is not False:
        answer = f"{letter}'s iteration is shorter with {format_share(chance)}"
    if difference.low_ns == difference.high_ns == 0:
        answer = "both take as long"
    between = f"from {_signed(difference.low_ns)} to {_signed(difference.high_ns)} with 95 %"
    text = f"B - A: {_signed(difference.ns)}, {between}; {answer}: what is unknown of the machine "
    lines = [text + "is the same for both"]
    if comparison.batches_differ is None:
        text = "one of them does not say how many tokens an iteration has, so nobody knows which "
        lines.append(text + "trains faster")
    # what decides instead: the job's rate with other batches, a GPU's with other numbers of GPUs
    for speed in comparison.speeds:
        decides = comparison.gpus_differ if speed.of_a_gpu else comparison.batches_differ
        if decides:
            letter, chance = _likelier(speed.first_faster)
            lines.append(f"by {speed.what}: {letter} is faster with {format_share(chance)}")
    cost = comparison.cost
    # with the same GPUs at one price, tokens per second of a GPU say it already
    if cost is not None and cost.prices[0] != cost.prices[1]:
        letter, chance = _likelier(cost.first_cheaper)
        lines.append(f"by cost of tokens: {letter} is cheaper with {format_share(chance)}")
    return lines


def _likelier(first_faster: float) -> tuple[str, float]:
    """Return the likelier of A and B, and how likely it is."""
    if first_faster >= 0.5:
        return "A", first_faster
    return "B", 1 - first_faster


def _precision(comparison: Comparison) -> Iterator[str]:
    """Yield what a job without --bf16 has to be asked."""
    for letter, rates in zip("AB", comparison.rates or (), strict=False):
        if rates.precision:
            yield f"{letter} {rates.precision}"


def _memory(comparison: Comparison) -> Iterator[str]:
    if comparison.memory is None:
        yield "memory is not compared: one of them recorded none"
        return
    yield from columns(_memory_rows(comparison))
    for change in comparison.changes[:_MAX_CLASSES]:
        yield from _change(change)


def _memory_rows(comparison: Comparison) -> list[list[str]]:
    """Return a head, and a row for every part of the device's bytes."""
    rows = [["memory of a rank that needs most", "A", "B", "B - A"]]
    for part in comparison.kinds:
        a, b = int(part.a), int(part.b)
        sign = "+" if b > a else ""
        row = [_NAMES[part.what], format_bytes(a), format_bytes(b), f"{sign}{format_bytes(b - a)}"]
        rows.append(row)
    return rows


def _change(change: Change) -> Iterator[str]:
    """Say how the peak of a class changed, and by which origins."""
    difference = (change.after or 0) - (change.before or 0)
    text = f"{change.name}: {_size(change.before)} -> {_size(change.after)} allocated "
    text += f"({difference:+,} B)"
    if change.resized:
        text += f"; {change.resized}"
    if change.moved:
        text += f"; peak moved {change.moved}"
    yield from folded(text, 2)
    largest_first = sorted(change.origins, key=lambda origin: -abs(origin.num_bytes))
    for origin in largest_first[:_MAX_ORIGINS]:
        module = module_of(origin.module)
        text = f"{origin.num_bytes:+,} B  {KINDS[origin.kind]}: {module} {origin.site}"
        yield from folded(f"  {text}".rstrip(), 6)


def _size(num_bytes: int | None) -> str:
    return "absent" if num_bytes is None else format_bytes(num_bytes)


def _ops(comparison: Comparison) -> Iterator[str]:
    if comparison.scale:
        yield "what changes with scale"
    for change in comparison.scale[:_MAX_SCALE_CHANGES]:
        yield from folded(f"  {with_short_names(str(change))}", 4)
    if len(comparison.scale) > _MAX_SCALE_CHANGES:
        yield f"  and {len(comparison.scale) - _MAX_SCALE_CHANGES} more: --json has all"
    # worlds of other sizes have no ops to compare
    if comparison.first is None:
        return
    if not comparison.first:
        yield "every op of the ranks that both have is alike"
    else:
        yield from comparison.first[0].to_text().splitlines()
    if len(comparison.first) > 1:
        yield f"and {len(comparison.first) - 1} more captured ranks differ: --json has all"


@renders(Comparison)
class ComparisonRenderer(Renderer):
    """Writes two jobs side by side."""

    text = staticmethod(render_text)
    page = staticmethod(render_html)
