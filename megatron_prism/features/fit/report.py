"""Whether a job fits, as text of a terminal's width."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_prism.core.columns import columns, folded
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.rendering import Renderer, renders
from megatron_prism.core.units import counted, format_bytes, format_change, format_ns
from megatron_prism.features.fit.fit import Fit, TriedChange
from megatron_prism.memory.host_need import HostNeed
from megatron_prism.memory.job_peaks import ClassMemoryFigures
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


def render_text(fit: Fit, shown: str = "", top: int = 8) -> str:
    """Ends in a newline; ``shown``: the class whose peak it shows, ``top`` origins of it."""
    shown_class = shown or fit.worst
    # nobody asks whether a class fits where memory is to be freed
    overruns = None if fit.free else fit.overruns
    parts: list[Iterable[str]] = [
        _verdict(fit),
        class_table(fit.memory, overruns, fit.at_risk),
        _host(fit.host),
        _peak(fit, shown_class, top),
    ]
    for section in fit.sections:
        parts.append(section.lines(shown_class))
    parts.append(changes_of(fit))
    parts.append(source_lines(fit.memory))
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines) + "\n"


def _verdict(fit: Fit) -> Iterator[str]:
    """Say whether the job fits, what the class that needs most has left, and what runs out."""
    limit = format_bytes(fit.limit)
    # nothing runs out where the job shall need less
    if fit.free:
        yield from _freeing(fit)
        return
    source = f" ({fit.limit_source})" if fit.limit_source else ""
    first = fit.headline
    assumes = f", {first.assumes}" if first is not None else ""
    runs_out = bool(fit.overruns) or bool(fit.overruns_beside)
    verdict = "does not fit"
    if fit.fits:
        verdict = "fits"
    # the first iterations fit
    elif not runs_out:
        verdict = "at risk"
    yield from folded(f"{verdict}: the limit is {limit}{source}{assumes}", 2)
    if fit.without is not None:
        yield from folded(f"  without {fit.without}", 4)
    if fit.what_if is not None:
        yield from folded(f"  assumed: {fit.what_if}", 4)
    left = f"{format_bytes(abs(fit.over))} to spare"
    if fit.over > 0:
        left = f"{format_bytes(fit.over)} too much"
    # no calibration of the device was asked for: what lies beside segments is not known
    level = "reserved"
    if fit.memory.classes[fit.worst].get("peak_device") is not None:
        level = "device"
    size = format_bytes(fit.limit + fit.over)
    yield f"  {fit.worst} needs most: {size} of {level} memory, {left}"
    for name, place in fit.overruns.items():
        # within the limit, if segments that are not in use go back before the request
        if place.where is None:
            text = "fits if the allocator gives its cache back in time"
        else:
            beside = f"{place.size:,} B do not fit beside {format_bytes(place.reserved)} reserved"
            text = f"runs out {place.where}: {beside}"
        yield from folded(f"  {name} {text}", 4)
    for name, risk in fit.risks.items():
        text = later_iterations(risk)
        if text:
            yield from folded(f"  {name} {text}", 4)
    for name, text in fit.overruns_beside.items():
        yield from folded(f"  {name} {text}", 4)
    if first is not None and first.iteration_ns:
        yield from folded(f"  an iteration: {first.text}", 4)
    precision_question = precision_of(fit.programs).asks
    if precision_question:
        yield from folded(f"  {precision_question}", 4)


def _freeing(fit: Fit) -> Iterator[str]:
    """Say whether a change frees as much as is asked for."""
    free, needs = format_bytes(fit.free), format_bytes(fit.limit + fit.over)
    text = f"no change that was tried frees {free}"
    if fit.frees_enough:
        text = f"{counted(sum(change.fits for change in fit.changes), 'change')} free {free}"
    yield from folded(text)
    yield from folded(f"  {fit.worst} needs most: {needs}", 4)


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
    smallest, largest = format_bytes(risk.reserved[0]), format_bytes(risk.reserved[-1])
    if smallest == largest:
        return ""
    within = f"reserved within {counted(risk.iterations, 'iteration')}"
    if risk.draws < _FEWEST_WITH_SHARES:
        return f"{within}: {smallest} to {largest} in {risk.draws} draws"
    half = format_bytes(risk.reserved_at(0.5))
    tenth = format_bytes(risk.reserved_at(0.9))
    shares = f"{half} in half of {risk.draws} draws, {tenth} or more in a tenth"
    return f"{within}: {shares}; {smallest} to {largest} in all"


def _peak(fit: Fit, name: str, top: int) -> Iterator[str]:
    """Show the peak of a class: where it is reached, its parts and its largest origins."""
    figures = fit.memory.classes[name]
    peak_place = figures["at"]
    step = words.step(peak_place["phase"], peak_place["microbatch"], peak_place["chunk"])
    place = f"{step} ({peak_place['step']}), {peak_place['op']} {peak_place['site']}"
    # an iteration before the recorded one needed more
    if figures.get("earlier"):
        place = f"before the recorded iteration, {place}"
    yield from folded(f"the peak of {name}: {place}".rstrip(), 2)
    yield from columns([["  of the device", ""], *part_rows(figures)])
    drawn = reserved_of_draws(fit.risks.get(name))
    reserved_range = figures.get("reserved_between") or (0, 0)
    smallest, largest = map(format_bytes, reserved_range)
    # draws of later iterations say more than the two bounds of the recorded one
    if drawn:
        yield from folded(f"  {drawn}", 4)
    elif smallest != largest:
        between = f"{smallest} if the device keeps up with the host, up to "
        yield from folded(f"  reserved: {between}{largest} else", 4)
    allocated_bytes = figures["peak_allocated"]
    counted_by_torch = fit.as_torch_counts(name)
    beyond_tensors = counted_by_torch - allocated_bytes
    if beyond_tensors > _WORTH_SAYING * allocated_bytes:
        text = f"torch.cuda.max_memory_allocated: {format_bytes(counted_by_torch)}, as blocks have "
        yield from folded(f"  {text}{format_bytes(beyond_tensors)} beyond their tensors", 4)
    yield from _largest_origins(figures, top)


def _largest_origins(figures: ClassMemoryFigures, top: int) -> Iterator[str]:
    """List what is alive at the peak of a class by kind, module and site, the largest first."""
    sums: dict[tuple[str, str, str], list[int]] = {}  # origin -> [bytes, tensors]
    for held in figures["top"]:
        key = KINDS.get(held["kind"], held["kind"]), module_of(held["module"]), held["site"]
        entry = sums.setdefault(key, [0, 0])
        entry[0] += held["num_bytes"]
        entry[1] += held["count"]
    largest_origins = sorted(sums.items(), key=lambda item: -item[1][0])[:top]
    if not largest_origins:
        return
    yield ""
    yield f"  the largest of {format_bytes(figures['peak_allocated'])} allocated"
    for (kind, module, site), (size, count) in largest_origins:
        text = f"{format_bytes(size):>10}  {kind}, {counted(count, 'tensor')}: {module} {site}"
        yield from folded(f"  {text.rstrip(': ')}", 14)


def changes_of(fit: Fit) -> Iterator[str]:
    """What frees memory of a job that does not fit, tried on its slices."""
    if fit.steps_fit:
        return
    captured: list[TriedChange] = []
    estimated: list[TriedChange] = []
    for change in fit.changes:
        listed = captured if change.captured else estimated
        listed.append(change)
    if captured:
        yield "what frees memory, captured with the change"
        yield from _outcomes(captured, fit)
    if estimated:
        yield "what frees memory, tried on the slices"
        yield from _outcomes(estimated, fit)
    if not fit.changes:
        yield "nothing that can be tried on the slices frees memory of the peak"
    for change_words, why in fit.refused.items():
        yield from folded(f"  not captured: {change_words}: {why}", 4)
    if not captured and not fit.refused:
        text = (
            "--try captures the job with further changes: optimizer and activations on the host, "
        )
        text += "virtual stages, single layers again"
        yield from folded(f"  {text}", 2)
    if not fit.frees_enough:
        yield from folded(
            "  none of these is enough: weights, gradients and optimizer shrink with "
            "more pipeline, tensor or expert ranks, activations with context "
            "parallelism: prism sweep tries them",
            2,
        )


def _outcomes(changes: Iterable[TriedChange], fit: Fit) -> Iterator[str]:
    for change in changes:
        yield from folded(f"  {change.words}", 4)
        yield from folded(f"    {outcome(change, fit)}", 6)


def outcome(change: TriedChange, fit: Fit) -> str:
    """What a change leaves of the limit, or how much it frees, and what it costs in time."""
    iteration_ns = fit.iteration_ns
    left = format_bytes(abs(fit.limit - change.num_bytes))
    if fit.free:
        room = f"frees {format_bytes(fit.limit + fit.free - change.num_bytes)}"
        if not change.fits:
            room += f", {left} less than asked for"
    elif change.fits:
        room = f"fits, {left} to spare"
    else:
        room = f"{left} too much"
    text = f"{format_bytes(change.num_bytes)}: {room}"
    if change.host_bytes:
        text += f", {format_bytes(change.host_bytes)} of host memory a rank"
    if change.slower_ns is None or iteration_ns is None:
        return f"{text}; its time is not known"
    if change.slower_ns < 0:
        return f"{text}; an iteration takes {format_ns(-change.slower_ns)} less"
    if change.slower_ns == 0:
        return f"{text}; an iteration takes no longer"
    slower = format_change(change.slower_ns / iteration_ns)
    return f"{text}; an iteration takes {format_ns(change.slower_ns)} longer ({slower})"


def render_fit(fit: Fit) -> str:
    """The page of a job."""
    data = page_data(fit.programs, fit.memory, fit.limit)
    data["verdict"] = "It may run out of memory later"
    overruns_beside = fit.overruns_beside
    # nothing runs out where the job shall need less
    if fit.free:
        data["verdict"] = next(iter(_freeing(fit)))
        overruns_beside = {}
    elif fit.fits:
        data["verdict"] = "It fits"
    elif fit.overruns or overruns_beside:
        data["verdict"] = "It does not fit"
    data["about"] = []
    for name, place in fit.shown_overruns.items():
        if place.where:
            data["about"].append(f"{name} runs out {place.where}.")
    for name, risk in fit.risks.items():
        text = later_iterations(risk)
        if text:
            data["about"].append(f"{name} {text}.")
    for name, text in overruns_beside.items():
        data["about"].append(f"{name} {text}.")
    data["changes"] = [(change.words, outcome(change, fit)) for change in fit.changes]
    rows = [[level, text] for level, text in fit.memory.provenance.items()]
    title = job_settings.title(fit.programs.source, fit.programs.world)
    return render_memory_page(title, "from slices, without a GPU", data, rows)


@renders(Fit)
class FitRenderer(Renderer):
    """Writes whether a job fits."""

    text = staticmethod(render_text)
    page = staticmethod(render_fit)
