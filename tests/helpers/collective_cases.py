"""One table of ways to call a collective, and the process that runs each of them twice.

``run`` is started once per process.  For every group size n, every set of local ranks and every
case it calls the same function on a plain gloo group, in which each virtual rank's process is fed
the inputs of the local rank that it mirrors, and on a virtual group of which only the local ranks
know.  Both must answer what the row's formula says.  Knows nothing of Megatron.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import pathlib
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.process_changes import ProcessChanges
from megatron_prism.core.programs.collectives import BY_NAME
from megatron_prism.runtime import torch_distributed, virtual_world
from megatron_prism.runtime.values import Values

NUM_PROCESSES = 4
TIMEOUT = timedelta(seconds=20)
WORLDS = [  # (size, local ranks)
    (1, (0,)),
    (2, (0,)),
    (2, (1,)),
    (2, (0, 1)),
    (3, (1,)),
    (3, (0, 2)),
    (3, (0, 1, 2)),
    (4, (2,)),
    (4, (1, 2)),
    (4, (0, 1, 3)),
    (4, (0, 1, 2, 3)),
]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)
FEWER = (torch.float32, torch.bfloat16, torch.int64, torch.bool)  # for the other cases of a row
OPS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")

Piece = tuple[int | None, Any]  # (group rank it comes from, or None; a tensor or an object)


@dataclass(frozen=True)
class Call:
    """One call as member ``p`` of ``group`` of ``n`` sees it."""

    group: Any
    n: int
    p: int
    local: tuple[int, ...]
    mirrors: tuple[int, ...]  # group rank -> the local member that it is or mirrors
    dtype: torch.dtype
    op: str = "SUM"
    root: int = 0
    async_op: bool = False

    @property
    def member(self) -> int:
        """Whose inputs we hold."""
        return self.mirrors[self.p]

    @property
    def reduce_op(self) -> Any:
        return getattr(dist.ReduceOp, self.op)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """``function(*args)`` on the group, waited for."""
        work = function(*args, group=self.group, async_op=self.async_op, **kwargs)
        assert (work is not None) == self.async_op, f"handle {work} with async_op={self.async_op}"
        if work is not None:
            work.wait()
            assert work.done() if hasattr(work, "done") else work.is_completed()

    @contextlib.contextmanager
    def coalescing(self) -> Iterator[None]:
        with c10d._coalescing_manager(group=self.group, async_ops=self.async_op) as manager:
            yield
        if self.async_op:
            manager.wait()

    def empty(self, *shape: int) -> torch.Tensor:
        """An output, filled with a value that no input holds."""
        return torch.full(shape, 1 if self.dtype == torch.bool else 99, dtype=self.dtype)


def values(dtype: torch.dtype, member: int, numel: int, salt: int = 0) -> torch.Tensor:
    """Distinct by member and small: reductions of four are exact in every dtype."""
    numbers = (torch.arange(numel) * 3 + member * 2 + salt) % 5
    if dtype == torch.bool:
        return numbers % 2 == 0
    return (numbers if dtype == torch.uint8 else numbers - 2).to(dtype)


# -- what a row means -----------------------------------------------------------------------------


def reduced(call: Call, tensors: list[torch.Tensor]) -> torch.Tensor:
    """One tensor of many by ``call.op``; sums and products of bools are or and and (as in NCCL)."""
    if call.dtype == torch.bool:
        name = {"SUM": "logical_or", "MAX": "logical_or", "BOR": "logical_or"}.get(call.op)
        name = name or ("logical_xor" if call.op == "BXOR" else "logical_and")
        return functools.reduce(getattr(torch, name), tensors)
    name = {
        "SUM": "add",
        "AVG": "add",
        "MIN": "minimum",
        "MAX": "maximum",
        "PRODUCT": "mul",
        "BAND": "bitwise_and",
        "BOR": "bitwise_or",
        "BXOR": "bitwise_xor",
    }[call.op]
    total = functools.reduce(getattr(torch, name), tensors)
    if call.op != "AVG":
        return total
    whole = not call.dtype.is_floating_point
    return torch.div(total, call.n, rounding_mode="trunc" if whole else None).to(call.dtype)


def _everybody(call: Call, ins: list[list[Any]]) -> list[Piece]:
    return [(None, reduced(call, [member[i] for member in ins])) for i in range(len(ins[call.p]))]


def _gathered(call: Call, ins: list[list[Any]]) -> list[Piece]:
    return [(j, ins[j][i]) for i in range(len(ins[call.p])) for j in range(call.n)]


def _scattered(call: Call, ins: list[list[Any]]) -> list[Piece]:
    return [
        (None, reduced(call, [member[i].view(call.n, -1)[call.p] for member in ins]))
        for i in range(len(ins[call.p]))
    ]


def _on_root(formula: Callable[..., list[Piece]]) -> Callable[..., list[Piece]]:
    return lambda call, ins: formula(call, ins) if call.p == call.root else []


FORMULAS: dict[str, Callable[[Call, list[list[Any]]], list[Piece]]] = {
    "all_reduce": _everybody,
    "reduce": _on_root(_everybody),
    "all_gather": _gathered,
    "gather": _on_root(_gathered),
    "reduce_scatter": _scattered,
    "all_to_all": lambda call, ins: [
        (j, rows.split(splits(call.n, call.mirrors[j]))[call.p]) for j, (rows,) in enumerate(ins)
    ],
    "broadcast": lambda call, ins: [(call.root, x) for x in ins[call.root]],
    "scatter": lambda call, ins: [(call.root, _parts_of(call, ins[call.root])[call.p])],
    "send": lambda call, ins: [((call.p - 1) % call.n, x) for x in ins[(call.p - 1) % call.n]],
    "barrier": lambda call, ins: [],
}


def _parts_of(call: Call, ins: list[Any]) -> Any:
    return ins[0].chunk(call.n) if isinstance(ins[0], torch.Tensor) else ins


def splits(n: int, member: int) -> list[int]:
    """Rows that ``member`` sends to each of n; uneven, some are zero, and no two members agree."""
    return [(2 * member + 3 * to) % 4 for to in range(n)]


# -- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A way to call a row: ``inputs(call, member)`` and ``do(call, inputs) -> pieces``.

    mirrored : slots of virtual members hold what they mirror; else they are only finite
    ops      : reduce ops to try (SUM alone where another case of the row tries all)
    dtypes   : all of them for the first case of a row
    asynchronous : also with async_op=True
    min_size     : fewest members for which it means something
    gloo         : false where gloo mixes up strides without saying so (the formula alone judges)
    """

    name: str
    row: str
    inputs: Callable[[Call, int], list[Any]]
    do: Callable[[Call, list[Any]], list[Piece]]
    mirrored: bool = True
    ops: tuple[str, ...] = ("SUM",)
    dtypes: tuple[torch.dtype, ...] = FEWER
    asynchronous: bool = True
    min_size: int = 1
    gloo: bool = True


