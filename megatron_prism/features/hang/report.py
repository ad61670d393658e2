"""A verdict on a hang as Markdown (for an issue) and as one HTML page.

In : Diagnosis.  Out: text.  The same words as on the terminal, first line first; what comes from
dumps and programs is hostile and is escaped.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_prism.core.groups import with_short_names
from megatron_prism.core.rendering import Renderer, renders
from megatron_prism.core.world import format_ranks
from megatron_prism.features.hang.verdict import Diagnosis, Waiting
from megatron_prism.report.page import Data, render_page
from megatron_prism.report.trace_events import Event, arrow, metadata, span, thread_name, trace_file

_SCRIPT = Path(__file__).with_name("hang.js")
_MAX_ROWS = 64  # rows of the table of victims
_MAX_ARROWS = 4  # arrows from one victim in the trace
_TRACE_NS = 10**9  # length of a rank's span in the trace, where a standstill has no time


@dataclass(frozen=True)
class _Section:
    """A part of a verdict: its title and its lines."""

    title: str
    lines: tuple[str, ...]


_Row = tuple[str, ...]  # cells of a table


def _evidence(diagnosis: Diagnosis) -> _Section:
    return _Section("Evidence", diagnosis.evidence)


def _further_sections(diagnosis: Diagnosis) -> list[_Section]:
    """Return what stands below the evidence, without sections that have no line."""
    watchdog = (diagnosis.watchdog,) if diagnosis.watchdog else ()
    sections = (
        _Section("Who waits for whom", diagnosis.chain),
        _Section("Places in the programs", diagnosis.places),
        _Section("Tried on the programs", diagnosis.tried),
        _Section("First watchdog to fire", watchdog),
        _Section("Missing, and what to set next time", diagnosis.missing),
    )
    return [section for section in sections if section.lines]


def _victim_rows(diagnosis: Diagnosis, victims: Sequence[Waiting]) -> list[_Row]:
    """Return rows (ranks, call, awaited); ranks that wait alike share a row."""
    ranks_of_wait: dict[tuple[str, str], list[int]] = {}
    for victim in victims:
        awaited = format_ranks(victim.waits_for)
        if not awaited:
            awaited = _unfitting_call(diagnosis)
        ranks_of_wait.setdefault((victim.call, awaited), []).append(victim.rank)
    rows: list[_Row] = []
    for (call, awaited), ranks in ranks_of_wait.items():
        rows.append((format_ranks(ranks), call, awaited))
    return rows[:_MAX_ROWS]


def _unfitting_call(diagnosis: Diagnosis) -> str:
    """Say what a victim waits for where all ranks have come, and their calls do not fit."""
    if not diagnosis.culprits:
        return "a call that does not fit"
    culprits = _ranks_text([culprit.rank for culprit in diagnosis.culprits])
    return f"the call of {culprits}"


# -- Markdown -------------------------------------------------------------------------------------
def markdown(diagnosis: Diagnosis) -> str:
    """Write a verdict for an issue or a chat: headings, tables, code for the job's own words."""
    lines = [f"**{_plain(diagnosis.headline())}**", "", f"confidence: {diagnosis.confidence}", ""]
    culprits: list[_Row] = []
    for culprit in diagnosis.culprits:
        culprits.append((str(culprit.rank), culprit.kind, culprit.why))
    lines += _table("| culprit | class | why |", culprits)
    lines += _table("| victims | wait in | for |", _victim_rows(diagnosis, diagnosis.victims))
    for section in (_evidence(diagnosis), *_further_sections(diagnosis)):
        if section.lines:
            fence = _fence(section.lines)
            lines += [f"### {section.title}", "", fence, *section.lines, fence, ""]
    return "\n".join(lines)


def _table(head: str, rows: Sequence[_Row]) -> list[str]:
    """Return the lines of a table of three columns; none where there is no row."""
    if not rows:
        return []
    lines = [head, "|---|---|---|"]
    for row in rows:
        cells = " | ".join(map(_plain, row))
        lines.append(f"| {cells} |")
    return [*lines, ""]


def _fence(lines: Sequence[str]) -> str:
    """Return a fence of code that is longer than each run of backticks in ``lines``."""
    longest = 0
    for line in lines:
        for backticks in re.findall("`+", line):
            longest = max(longest, len(backticks))
    return "`" * max(3, longest + 1)


