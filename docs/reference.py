"""Write the reference pages from the code: ``python docs/reference.py`` (``--check``: compare).

Commands and flags come from the parsers that read them, the Python API from its docstrings.
"""

import argparse
import inspect
import os
import pathlib
import re
import sys

import megatron_prism as prism
from megatron_prism.cli import main as cli
from megatron_prism.emulate.command_line.options import FLAGS

PAGES = pathlib.Path(__file__).parent / "reference"
HEAD = "<!-- written by docs/reference.py -->\n\n"


def commands() -> str:
    """Every command of ``prism`` with its help."""
    parts = [HEAD + "# Commands\n\nExit status: 0 done, 1 a finding, 2 bad usage.\n"]
    for name, command in cli.COMMANDS.items():
        text = inspect.getdoc(command.function) or ""
        parts.append(f"## prism {name}\n\n```text\n{text}\n```\n")
        if not command.raw:
            parts.append(_table(_rows(cli.parser(name))))
        else:
            parts.append("Its flags are [those of a job](flags.md).\n")
    return "\n".join(parts)


def flags() -> str:
    """Every flag on the job's own command line."""
    rows = []
    for flag, settings in FLAGS.items():
        choices = settings.get("choices")
        value = "{" + ",".join(choices) + "}" if choices else settings.get("metavar", "")
        rows.append((f"{flag} {value}".strip(), settings["help"]))
    text = (
        "# Flags of a job\n\nThey are added to the command line of a training script, given to "
        "`prism run` before `--`,\nor set in the environment variable `PRISM_ARGS`. "
        "In a recipe they are the keys of its `prism:` section.\n"
    )
    return HEAD + text + "\n" + _table(rows)


# Classes that users make; the others are results of functions
MADE_BY_USERS = {"WhatIf", "World"}


def python() -> str:
    """Every public name with its docstring; the signature of what a user calls."""
    parts = [HEAD + "# Python\n\n```python\nimport megatron_prism as prism\n```\n"]
    for name in prism.__all__:
        thing = getattr(prism, name)
        if not callable(thing):
            continue
        signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(thing)))
        kind = ""
        if inspect.isclass(thing):
            kind = "class "
            if name not in MADE_BY_USERS:
                signature = ""
        text = inspect.getdoc(thing) or ""
        parts.append(f"## {name}\n\n```python\n{kind}{name}{signature}\n```\n")
        parts.append(f"```text\n{text}\n```\n")
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            rows = [
                (f".{key}", _first_paragraph(value))
                for key, value in vars(thing).items()
                if not key.startswith("_") and (callable(value) or isinstance(value, property))
            ]
            if rows := [row for row in rows if row[1]]:
                parts.append(_table(rows, "member"))
    return "\n".join(parts)


def _first_paragraph(member: object) -> str:
    """The first paragraph of a member's docstring as one line."""
    paragraph = (inspect.getdoc(member) or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


def _rows(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    rows = []
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
            if not action.option_strings and action.choices:
                value = "{" + ",".join(map(str, action.choices)) + "}"
            rows.append((f"{', '.join(action.option_strings)} {value}".strip(), action.help or ""))
    return rows


def _table(rows: list[tuple[str, str]], first: str = "argument") -> str:
    if not rows:
        return ""
    lines = [f"| {first} | meaning |", "|---|---|"]
    for left, right in rows:
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in (left, right)]
        lines.append(f"| `{cells[0]}` | {_code(cells[1])} |")
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    """Flags, selectors and settings as code, so that Markdown leaves them alone."""
    if "``" in text:
        return text.replace("``", "`")
    return re.sub(r"(?<![`\w])(--[a-z][\w-]*|[\w.]+[=@:]\S*\w)", r"`\1`", text)


def main() -> None:
    """Write the pages, or with ``--check`` name those that differ from the code."""
    os.environ["COLUMNS"] = "100"
    pages = {"commands.md": commands(), "flags.md": flags(), "python.md": python()}
    if "--check" in sys.argv:
        old = [n for n, t in pages.items() if (PAGES / n).read_text(encoding="utf-8") != t]
        if old:
            sys.exit(f"{', '.join(old)}: not what the code says\n  fix: python docs/reference.py")
        return
    PAGES.mkdir(exist_ok=True)
    for name, text in pages.items():
        (PAGES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