CASES: list[Case] = []


def case(row: str, inputs: Callable[[Call, int], list[Any]], **settings: Any) -> Any:
    """Enter the decorated ``do`` into the table, under its own name."""

    if row not in {known.row for known in CASES}:
        settings.setdefault("dtypes", DTYPES)

    def enter(do: Callable[[Call, list[Any]], list[Piece]]) -> Any:
        CASES.append(Case(do.__name__, row, inputs, do, **settings))
        return do

    return enter


def flat(*sizes: int) -> Callable[[Call, int], list[torch.Tensor]]:
    """Tensors of these sizes."""
    return lambda call, member: [values(call.dtype, member, k, i) for i, k in enumerate(sizes)]


def flat_per_rank(*sizes: int) -> Callable[[Call, int], list[torch.Tensor]]:
    """Tensors of n times these sizes."""
    return lambda call, member: flat(*(k * call.n for k in sizes))(call, member)


def plain(tensors: list[torch.Tensor]) -> list[Piece]:
    return [(None, x) for x in tensors]


def by_source(call: Call, *gathered: torch.Tensor) -> list[Piece]:
    return [(j, row.reshape(-1)) for out in gathered for j, row in enumerate(out.view(call.n, -1))]


@case("all_reduce", flat(7), ops=OPS)
def all_reduce(call, ins):
    call.run(dist.all_reduce, ins[0], call.reduce_op)
    return plain(ins)


