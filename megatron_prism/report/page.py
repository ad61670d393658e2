"""The frame of every page: one self-contained HTML file that asks the network for nothing.

In : what a page shows, as JSON, and the files of its sections and scripts.  Out: HTML.  Labels come
from programs and are hostile: the JSON cannot end its script element, the scripts only ever write
text (never markup), and a content security policy lets nothing run that does not have the hash of
our own scripts and style.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_prism.core import groups

Data = dict[str, Any]  # what a page's script finds as DATA
FOLDER = Path(__file__).parent
# what could end a script element, or a line of JavaScript
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render_page(
    command: str,
    title: str,
    subtitle: str,
    script: Path,
    data: Data,
    text: str,
    more: Sequence[str] = (),
) -> str:
    """The page.

    Args:
        command: that writes such pages (``prism replay``).
        title: what it is about, the model's name first.
        subtitle: what else one must know of it.
        script: file of the script that fills it.
        data: what scripts find as ``DATA``; ``groups``: descriptions of groups that it names.
        text: for browsers without scripts.
        more: names of shared scripts that its own one needs, beside those of all pages.
    """
    style = _read("page.css")
    shared = [_read(name) for name in ("page.js", "terms.js", "charts.js", *more)]
    code = "".join([*shared, script.read_text(encoding="utf-8")])
    # the page asks the network for nothing and runs no other script
    policy = (
        f"default-src 'none'; script-src '{_hash(code)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    kinds = {name: (groups.short_name(name), groups.kind(name)) for name in data.get("groups", ())}
    # NaN is no JSON, and browsers refuse it
    content = json.dumps({**data, "groups": kinds}, separators=(",", ":"), allow_nan=False)
    parts = {
        "policy": html.escape(policy),
        "command": html.escape(command),
        "title": html.escape(title),
        "subtitle": html.escape(subtitle),
        "style": style,
        "text": html.escape(text),
        "data": re.sub("[<>&\u2028\u2029]", lambda match: _UNSAFE[match[0]], content),
        "script": code,
    }
    # in one pass: what is put in is not searched again
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("page.html"))


def allow_script(page: str, script: str) -> str:
    """``page`` with one script more, which its policy lets run: tests look at pages with it."""
    # beside the hash of the page's own script
    own = html.escape(f"'{_hash(script)}'")
    page = page.replace("script-src ", f"script-src {own} ", 1)
    return page.replace("</body>", f"<script data-driver>{script}</script></body>")


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
