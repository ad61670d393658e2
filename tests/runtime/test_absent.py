"""Packages that are not here: imports that nobody guards get names, whose use is refused."""

import importlib
import importlib.util
import sys

import pytest

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.devices import absent

SOURCE = """
from fla_of_a_test.modules import (
    FusedNorm,
)
import fla_of_a_test.ops.deep
try:
    import fla_of_a_test.other
except ImportError:
    other = None
try:
    from fla_of_a_test.modules import Gated
except ImportError:
    Gated = None
def late():
    from fla_of_a_test.modules import Late
    return Late
class Mine(FusedNorm):
    pass
"""


def test_only_imports_without_a_guard_get_names(tmp_path, monkeypatch):
    (tmp_path / "user_of_fla.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(absent.PACKAGES, "fla_of_a_test", "compiled with nvcc")
    with ProcessChanges() as changes:
        absent.add_modules(changes)
        assert importlib.util.find_spec("fla_of_a_test") is None  # who asks hears the truth
        user = importlib.import_module("user_of_fla")
        assert user.Gated is None
        assert user.other is None
        assert isinstance(user.late(), type)
        with pytest.raises(UnsupportedError, match=r"fla_of_a_test\.modules.*compiled with nvcc"):
            user.Mine(1, eps=2)
    assert not [name for name in sys.modules if name.startswith("fla_of_a_test")]
    with pytest.raises(ImportError):
        importlib.reload(user)
    del sys.modules["user_of_fla"]