@case("all_reduce", flat(0))
def all_reduce_of_nothing(call, ins):
    call.run(dist.all_reduce, ins[0])
    return plain(ins)


@case("all_reduce", flat(6))
def all_reduce_of_a_scalar_view(call, ins):
    whole = ins[0].clone()
    call.run(dist.all_reduce, whole[3])
    assert torch.equal(whole[:3], ins[0][:3]), "the neighbours moved"
    reduced_here = ins[0].clone()
    call.run(dist.all_reduce, reduced_here)
    assert torch.equal(whole[3], reduced_here[3])
    return plain([reduced_here])


@case("all_reduce", flat(6), ops=("SUM", "MAX"))
def all_reduce_transposed(call, ins):
    column = ins[0].view(2, 3).t()
    call.run(dist.all_reduce, column, call.reduce_op)
    return plain([column.t().reshape(-1)])


@case("all_reduce", flat(6), ops=("SUM", "MAX"), gloo=False)
def all_reduce_strided(call, ins):
    wide = call.empty(12)
    every_other = wide[::2]
    every_other.copy_(ins[0])
    call.run(dist.all_reduce, every_other, call.reduce_op)
    assert torch.equal(wide[1::2], call.empty(6)), "what lies between moved"
    return plain([every_other.clone()])


@case("all_reduce", flat(3, 5, 0, 1), asynchronous=True)
def all_reduce_coalesced(call, ins):
    with call.coalescing():
        for x in ins:
            dist.all_reduce(x, group=call.group)
    return plain(ins)


@case("all_reduce", flat(4, 2), asynchronous=True)
def all_reduce_of_a_list(call, ins):
    call.run(dist.all_reduce_coalesced, ins)
    return plain(ins)


@case("all_gather", flat(5))
def all_gather(call, ins):
    outs = [call.empty(5) for _ in range(call.n)]
    call.run(dist.all_gather, outs, ins[0])
    return list(enumerate(outs))


@case("all_gather", flat(6))
def all_gather_of_a_column(call, ins):
    wide = call.empty(6, 2)
    wide[:, 0] = ins[0]
    outs = [call.empty(6) for _ in range(call.n)]
    call.run(dist.all_gather, outs, wide[:, 0])
    return list(enumerate(outs))


@case("all_gather", flat(6))
def all_gather_into_columns(call, ins):
    wide = call.empty(6, call.n)
    outs = [wide[:, j] for j in range(call.n)]
    call.run(dist.all_gather, outs, ins[0])
    return [(j, out.clone()) for j, out in enumerate(outs)]


@case("all_gather", lambda call, member: [values(call.dtype, member, 2 + member)])
def all_gather_uneven(call, ins):
    outs = [call.empty(2 + member) for member in call.mirrors]
    call.run(dist.all_gather, outs, ins[0])
    return list(enumerate(outs))


@case("all_gather", flat(5))
def all_gather_into_tensor(call, ins):
    out = call.empty(call.n * 5)
    call.run(dist.all_gather_into_tensor, out, ins[0])
    return by_source(call, out)


@case("all_gather", flat(4), mirrored=False)
def all_gather_in_place(call, ins):
    out = call.empty(call.n * 4)
    slot = out.view(call.n, -1)[call.p]
    slot.copy_(ins[0])
    call.run(dist.all_gather_into_tensor, out, slot)
    for j in set(range(call.n)) - set(call.local):
        assert torch.equal(out.view(call.n, -1)[j], call.empty(4)), "a virtual slot moved"
    return by_source(call, out)


