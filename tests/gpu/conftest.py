"""Two ranks of one process wait for each other on one device, which takes a queue for each.

With one hardware queue for all streams, which Megatron's jobs ask for, the second rank's kernel
would be behind the first's for good.  The driver reads the variable when it starts.
"""

import os

import pytest
import torch

os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
