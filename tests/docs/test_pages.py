"""The commands on the pages that a newcomer follows run, and print what the pages show."""

import os
import re
import sys
from pathlib import Path

import pytest
from helpers import doc_blocks

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "docs/quickstart.md", "docs/how-it-works.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs/tutorials").glob("[a-z]*.md"))


def prose(page):
    """The words of a page, without its first paragraph, blocks and marks."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").split("\n\n", 2)[-1]
    text = text if page.startswith("reference") else re.sub(r"```.*?```", "", text, flags=re.S)
    return re.sub(r"[`*|]", "", text).split()


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs/how-to").glob("*.md")))
def test_a_how_to_page_does_not_repeat_the_reference(page):
    """No twelve words in a row: commands.md and flags.md are made of what the code says."""
    known = " ".join(
        word for name in ("commands", "flags") for word in prose(f"reference/{name}.md")
    )
    words = prose(f"how-to/{page}")
    runs = (" ".join(words[i : i + 12]) for i in range(len(words) - 11))
    assert [run for run in runs if run in known] == []


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    return doc_blocks.Runner(tmp_path_factory.mktemp("captured"))


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="shown of megatron-core 0.16.1")
@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_what_its_commands_print(page, runner, tmp_path):
    text = (ROOT / page).read_text(encoding="utf-8")
    if any("Megatron-LM/" in step.command for step in doc_blocks.steps(text)):
        if "PRISM_MEGATRON" not in os.environ:
            pytest.skip("PRISM_MEGATRON: a checkout")
        (tmp_path / "Megatron-LM").symlink_to(os.environ["PRISM_MEGATRON"])
    doc_blocks.check(text, runner, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif("PRISM_MEGATRON" not in os.environ, reason="PRISM_MEGATRON: a checkout")
def test_the_readme_runs_a_stock_script(runner, tmp_path):
    found = doc_blocks.steps((ROOT / "README.md").read_text(encoding="utf-8"), skipped=True)
    (step,) = (step for step in found if "pretrain_gpt.py" in step.command)
    command = step.command[step.command.index("\n.venv/bin/prism") :]
    (tmp_path / "Megatron-LM").symlink_to(os.environ["PRISM_MEGATRON"])
    command = command.replace(".venv/bin/prism", f"{sys.executable} -m megatron_prism")
    printed = runner.run(doc_blocks.Step(command, None), tmp_path)
    line = doc_blocks.differences(["…", *step.shown], printed.splitlines())
    assert line is None, f"{line}\n{printed}"
