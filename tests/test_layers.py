"""A package may import those of its row and itself; only some may import torch or Megatron.

The table is the architecture.  To change the architecture, change the table in the same commit.
"""

import ast
import functools
import graphlib
import pathlib
import re
import sys

import pytest

import megatron_prism
from megatron_prism.core import feature

ROOT = pathlib.Path(megatron_prism.__file__).parent

# package of core -> the packages that it may import, from the bottom up
MAY_IMPORT = {
    "core": "",
    "graph": "core",
    "replay": "graph core",
    "memory": "graph core",
    "runtime": "core",
    "emulate": "runtime replay memory graph core",
    "report": "replay memory graph core",
    "cli": "emulate report memory replay graph runtime core",
}
CORE = set(MAY_IMPORT)
# The command line, and whoever is loaded into programs of others, start without torch: what needs
# it is imported where it is used.
LAZILY = {
    "cli": {"emulate", "runtime"},
    "_attach": {"emulate"},
    "pytest_plugin": {"emulate"},
}
TOP = {  # modules beside the packages
    "__init__": {"_attach", "core"},
    "__main__": {"cli"},
    "_attach": {"core", "emulate"},
    "pytest_plugin": {"core"},
}
# Third-party package -> who may import it ("a/*" is at any depth below a/).
PACKAGES = {
    "torch": ["runtime/*", "emulate/*", "features/calibrate/*", "features/debugger/*",
              "features/faults/*", "features/pacing/*", "features/hang/confirm.py",
              "features/streams/recording.py", "features/sweep/recipe_server.py",
              "features/verify/record.py", "features/verify/wide_floats.py"],
    "megatron": ["emulate/patches/*", "emulate/jobs/recipe_*.py", "emulate/schedule*.py",
                 "emulate/command_line/job_arguments.py", "emulate/preflight/arguments_alone.py",
                 "features/sweep/recipe_server.py",
                 "features/verify/record.py", "features/uneven/packed_data.py"],
    "yaml": ["features/scripts/batch_script.py", "core/jobs/recipe.py", "core/foreign.py",
             "features/hang/fault_plan.py"],
    # types of files, checked by core/foreign.py
    "msgspec": ["core/*", "replay/costs/*", "memory/*", "features/*"],
    "rich": ["cli/*", "report/*", "emulate/*", "features/*"],
    "pytest": ["pytest_plugin.py", "features/guard/pytest_plugin.py"],
    "numba": ["graph/loops.py"],
    "triton": ["runtime/devices/triton.py"],
    "transformer_engine_torch": ["runtime/te_kernels/*"],
    "debugpy": ["features/debugger/debugger.py"],
    "pynvml": ["runtime/recorder/gpu_clock.py"],
    "ray": ["features/sweep/evaluate.py"],
    "optuna": ["features/sweep/sweep.py"],
    "mcp": ["features/agents/server.py"],
    "pydantic": ["features/agents/server.py"],
    "numpy": ["core/*", "graph/*", "replay/*", "memory/*", "report/*", "runtime/*", "emulate/*",
              "cli/*", "features/*"],
}  # fmt: skip
WITHOUT_NUMPY = {"core/errors.py", "core/units.py", "cli/main.py"}


@functools.cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


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


def home_of(parts):
    """Where a module is at home: a package of core, "features", or the module's own name."""
    return parts[0].removesuffix(".py")


def of_core(me, them, inside):
    """What is wrong with ``me`` of core importing ``them``, packages or modules; "": nothing."""
    may = TOP[me] if me in TOP else {me, *MAY_IMPORT[me].split()}
    if them in ("", me) or them.startswith("__"):  # the package itself, which imports nothing
        return ""
    if them not in may:
        return f"{me} may not import {them}"
    return "" if inside or them not in LAZILY.get(me, ()) else f"{me} may not import {them} up here"


