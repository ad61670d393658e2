"""One emulated rank of a job: what was asked for, where it runs, and who follows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_prism.emulate.memory_watch import MemoryWatch
from megatron_prism.emulate.monitor import TrainingMonitor
from megatron_prism.emulate.options import Options
from megatron_prism.runtime.devices import Tier
from megatron_prism.runtime.listeners import CallListener, TrainingListener

__all__ = ["Run"]


@dataclass
class Run:
    """What ``launch`` builds from the options before Megatron is imported.

    monitor  : counts train steps and tells ``training`` of them
    training : who follows the training, in the order in which they are told
    calls    : who follows the communication calls, the outermost first; a pacer, which needs the
               device, joins them when the world starts
    tally    : counts the calls; a ballast takes memory for them, too
    version  : megatron-core's
    store    : of the launcher, through which several local processes find each other
    pace, recording, memory : the Pace, the recorder or replayer of control values, the MemoryWatch
               of this run, where it has one
    on_arguments : told the job's arguments, as text, once Megatron has parsed them and before
               anything is trained; what is of another job refuses it there
    """

    options: Options
    tier: Tier
    monitor: TrainingMonitor
    training: tuple[TrainingListener, ...] = ()
    calls: tuple[CallListener, ...] = ()
    tally: Any = None
    version: str = ""
    store: Any = None
    pace: Any = None
    recording: Any = None
    memory: MemoryWatch | None = None
    on_arguments: list[Callable[[str], None]] = field(default_factory=list)
