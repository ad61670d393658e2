"""Keep the NVLinks of a GPU whose rank runs alone as awake as in the job.

A link that has carried nothing for 50 ms falls asleep (``nvidia-smi nvlink -gLowPwrInfo``, H200)
and leaves its power to the rest of the GPU.  A rank alone sends nothing to anybody, so a GPU at its
power limit runs faster alone: 1,875 MHz instead of the job's 1,792, and 2.0 % less time for the
same iteration, of which a process beside it that copied to the neighbour gave back 1.2 (tp 2 on
2 x H200, 2026-11-22, ``benchmarks/results/h200_x2_mirrors.json``).  Here a word goes to another
GPU of this host whenever the rank has made calls to others, if one is visible: between the calls of
a pipeline's stage, or of data parallelism, links sleep in the job, too, and another process of this
GPU would be interrupted by each word.  After
a second of nearly nothing but calls, as of tensor parallelism, words go on for a while: the host is
through before its device is.  Whether links sleep nobody looks.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable

PERIOD_S = 0.02  # well below the 50 ms after which a link falls asleep
_LOOKS, _DENSE = 50, 35  # of the last second's looks so many found new calls: they never pause
_BYTES = 1 << 18  # as that process beside it copied; 256 B may pass one of a GPU's 18 links only


class KeepAlive:
    """Sends words to a neighbour and back from a thread of its own.

    how   : what keeps the links awake
    why   : why nothing does; empty as long as something does
    send  : sends one word
    calls : how many calls the rank has made to others
    """

    def __init__(
        self,
        how: str = "",
        why: str = "",
        send: Callable[[], None] | None = None,
        calls: Callable[[], int] = int,
    ) -> None:
        self.how, self.why, self.words = how, why, 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if send is not None:
            self._thread = threading.Thread(
                target=self._run, args=(send, calls), name="prism-links", daemon=True
            )
            self._thread.start()
            atexit.register(self.stop)  # a job that fails ends without a summary

    def _run(self, send: Callable[[], None], calls: Callable[[], int]) -> None:
        try:
            calls_before, recent = calls(), deque([False] * _LOOKS, maxlen=_LOOKS)
            while not self._stop.wait(PERIOD_S):
                now = calls()
                recent.append(now != calls_before)
                calls_before = now
                if recent[-1] or sum(recent) >= _DENSE:
                    send()
                    self.words += 1
        except Exception as error:  # of whatever kind: the rank goes on, and the summary says it
            self.why = f"sending stopped: {type(error).__name__}: {error}"

    def stop(self) -> None:
        """No word is sent any more when this returns."""
        self._stop.set()
        atexit.unregister(self.stop)
        if self._thread is not None:
            self._thread.join(10)

    def summary(self) -> dict[str, object]:
        """What the run's JSON says."""
        return {"awake": not self.why, "words": self.words, "said": str(self)}

    def __str__(self) -> str:
        if not self.why:
            return f"NVLinks kept awake by {self.how}, as in the job (assumed, not looked at)"
        return (
            f"NVLinks, if it has any, asleep, {self.why}: a GPU at its power limit is 1 to 3 % "
            "faster so than in the job"
        )


def keep_awake(index: int, calls: Callable[[], int], num_processes: int = 1) -> KeepAlive:
    """Keep the links of CUDA device ``index`` as awake as calls do; never raises.

    Several local ranks do so by themselves.  Every visible GPU gets a context of this process,
    about half a GB of its memory; this device gives 256 KiB that torch does not count.
    """
    if num_processes > 1:
        return KeepAlive("calls between the local ranks")
    try:
        peer = _neighbour(index)
        if peer is None:
            return KeepAlive(why="no other GPU of this host is visible")
        how = f"words to GPU {peer} behind its calls"
        return KeepAlive(how, send=_sender(index, peer), calls=calls)
    except Exception as error:  # a rank whose links sleep is better than none
        return KeepAlive(why=f"{type(error).__name__}: {error}")


def _neighbour(index: int) -> int | None:
    """Another device that can be written to directly."""
    import torch

    reachable = torch.cuda.can_device_access_peer
    count = torch.cuda.device_count()
    devices = ((index + i) % count for i in range(1, count))  # not everybody's the same one
    return next((i for i in devices if reachable(index, i)), None)


def _sender(index: int, peer: int) -> Callable[[], None]:
    """Copies to ``peer`` and back, both made by ``index`` on a stream on which nothing else is.

    Straight to the driver: torch's copies between devices come with events of both, for which the
    job's own kernels would wait too (CUDA_DEVICE_MAX_CONNECTIONS=1 is one queue for all streams).
    """
    import torch

    from megatron_prism.runtime.cuda_driver import Driver

    driver = Driver()
    own_words = driver.words(_BYTES, f"cuda:{index}")
    address = own_words.data_ptr()
    peer_words = torch.zeros(_BYTES, dtype=torch.uint8, device=f"cuda:{peer}")
    peer_words.copy_(own_words)  # torch lets one device reach the other at the first copy
    stream = torch.cuda.Stream(index)

    def send() -> None:
        torch.cuda.set_device(index)  # a thread begins with device 0, which would get a context
        for to, source in ((peer_words.data_ptr(), address), (address, peer_words.data_ptr())):
            driver.copy(to, source, _BYTES, stream.cuda_stream)

    return send