@case("all_gather", flat(4))
def all_gather_beside_the_input(call, ins):
    # one buffer holds input and output, but the input is no slot of the output
    buffer = call.empty((call.n + 1) * 4)
    buffer[:4] = ins[0]
    call.run(dist.all_gather_into_tensor, buffer[4:], buffer[:4])
    return by_source(call, buffer[4:])


@case("all_gather", flat(2, 3))
def all_gather_coalesced(call, ins):
    outs = [call.empty(call.n * x.numel()) for x in ins]
    with call.coalescing():
        for out, x in zip(outs, ins, strict=True):
            dist.all_gather_into_tensor(out, x, group=call.group)
    return by_source(call, *outs)


@case("all_gather", flat(2, 3))
def all_gather_of_lists(call, ins):
    outs = [[call.empty(x.numel()) for x in ins] for _ in range(call.n)]
    call.run(dist.all_gather_coalesced, outs, ins)
    return [(j, outs[j][i]) for i in range(2) for j in range(call.n)]


@case("reduce_scatter", flat_per_rank(3), ops=OPS)
def reduce_scatter_tensor(call, ins):
    out = call.empty(3)
    call.run(dist.reduce_scatter_tensor, out, ins[0], call.reduce_op)
    return plain([out])


@case("reduce_scatter", flat_per_rank(4), ops=("SUM", "MAX"))
def reduce_scatter_in_place(call, ins):
    slot = ins[0].view(call.n, -1)[call.p]
    call.run(dist.reduce_scatter_tensor, slot, ins[0], call.reduce_op)
    return plain([slot.clone()])


@case("reduce_scatter", flat_per_rank(2, 1))
def reduce_scatter_coalesced(call, ins):
    outs = [call.empty(2), call.empty(1)]
    with call.coalescing():
        for out, x in zip(outs, ins, strict=True):
            dist.reduce_scatter_tensor(out, x, group=call.group)
    return plain(outs)


@case("reduce_scatter", flat_per_rank(3), ops=("SUM", "MAX"))
def reduce_scatter_of_a_list(call, ins):
    out = call.empty(3)
    call.run(dist.reduce_scatter, out, list(ins[0].chunk(call.n)), call.reduce_op)
    return plain([out])


@case("reduce_scatter", flat_per_rank(3))
def reduce_scatter_of_columns(call, ins):
    wide = ins[0].view(call.n, 3).t().contiguous()
    out = call.empty(3)
    call.run(dist.reduce_scatter, out, [wide[:, j] for j in range(call.n)])
    return plain([out])


def _rows(call: Call, member: int) -> list[torch.Tensor]:
    return [values(call.dtype, member, sum(splits(call.n, member)))]


def _mirrored_rows(call: Call) -> list[int]:
    return [splits(call.n, member)[call.p] for member in call.mirrors]


@case("all_to_all", _rows, mirrored=False)
def all_to_all_uneven(call, ins):
    out = call.empty(sum(_mirrored_rows(call)))
    call.run(dist.all_to_all_single, out, ins[0], _mirrored_rows(call), splits(call.n, call.member))
    return list(enumerate(out.split(_mirrored_rows(call))))


@case("all_to_all", _rows, mirrored=False)
def all_to_all_uneven_rows(call, ins):
    out = call.empty(sum(_mirrored_rows(call)), 2)
    wide = torch.stack([ins[0], ins[0]], dim=1)
    call.run(dist.all_to_all_single, out, wide, _mirrored_rows(call), splits(call.n, call.member))
    assert torch.equal(out[:, 0], out[:, 1]), "rows came apart"
    return list(enumerate(out[:, 0].split(_mirrored_rows(call))))


