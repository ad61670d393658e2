"""What some tests need that not every environment has."""

import importlib.util
import sys

import pytest

TRAINING = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None
    or importlib.util.find_spec("megatron.training") is None
    or sys.version_info < (3, 12),
    reason="megatron.training 0.19 needs Python 3.12 and megatron-core[training]",
)
MEGATRON = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)
