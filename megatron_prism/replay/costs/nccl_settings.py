"""NCCL's environment: what a job's settings allow its calls to do.

In : environment variables, of a slice (``NCCL_ENV`` of its source) or as typed.  Out: NcclSettings:
which algorithms and protocols are left, how many channels, how large buffers are.  What a setting
means is NCCL's own documentation (user guide, Environment Variables, 2.28).  Settings that no part
of the model looks at are kept and said (``unmodelled``), never dropped in silence.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron_prism.core.errors import UsageError

NCCL_ENV = "nccl_env"  # of a source: "NAME=VALUE NAME=VALUE"
ALGORITHMS = {
    "tree": "tree",
    "ring": "ring",
    "nvls": "NVLS",
    "nvlstree": "NVLS tree",
    "pat": "PAT",
    "collnetdirect": "",  # switches that add up: not in the model
    "collnetchain": "",
}
PROTOCOLS = {"ll": "LL", "ll128": "LL128", "simple": "Simple"}
# name as in NCCL's messages -> ours
CALLS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
CHANNELS = {  # newer name -> older one
    "NCCL_MIN_CTAS": "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_CTAS": "NCCL_MAX_NCHANNELS",
}
# that decide something in the model; the rest of what is recorded is said to be left out
_MODELLED = {
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NVLS_ENABLE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_BUFFSIZE",
    *CHANNELS,
}
_RECORDED = re.compile(r"NCCL_\w+|TORCH_NCCL_\w+|CUDA_DEVICE_MAX_CONNECTIONS")
# say nothing of how long a call takes: output, where files are, when a dead job is given up
_SILENT = re.compile(
    r"NCCL_(DEBUG|CONF|SOCKET|IB_HCA|IB_TIMEOUT|IB_RETRY|TOPO|GRAPH_DUMP|LAUNCH|SHARED|ASYNC_ERROR)\w*"
    r"|TORCH_NCCL_(TRACE|DUMP|DEBUG|DESYNC|ENABLE_MON|HEARTBEAT|ASYNC_ERROR|RETHROW|PROPAGATE"
    r"|EXTRA_DUMP|WAIT_TIMEOUT|COORD|LOG|NAN|FR_|AVOID_RECORD|SHOW|CUDA_EVENT)\w*"
)
_FIX = "nccl=NCCL_ALGO=Ring, nccl=NCCL_PROTO=Simple, nccl=NCCL_NVLS_ENABLE=0"


@dataclass(frozen=True)
class NcclSettings:
    """Environment variables, checked."""

    values: Mapping[str, str]

    def __bool__(self) -> bool:
        return bool(self.values)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in sorted(self.values.items()))

    def allows(self, name: str, algorithm: str, protocol: str) -> bool:
        """Whether a call may go that way; messages know protocols only."""
        if algorithm != "messages" and algorithm not in self._algorithms(name):
            return False
        return protocol in self._protocols(name)

    def same_calls(self, settings: NcclSettings) -> bool:
        """Whether calls go the same way under ``settings``."""
        return self._modelled == settings._modelled

    @property
    def _modelled(self) -> dict[str, str]:
        return {name: value for name, value in self.values.items() if name in _MODELLED}

    @cached_property
    def channels(self) -> tuple[int, int | None]:
        """(fewest, most) channels; None: as many as NCCL likes."""
        low, high = (self._count(names) for names in (_LEAST, _MOST))
        if low and high and low > high:
            message = f"at least {low} channels and at most {high} contradict each other"
            raise UsageError(message, fix=f"nccl=NCCL_MAX_NCHANNELS={low}, or leave one out")
        return low or 0, high

    @property
    def buffer_bytes(self) -> int | None:
        """NCCL_BUFFSIZE; None: as usual."""
        return self._count(("NCCL_BUFFSIZE",))

    @property
    def unmodelled(self) -> tuple[str, ...]:
        """Settings that the model of calls does not look at, though they may change times."""
        return tuple(
            name
            for name in sorted(self.values)
            if name not in _MODELLED and not _SILENT.fullmatch(name)
        )

    def _count(self, names: tuple[str, ...]) -> int | None:
        for name in names:
            text = self.values.get(name)
            if text is not None:
                return int(text)
        return None

    def _algorithms(self, name: str) -> set[str]:
        algorithms = _chosen(self.values.get("NCCL_ALGO", ""), ALGORITHMS, "NCCL_ALGO", name)
        if self.values.get("NCCL_NVLS_ENABLE", "2") == "0":
            algorithms -= {"NVLS", "NVLS tree"}
        return algorithms

    def _protocols(self, name: str) -> set[str]:
        return _chosen(self.values.get("NCCL_PROTO", ""), PROTOCOLS, "NCCL_PROTO", name)


_LEAST = ("NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS")
_MOST = ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS")
_WHOLE = (*_LEAST, *_MOST, "NCCL_BUFFSIZE", "CUDA_DEVICE_MAX_CONNECTIONS")


def recorded(environment: Mapping[str, str] = os.environ) -> str:
    """What a slice keeps of its process's environment, ``NAME=VALUE …``; "" for nothing."""
    words = list[str]()
    for name, value in sorted(environment.items()):
        if not _RECORDED.fullmatch(name) or _SILENT.fullmatch(name):
            continue
        if value and not re.search(r"\s", value):
            words.append(f"{name}={value}")
    return " ".join(words)