@case("all_to_all", _rows, mirrored=False)
def all_to_all_of_lists(call, ins):
    outs = [call.empty(k) for k in _mirrored_rows(call)]
    call.run(dist.all_to_all, outs, list(ins[0].split(splits(call.n, call.member))))
    return list(enumerate(outs))


@case("all_to_all", _rows, mirrored=False)
def all_to_all_of_columns(call, ins):
    outs = [call.empty(k, 2)[:, 0] for k in _mirrored_rows(call)]
    wide = torch.stack([ins[0], ins[0]], dim=1)
    call.run(dist.all_to_all, outs, list(wide[:, 0].split(splits(call.n, call.member))))
    return [(j, out.clone()) for j, out in enumerate(outs)]


@case("broadcast", flat(5))
def broadcast(call, ins):
    call.run(dist.broadcast, ins[0], src=call.root)
    return [(call.root, ins[0])]


@case("reduce", flat(5), ops=OPS)
def reduce(call, ins):
    call.run(dist.reduce, ins[0], op=call.reduce_op, group_dst=call.root)
    return plain(ins) if call.p == call.root else []


@case("gather", flat(5))
def gather(call, ins):
    outs = [call.empty(5) for _ in range(call.n)] if call.p == call.root else None
    call.run(dist.gather, ins[0], outs, dst=call.root)
    return list(enumerate(outs or []))


@case("gather", flat(4))
def gather_into_columns(call, ins):
    wide = call.empty(4, call.n)
    outs = [wide[:, j] for j in range(call.n)] if call.p == call.root else None
    call.run(dist.gather, ins[0], outs, group_dst=call.root)
    return [(j, out.clone()) for j, out in enumerate(outs or [])]


@case("scatter", flat_per_rank(3), mirrored=False)
def scatter(call, ins):
    out = call.empty(3)
    parts = list(ins[0].chunk(call.n)) if call.p == call.root else None
    call.run(dist.scatter, out, parts, src=call.root)
    return [(call.root, out)]


@case("scatter", flat_per_rank(4), mirrored=False, gloo=False)
def scatter_of_columns(call, ins):
    wide = ins[0].view(call.n, 4).t().contiguous()
    out = call.empty(4, 2)[:, 0]
    parts = [wide[:, j] for j in range(call.n)] if call.p == call.root else None
    call.run(dist.scatter, out, parts, src=call.root)
    return [(call.root, out.clone())]


@case("barrier", flat(), dtypes=(torch.float32,))
def barrier(call, ins):
    call.run(dist.barrier)
    return []


# Point to point: a ring, in which everybody sends to the next and receives from the one before.
# With two members both directions meet the same peer.


@case("send", flat(5, 2), mirrored=False, asynchronous=False, min_size=2)
def batch_isend_irecv(call, ins):
    outs = [call.empty(5), call.empty(2)]
    after, before = (call.p + 1) % call.n, (call.p - 1) % call.n
    ops = [dist.P2POp(dist.isend, x, after, group=call.group) for x in ins]
    ops += [dist.P2POp(dist.irecv, x, group_peer=before, group=call.group) for x in outs]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [(before, out) for out in outs]


@case("send", flat(4), mirrored=False, asynchronous=False, min_size=2)
def send_recv(call, ins):
    out = call.empty(4)
    after, before = (call.p + 1) % call.n, (call.p - 1) % call.n
    if call.p == 0:  # somebody must receive first
        assert dist.recv(out, before, group=call.group) == before
        dist.send(ins[0], after, group=call.group)
    else:
        dist.send(ins[0], after, group=call.group)
        assert dist.recv(out, before, group=call.group) == before
    return [(before, out)]