def _plain(text: str) -> str:
    """Escape text, so that it means nothing in a Markdown table."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text.replace("\n", " "))


# -- page -----------------------------------------------------------------------------------------
# kind of culprit -> what happened, in words; the other kinds are a field that differs
_SENTENCES = {
    "host stuck": "{ranks} never issued this call: the host stands elsewhere",
    "device stuck": "{ranks} issued this call, and the device did not finish it",
    "missing dump": "{ranks} left no dump: the process died, or its file is lost or not there",
    "order": "{ranks} made these calls in another order than the other ranks",
    "groups": "{ranks} list other members of their groups than the rest: other parallel sizes",
    "extra call": "{ranks} made a call that nobody else makes",
    "skipped call": "{ranks} skipped this call",
    "operation": "{ranks} made another call in place of this one",
}


def page(diagnosis: Diagnosis) -> str:
    """Write one self-contained page: who waits for whom, the evidence, all victims."""
    data = page_data(diagnosis)
    subtitle = with_short_names(diagnosis.headline())
    title = "; ".join(culprit["said"] for culprit in data["culprits"])
    if not title:
        title = "No rank is named: several explanations remain"
    if diagnosis.verdict == "healthy":
        title = "No rank waits in vain"
    return render_page("prism hang", title, subtitle, _SCRIPT, data, str(diagnosis))


def page_data(diagnosis: Diagnosis) -> Data:
    """Return what hang.js draws: culprits in words, direct victims and the others, in rows."""
    culprit_ranks = {culprit.rank for culprit in diagnosis.culprits}
    direct: list[Waiting] = []
    others: list[Waiting] = []
    for victim in diagnosis.victims:
        if _is_direct(diagnosis, culprit_ranks, victim):
            direct.append(victim)
        else:
            others.append(victim)
    site = re.search(r" at (\S+:\d+)", " ".join(diagnosis.evidence))
    sections = [[section.title, list(section.lines)] for section in _further_sections(diagnosis)]
    return {
        "verdict": diagnosis.verdict,
        "confidence": diagnosis.confidence,
        "confirmed": diagnosis.confirmed,
        "call": diagnosis.call,
        "site": "" if site is None else site[1],
        "candidates": format_ranks(diagnosis.candidates),
        "culprits": _culprits_in_words(diagnosis),
        "direct": _victim_rows(diagnosis, direct),
        "others": _victim_rows(diagnosis, others),
        "counts": [len(culprit_ranks), len(direct), len(others)],
        "evidence": list(diagnosis.evidence),
        "sections": sections,
    }


def _is_direct(diagnosis: Diagnosis, culprit_ranks: set[int], victim: Waiting) -> bool:
    """Tell whether a victim waits in the first call that cannot end, or for a culprit."""
    call = (victim.op, victim.group, victim.seq)
    first_call = (diagnosis.op, diagnosis.group, diagnosis.seq)
    return call == first_call or not culprit_ranks.isdisjoint(victim.waits_for)


def _culprits_in_words(diagnosis: Diagnosis) -> list[dict[str, str]]:
    """Return the culprits; ranks of one kind and one reason share a row."""
    ranks_of_reason: dict[tuple[str, str], list[int]] = {}
    for culprit in diagnosis.culprits:
        ranks_of_reason.setdefault((culprit.kind, culprit.why), []).append(culprit.rank)
    rows: list[dict[str, str]] = []
    for (kind, reason), ranks in ranks_of_reason.items():
        sentence = _sentence(ranks, kind)
        rows.append({"ranks": _ranks_text(ranks), "kind": kind, "why": reason, "said": sentence})
    return rows


def _ranks_text(ranks: Sequence[int]) -> str:
    plural = "s" if len(ranks) > 1 else ""
    return f"rank{plural} {format_ranks(ranks)}"


def _sentence(ranks: Sequence[int], kind: str) -> str:
    """Say what the ranks did that are culprits of a kind."""
    text = _ranks_text(ranks)
    differing = f"{{ranks}} made this call with another {kind} than the other ranks"
    sentence = _SENTENCES.get(kind, differing)
    return sentence.format(ranks=text[0].upper() + text[1:])


# -- trace ----------------------------------------------------------------------------------------
def render_hang(diagnosis: Diagnosis) -> str:
    """Write a Chrome trace of who waits for whom: a thread per rank, an arrow per wait."""
    about = {
        "made_by": "prism hang",
        "verdict": diagnosis.headline(),
        "confidence": diagnosis.confidence,
        "evidence": list(diagnosis.evidence),
        "missing": list(diagnosis.missing),
    }
    return trace_file(about, (*_rank_spans(diagnosis), *_wait_arrows(diagnosis)))


def _rank_spans(diagnosis: Diagnosis) -> Iterator[Event]:
    """Yield a thread and a span per rank: culprits above victims, each in the order of ranks."""
    span_of_victim: dict[int, Event] = {}
    for victim in diagnosis.victims:
        name = f"{victim.op} #{victim.seq} of {victim.group}"
        about = {"group": victim.group, "waits for": format_ranks(sorted(victim.waits_for))}
        span_of_victim[victim.rank] = span(0, victim.rank, 0, _TRACE_NS, name, "victim", about)
    span_of_culprit: dict[int, Event] = {}
    for culprit in diagnosis.culprits:
        about = {"why": culprit.why}
        rank_span = span(0, culprit.rank, 0, _TRACE_NS, culprit.kind, "culprit", about)
        span_of_culprit[culprit.rank] = rank_span

    # a culprit that waits, too, is shown as a culprit alone
    only_victims = span_of_victim.keys() - span_of_culprit
    for place, rank in enumerate([*sorted(span_of_culprit), *sorted(only_victims)]):
        if rank in span_of_culprit:
            yield from thread_name(0, rank, f"rank {rank} (culprit)", place)
            yield span_of_culprit[rank]
        else:
            yield from thread_name(0, rank, f"rank {rank}", place)
            yield span_of_victim[rank]
    yield metadata("process_name", 0, 0, name="ranks")


def _wait_arrows(diagnosis: Diagnosis) -> Iterator[Event]:
    """Yield arrows from victims to ranks for which they wait, culprits first."""
    culprits = {culprit.rank for culprit in diagnosis.culprits}
    drawn_ranks = culprits | {victim.rank for victim in diagnosis.victims}
    numbers = itertools.count(1)
    for victim in diagnosis.victims:
        awaited = [rank for rank in victim.waits_for if rank in drawn_ranks]
        awaited.sort(key=lambda rank: (rank not in culprits, rank))
        for rank in awaited[:_MAX_ARROWS]:
            start = (0, victim.rank, 0.4 * _TRACE_NS)
            end = (0, rank, 0.6 * _TRACE_NS)
            yield from arrow(next(numbers), "waits for", "waits", start, end)


@renders(Diagnosis)
class DiagnosisRenderer(Renderer):
    """Writes verdicts on hangs."""

    page = staticmethod(page)
    trace = staticmethod(render_hang)
    markdown = staticmethod(markdown)