def parse(*texts: str) -> NcclSettings:
    """Settings of ``NAME=VALUE`` words, separated by blanks or by commas before the next name; the
    later counts.  UsageError for names that are none of NCCL's and for values that cannot be.
    """
    values = dict[str, str]()
    for text in texts:
        for word in re.split(r"\s+|,(?=[A-Z][A-Z_0-9]*=)", text.strip()):
            if not word:
                continue
            name, _, value = word.partition("=")
            if not value or not _RECORDED.fullmatch(name):
                raise UsageError(f"{word} is no setting of NCCL", fix=_FIX)
            values[name] = value
    settings = NcclSettings(values)
    _check(settings)
    return settings


def _check(settings: NcclSettings) -> None:
    for name in _WHOLE:
        text = settings.values.get(name)
        if text is not None and not re.fullmatch(r"[1-9]\d{0,9}", text):
            raise UsageError(f"{name}={text} is no whole number above 0", fix=f"nccl={name}=16")
    nvls = settings.values.get("NCCL_NVLS_ENABLE", "2")
    if nvls not in ("0", "1", "2"):
        raise UsageError(f"NCCL_NVLS_ENABLE={nvls} is neither 0 nor 1 nor 2", fix=_FIX)
    # reading them refuses names that NCCL does not have
    for name in CALLS.values():
        settings._algorithms(name)
        settings._protocols(name)
    # NVLS alone, and it is off
    algorithms = settings.values.get("NCCL_ALGO", "")
    names = set(re.split(r"[,;]", algorithms.lower()))
    if nvls == "0" and algorithms and names <= {"nvls", "nvlstree"}:
        message = f"NCCL_ALGO={algorithms} with NCCL_NVLS_ENABLE=0: no way is left"
        raise UsageError(message, fix="nccl=NCCL_ALGO=Ring, or nccl=NCCL_NVLS_ENABLE=1")
    _ = settings.channels


def _chosen(text: str, known: Mapping[str, str], variable: str, call: str) -> set[str]:
    """Ours of the names in ``text``: ``Ring,Tree``, ``^NVLS``, ``allreduce:tree;reduce:ring``."""
    every = {ours for ours in known.values() if ours}
    for part in text.split(";"):
        head, colon, names = part.rpartition(":")
        # of another call
        if colon and CALLS.get(head.strip().lower()) != call:
            if head.strip().lower() not in CALLS:
                raise UsageError(f"{variable}={text}: {head} is no call of NCCL", fix=_FIX)
            continue
        excludes = names.startswith("^")
        words = [word.strip().lower() for word in names.removeprefix("^").split(",") if word]
        strange = [word for word in words if word not in known]
        if strange:
            message = f"{variable}={text}: NCCL has no {strange[0]}"
            raise UsageError(message, fix=f"one of {', '.join(known)}")
        if words:
            # names of NCCL's that have no part in the model are none of ours
            chosen = {known[word] for word in words if known[word]}
            if excludes:
                every = every - chosen
            else:
                every = every & chosen
    return every