@case("send", flat(4), mirrored=False, asynchronous=False, min_size=2)
def recv_from_anyone(call, ins):
    if 1 < len(call.local) < call.n:  # whether somebody real will send is not to be known
        with contextlib.suppress(UnsupportedError):
            dist.recv(call.empty(4), group=call.group)
            raise AssertionError("received from anyone in a group that is partly virtual")
        return None
    out = call.empty(4)
    work = dist.isend(ins[0], (call.p + 1) % call.n, group=call.group)
    source = dist.recv(out, group=call.group)
    work.wait()
    assert source != call.p
    return [((call.p - 1) % call.n, out)]


# Objects go through the same rows.


def _thing(call: Call, member: int) -> list[Any]:
    return [{"member": member, "text": "x" * (7 * member), "set": {member}}]


def _parts(call: Call, member: int) -> list[Any]:
    return [("for", j, "y" * member) for j in range(call.n)]


OBJECTS = {"dtypes": (torch.uint8,), "asynchronous": False}


@case("all_gather", _thing, **OBJECTS)
def all_gather_object(call, ins):
    outs = [None] * call.n
    dist.all_gather_object(outs, ins[0], group=call.group)
    return list(enumerate(outs))


@case("gather", _thing, **OBJECTS)
def gather_object(call, ins):
    outs = [None] * call.n if call.p == call.root else None
    dist.gather_object(ins[0], outs, dst=call.root, group=call.group)
    return list(enumerate(outs or []))


@case("broadcast", _thing, **OBJECTS)
def broadcast_object_list(call, ins):
    things = [ins[0]]
    dist.broadcast_object_list(things, src=call.root, group=call.group)
    return [(call.root, things[0])]


@case("scatter", _parts, **OBJECTS)
def scatter_object_list(call, ins):
    out = [None]
    parts = ins if call.p == call.root else None
    if call.root in call.local:
        dist.scatter_object_list(out, parts, src=call.root, group=call.group)
        return [(call.root, out[0])]
    with contextlib.suppress(UnsupportedError):  # a virtual source has nothing to unpickle
        dist.scatter_object_list(out, parts, src=call.root, group=call.group)
        raise AssertionError("scattered objects from a virtual rank")
    return None


# -- the process ----------------------------------------------------------------------------------


def mirrored(n: int, local: tuple[int, ...]) -> tuple[int, ...]:
    """Virtual members, in order, mirror the local ones in turn."""
    turn = itertools.cycle(local)
    return tuple(member if member in local else next(turn) for member in range(n))


def same(a: Any, b: Any, tolerance: bool) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return bool(a == b)
    if tolerance:
        return a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-2, atol=0)
    return a.dtype == b.dtype and torch.equal(a, b)


def differences(
    call: Call, case: Case, got: list[Piece] | None, wanted: list[Piece]
) -> Iterator[str]:
    """What is wrong with ``got`` (None: the case has judged for itself), one line each."""
    if got is None:
        return
    if len(got) != len(wanted):
        yield f"{len(got)} pieces instead of {len(wanted)}"
        return
    tolerance = call.op == "AVG" and call.dtype.is_floating_point  # ours scales first, as NCCL does
    for (source, out), (_, expected) in zip(got, wanted, strict=True):
        if case.mirrored or source is None or source in call.local:
            if not same(out, expected, tolerance):
                yield f"from {source}: {out} instead of {expected}"
        elif out.shape != expected.shape or not torch.isfinite(out.float()).all():
            yield f"from virtual {source}: {out} instead of something finite like {expected}"


def variations(case: Case, n: int) -> Iterator[dict[str, Any]]:
    """Settings of a Call to try."""
    rooted = BY_NAME[case.row].rooted
    for dtype in case.dtypes:
        for op in case.ops:
            bitwise = op in ("BAND", "BOR", "BXOR")
            if (bitwise and dtype.is_floating_point) or (op == "AVG" and dtype == torch.bool):
                continue
            for root in {0, n - 1} if rooted else {0}:
                yield {"dtype": dtype, "op": op, "root": root}
    if case.asynchronous:
        yield {"dtype": case.dtypes[0], "async_op": True}