def of_feature(file, name):
    """What is wrong with a feature's file importing the module ``name``; "": nothing."""
    own = file.parts[1]
    parts = name.split(".")
    if parts[1:2] == ["features"] and len(parts) > 2:
        other = parts[2]
        uses = feature.installed()[own].uses if own in feature.installed() else ""
        allowed = {own, uses}
        return "" if other in allowed else f"feature {own} may not import feature {other}"
    them = parts[1] if len(parts) > 1 else ""
    return "" if them in CORE or them in ("", "features") or them.startswith("__") else (
        f"feature {own} may not import {them}")  # fmt: skip


def violations(root):
    """What every file below ``root`` imports against the table, one line each."""
    for path in sorted(root.rglob("*.py")):
        file = path.relative_to(root)
        me = home_of(file.parts)
        if me not in CORE and me not in TOP and me != "features":
            yield f"{file}: {me} is in no row of the table"
            continue
        for name, inside, level in imported(parsed(path)):
            top, them = (*name.split("."), "")[:2]
            if level:
                yield f"{file}: write absolute imports"
            elif top == "megatron_prism":
                is_feature = me == "features" and len(file.parts) > 2
                wrong = of_feature(file, name) if is_feature else of_core_file(me, them, inside)
                if wrong:
                    yield f"{file}: {wrong}"
            elif top in PACKAGES:
                patterns = [*PACKAGES[top]]
                patterns += [p + "/*" * n for p in patterns if p.endswith("/*") for n in (1, 2)]
                if file.as_posix() in WITHOUT_NUMPY and top == "numpy":
                    yield f"{file}: it does without numpy"
                elif not any(file.match(pattern) for pattern in patterns):
                    yield f"{file}: {top} belongs to {', '.join(PACKAGES[top])}"
            elif top not in sys.stdlib_module_names:
                yield f"{file}: {top} is no dependency of ours"


def of_core_file(me, them, inside):
    """``of_core``; the package ``features`` itself imports nothing."""
    return "features may import nothing" if me == "features" else of_core(me, them, inside)


def test_a_feature_uses_at_most_one_other():
    names = set(feature.installed())
    used = {name: row.uses for name, row in feature.installed().items() if row.uses}
    assert set(used.values()) <= names


def test_imports_follow_the_table():
    assert list(violations(ROOT)) == []


# that features take; about 60 would be an interface.  Of them two are the headline of fit, compare,
# six what reshard takes of ranks that plan their reading, one the scheduler that uneven asks, and
# four what ops take the host and how hosts differ, for fit; three a check of its own, its file and
# that the host waits, for streams; two what slices keep of a process's life, two what a save copies
# to the hosts; two types of a page's memory and of a trace's tracks, for snapshots and traces; two
# the durations of a timeline's nodes and when these end, and one the allocator's model, for batches
# of uneven; three what-ifs of fit and what tokens cost, for compare and sweep; two a file of phases
# and the sizes in it; three an estimate, and how far off it was
MOST_NAMES_OF_CORE = 419


def names_of_core():
    """Every name of core that a feature takes, also as an attribute of a module."""
    taken = set()
    for path in (ROOT / "features").rglob("*.py"):
        tree, modules = parsed(path), {}
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.module.startswith("megatron_prism"):
                continue
            if ".features" in node.module:
                continue
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                place = ROOT.parent / name.replace(".", "/")
                if place.with_suffix(".py").exists() or place.is_dir():
                    modules[alias.asname or alias.name] = name
                else:
                    taken.add(name)
        taken |= attributes_of(modules, tree)
    return taken


def attributes_of(modules, tree):
    """What is taken of modules by attribute; a parameter of a module's name is no module."""
    taken = set()
    if isinstance(tree, ast.FunctionDef):
        parameters = {argument.arg for argument in [*tree.args.args, *tree.args.kwonlyargs]}
        modules = {name: home for name, home in modules.items() if name not in parameters}
    for node in ast.iter_child_nodes(tree):
        of_name = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if of_name and node.value.id in modules:
            taken.add(f"{modules[node.value.id]}.{node.attr}")
        taken |= attributes_of(modules, node)
    return taken


def test_features_take_no_more_names_of_core():
    assert len(names_of_core()) <= MOST_NAMES_OF_CORE


