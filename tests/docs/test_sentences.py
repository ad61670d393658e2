"""README, docs and help are written in sentences that are read once."""

import inspect
import re
import statistics
from pathlib import Path

import pytest

from megatron_prism.cli.main import COMMANDS
from megatron_prism.emulate import options

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "recipes/README.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
PAGES = [page for page in PAGES if "docs/reference/" not in page]  # made of the help
MOST, MEDIAN = 35, 18  # words


def prose(page):
    """The running text of a page of Markdown, a paragraph or a cell of a table each."""
    page = re.sub(r"^#.*$", "", page, flags=re.MULTILINE)
    page = re.sub(r"<!--.*?-->|^```.*?^```", "\n", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"^ {4}.*$|^---\n.*?^---\n|</?\w[^>]*>", "", page, flags=re.MULTILINE)
    page = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", page)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=#)|(?<=\|)\n", page):
        cells = block.split("|") if block.lstrip().startswith("|") else [block]
        yield from (" ".join(cell.split()) for cell in cells)


def sentences(text):
    """The sentences of a paragraph; what is in backticks counts as one word."""
    text = re.sub(r"`+[^`]*`+", "CODE", text)
    text = re.sub(r"\b(e\.g|i\.e|vs|etc|cf|Sec|Fig|No)\.", r"\1", text)
    return [one for one in re.split(r"(?<=[.!?])\s+(?=[\w*(“\"-])|:\s+(?=[A-Z])", text) if one]


def words(sentence):
    return len(re.findall(r"\w[\w'’.,/%-]*", sentence))


def helps():
    """The prose of every command's help and of every flag's, less what shows commands."""
    for name, command in COMMANDS.items():
        for block in re.split(r"\n\s*\n", inspect.getdoc(command.function)):
            lines = [
                x for x in block.splitlines() if not re.match(r"\s|prism |eval |\w+=\S*\s{2}", x)
            ]
            yield f"prism {name}", " ".join(lines)
        for flags, settings in command.arguments:
            yield f"prism {name} {flags[-1]}", settings.get("help", "")
    for name, settings in options.FLAGS.items():
        yield name, settings["help"]


def long_ones(texts):
    return [(words(one), one) for text in texts for one in sentences(text) if words(one) > MOST]


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_of_a_page_is_long(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert long_ones(prose(text)) == []
    counts = [n for part in prose(text) for one in sentences(part) if (n := words(one)) > 3]
    assert statistics.median(counts or [0]) <= MEDIAN


def test_no_sentence_of_the_help_is_long():
    assert long_ones(text for _, text in helps()) == []
