"""The commands on the pages that a newcomer follows run, and print what the pages show."""

import os
import sys
from pathlib import Path

import pytest
from helpers import doc_blocks

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "docs/quickstart.md", "docs/how-it-works.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs/tutorials").glob("[a-z]*.md"))


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    return doc_blocks.Runner(tmp_path_factory.mktemp("captured"))


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
