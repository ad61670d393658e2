"""A module may import what stands in rows above its own; only some may import torch or Megatron.

The table is the architecture.  To change the architecture, change the table in the same commit.
"""

import ast
import pathlib
import sys

import pytest

import megatron_prism

ROOT = pathlib.Path(megatron_prism.__file__).parent

# Analysis half, from the nouns down to the commands.  Modules of one row do not import each other.
# Rows also name what the design has settled but nobody has written yet.
ROWS = [
    "errors guards fault_kinds process_changes results megatron_source",
    "units",
    "rank_groups selectors",
    "collectives artefact world",
    "ops",
    "program fault_plan",
    "programs fault_files",
    "program_text",
    "program_parse",
    "slices",  # the nouns end here
    "membership",
    "subgroups",
    "classes",
    "splits fifo fault_edits",
    "matching",
    "topology graph unit_time",
    "costs",
    "replay",
    "flight_dump diagnosis",
    "flight_entries",
    "flight_recorder quiescence hang_graph",
    "flight_export flight_workers stages faults",
    "outstanding",
    "joint_calls watchdog moments sources outside wait_graph",
    "votes orders overlay",
    "allocator_settings",
    "allocator",
    "allocator_trace",
    "memory hang stochastic explain",  # the analyses never import each other
    "memory_baseline hang_world placement",
    "diagnose",
    "report",
    "recipe_layers",
    "recipe_checks",
    "recipe_schema",
    "recipe testing",
    "cli_output cli_settings",
    "cli_memory_text cli_predict_text cli_predict_settings",
    "cli_world cli_programs cli_hang cli_schedule cli_replay cli_predict cli_memory cli_patches",
    "cli pytest_plugin _attach",
    "__main__",
]
ROW = {name: number for number, row in enumerate(ROWS) for name in row.split()}
NOUNS = ROW["slices"]

# Capture half: each may import the nouns and what stands before it.
CAPTURE = ["virtual", "tiers", "slicer", "plugin"]
# the flags read recipes, the main job is one, pacing replays the world or a draw of it,
# the ballast prices communicators, a capture has groups that the world's sizes do not give
ALSO = {
    "plugin": {"recipe", "recipe_schema", "graph", "costs", "replay", "stochastic", "subgroups"}
}
# Across the halves only inside a function, so that the command line starts without torch.
INSIDE_FUNCTIONS = {
    ("cli", "plugin"),
    ("cli_programs", "plugin"),
    ("cli_hang", "plugin"),
    ("cli_schedule", "plugin"),
    ("cli_predict", "plugin"),
    ("cli_patches", "plugin"),
    ("_attach", "plugin"),
    ("pytest_plugin", "plugin"),
    # what a fault of a virtual rank leads to is known before the job starts
    *(("plugin", name) for name in ("classes", "diagnosis", "faults", "hang_world", "quiescence")),
}

# Third-party package -> who may import it ("a/b*" is a pattern below megatron_prism/).
PACKAGES = {
    "torch": ["virtual/*", "tiers/*", "slicer/*", "plugin/*"],
    "megatron": ["plugin/seams*.py", "plugin/rank_*.py"],
    "omegaconf": ["recipe.py"],
    "yaml": ["recipe.py", "fault_files.py"],
    "rich": ["cli*.py", "report/*", "plugin/*"],
    "pytest": ["pytest_plugin.py", "testing.py"],
    "numba": ["replay/*"],
}
WITHOUT_NUMPY = {"errors", "units", "selectors", "__init__", "__main__", "_attach", "cli"}