class Runner:
    """Runs the table in one of the processes and writes ``result_<rank>.json``."""

    def __init__(self, rank: int, folder: pathlib.Path) -> None:
        self.rank, self.folder = rank, folder
        self.problems: list[dict[str, str]] = []
        self.agreed: Counter[str] = Counter()  # virtual == gloo == formula, by case
        self.refused: Counter[str] = Counter()  # gloo raised: virtual == formula alone
        self.raised: Counter[str] = Counter()  # both raised

    def attempt(self, case: Case, call: Call) -> tuple[list[Piece] | None, str]:
        try:
            return case.do(call, case.inputs(call, call.member)), ""
        except (RuntimeError, ValueError, TypeError, AssertionError, UnsupportedError):
            return [], traceback.format_exc()

    def one(self, case: Case, group: Any, reference: Call) -> None:
        label = f"{case.name} {reference.dtype} {reference.op} root={reference.root} "
        label += f"async={reference.async_op} local={reference.local} of {reference.n}, "
        label += f"on {self.rank}: "

        def note(what: str) -> None:
            self.problems.append({"case": case.name, "what": label + what})

        ins = [case.inputs(reference, member) for member in reference.mirrors]
        wanted = FORMULAS[case.row](reference, ins)
        everybody = replace(reference, local=tuple(range(reference.n)))
        refusal = "not asked"
        if case.gloo:
            answer, refusal = self.attempt(case, everybody)
        if not refusal:
            for line in differences(everybody, case, answer, wanted):
                note(f"gloo and the formula differ: {line}")
        if group is None:
            return
        got, error = self.attempt(case, replace(reference, group=group))
        if error:
            if refusal and group._passes:
                self.raised[case.name] += 1  # gloo itself was asked
            else:
                note(f"raised (gloo {'too' if refusal else 'did not'}):\n{error}")
            return
        for line in differences(reference, case, got, wanted):
            note(line)
        (self.refused if refusal else self.agreed)[case.name] += 1

    def all(self) -> None:
        store = dist.FileStore(str(self.folder / "store"), NUM_PROCESSES)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=NUM_PROCESSES, timeout=TIMEOUT
        )
        gloo = {n: dist.new_group(range(n)) for n in range(1, NUM_PROCESSES + 1)}
        virtual_world._TIMEOUT = TIMEOUT
        # as NCCL groups do: with all members local the real group itself is asked
        passing = [(n, local, True) for n, local in WORLDS if len(local) == n > 1]
        changes = ProcessChanges()
        for number, (n, local, passes) in enumerate([(*w, False) for w in WORLDS] + passing):
            if self.rank >= n:
                continue
            group = None
            if self.rank in local:
                prefix = dist.PrefixStore(f"world {number}", store)
                cpu = torch.device("cpu")
                world = virtual_world.VirtualWorld(n, self.rank, local, Values(), cpu, prefix)
                group = world.build_group(range(n), f"conformance_{number}", "CONFORMANCE")
                if passes:
                    group._passes, group._mixed = True, None
                changes.undo()  # of the world before
                torch_distributed.replace_functions(changes)
                torch_distributed.register(group, "gloo")
            for case in CASES:
                every = list(variations(case, n)) if n >= case.min_size else []
                for settings in every[number % 2 :: 2] or every:  # the next world has the others
                    call = Call(gloo[n], n, self.rank, local, mirrored(n, local), **settings)
                    if case.gloo or not passes:
                        self.one(case, group, call)


def run(rank: int, folder: str) -> None:
    """Entry point of one process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    runner = Runner(rank, pathlib.Path(folder))
    error = None
    try:
        runner.all()
    except BaseException:  # the parent wants to know, whatever it is
        error = traceback.format_exc()
    counts = {name: dict(getattr(runner, name)) for name in ("agreed", "refused", "raised")}
    result = {"problems": runner.problems, "error": error, **counts}
    (runner.folder / f"result_{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
