"""What triton's autotuners allocate before a kernel's first launch, on shapes."""

import importlib.util

import pytest
import torch

from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.runtime.devices import triton

BYTES = 256 * 1024 * 1024  # triton/backends/nvidia/driver.py get_empty_cache_for_benchmark @3.6


def rotate(x_ptr, hidden_size, BLOCK: int):  # noqa: N803
    pass


@pytest.fixture
def allocated(monkeypatch):
    """Sizes of buffers, in their order."""
    sizes = []
    empty = torch.empty

    def recording(*size, **options):
        made = empty(*size, **options)
        # torch.zeros asks here, too, on shapes
        if made.nbytes > 1024:
            sizes.append(made.nbytes)
        return made

    monkeypatch.setattr(triton.torch, "empty", recording)
    triton._tuned.clear()
    yield sizes
    triton._tuned.clear()


def kernel_of_stub(configs):
    return triton._autotune(configs=configs, key=["hidden_size"])(triton._jit(rotate))


@pytest.fixture
def real_triton():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    changes = ProcessChanges()
    triton.replace_launches(changes)
    import triton as installed

    yield installed
    changes.undo()


def launches(kernel, device="meta"):
    x = torch.zeros(4, device=device)
    for hidden_size in (8, 8, 16):
        kernel[(1,)](x, hidden_size, BLOCK=64)
    kernel[(1,)](x.bfloat16(), 8, BLOCK=64)
    kernel[(1,)](x, hidden_size=16)


def test_a_buffer_comes_for_each_size_and_type(allocated):
    launches(kernel_of_stub([1, 2]))
    # of 8 and of 16 in fp32, of 8 in bf16
    assert allocated == [BYTES] * 3


def test_one_configuration_is_not_measured(allocated):
    launches(kernel_of_stub([1]))
    launches(triton._jit(rotate))
    assert allocated == []


def test_the_installed_autotuner_is_read_as_its_stand_in(real_triton, allocated):
    configs = [real_triton.Config({"BLOCK": size}) for size in (64, 128)]
    launches(real_triton.autotune(configs=configs, key=["hidden_size"])(real_triton.jit(rotate)))
    assert allocated == [BYTES] * 3


def test_values_of_stand_ins_are_not_tuned(allocated, monkeypatch):
    monkeypatch.setitem(triton.COMPUTED, "rotate", lambda arguments: None)
    launches(kernel_of_stub([1, 2]), device="cpu")
    assert allocated == []
