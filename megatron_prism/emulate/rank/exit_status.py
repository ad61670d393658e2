"""Have a say in the exit status of a process that would end with 0.

``atexit`` cannot see the exit status, so ``sys.exit`` and the exception hook leave a note
(``note``).  A status that neither saw, such as a bare ``raise SystemExit(3)``, counts as good.
``os._exit(0)`` would pass ``atexit`` by, and is asked as well.

Launchers have the flags of their workers and train nothing themselves.  So each process that is
asked names a file in ``PRISM_TRAINED``, and whoever trains below it makes that file.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from megatron_prism.core.errors import NotTrainedError, PrismError
from megatron_prism.core.process_changes import ProcessChanges

leave = os._exit  # whatever the verdict
MARK = "PRISM_TRAINED"

Status = str | int | None  # of sys.exit
Check = Callable[[], "PrismError | None"]
Idle = Callable[[], bool]

_checks: list[tuple[Check, Idle]] = []
_expected = False
_asked = 0  # process id of whoever is asked at its end
_above: str | None = None  # the mark of the process above it
_ended: dict[str, object] = {}  # "status" of sys.exit or of a failure; "failed": of the latter


def note(status: Status) -> None:
    """Remember with which status the process is about to end."""
    _ended["status"] = status


def report(error: PrismError) -> None:
    """Print ``error``, and hand it to the process that started this one."""
    print(f"prism: error: {error}", file=sys.stderr, flush=True)
    tell_parent(error)


def tell_parent(error: PrismError) -> None:
    """Hand ``error`` to whoever started this process as a worker, if one did."""
    if "PRISM_WORKER_EVENTS" in os.environ:
        from megatron_prism.emulate.processes import workers

        if (emit := workers.emitter()) is not None:
            emit("error", message=error.message, fix=error.fix, exit_code=error.exit_code)


def end_without_estimate(reason: str) -> NoReturn:
    """End this process, a worker that runs few layers, and say why there is no estimate.

    No check is asked about its end: the job itself goes on in other workers.
    """
    from megatron_prism.emulate.processes import workers

    emit = workers.emitter()
    assert emit is not None, "few layers run in workers alone"
    emit("result", result={"no_estimate": reason})
    leave(0)


def at_good_end(check: Check, changes: ProcessChanges, idle: Idle = lambda: False) -> None:
    """Call ``check`` where this process would exit 0; the error that it returns decides instead.

    Undoing ``changes`` takes the check back, and with the first one what sees the exit status.

    idle : whether nothing trained, so that the process must not end well whatever else it said
    """
    if not _checks:
        _watch(changes)
    _checks.append((check, idle))
    changes.on_undo(lambda: _checks.remove((check, idle)))


def trained() -> None:
    """Tell the process above that a job has trained here."""
    mark = _above if os.getpid() == _asked else os.environ.get(MARK)
    if mark:
        with contextlib.suppress(OSError):
            Path(mark).touch()


def trained_below() -> bool:
    """Whether a job has trained in a process that this one started."""
    return Path(os.environ.get(MARK, "/")).is_file()


def expect_emulation() -> None:
    """A job's script with ``--prism-emulate`` that ends well without being emulated fails.

    ``python -c`` and interactive sessions are nobody's job, and pytest's options are its own.
    """
    global _expected
    _expected = not is_worker()
    # asked now: at its end Python takes __file__ away
    main = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    if main.endswith(".py") and "pytest" not in sys.modules:
        at_good_end(_never_attached, ProcessChanges())  # no session is open yet


def emulation_is_expected() -> bool:
    """Whether ``--prism-emulate`` was on the command line when torch was imported."""
    return _expected


def _never_attached() -> NotTrainedError | None:
    """The error of a script that used neither Megatron nor a process group."""
    attached = "megatron_prism.emulate.rank.launch" in sys.modules  # the monitor has the verdict
    if attached or trained_below() or is_worker():
        return None
    return NotTrainedError(
        "nothing trained: neither this program nor one that it started used megatron or a process "
        "group, so --prism-emulate had no effect",
        fix="--prism-emulate belongs on a script that trains, such as pretrain_gpt.py; where that "
        "is started on another host, PRISM_ARGS='--prism-emulate …' there",
    )


def is_worker() -> bool:
    """Whether multiprocessing made this process: it has its parent's command line."""
    process = sys.modules.get("multiprocessing.process")
    if process is None:
        return False
    # while it imports the script of its parent it does not know its parent yet
    starting = getattr(process.current_process(), "_inheriting", False)
    return starting or process.parent_process() is not None


