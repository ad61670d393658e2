"""Modules are changed right after their import, before anybody copies names out of them."""

import sys

import pytest

from megatron_prism.emulate import import_hooks


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "hooked"
    folder.mkdir()
    (folder / "__init__.py").write_text("from hooked.inner import f\n")
    (folder / "inner.py").write_text("def f():\n    return 'original'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "hooked"
    import_hooks.clear()
    for name in [n for n in sys.modules if n.partition(".")[0] == "hooked"]:
        del sys.modules[name]


def test_a_copy_made_by_the_importer_is_the_replacement(package):
    import_hooks.after_import("hooked.inner", lambda m: setattr(m, "f", lambda: "replaced"))
    import hooked

    assert hooked.f() == "replaced"


def test_a_module_that_is_imported_already_is_changed_at_once(package):
    import hooked.inner

    import_hooks.after_import("hooked.inner", lambda m: setattr(m, "f", lambda: "late"))
    assert hooked.inner.f() == "late"
    assert hooked.f() == "original"  # the copy had leaked: why launch installs first


def test_the_trigger_runs_once_before_anything_of_the_package(package):
    seen = []
    import_hooks.before_first_import("hooked", lambda: seen.append("hooked" in sys.modules))
    import hooked.inner  # noqa: F401

    assert seen == [False]


def test_without_callbacks_the_finder_leaves(package):
    import_hooks.after_import("hooked.inner", lambda m: None)
    import_hooks.clear()
    assert import_hooks._finder not in sys.meta_path
