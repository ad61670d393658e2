"""A verdict on a hang as Markdown (for an issue) and as one HTML page.

In : Diagnosis.  Out: text.  The same words as on the terminal, first line first; what comes from
dumps and programs is hostile and is escaped.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_prism.core.groups import with_short_names
from megatron_prism.core.rendering import Renderer, renders
from megatron_prism.core.world import format_ranks
from megatron_prism.features.hang.verdict import Diagnosis, Waiting
from megatron_prism.report.page import Data, render_page
from megatron_prism.report.trace_events import Event, arrow, metadata, span, thread_name, trace_file

_SCRIPT = Path(__file__).with_name("hang.js")
_MOST = 64  # victims in the table

_MOST_ARROWS = 4  # from a victim
_LENGTH_NS = 10**9  # of a rank in the trace of a hang


def _sections(found: Diagnosis) -> list[tuple[str, tuple[str, ...]]]:
    """(title, lines), the evidence first."""
    return [("Evidence", found.evidence), *((title, lines) for title, lines in (
        ("Who waits for whom", found.chain),
        ("Places in the programs", found.places),
        ("Tried on the programs", found.tried),
        ("First watchdog to fire", (found.watchdog,) if found.watchdog else ()),
        ("Missing, and what to set next time", found.missing),
    ) if lines)]  # fmt: skip


def _victims(found: Diagnosis, victims: Sequence[Waiting]) -> list[tuple[str, ...]]:
    """(ranks, waits in, for) with the ranks that wait alike in one row."""
    alike: dict[tuple[str, str], list[int]] = {}
    for victim in victims:
        waits = format_ranks(victim.waits_for)
        if not waits:  # all have come, and their calls do not fit
            culprits = _ranks([one.rank for one in found.culprits])
            waits = f"the call of {culprits}" if found.culprits else "a call that does not fit"
        alike.setdefault((victim.call, waits), []).append(victim.rank)
    rows: list[tuple[str, ...]] = [(format_ranks(at), *row) for row, at in alike.items()]
    return rows[:_MOST]


def markdown(found: Diagnosis) -> str:
    """For an issue or a chat: headings, tables, code for whatever the job named itself."""
    lines = [f"**{_plain(found.headline())}**", "", f"confidence: {found.confidence}", ""]
    culprits = [(str(c.rank), c.kind, c.why) for c in found.culprits]
    victims = _victims(found, found.victims)
    for head, rows in (
        ("| culprit | class | why |", culprits), ("| victims | wait in | for |", victims)
    ):  # fmt: skip
        if rows:
            lines += [head, "|---|---|---|"]
            lines += ["| " + " | ".join(map(_plain, row)) + " |" for row in rows] + [""]
    for title, texts in _sections(found):
        longest = max((len(m) for text in texts for m in re.findall("`+", text)), default=0)
        fence = "`" * max(3, longest + 1)
        lines += [f"### {title}", "", fence, *texts, fence, ""] if texts else []
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Text that means nothing in a Markdown table."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text.replace("\n", " "))


_SAID = {  # kind of culprit -> what happened, in words; the others are a field that differs
    "host stuck": "{ranks} never issued this call: the host stands elsewhere",
    "device stuck": "{ranks} issued this call, and the device never started it",
    "missing dump": "{ranks} left no dump: the process died, or could not write one",
    "order": "{ranks} made these calls in another order than the other ranks",
    "groups": "{ranks} list other members of their groups than the rest: other parallel sizes",
    "extra call": "{ranks} made a call that nobody else makes",
    "skipped call": "{ranks} skipped this call",
    "operation": "{ranks} made another call in place of this one",
}


def page(found: Diagnosis) -> str:
    """One self-contained page: who waits for whom, the evidence, all victims."""
    data, about = page_data(found), with_short_names(found.headline())
    unsure = "No rank is named: several explanations remain"
    named = "; ".join(one["said"] for one in data["culprits"]) or unsure
    title = named if found.verdict != "healthy" else "No rank waits in vain"
    return render_page("prism hang", title, about, _SCRIPT, data, str(found))


def page_data(found: Diagnosis) -> Data:
    """What hang.js draws: culprits in words, direct victims and the others, in rows."""
    culprits = {one.rank for one in found.culprits}

    def direct(victim: Waiting) -> bool:
        here = (victim.op, victim.group, victim.seq) == (found.op, found.group, found.seq)
        return here or bool(culprits.intersection(victim.waits_for))

    near = [victim for victim in found.victims if direct(victim)]
    far = [victim for victim in found.victims if not direct(victim)]
    alike: dict[tuple[str, str], list[int]] = {}
    for one in found.culprits:
        alike.setdefault((one.kind, one.why), []).append(one.rank)
    site = re.search(r" at (\S+:\d+)", " ".join(found.evidence))
    return {
        "verdict": found.verdict,
        "confidence": found.confidence,
        "confirmed": found.confirmed,
        "call": found.call,
        "site": "" if site is None else site[1],
        "candidates": format_ranks(found.candidates),
        "culprits": [
            {"ranks": _ranks(ranks), "kind": kind, "why": why, "said": _words(ranks, kind)}
            for (kind, why), ranks in alike.items()
        ],
        "direct": _victims(found, near),
        "others": _victims(found, far),
        "counts": [len(culprits), len(near), len(far)],
        "evidence": list(found.evidence),
        "sections": [[title, list(lines)] for title, lines in _sections(found)[1:]],
    }


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"


def _words(ranks: Sequence[int], kind: str) -> str:
    named = _ranks(ranks)
    said = _SAID.get(kind, f"{{ranks}} made this call with another {kind} than the other ranks")
    return said.format(ranks=named[0].upper() + named[1:])


def render_hang(found: Diagnosis) -> str:
    """Who waits for whom: a thread per rank, an arrow per wait."""
    about = {"made_by": "prism hang", "verdict": found.headline(), "confidence": found.confidence,
             "evidence": list(found.evidence), "missing": list(found.missing)}  # fmt: skip
    return trace_file(about, (*_rank_spans(found), *_wait_arrows(found)))


def _rank_spans(found: Diagnosis) -> Iterator[Event]:
    """Culprits above victims, each in the order of ranks."""
    spans = {victim.rank: span(
        0, victim.rank, 0, _LENGTH_NS, f"{victim.op} #{victim.seq} of {victim.group}", "victim",
        {"group": victim.group, "waits for": format_ranks(sorted(victim.waits_for))})
        for victim in found.victims}  # fmt: skip
    culprits = {one.rank: span(0, one.rank, 0, _LENGTH_NS, one.kind, "culprit", {"why": one.why})
                for one in found.culprits}  # fmt: skip
    for place, rank in enumerate([*sorted(culprits), *sorted(spans.keys() - culprits)]):
        yield from thread_name(0, rank, f"rank {rank}" + " (culprit)" * (rank in culprits), place)
        yield culprits.get(rank) or spans[rank]
    yield metadata("process_name", 0, 0, name="ranks")


def _wait_arrows(found: Diagnosis) -> Iterator[Event]:
    culprits = {culprit.rank for culprit in found.culprits}
    shown = culprits | {victim.rank for victim in found.victims}
    numbers = itertools.count(1)
    for victim in found.victims:
        others = [rank for rank in victim.waits_for if rank in shown]
        for other in sorted(others, key=lambda rank: (rank not in culprits, rank))[:_MOST_ARROWS]:
            ends = (0, victim.rank, 0.4 * _LENGTH_NS), (0, other, 0.6 * _LENGTH_NS)
            yield from arrow(next(numbers), "waits for", "waits", *ends)


@renders(Diagnosis)
class DiagnosisRenderer(Renderer):
    """Writes verdicts on hangs."""

    page = staticmethod(page)
    trace = staticmethod(render_hang)
    markdown = staticmethod(markdown)
