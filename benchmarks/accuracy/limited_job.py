"""A job that may use so many bytes of device memory, as if the device were smaller.

``LIMIT_BYTES=N LIMITED_SCRIPT=pretrain_gpt.py``
``prism run <flags> -- benchmarks/accuracy/limited_job.py <arguments>``

The limit is of torch's caching allocator (reserved bytes); beyond it a request fails as it does on
a full device: caches are given back first.  Without a CUDA device it does nothing.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch


def main() -> None:
    script = Path(os.environ["LIMITED_SCRIPT"]).resolve()
    sys.argv[0] = str(script)
    sys.path.insert(0, str(script.parent))
    limit = int(os.environ.get("LIMIT_BYTES", "0"))
    if limit and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        if total != torch.cuda.mem_get_info()[1]:
            print(f"limited_job: {total:,} B or {torch.cuda.mem_get_info()[1]:,} B in all?")
        torch.cuda.set_per_process_memory_fraction((limit + 0.5) / total)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