def test_features_take_public_names_of_core():
    private = {name for name in names_of_core() if name.rpartition(".")[2].startswith("_")}
    assert private <= {"megatron_prism.__version__"}


def test_the_table_has_no_circle():
    rows = {name: set(row.split()) for name, row in MAY_IMPORT.items()}
    order = []
    while len(order) < len(rows):
        free = [name for name in rows if name not in order and rows[name] <= set(order)]
        assert free, set(rows) - set(order)
        order += free


def test_no_files_import_each_other_in_a_circle():
    """Not even for types: two files that name each other are one concept, or lack an interface."""
    files = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    arrows = {}
    for me, path in files.items():
        if path.name != "__init__.py":  # only hands names on
            tree = parsed(path)
            names = [(node.module, one.name) for node in ast.walk(tree)
                     if isinstance(node, ast.ImportFrom) for one in node.names]  # fmt: skip
            found = {f"{of}.{name}" if f"{of}.{name}" in files else of for of, name in names}
            arrows[me] = {them for them in found & files.keys() if them != me}
    graphlib.TopologicalSorter(arrows).prepare()  # CycleError names the files


@pytest.mark.parametrize("init", sorted(ROOT.rglob("__init__.py")), ids=lambda p: p.parent.name)
def test_a_package_that_names_files_names_all_of_its_own(init):
    named = set(
        re.findall(
            r"(?<![\w/])\w+\.py\b(?!:)", ast.get_docstring(ast.parse(init.read_text("utf-8")))
        )
    )
    assert not named or named == {p.name for p in init.parent.glob("*.py") if p.stem[:2] != "__"}


def test_few_modules_are_beside_the_packages():
    assert sorted(path.stem for path in ROOT.glob("*.py")) == sorted(TOP)


@pytest.mark.parametrize(
    ("file", "code", "says"),
    [
        ("core/a.py", "from megatron_prism.graph import x", "core may not import graph"),
        ("replay/a.py", "from megatron_prism.features.hang import x", "may not import features"),
        (
            "features/fit/a.py",
            "from megatron_prism.features.hang import x",
            "feature fit may not import feature hang",
        ),
        (
            "features/new/a.py",
            "def f():\n    from megatron_prism.features.fit import x",
            "feature new may not import feature fit",
        ),
        ("cli/a.py", "from megatron_prism.emulate import x", "cli may not import emulate up here"),
        ("_attach.py", "from megatron_prism.emulate import x", "may not import emulate up here"),
        ("emulate/a.py", "from megatron_prism.cli import x", "emulate may not import cli"),
        ("__init__.py", "from megatron_prism.graph import x", "__init__ may not import graph"),
        ("core/a.py", "from . import errors", "write absolute imports"),
        ("core/a.py", "def f():\n    import torch", "torch belongs to runtime/*"),
        ("core/units.py", "import numpy as np", "it does without numpy"),
        ("core/world.py", "import scipy", "scipy is no dependency of ours"),
        ("utils.py", "", "utils is in no row"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, code, says):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(code)
    (found,) = violations(tmp_path)
    assert says in found


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("cli/a.py", "def f():\n    from megatron_prism.emulate import launch"),
        ("emulate/patches/deep.py", "import megatron.core"),
        ("core/a.py", "if TYPE_CHECKING:\n    from megatron_prism.graph import x"),
        ("emulate/a.py", "from megatron_prism import __version__"),
    ],
)
def test_what_is_allowed_is_not_found(tmp_path, file, code):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(code)
    assert list(violations(tmp_path)) == []


def test_no_test_module_imports_another():
    """What tests share is in tests/helpers and tests/oracles."""
    tests = pathlib.Path(__file__).parent
    names = {path.stem for path in tests.rglob("test_*.py")}
    found = [
        f"{path.relative_to(tests)} imports {name}"
        for path in sorted(tests.rglob("*.py"))
        for name, _, _ in imported(parsed(path))
        if not names.isdisjoint(name.split("."))
    ]
    assert found == []