def imported(tree, inside=False):
    """(name, whether in a function, level) of every import that runs, not of those for types."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{a.name}", inside, node.level) for a in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from ((a.value, inside, 0) for a in node.args[:1] if isinstance(a, ast.Constant))
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imported(node, inside or function)


def allowed(me, them, inside):
    if (me, them) in INSIDE_FUNCTIONS:
        return inside
    if me in CAPTURE:
        before = CAPTURE[: CAPTURE.index(me)]
        return ROW.get(them, len(ROWS)) <= NOUNS or them in before or them in ALSO.get(me, ())
    return ROW.get(them, len(ROWS)) < ROW[me]


def violations(root):
    """What every file below ``root`` imports against the table, one line each."""
    for path in sorted(root.rglob("*.py")):
        file = path.relative_to(root)
        me = file.with_suffix("").parts[0]
        if me not in ROW and me not in CAPTURE and me != "__init__":
            yield f"{file}: {me} is in no row of the table"
            continue
        for name, inside, level in imported(ast.parse(path.read_text(encoding="utf-8"))):
            top, them = (*name.split("."), "")[:2]
            if level:
                yield f"{file}: write absolute imports"
            elif top == "megatron_prism":
                # dunder names (__version__) are the package itself, which imports nothing
                ours = them in ("", me) or them.startswith("__")
                if not ours and (me == "__init__" or not allowed(me, them, inside)):
                    yield f"{file}: {me} may not import {them}" + ("" if inside else " up here")
            elif top == "numpy":
                if me in WITHOUT_NUMPY:
                    yield f"{file}: {me} does without numpy"
            elif top in PACKAGES:
                if not any(file.match(pattern) for pattern in _patterns(top)):
                    yield f"{file}: {top} belongs to {', '.join(PACKAGES[top])}"
            elif top not in sys.stdlib_module_names:
                yield f"{file}: {top} is no dependency of ours"


def _patterns(package):
    """``a/*`` means at any depth below a/."""
    for pattern in PACKAGES[package]:
        yield pattern
        if pattern.endswith("/*"):
            yield from (pattern + "/*", pattern + "/*/*")


def test_imports_follow_the_table():
    assert list(violations(ROOT)) == []


@pytest.mark.parametrize(
    ("file", "code", "says"),
    [
        ("world.py", "from megatron_prism import recipe", "world may not import recipe"),
        ("world.py", "import megatron_prism.cli", "world may not import cli"),
        ("errors.py", "from megatron_prism.units import x", "errors may not import units"),
        ("memory.py", "from megatron_prism.hang import x", "memory may not import hang"),
        ("world.py", "from megatron_prism.virtual import x", "world may not import virtual"),
        ("cli.py", "from megatron_prism.plugin import job", "cli may not import plugin up here"),
        ("virtual/a.py", "from megatron_prism.tiers import x", "virtual may not import tiers"),
        ("tiers/a.py", "from megatron_prism.recipe import x", "tiers may not import recipe"),
        ("plugin/a.py", "from megatron_prism.cli import x", "plugin may not import cli"),
        ("plugin/a.py", "from megatron_prism.hang import x", "plugin may not import hang"),
        ("__init__.py", "from megatron_prism.world import World", "__init__ may not import world"),
        ("world.py", "from . import errors", "write absolute imports"),
        ("world.py", "def f():\n    import torch", "torch belongs to virtual/*"),
        ("world.py", "if True:\n    from torch import nn", "torch belongs to virtual/*"),
        ("recipe.py", "importlib.import_module('torch.nn')", "torch belongs to"),
        ("plugin/launch.py", "import megatron.core", "megatron belongs to plugin/seams*.py"),
        ("virtual/a.py", "from megatron.core import x", "megatron belongs to"),
        ("world.py", "import omegaconf", "omegaconf belongs to recipe.py"),
        ("plugin/rank_job.py", "from omegaconf import x", "omegaconf belongs to recipe.py"),
        ("units.py", "import numpy as np", "units does without numpy"),
        ("world.py", "import rich", "rich belongs to"),
        ("world.py", "import scipy", "scipy is no dependency of ours"),
        ("costs/a.py", "def f():\n    import numba", "numba belongs to replay/*"),
        ("utils.py", "", "utils is in no row"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, code, says):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(code)
    (found,) = violations(tmp_path)
    assert says in found


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("cli.py", "def f():\n    from megatron_prism.plugin import job"),
        ("plugin/seams_deep.py", "import megatron.core"),
        ("plugin/rank_job.py", "from megatron.core import x\nimport torch"),
        ("tiers/virtual_te/deep.py", "import torch"),
        ("plugin/flags.py", "from megatron_prism.recipe import load"),
        ("recipe_checks.py", "if TYPE_CHECKING:\n    from megatron_prism.recipe import Recipe"),
        ("plugin/summary.py", "from megatron_prism import __version__"),
        ("world.py", "import numpy, math"),
    ],
)
def test_what_is_allowed_is_not_found(tmp_path, file, code):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(code)
    assert list(violations(tmp_path)) == []
