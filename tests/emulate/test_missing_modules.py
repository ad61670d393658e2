"""All packages that a script lacks are named at once, and none that it can do without."""

import pytest

from megatron_prism.emulate.preflight.missing_modules import missing_packages
from megatron_prism.emulate.rank import exit_status


def test_what_a_script_and_its_modules_lack_is_named_at_once(tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "data.py").write_text("import no_such_b\nfrom tools import more\n")
    (tmp_path / "tools" / "more.py").write_text("from no_such_c.x import y\nimport tools.data\n")
    (tmp_path / "beside.py").write_text("import no_such_a\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import os, json.decoder\n"
        "from beside import thing\n"
        "from tools.data import load\n"
        "import no_such_a.part\n"
        "try:\n    import no_such_optional\nexcept ImportError:\n    pass\n"
        "def later():\n    import no_such_later\n"
    )
    assert missing_packages(script) == ["no_such_a", "no_such_b", "no_such_c"]
    assert missing_packages(tmp_path / "gone.py") == []

    # a module of another folder of the checkout, which the script adds to its path
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "no_such_b.py").touch()
    assert missing_packages(script) == ["no_such_a", "no_such_c"]


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        # core/optimizer/__init__.py:757 @0.19.0
        (
            "emerging-optimizers package is required for optimizer='muon'. "
            "Install it with: pip install emerging-optimizers",
            "pip install emerging-optimizers",
        ),
        ("cannot import name 'x' from 'y'", None),
    ],
)
def test_a_package_that_is_asked_for_is_the_fix(text, fix):
    error = exit_status._asked_package(ImportError(text))
    assert (error and error.fix) == fix


def test_the_error_of_a_missing_module_names_the_next_ones(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("import PIL_of_nobody\nimport no_such_b\n")
    monkeypatch.setattr("sys.argv", [str(script)])
    error = exit_status._missing_module("PIL_of_nobody")
    assert "imports PIL_of_nobody, no_such_b, which are not installed" in error.message
    assert error.fix.startswith("pip install PIL_of_nobody no_such_b, or")
