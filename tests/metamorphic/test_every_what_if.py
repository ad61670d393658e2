"""No what-if that the documentation names is without a metamorphic test."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
from helpers import metamorphic

from megatron_prism.cli import what_ifs
from megatron_prism.features.replay import command as cli_replay

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "how-to" / "replay.md"


def of_the_page():
    """The settings of the table under "What if"."""
    return set(re.findall(r"^\| `(\w+)=", PAGE.read_text(encoding="utf-8"), re.MULTILINE))


def of_the_help():
    """Those that the command's help lists under "What if"."""
    text = inspect.getdoc(cli_replay.replay)
    block = text.partition("What-ifs")[2].partition("\n\n")[0]
    rows = re.findall(r"^  ((?:\w+=\S+ ?)+)", block, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"(\w+)=", row.split(" …")[0]) if name}


def test_each_has_a_test():
    for path in HERE.glob("test_*.py"):
        importlib.import_module(f"metamorphic.{path.stem}")
    documented = of_the_page() | of_the_help() - {"NCCL_ALGO"}
    assert {"dp", "microbatches", "slow", "nccl", "network"} <= documented
    assert documented <= set(metamorphic.ABOUT)


@pytest.mark.parametrize("name", sorted(what_ifs._READERS))
def test_each_setting_of_the_command_is_documented(name):
    """So that the walk above meets it."""
    assert name in of_the_help() | {"tp", "cp", "pp", "ep", "etp", "vpp"}
