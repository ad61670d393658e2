"""A verdict on a hang as Markdown (for an issue) and as one HTML page.

In : Diagnosis.  Out: text.  The same words as on the terminal, first line first; what comes from
dumps and programs is hostile and is escaped.
"""

from __future__ import annotations

import html
import re

from megatron_prism.core.world import format_ranks
from megatron_prism.hang.verdict import Diagnosis

__all__ = ["markdown", "page"]

_MOST = 64  # victims in the table
_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.25em} h2{font-size:1.05em;margin-top:1.6em} pre{background:#f6f6f6}
td,th{padding:.15em .8em .15em 0;text-align:left;vertical-align:top;border-bottom:1px solid #ddd}
.healthy{color:#186a3b}.fault{color:#922b21}pre{padding:.6em;white-space:pre-wrap;overflow-wrap:anywhere}
@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}pre{background:#242424}}
"""


def _sections(found: Diagnosis) -> list[tuple[str, tuple[str, ...]]]:
    rows = [
        ("Evidence", found.evidence),
        ("Who waits for whom", found.chain),
        ("Places in the programs", found.places),
        ("Tried on the programs", found.tried),
        ("First watchdog to fire", (found.watchdog,) if found.watchdog else ()),
        ("Missing, and what to set next time", found.missing),
    ]
    return [(title, lines) for title, lines in rows if lines]


def _victims(found: Diagnosis) -> list[tuple[str, ...]]:
    """(ranks, waits in, for) with the ranks that wait alike in one row."""
    alike: dict[tuple[str, str], list[int]] = {}
    for victim in found.victims:
        call = f"{victim.op} #{victim.seq} of {victim.group}"
        alike.setdefault((call, format_ranks(victim.waits_for)), []).append(victim.rank)
    rows: list[tuple[str, ...]] = [
        (format_ranks(ranks), call, others) for (call, others), ranks in alike.items()
    ]
    return rows[:_MOST]


def markdown(found: Diagnosis) -> str:
    """For an issue or a chat: headings, tables, code for whatever the job named itself."""
    lines = [f"**{_plain(found.headline())}**", "", f"confidence: {found.confidence}", ""]
    if found.culprits:
        lines += ["| culprit | class | why |", "|---|---|---|"]
        lines += [f"| {c.rank} | {_plain(c.kind)} | {_plain(c.why)} |" for c in found.culprits]
        lines.append("")
    if found.victims:
        lines += ["| victims | wait in | for |", "|---|---|---|"]
        lines += ["| " + " | ".join(map(_plain, row)) + " |" for row in _victims(found)]
        lines.append("")
    for title, rows in _sections(found):
        fence = "`" * (max((len(m) for row in rows for m in re.findall("`+", row)), default=2) + 1)
        fence = fence if len(fence) > 2 else "```"
        lines += [f"### {title}", "", fence, *rows, fence, ""]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Text that means nothing in a Markdown table."""
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text.replace("\n", " "))


def page(found: Diagnosis) -> str:
    """One self-contained page without scripts."""
    kind = "healthy" if found.verdict == "healthy" else "fault"
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">',
        f"<title>{html.escape(found.headline())}</title><style>{_STYLE}</style>",
        f"<h1 class={kind}>{html.escape(found.headline())}</h1>",
        f"<p>confidence: {html.escape(found.confidence)}",
    ]
    if found.culprits:
        rows: list[tuple[str, ...]] = [(str(c.rank), c.kind, c.why) for c in found.culprits]
        parts.append("<h2>Culprits</h2>" + _table(("rank", "class", "why"), rows))
    if found.victims:
        parts.append("<h2>Victims</h2>" + _table(("ranks", "wait in", "for"), _victims(found)))
    for title, lines in _sections(found):
        parts.append(f"<h2>{title}</h2><pre>{html.escape(chr(10).join(lines))}</pre>")
    return "\n".join(parts) + "\n"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    top = "".join(f"<th>{name}" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(x)}" for x in row) for row in rows)
    return f"<table><tr>{top}{body}</table>"
