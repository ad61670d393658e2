"""The parts of a process's life in the answer of ``prism fit``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_prism.core.columns import columns, folded
from megatron_prism.core.units import counted, format_bytes
from megatron_prism.features.fit.section import JobMemory
from megatron_prism.features.life.parts import AT_END, STEADY, LifeParts, lives
from megatron_prism.memory import saved_bytes
from megatron_prism.memory.saved_bytes import SavingNeed

# on what a part ran that could not run as in the job
_ASSUMPTIONS = {"load": "of an assumed checkpoint of the job's own layout; --load is not here"}
_UNNAMED = "on an assumption"  # of another release
# what people call the parts
_WORDS = {
    "model": "building the model",
    "optimizer": "building the optimizer",
    "load": "loading",
    "first iteration": "the first step",
    STEADY: "a steady step",
    "checkpoint": "saving",
}


def words_of(part: str) -> str:
    """Return what people call a part."""
    return _WORDS.get(part, part)


def _assumption(part: str) -> str:
    """Say on what a part ran that could not run as in the job."""
    return _ASSUMPTIONS.get(part, _UNNAMED)


class LifeSection:
    """The parts of every class, beside a limit.

    Args:
        lives_of_classes: class of ranks -> its life.
        limit: bytes of device memory that a process may take.
    """

    name = "life"

    def __init__(self, lives_of_classes: Mapping[str, LifeParts], limit: int) -> None:
        self._lives = lives_of_classes
        self._limit = limit

    def to_json(self) -> dict[str, object]:
        """Make the parts of every class; bytes, null for a part that did not run."""
        classes: dict[str, object] = {}
        for name, life in self._lives.items():
            parts: dict[str, int | None] = dict(life.peaks)
            # a part that did not run is no part of 0 bytes
            parts.update(dict.fromkeys(life.not_run))
            assumed = {part: _assumption(part) for part in life.assumed}
            classes[name] = {"parts": parts, "decides": life.decides, "assumed": assumed}
        return classes

    def lines(self, class_name: str) -> Iterator[str]:
        """Make a table of the parts of a class, the part that decides, and what is not known."""
        life = self._lives.get(class_name)
        if life is None:
            return
        yield f"the parts of the process's life, of {class_name}: max_memory_allocated"
        steady_bytes = life.peaks[STEADY]
        rows = []
        for part, num_bytes in life.peaks.items():
            beside = ""
            if part != STEADY:
                beside = _difference(num_bytes - steady_bytes)
            rows.append([f"  {words_of(part)}", format_bytes(num_bytes), beside])
        yield from columns(rows)
        for part in life.assumed:
            yield from folded(f"  {words_of(part)}: {_assumption(part)}", 4)
        yield from folded(f"  {_decision(life)}", 4)
        yield from folded(f"  {_unknown(life)}", 4)

    def overruns(self) -> dict[str, str]:
        """Return the classes of which a part beside the steps exceeds the limit in any case."""
        places = {}
        for name, life in self._lives.items():
            # the steps have prism fit's own verdict
            if life.decides != STEADY and life.least_needed > self._limit:
                size = format_bytes(life.least_needed)
                text = f"runs out in {words_of(life.decides)}, which needs {size} at least"
                if life.decides in life.assumed:
                    text += f": {_assumption(life.decides)}"
                places[name] = text
        return places


class SavingSection:
    """What a save needs beyond its state dict.

    Args:
        need: of the job.
    """

    name = "saving"

    def __init__(self, need: SavingNeed) -> None:
        self._need = need

    def to_json(self) -> dict[str, object]:
        """Make the bytes of hosts and of the device."""
        return dict(vars(self._need))

    def lines(self, class_name: str) -> Iterator[str]:
        """Say it of the ranks that need most, whatever class is shown."""
        yield from folded(_copies(self._need), 2)

    def overruns(self) -> dict[str, str]:
        """Return nothing: no limit of hosts is known."""
        return {}


def _difference(num_bytes: int) -> str:
    """Write how much more or less than a steady step a part allocates."""
    if num_bytes == 0:
        return "as a steady step"
    sign = "+" if num_bytes > 0 else "-"
    return f"{sign}{format_bytes(abs(num_bytes))}"


def _copies(saving: SavingNeed) -> str:
    """Say what a save takes of the host, and beyond its state dict of the device."""
    rank_bytes, node_bytes = format_bytes(saving.rank_bytes), format_bytes(saving.node_bytes)
    text = f"saving copies up to {rank_bytes} of a rank to its host, up to {node_bytes} of a node "
    text += f"of {counted(saving.node_ranks, 'rank')}"
    if saving.is_async:
        text += "; the copies stay while the job trains on, until all is written"
    if saving.device_bytes:
        text += "; quantized parameters are on the device in bf16, too: "
        text += format_bytes(saving.device_bytes)
    return text


def _decision(life: LifeParts) -> str:
    """Say which part decides."""
    peak = format_bytes(life.peaks[life.decides])
    if life.decides == STEADY:
        return f"{words_of(STEADY)} decides: {peak}"
    return f"{words_of(life.decides)} decides: {peak} beside {format_bytes(life.peaks[STEADY])}"


def _unknown(life: LifeParts) -> str:
    """Say which parts were not run, and what of those that were is not known."""
    text = "not known: what segments take in parts other than the steps"
    missing = [words_of(part) for part in life.not_run if part != "end"]
    if missing:
        text += f"; {', '.join(missing)}: did not run"
    if set(life.not_run) & set(AT_END):
        text += "; --prism-life captures the end of the job, too"
    return text


def life_section(job: JobMemory) -> LifeSection | None:
    """Make the section of a job; None where its slices keep no parts."""
    found = lives(job)
    if not found:
        return None
    return LifeSection(found, job.limit)


def saving_section(job: JobMemory) -> SavingSection | None:
    """Make the section of a job; None where its slices do not say what is written."""
    need = saved_bytes.saving_need(job.programs)
    if need is None:
        return None
    return SavingSection(need)


FIT_SECTIONS = (life_section, saving_section)
