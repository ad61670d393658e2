"""Zero-edit attach: ``import torch`` calls :func:`autoload` in every process of the environment.

The entry point group ``torch.backends`` makes torch import this module (off switch:
``TORCH_DEVICE_BACKEND_AUTOLOAD=0``).  Without a ``--prism-*`` argument and without ``PRISM_ARGS``
it does nothing and imports nothing.  With one, it waits for the first ``import megatron``.
"""

import os
import sys

__all__ = ["attach", "autoload", "wanted"]


def wanted(argv: "list[str] | None" = None) -> bool:
    """Whether this process was asked for emulation: a ``--prism-*`` flag or ``PRISM_ARGS``."""
    arguments = sys.argv[1:] if argv is None else argv
    return bool(os.environ.get("PRISM_ARGS")) or any(a.startswith("--prism-") for a in arguments)


def autoload() -> None:
    """Called by torch; must be cheap and must never raise."""
    if not wanted():
        return
    from megatron_prism.plugin import hooks

    hooks.before_first_import("megatron", _install)


attach = autoload  # the name for scripts that attach by hand (patches/)


def _install() -> None:
    from megatron_prism.plugin import launch

    launch.install_from_command_line()