def test_nothing_in_the_package_looks_for_a_packages_name_in_a_path():
    """``"/megatron_prism/" in path`` is true of everything in a clone of that name."""
    guess = re.compile(r"/(megatron_prism|torch|megatron|site-packages)/|site-packages/")
    guesses = []
    for file in sorted(ROOT.rglob("*.py")):
        documentation = set()
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                documentation.add(node.value)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or node in documentation:
                continue
            if isinstance(node.value, str) and guess.search(node.value):
                guesses.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert guesses == []


def test_no_file_is_told_by_a_packages_name_in_its_path():
    """An environment in a clone of that name holds files of every package."""
    packages = {"megatron_prism", "megatron", "torch", "transformer_engine"}
    repository = ROOT.parent
    guesses = []
    for file in [*ROOT.rglob("*.py"), *(repository / "tests").rglob("*.py")]:
        for node in ast.walk(parsed(file)):
            if not isinstance(node, ast.Compare) or not isinstance(node.left, ast.Constant):
                continue
            compared = ast.unparse(node.comparators[0])
            if node.left.value in packages and re.search(r"file|path", compared):
                guesses.append(f"{file.relative_to(repository)}:{node.lineno}")
    assert guesses == []


def folders_of(package):
    """Names of the packages directly below ``package``."""
    return {path.parent.name for path in package.glob("*/__init__.py")}


def test_the_map_of_the_package_names_the_folders_that_are_there():
    """Of packages below a package of core the map may name some."""
    lists = re.findall(r"^    .*$", megatron_prism.__doc__, flags=re.M)
    named = set(re.findall(r"\b(\w+)/", "".join(lists)))
    there = folders_of(ROOT) | folders_of(ROOT / "features")
    below_packages = {path.name for path in ROOT.glob("*/*/")}
    assert there - named == {"features"}
    assert named - there - below_packages == set()


def test_the_page_of_the_code_names_the_folders_that_are_there():
    page = (ROOT.parent / "docs/how-it-works.md").read_text(encoding="utf-8")
    drawing = page.partition("## The code")[2]
    drawn = re.findall(r'\w+\["(\w+):', drawing)
    of_core, _, of_features = drawing.partition("A feature is a folder of")
    assert sorted(drawn) == sorted(folders_of(ROOT))
    packages = [path.parent.relative_to(ROOT).as_posix() for path in ROOT.rglob("*/__init__.py")]
    in_table = re.findall(r"`([\w/]+)`", first_cells(of_core.partition("| to change")[0]))
    assert sorted(in_table) == sorted(p for p in packages if not p.startswith("features"))
    named = re.findall(r"`(\w+)`", first_cells(of_features))
    assert sorted(named) == sorted(folders_of(ROOT / "features"))


def first_cells(page):
    """The first cells of a page's tables whose cells begin with a name of code."""
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return "".join(rows)


def rows_of_what_to_change():
    """The rows "to change … | look in …" of the page of the code."""
    page = (ROOT.parent / "docs/how-it-works.md").read_text(encoding="utf-8")
    return page.partition("| to change")[2].partition("\n\n")[0]


def place_of(name):
    """The file or folder that the page names so; None where there is none."""
    roots = (ROOT, ROOT.parent, ROOT / "replay/costs", ROOT.parent / "tests/helpers")
    return next((root / name for root in roots if (root / name).exists()), None)


def test_the_page_of_the_code_names_files_that_are_there():
    names = re.findall(r"`([\w./]+)`", rows_of_what_to_change())
    places = [name for name in names if "/" in name or name.endswith(".py")]
    assert len(places) > 20
    assert [name for name in places if place_of(name) is None] == []


def test_the_page_of_the_code_names_what_its_files_have():
    """Behind a file stand, in parentheses, the names at which to begin."""
    named = re.findall(r"`([\w./]+\.\w+)` \(([^)]*`[^)]*)\)", rows_of_what_to_change())
    missing = []
    for path, words in named:
        text = place_of(path).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", words):
            # a definition, not a mention
            definition = rf"^ *(?:def |class |function |const )?{name}\b *(?:[=:(]|$)"
            if re.search(definition, text, flags=re.M) is None:
                missing.append(f"{name} of {path}")
    assert len(named) > 10
    assert missing == []
