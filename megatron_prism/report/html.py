"""How does a browser show a timeline?  One self-contained page that asks the network for nothing.

In : Timeline.  Out: HTML.  page.html is the frame, *.css and *.js are put into it, and page_data's
value as JSON.  Labels come from programs and are hostile: the JSON cannot end its script element,
the scripts only ever write text (never markup), and a content security policy lets nothing run
that does not have the hash of our own scripts and style.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from pathlib import Path

from megatron_prism.replay.timeline import Timeline
from megatron_prism.report import text
from megatron_prism.report.page_data import page_data

__all__ = ["render"]

FOLDER = Path(__file__).parent
SCRIPTS = ("units.js", "diagram.js", "charts.js", "page.js")
# what could end a script element, or a line of JavaScript
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render(timeline: Timeline) -> str:
    """The page."""
    style = _read("page.css")
    script = "".join(_read(name) for name in SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    data = json.dumps(page_data(timeline), separators=(",", ":"), allow_nan=False)
    parts = {
        "policy": html.escape(policy),
        "title": html.escape(str(timeline.graph.programs.world)),
        "style": style,
        "text": html.escape(text.render(timeline)),
        "data": re.sub("[<>&\u2028\u2029]", lambda found: _UNSAFE[found[0]], data),
        "script": script,
    }
    # in one pass: what is put in is not searched again
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _read("page.html"))


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
