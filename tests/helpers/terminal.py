"""Run a command on a terminal of its own and type at the prompts of its debugger."""

import os
import pty
import select
import subprocess
import time

PROMPTS = (b"(prism)", b"(Pdb)")


def typed(command, lines, cwd=None, env=None, timeout=240):
    """(exit status, output) of ``command`` on a terminal where ``lines`` are typed."""
    ours, theirs = pty.openpty()
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **(env or os.environ)}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd,
                               env=environment, close_fds=True)  # fmt: skip
    os.close(theirs)
    said, lines, end = b"", list(lines), time.monotonic() + timeout
    try:
        while time.monotonic() < end:
            if not select.select([ours], [], [], 1)[0]:
                continue
            try:
                found = os.read(ours, 1 << 16)
            except OSError:  # the process ended
                break
            said += found
            if said.rstrip().endswith(PROMPTS) and lines:
                os.write(ours, lines.pop(0).encode() + b"\n")
                said += b" "
    finally:
        process.kill() if time.monotonic() >= end else None
        os.close(ours)
    return process.wait(10), said.decode(errors="replace").replace("\r\n", "\n")
