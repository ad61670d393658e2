"""Patches fail closed: every target is there, and a target that is renamed is noticed."""

import dataclasses
import json
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from megatron_prism.cli import main as cli
from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.jobs import megatron_source
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.emulate import import_hooks, patch
from megatron_prism.emulate.patches import PATCHES, without_cuda
from megatron_prism.emulate.rank.monitor import TrainingMonitor

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron.core")

RELEASE = megatron_source.parse_release(megatron_source.megatron_release())
FOUND = [one for one in patch.statuses(PATCHES) if one.state == patch.FOUND]


def context():
    return patch.PatchContext(lambda: None, TrainingMonitor(), True, (0,), 0)


def test_this_release_has_every_target(capsys):
    assert cli.main(["patches", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["megatron_core"] == megatron_source.megatron_release()
    states = {f"{row['patch']} {row['target']}": row["state"] for row in said["targets"]}
    assert [target for target, state in states.items() if state == patch.MISSING] == []
    assert sum(state == patch.FOUND for state in states.values()) > 50


def test_every_patch_says_what_it_replaces():
    assert len({(one.name, one.module, one.targets) for one in PATCHES}) == len(PATCHES)
    for one in PATCHES:
        assert one.targets, one.name
        assert one.purpose in (patch.PROTECTS, patch.ENABLES, patch.SPEEDS_UP)
        assert one.reason
        assert re.search(r"\.py:\d+.* @\d|@3\.6", one.source), one.name


@pytest.mark.parametrize("one", FOUND, ids=lambda one: f"{one.patch.name}:{one.target}")
def test_a_renamed_target_is_noticed(one, monkeypatch):
    """As a release would rename it: in the source of the module that would be imported."""
    path, real = megatron_source.locate(one.patch.module), megatron_source.read_source
    name, _, member = one.target.partition(".")
    special = member in ("__init__", "__new__")  # every class has one

    def renamed(place):
        source = real(place)
        if place != path:
            return source
        word = name if special or not member else member
        return re.sub(rf"\b{word}\b", f"{word}_renamed", source)

    monkeypatch.setattr(megatron_source, "read_source", renamed)
    (status,) = [s for s in patch.statuses([one.patch]) if s.target == one.target]
    inherits = member and not special and _bases(real(path), name)
    assert status.state == (patch.FOUND if inherits else patch.MISSING)


def _bases(source, name):
    """Whether the member of a class may come from another one, which only its import shows."""
    return re.search(rf"^class {name}\([^)]*\w", source, re.MULTILINE)


@pytest.mark.parametrize("one", FOUND, ids=lambda one: f"{one.patch.name}:{one.target}")
def test_a_target_that_an_import_shows_to_be_missing_stops_it(one):
    """Also where the source did not show it: inherited members, names made when it is imported."""
    module, (name, _, member) = ModuleType(one.patch.module), one.target.partition(".")
    for target in one.patch.paths(RELEASE):
        owner, _, leaf = target.partition(".")
        known = vars(module).setdefault(owner, type(owner, (), {}) if leaf else lambda *a: None)
        if leaf and leaf not in ("__init__", "__new__"):
            setattr(known, leaf, lambda *a: None)
    if member and member not in ("__init__", "__new__"):
        delattr(getattr(module, name), member)
    else:
        setattr(module, name, (lambda *a: None) if member else None)
        if not member:
            delattr(module, name)
    if one.patch.purpose == patch.SPEEDS_UP:
        return
    only = dataclasses.replace(one.patch, apply=lambda module, context: None)
    with pytest.raises(UnsupportedError, match=re.escape(one.patch.name)):
        patch._apply(only, RELEASE, context(), module)


@pytest.mark.parametrize("purpose", [patch.PROTECTS, patch.ENABLES, patch.SPEEDS_UP])
def test_what_a_missing_target_leads_to(purpose, tmp_path, monkeypatch):
    package = tmp_path / "planted_package"
    package.mkdir()
    (package / "__init__.py").write_text("def other(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    one = patch.Patch("planted", "planted_package", "why", "x.py:1 @1", lambda m, c: None,
                      targets=("gone",), purpose=purpose)  # fmt: skip
    if purpose == patch.SPEEDS_UP:
        with pytest.warns(UserWarning, match="planted"):
            patch.apply([one], context())
    else:
        with pytest.raises(UnsupportedError, match="planted_package:gone") as caught:
            patch.apply([one], context())
        assert caught.value.exit_code == 1
        assert "prism patches" in caught.value.fix
    import_hooks.clear()


def test_a_release_is_the_same_before_and_after_its_import(monkeypatch):
    """In a git checkout, Megatron adds the commit to its version once it is imported."""
    before = megatron_source.megatron_release()
    imported = SimpleNamespace(__version__=f"{before}+0123abc")
    monkeypatch.setitem(sys.modules, "megatron.core", imported)
    assert megatron_source.megatron_release() == before


def test_a_module_that_moved_is_missing(tmp_path):
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    info = "MAJOR = 0\nMINOR = 21\nPATCH = 3\nPRE_RELEASE = 'rc0'\n"
    (tmp_path / "megatron" / "core" / "package_info.py").write_text(info)
    (tmp_path / "megatron" / "core" / "__init__.py").write_text("")
    assert megatron_source.megatron_release([str(tmp_path)]) == "0.21.3rc0"
    found = patch.statuses(PATCHES, [str(tmp_path)])
    core = [one for one in found if one.patch.module.startswith("megatron.core.")]
    assert {one.state for one in core} == {patch.MISSING, patch.NOT_NEEDED}
    training = [one for one in found if one.patch.module.startswith("megatron.training.")]
    assert {one.state for one in training} == {patch.NOT_NEEDED}  # there is none at all


def test_a_patch_replaces_only_what_it_declares():
    module = SimpleNamespace(declared=lambda: 1, other=lambda: 2)
    changes = ProcessChanges()
    here = dataclasses.replace(context(), changes=changes)
    one = patch.Patch("planted", "nowhere", "why", "", lambda m, c: None, targets=("declared",))
    with here.applying(one):
        for _ in range(2):  # as if it were reachable through two modules
            here.replace(module, lambda original: 10 * original())
        with pytest.raises(AssertionError, match="replaces other and does not declare it"):
            here.replace(module, lambda original: original, "other")
    assert module.declared() == 10
    two = dataclasses.replace(one, name="another")
    with here.applying(two):
        here.replace(module, lambda original: 1 + original())
    assert module.declared() == 11
    later = dataclasses.replace(one, targets=("OfLater.__init__ >=99",))
    with here.applying(later):  # a class that this release lacks
        here.replace(module, lambda original: None)
        here.set(module, "OfLater.__init__", None)
    changes.undo()
    assert module.declared() == 1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("moe_paged_stash", "paged-stash"),
        ("fp4", "FP4 is"),
        ("fp8 fp8_dot_product_attention", "attention in FP8"),
        ("fp8 fp8_param", ""),
        ("hybrid_context_parallel", "hybrid and dynamic"),
        ("dynamic_context_parallel", "hybrid and dynamic"),
        ("fine_grained_activation_offloading mtp_num_layers overlap_moe_expert_parallel_comm",
         "offloaded beside"),
        ("fine_grained_activation_offloading overlap_moe_expert_parallel_comm", ""),
    ],
)  # fmt: skip
def test_what_shapes_cannot_say_is_refused_by_name(settings, named):
    config = SimpleNamespace(**dict.fromkeys(settings.split(), True))
    rows = without_cuda._without_stand_in(config, meta=True)
    found = [what for (what, _), asked in rows.items() if asked]
    assert [named in what for what in found] == [True] * bool(named)
