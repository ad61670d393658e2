"""Whether a job fits, as text of a terminal's width."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_prism.core.columns import columns, folded
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.rendering import Renderer, renders
from megatron_prism.core.units import counted, format_bytes, format_change, format_ns
from megatron_prism.features.fit.fit import Fit, TriedChange
from megatron_prism.memory.host_need import HostNeed
from megatron_prism.memory.steady import Risk
from megatron_prism.replay.costs.precision import precision_of
from megatron_prism.report import words
from megatron_prism.report.memory import page_data, render_memory_page
from megatron_prism.report.memory_tables import (
    KINDS,
    class_table,
    module_of,
    part_rows,
    source_lines,
)

_WORTH_SAYING = 1e-3  # of the tensors: what blocks have beyond them
_FEWEST_WITH_SHARES = 10  # draws of which a tenth can be told


def render_text(found: Fit, shown: str = "", top: int = 8) -> str:
    """Ends in a newline; ``shown``: the class whose peak it shows, ``top`` origins of it."""
    shown_class = shown or found.worst
    # nobody asks whether a class fits where memory is to be freed
    overruns = None if found.free else found.overruns
    parts: list[Iterable[str]] = [
        _verdict(found),
        class_table(found.memory, overruns, found.at_risk),
        _host(found.host),
        _peak(found, shown_class, top),
    ]
    for section in found.sections:
        parts.append(section.lines(shown_class))
    parts.append(changes_of(found))
    parts.append(source_lines(found.memory))
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines) + "\n"


def _verdict(found: Fit) -> Iterator[str]:
    limit = format_bytes(found.limit)
    # nothing runs out where the job shall need less
    if found.free:
        yield from _freeing(found)
        return
    source = f" ({found.limit_source})" if found.limit_source else ""
    first = found.headline
    assumes = f", {first.assumes}" if first is not None else ""
    runs_out = bool(found.overruns) or bool(found.overruns_beside)
    verdict = "does not fit"
    if found.fits:
        verdict = "fits"
    # the first iterations fit
    elif not runs_out:
        verdict = "at risk"
    yield from folded(f"{verdict}: the limit is {limit}{source}{assumes}", 2)
    if found.without is not None:
        yield from folded(f"  without {found.without}", 4)
    if found.what_if is not None:
        yield from folded(f"  assumed: {found.what_if}", 4)
    left = f"{format_bytes(abs(found.over))} {'too much' if found.over > 0 else 'to spare'}"
    one = found.memory.classes[found.worst]
    level = "device" if one.get("peak_device") is not None else "reserved"
    size = format_bytes(found.limit + found.over)
    yield f"  {found.worst} needs most: {size} of {level} memory, {left}"
    for name, place in found.overruns.items():
        if place.where is None:
            text = "fits if the allocator gives its cache back in time"
        else:
            beside = f"{place.size:,} B do not fit beside {format_bytes(place.reserved)} reserved"
            text = f"runs out {place.where}: {beside}"
        yield from folded(f"  {name} {text}", 4)
    for name, risk in found.risks.items():
        text = later_iterations(risk)
        if text:
            yield from folded(f"  {name} {text}", 4)
    for name, text in found.overruns_beside.items():
        yield from folded(f"  {name} {text}", 4)
    if first is not None and first.iteration_ns:
        yield from folded(f"  an iteration: {first.text}", 4)
    if asks := precision_of(found.programs).asks:
        yield from folded(f"  {asks}", 4)


def _freeing(found: Fit) -> Iterator[str]:
    """Say whether a change frees as much as is asked for."""
    free, needs = format_bytes(found.free), format_bytes(found.limit + found.over)
    text = f"no change that was tried frees {free}"
    if found.frees_enough:
        text = f"{counted(sum(change.fits for change in found.changes), 'change')} free {free}"
    yield from folded(text)
    yield from folded(f"  {found.worst} needs most: {needs}", 4)


def _host(need: HostNeed | None) -> Iterator[str]:
    """What the job keeps in memory of its hosts."""
    if need is None:
        return
    rank, node = format_bytes(need.rank_bytes), format_bytes(need.node_bytes)
    text = f"{rank} of host memory a rank, {node} a node of {need.node_ranks}: copies and states "
    text += "that the job keeps there, without its processes; pinned pieces may be rounded up"
    if need.what_if:
        text += f"; as captured, without {need.what_if}"
    yield from folded(text, 2)


def later_iterations(risk: Risk) -> str:
    """Say what later iterations do with a class that has little to spare; empty if they fit."""
    if not risk.draws:
        return "has little to spare, and too many requests to replay later iterations"
    if not risk.failed:
        return ""
    iterations = counted(risk.iterations, "iteration")
    if risk.draws == 1:
        text = f"runs out in iteration {risk.first}"
    else:
        text = f"runs out within {iterations} in {_share_of_draws(risk)}"
        text += f", first in iteration {risk.first}"
    text += f": a request of {format_bytes(risk.size)}"
    if risk.where:
        text += f" ({risk.where})"
    return f"{text} finds no block, {format_bytes(risk.unused)} are in free blocks that are smaller"


def _share_of_draws(risk: Risk) -> str:
    """Say how many draws run out: one in N where that is half of them or fewer."""
    drawn = "of how far the host is ahead"
    if risk.follows_times:
        drawn = "of the host's speed"
    if 2 * risk.failed > risk.draws:
        return f"{risk.failed} of {risk.draws} draws {drawn}"
    return f"one draw in {round(risk.draws / risk.failed)} {drawn} ({risk.failed} of {risk.draws})"


def reserved_of_draws(risk: Risk | None) -> str:
    """Say what segments take in half of the draws, and in a tenth; empty where all are alike.

    Fewer than ten draws have no tenth: these are a range.
    """
    if risk is None or len(risk.reserved) < 2:
        return ""
    least, most = format_bytes(risk.reserved[0]), format_bytes(risk.reserved[-1])
    if least == most:
        return ""
    within = f"reserved within {counted(risk.iterations, 'iteration')}"
    if risk.draws < _FEWEST_WITH_SHARES:
        return f"{within}: {least} to {most} in {risk.draws} draws"
    half = format_bytes(risk.reserved_at(0.5))
    tenth = format_bytes(risk.reserved_at(0.9))
    shares = f"{half} in half of {risk.draws} draws, {tenth} or more in a tenth"
    return f"{within}: {shares}; {least} to {most} in all"


def _peak(found: Fit, name: str, top: int) -> Iterator[str]:
    one = found.memory.classes[name]
    at = one["at"]
    step = words.step(at["phase"], at["microbatch"], at["chunk"])
    place = f"{step} ({at['step']}), {at['op']} {at['site']}"
    if one.get("earlier"):
        place = f"before the recorded iteration, {place}"
    yield from folded(f"the peak of {name}: {place}".rstrip(), 2)
    yield from columns([["  of the device", ""], *part_rows(one)])
    drawn = reserved_of_draws(found.risks.get(name))
    least, most = one.get("reserved_between") or (0, 0)
    if drawn:
        yield from folded(f"  {drawn}", 4)
    elif format_bytes(least) != format_bytes(most):
        between = f"{format_bytes(least)} if the device keeps up with the host, up to "
        yield from folded(f"  reserved: {between}{format_bytes(most)} else", 4)
    counted_by_torch = found.as_torch_counts(name)
    beyond = counted_by_torch - one["peak_allocated"]
    if beyond > _WORTH_SAYING * one["peak_allocated"]:
        text = f"torch.cuda.max_memory_allocated: {format_bytes(counted_by_torch)}, as blocks have "
        yield from folded(f"  {text}{format_bytes(beyond)} beyond their tensors", 4)
    sums: dict[tuple[str, str, str], list[int]] = {}
    for held in one["top"]:
        key = KINDS.get(held["kind"], held["kind"]), module_of(held["module"]), held["site"]
        entry = sums.setdefault(key, [0, 0])
        entry[0] += held["num_bytes"]
        entry[1] += held["count"]
    largest = sorted(sums.items(), key=lambda item: -item[1][0])[:top]
    if not largest:
        return
    yield ""
    yield f"  the largest of {format_bytes(one['peak_allocated'])} allocated"
    for (kind, module, site), (size, count) in largest:
        text = f"{format_bytes(size):>10}  {kind}, {counted(count, 'tensor')}: {module} {site}"
        yield from folded(f"  {text.rstrip(': ')}", 14)


def changes_of(found: Fit) -> Iterator[str]:
    """What frees memory of a job that does not fit, tried on its slices."""
    if found.steps_fit:
        return
    enough = any(one.fits for one in found.changes)
    captured: list[TriedChange] = []
    estimated: list[TriedChange] = []
    for change in found.changes:
        listed = captured if change.captured else estimated
        listed.append(change)
    if captured:
        yield "what frees memory, captured with the change"
        yield from _outcomes(captured, found)
    if estimated:
        yield "what frees memory, tried on the slices"
        yield from _outcomes(estimated, found)
    if not found.changes:
        yield "nothing that can be tried on the slices frees memory of the peak"
    for change_words, why in found.refused.items():
        yield from folded(f"  not captured: {change_words}: {why}", 4)
    if not captured and not found.refused:
        text = (
            "--try captures the job with further changes: optimizer and activations on the host, "
        )
        text += "virtual stages, single layers again"
        yield from folded(f"  {text}", 2)
    if not enough:
        yield from folded(
            "  none of these is enough: weights, gradients and optimizer shrink with "
            "more pipeline, tensor or expert ranks, activations with context "
            "parallelism: prism sweep tries them",
            2,
        )


def _outcomes(changes: Iterable[TriedChange], found: Fit) -> Iterator[str]:
    for change in changes:
        yield from folded(f"  {change.words}", 4)
        yield from folded(f"    {outcome(change, found)}", 6)


def outcome(one: TriedChange, found: Fit) -> str:
    """What a change leaves of the limit, or how much it frees, and what it costs in time."""
    iteration_ns = found.iteration_ns
    left = format_bytes(abs(found.limit - one.num_bytes))
    if found.free:
        room = f"frees {format_bytes(found.limit + found.free - one.num_bytes)}"
        if not one.fits:
            room += f", {left} less than asked for"
    elif one.fits:
        room = f"fits, {left} to spare"
    else:
        room = f"{left} too much"
    text = f"{format_bytes(one.num_bytes)}: {room}"
    if one.host_bytes:
        text += f", {format_bytes(one.host_bytes)} of host memory a rank"
    if one.slower_ns is None or iteration_ns is None:
        return f"{text}; its time is not known"
    if one.slower_ns < 0:
        return f"{text}; an iteration takes {format_ns(-one.slower_ns)} less"
    if one.slower_ns == 0:
        return f"{text}; an iteration takes no longer"
    slower = format_change(one.slower_ns / iteration_ns)
    return f"{text}; an iteration takes {format_ns(one.slower_ns)} longer ({slower})"


def render_fit(found: Fit) -> str:
    """The page of a job."""
    data = page_data(found.programs, found.memory, found.limit)
    data["verdict"] = "It may run out of memory later"
    overruns_beside = found.overruns_beside
    # nothing runs out where the job shall need less
    if found.free:
        data["verdict"] = next(iter(_freeing(found)))
        overruns_beside = {}
    elif found.fits:
        data["verdict"] = "It fits"
    elif found.overruns or overruns_beside:
        data["verdict"] = "It does not fit"
    data["about"] = []
    for name, place in found.shown_overruns.items():
        if place.where:
            data["about"].append(f"{name} runs out {place.where}.")
    for name, risk in found.risks.items():
        text = later_iterations(risk)
        if text:
            data["about"].append(f"{name} {text}.")
    for name, text in overruns_beside.items():
        data["about"].append(f"{name} {text}.")
    data["changes"] = [(one.words, outcome(one, found)) for one in found.changes]
    rows = [[level, text] for level, text in found.memory.provenance.items()]
    title = job_settings.title(found.programs.source, found.programs.world)
    return render_memory_page(title, "from slices, without a GPU", data, rows)


@renders(Fit)
class FitRenderer(Renderer):
    """Writes whether a job fits."""

    text = staticmethod(render_text)
    page = staticmethod(render_fit)
