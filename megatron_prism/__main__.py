"""``python -m megatron_prism`` is ``prism``."""

import sys

from megatron_prism.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
