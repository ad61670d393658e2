"""The phases of a job as text."""

from __future__ import annotations

from megatron_prism.core.columns import columns, folded
from megatron_prism.core.rendering import Renderer, renders
from megatron_prism.core.units import format_bytes
from megatron_prism.features.phases.phases import PROVENANCE, Phases


def render_text(job: Phases) -> str:
    """Write the verdict, then a table of the class that needs most."""
    decides = job.decides
    verdict = "fits" if job.fits else "does not fit"
    difference = format_bytes(abs(job.limit - decides.peak))
    room = f"{difference} to spare" if job.fits else f"{difference} too much"
    lines = [
        f"{verdict}: the limit is {format_bytes(job.limit)}",
        f"  {job.worst} needs most, to {decides.name}: {format_bytes(decides.peak)}, {room}",
        "",
    ]
    rows = [["phase", "peak", "stays", "on the host"]]
    for phase in job.classes[job.worst]:
        row = [phase.name, format_bytes(phase.peak), format_bytes(phase.stays)]
        rows.append([*row, format_bytes(phase.host)])
    lines += columns(rows)
    lines.append("a rank's device; stays, on the host: when the phase is over")
    lines += folded(PROVENANCE, 2)
    return "\n".join(lines) + "\n"


@renders(Phases)
class PhasesRenderer(Renderer):
    """Writes phases."""

    text = staticmethod(render_text)