_DISTRIBUTIONS = {
    "PIL": "pillow",
    "absl": "absl-py",
    "yaml": "PyYAML",
    "transformer_engine": "transformer-engine[pytorch]",
}


def _missing_module(name: str) -> PrismError:
    """The error of a script without the module ``name``.

    megatron.training imports packages that megatron-core does not ask for (0.16.1: six, regex,
    pydantic; 0.19 has an extra for them).
    """
    # parsing files is no part of the start of a job that has its modules
    from megatron_prism.emulate.preflight.missing_modules import missing_packages

    parent, _, child = name.partition(".")
    parents = [parent]
    # the next ones would stop the script when this one is installed
    if parent != "megatron":
        parents += missing_packages(Path(sys.argv[0]))
    packages = [_DISTRIBUTIONS.get(each, each) for each in dict.fromkeys(parents)]
    fix = f"pip install {' '.join(packages)}, or all that megatron.training imports: "
    fix += "pip install 'megatron_prism[training]'"
    if child and parent == "megatron" and "megatron.core" in sys.modules:  # megatron.energon, say
        parent = name
        fix = f"pip install megatron-{child.partition('.')[0]}, or another checkout of Megatron-LM"
    elif parent == "megatron":
        fix = "start the script in its checkout of Megatron-LM, or PYTHONPATH=CHECKOUT"
    names = ", ".join(dict.fromkeys([parent, *parents[1:]]))
    verb = "is" if "," not in names else "are"
    return PrismError(f"the script imports {names}, which {verb} not installed here", fix=fix)


def _asked_package(value: ImportError) -> PrismError | None:
    """Return the error of a package that somebody asks to install, as Megatron's optimizers do."""
    command = re.search(r"pip install [\w.\[\]=,<>-]*\w", str(value))
    if command is None:
        return None
    return PrismError(str(value).partition(". ")[0], fix=command[0])


def _watch(changes: ProcessChanges) -> None:
    global _asked, _above
    original_exit, original_hook = sys.exit, sys.excepthook
    pid = _asked = os.getpid()
    _above = os.environ.get(MARK)
    mark = Path(tempfile.gettempdir(), f"prism-trained-{pid}-{os.urandom(4).hex()}")

    def note_exit(status: Status = None) -> None:
        note(status)
        original_exit(status)

    def note_exception(
        kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        note(1)
        _ended["failed"] = True
        if isinstance(value, PrismError):
            report(value)
            return
        original_hook(kind, value, trace)
        if isinstance(value, ModuleNotFoundError) and value.name:
            report(_missing_module(value.name))
        elif isinstance(value, ImportError):
            error = _asked_package(value)
            if error is not None:
                report(error)

    def verdict() -> int:
        """The status to end with, 0 for the one that was on its way."""
        status = _ended.get("status") or 0
        if status:
            # where something failed or trained, the status that is on its way stays
            is_idle = "failed" not in _ended and any(idle() for _, idle in _checks)
            if not is_idle:
                return 0
            # the job may have caught that sys.exit, and would end with 0
            if isinstance(status, int):
                return status & 0xFF or 1
            # a text, which Python prints before it ends with 1
            return 1
        for check, _ in _checks:
            error = check()
            if error is not None:
                report(error)
                return error.exit_code
        if trained_below():
            trained()
        return 0

    def end() -> None:
        if os.getpid() != pid:
            return  # a fork inherits this, but not the job
        changes.set(os, "_exit", leave)  # asked once
        try:
            status = verdict()
        finally:
            mark.unlink(missing_ok=True)
        if status:
            sys.stdout.flush()
            leave(status)

    def leave_at_once(status: int) -> None:
        if not status:
            end()
        leave(status)

    changes.on_undo(_ended.clear)
    changes.set(sys, "exit", note_exit)
    changes.set(sys, "excepthook", note_exception)
    changes.set(os, "_exit", leave_at_once)
    changes.set_item(os.environ, MARK, str(mark))
    changes.on_undo(lambda: atexit.unregister(end))
    atexit.register(end)
