"""Zero-edit attach: ``import torch`` calls :func:`autoload` in every process of the environment.

The entry point group ``torch.backends`` makes torch import this module (off switch:
``TORCH_DEVICE_BACKEND_AUTOLOAD=0``).  Without a ``--prism-*`` argument and without ``PRISM_ARGS``
it imports nothing, and hides a Transformer Engine that has no library.  With one, it ends a
launcher that would wait for other hosts, and waits for the first ``import megatron`` or the first
``init_process_group``; a script that was told to emulate and ends without either fails.
"""

import os
import sys

from megatron_prism.core.bare_engine import hide_bare_engine


def emulation_is_asked_for(argv: "list[str] | None" = None) -> bool:
    """Whether this process was asked for emulation: a ``--prism-*`` flag or ``PRISM_ARGS``.

    ``--prism-mem-…`` are pytest's.
    """
    words = sys.argv[1:] if argv is None else argv
    ours = (a.startswith("--prism-") and not a.startswith("--prism-mem-") for a in words)
    return bool(os.environ.get("PRISM_ARGS")) or any(ours)


def autoload() -> None:
    """Called by torch; must be cheap and must never raise."""
    hide_bare_engine()
    if not emulation_is_asked_for():
        return
    from megatron_prism.emulate import import_hooks
    from megatron_prism.emulate.command_line import real_launch
    from megatron_prism.emulate.rank import exit_status

    real_launch.check(sys.orig_argv)
    import_hooks.before_first_import("megatron", _install)
    for module in ("", ".distributed_c10d", ".device_mesh"):  # each has the name
        import_hooks.before_first_call(f"torch.distributed{module}", "init_process_group", _install)
    if "--prism-emulate" in sys.argv[1:]:  # PRISM_ARGS reaches processes that are not the job
        exit_status.expect_emulation()


def attach() -> None:
    """Attach the emulation to this process, if its command line or ``PRISM_ARGS`` asks for it.

    ``import torch`` does the same where the package is installed.  A script that prefers to show
    the attachment calls this before it imports torch or Megatron (``patches/`` has the two lines).
    """
    autoload()


def _install() -> None:
    from megatron_prism.emulate.rank import launch

    launch.attach_from_command_line()
