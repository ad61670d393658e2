"""Which fault shall happen, to whom and when?  ``KIND@SELECTOR[:PARAM=VALUE,…]`` and plans of them.

In : a line of text, a YAML list of them, or the names of Megatron's and NVRx's own fault injectors.
Out: ``Fault``s, and ``Finder``, which is told of a rank's calls one by one and says which is hit.
Programs (``faults``) and running ranks (``plugin.injector``) ask the same Finder, so that a plan
hits the same call in both.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_prism.errors import UsageError
from megatron_prism.ops import DTYPES, NAMES, REDUCE
from megatron_prism.world import AXES, World

__all__ = ["KINDS", "Call", "Fault", "Finder", "load_plan", "parse", "parse_nvrx"]

# kind -> (parameters it takes, what happens)
KINDS: dict[str, tuple[tuple[str, ...], str]] = {
    "drop": ((), "the call is not made"),
    "skip_microbatch": ((), "the calls of a microbatch are not made"),
    "swap": (("with",), "the call changes places with group:op:nth"),
    "shape": (("n",), "n elements instead (default: half of them)"),
    "dtype": (("to",), "another dtype (default: fp32, or bf16)"),
    "splits": (("rows",), "an all-to-all sends rows more to one member, fewer to the next"),
    "root": (("to",), "another root (default: the next member)"),
    "reduce_op": (("to",), "another reduction (default: max, or sum)"),
    "op": (("to",), "another collective (default: broadcast, or all_reduce)"),
    "group": (("to",), "made in another group"),
    "p2p_lost": ((), "a message is not sent, or not received"),
    "p2p_dup": ((), "a message is sent, or received, twice"),
    "p2p_swap": ((), "a message goes to, or is awaited from, the other side"),
    "exception": (("code",), "the rank raises and leaves no dump"),
    "exit": (("code",), "the process ends"),
    "sigkill": ((), "the process is killed"),
    "segfault": ((), "the process is killed by itself"),
    "sigstop": ((), "the process stands still"),
    "gil": ((), "the host stands still, its watchdog does not"),
    "data_end": ((), "the data loader ends: the rank leaves"),
    "data_stall": (("s",), "the data loader does not answer"),
    "gpu_hang": ((), "a kernel does not end"),
    "gpu_error": ((), "completions are not seen any more, a few calls later the host stops"),
    "nan": ((), "a value becomes NaN; the rank that checks raises"),
    "inf": ((), "a value becomes infinite"),
    "oom": (("at_bytes",), "an allocation beyond at_bytes fails"),
    "delay": (("ms",), "the call is made later"),
}
_MESSAGES = ("p2p_lost", "p2p_dup", "p2p_swap")
# NVRx (shared_utils/inject_fault.py) and Megatron's --fault-injector-fault-types
_ALIASES = {"gpu_error": "gpu_error", "gpu_sleep": "gpu_hang", "workload_exc": "exception",
            "async_exc": "exception", "signal_exc": "exception", "os_abort": "segfault",
            "lock_gil": "gil", "sigint": "exception", "sigterm": "exit"}  # fmt: skip
_KEYS = ("rank", "iter", "mb", "chunk", "phase", "group", "op", "nth", "site")
GROUPS = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP", "cp": "CONTEXT_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP", "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "etp": "EXPERT_TENSOR_PARALLEL_GROUP", "edp": "EXPERT_DATA_PARALLEL_GROUP",
    "dp": "DATA_PARALLEL_GROUP", "mp": "MODEL_PARALLEL_GROUP", "world": "default_pg",
    "embd": "EMBEDDING_GROUP",
}  # fmt: skip
FIX = "write KIND@rank=R[,iter=I,mb=M,chunk=C,group=G,op=NAME,nth=N,site=REGEX][:PARAM=VALUE]"


@dataclass(frozen=True)
class Call:
    """What a Finder is told of a call."""

    op: str
    group: str
    iteration: int = -1  # from 1; -1 where programs know none
    microbatch: int = -1
    chunk: int = -1
    phase: str = ""
    site: str = ""


@dataclass(frozen=True)
class Fault:
    """One fault.  ``select`` has keys of ``_KEYS``, ``params`` those of the kind; both as text."""

    kind: str
    select: Mapping[str, str]
    params: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        where = ",".join(f"{k}={v}" for k, v in self.select.items())
        how = ",".join(f"{k}={v}" for k, v in self.params.items())
        return f"{self.kind}@{where}" + (f":{how}" if how else "")

    def ranks(self, world: World, seed: int = 0) -> tuple[int, ...]:
        """The ranks it happens to; ``any:2`` are two drawn by ``seed``."""
        text = self.select["rank"]
        if text.startswith("any"):
            count = int(text.partition(":")[2] or 1)
            if count > world.size:
                raise UsageError(f"{self}: {count} of {world.size} ranks", fix=FIX)
            drawn = random.Random(f"{seed}:{self}").sample(range(world.size), count)
            return tuple(sorted(drawn))
        return world.select(text)

    def number(self, name: str, default: int | None = None) -> int | None:
        """A parameter that is a number."""
        text = self.params.get(name)
        if text is None:
            return default
        if not re.fullmatch(r"-?\d{1,18}", text):
            raise UsageError(f"{self}: {name}={text} is no number", fix=f"{name}=16")
        return int(text)


def parse(text: str) -> Fault:
    """One fault as a person writes it.  UsageError says what is wrong with it."""
    head, *rest = re.split(r":(?=[a-z_]+=)", text.strip(), maxsplit=1)
    kind, at, where = head.partition("@")
    kind = _ALIASES.get(kind.lower(), kind.lower())
    if kind not in KINDS:
        raise UsageError(f"{text!r}: there is no fault {kind}", fix=f"one of {', '.join(KINDS)}")
    if not at or not where:
        raise UsageError(f"{text!r} does not say where", fix=FIX)
    select = _select(text, where)
    params = {}
    for word in rest[0].split(",") if rest else ():
        key, equals, value = word.partition("=")
        if not equals or key not in KINDS[kind][0] or not value:
            known = ", ".join(KINDS[kind][0]) or "none"
            raise UsageError(f"{text!r}: {kind} has no parameter {word}", fix=f"it takes: {known}")
        params[key] = value
    _check(text, kind, select, params)
    return Fault(kind, select, params)


def _select(text: str, where: str) -> dict[str, str]:
    """``rank=pp=1,tp=0`` has commas and equal signs of its own: axes and numbers go on with it."""
    found: dict[str, str] = {}
    for word in where.split(","):
        key, equals, value = word.partition("=")
        axis = key in AXES and key not in found and value.isdigit()
        if not equals or axis:
            if not equals and not re.fullmatch(r"\d+(-\d+(:\d+)?)?|any(:\d+)?", word):
                raise UsageError(f"{text!r}: {word!r} is no key=value", fix=FIX)
            found["rank"] = f"{found['rank']},{word}" if "rank" in found else word
        elif key not in _KEYS or not value or key in found:
            known = ", ".join(_KEYS)
            raise UsageError(f"{text!r}: {word!r} is not understood", fix=f"keys are {known}")
        else:
            found[key] = value
    for key in ("iter", "mb", "chunk", "nth"):
        if not found.get(key, "0").isdigit():
            raise UsageError(f"{text!r}: {key}={found[key]} is no number", fix=f"{key}=1")
    if "rank" not in found:
        raise UsageError(f"{text!r} names no rank", fix="rank=5, rank=pp=1,tp=0 or rank=any:1")
    return found


def _check(text: str, kind: str, select: Mapping[str, str], params: Mapping[str, str]) -> None:
    if "op" in select and select["op"] not in NAMES:
        raise UsageError(f"{text!r}: there is no op {select['op']}", fix="op=all_reduce, op=send …")
    if "site" in select:
        try:
            re.compile(select["site"])
        except re.error as error:
            what = f"{text!r}: site is no pattern: {error}"
            raise UsageError(what, fix="site=mappings") from None
    known = {"dtype": DTYPES, "reduce_op": REDUCE, "op": NAMES}.get(kind)
    if known is not None and params.get("to", "") not in ("", *known):
        raise UsageError(f"{text!r}: {kind} cannot be {params['to']}",
                         fix=f"to= one of {', '.join(filter(None, known))}")  # fmt: skip
    if kind == "swap" and not re.fullmatch(r"[A-Za-z_-]+:[a-z_]+(:\d+)?", params.get("with", "")):
        raise UsageError(f"{text!r}: swap with what?", fix="with=ep:all_to_all:0")
    if kind == "oom" and "at_bytes" not in params:
        raise UsageError(f"{text!r}: how much memory is there?", fix="at_bytes=85899345920")
    if kind == "group" and "to" not in params:
        raise UsageError(f"{text!r}: in which group then?", fix="to=tp")


def parse_nvrx(text: str) -> Fault:
    """``FAULT:RANK:ITER[:NODES]`` of NVRx's fault-injection loop."""
    match = re.fullmatch(r"([A-Za-z_]+):(\d+):(\d+)(:\d+)?", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no FAULT:RANK:ITER:NODES", fix=FIX)
    return parse(f"{match[1].lower()}@rank={match[2]},iter={match[3]}")


def load_plan(path: str | Path) -> tuple[Fault, ...]:
    """A YAML list of faults: texts, or mappings with ``kind``, ``at`` and ``with``-like params."""
    import yaml

    try:
        rows = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read the plan {path}: {error}", fix="a YAML list") from error
    if not isinstance(rows, list) or not rows:
        raise UsageError(f"{path} is no list of faults", fix="- drop@rank=3,group=tp,nth=1")
    found = []
    for row in rows:
        if isinstance(row, dict) and any(str(k).startswith("fault-injector-") for k in row):
            names = {str(k)[15:].replace("-", "_"): v for k, v in row.items()}
            found += of_megatron(names)
            continue
        if isinstance(row, dict):
            row = dict(row)
            kind, where = row.pop("kind", ""), row.pop("at", "")
            if isinstance(where, dict):
                where = ",".join(f"{k}={v}" for k, v in where.items())
            params = ",".join(f"{k}={v}" for k, v in row.items())
            row = f"{kind}@{where}" + (f":{params}" if params else "")
        if not isinstance(row, str):
            raise UsageError(f"{path}: {row!r} is no fault", fix=FIX)
        found.append(parse(row) if "@" in row else parse_nvrx(row))
    return tuple(found)


def named_group(text: str, desc: str) -> bool:
    """Whether a person who writes ``text`` means groups of description ``desc``."""
    if text == desc or GROUPS.get(text) == desc:
        return True
    return text == "dp" and desc.startswith("DATA_PARALLEL_GROUP")


class Finder:
    """Which of the calls it is told of, one after the other, is the one?"""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.seen = fault, 0
        self.nth = int(fault.select.get("nth", 0))
        self.site = re.compile(fault.select["site"]) if "site" in fault.select else None

    def matches(self, call: Call) -> bool:
        """Whether the selector fits ``call``, whichever of them is hit."""
        select, kind = self.fault.select, self.fault.kind
        numbers = {"iter": call.iteration, "mb": call.microbatch, "chunk": call.chunk}
        for key, value in numbers.items():
            if key in select and value != int(select[key]) and not (key == "iter" and value < 0):
                return False
        pair = call.op in ("send", "recv")
        if kind in _MESSAGES and not pair or kind == "splits" and call.op != "all_to_all":
            return False
        if kind in ("reduce_op", "root") and not _takes(kind, call.op):
            return False
        if kind in ("op", "shape", "dtype") and "op" not in select and pair:
            return False  # asked of collectives, unless a message is named
        if kind == "shape" and call.op in ("all_to_all", "barrier"):
            return False  # the sizes of an all-to-all are its splits
        return (
            ("group" not in select or named_group(select["group"], call.group))
            and select.get("op", call.op) == call.op
            and select.get("phase", call.phase) == call.phase
            and (self.site is None or bool(self.site.search(call.site)))
        )

    def hit(self, call: Call) -> bool:
        """Whether ``call`` is the one; to be asked once for every call in the order of issue."""
        if not self.matches(call):
            return False
        self.seen += 1
        return self.seen == self.nth + 1


def _takes(kind: str, op: str) -> bool:
    rooted = ("broadcast", "reduce", "gather", "scatter")
    return op in (rooted if kind == "root" else ("all_reduce", "reduce_scatter", "reduce"))


def of_megatron(settings: Mapping[str, Sequence[str] | str]) -> tuple[Fault, ...]:
    """Megatron's ``--fault-injector-*`` (core/fault_injector.py @0.18): ranks, fault-types,
    delay-start-iteration.  What is timed in seconds there has no place in an emulated job."""
    anyone = f"any:{settings.get('num_ranks', 1)}"
    given = settings.get("ranks", "")
    words = given.split() if isinstance(given, str) else [str(rank) for rank in given]
    ranks = ",".join(words) or anyone
    kinds = settings.get("fault_types", "exception")
    names = kinds.replace(",", " ").split() if isinstance(kinds, str) else list(kinds)
    after = settings.get("delay_start_iteration")
    where = f"rank={ranks}" + (f",iter={after}" if after else "")
    return tuple(parse(f"{name.lower()}@{where}") for name in names)
