"""What-ifs: slow ranks or NICs, another machine; not other replicas or microbatches.

In : Programs, or a WorldGraph and its Prices.  Out: the same kind of value, changed; nothing is
changed in place.  What a function assumes is in ``Programs.source["what-if"]`` or in the new
provenance of the prices that it changed.

slow         : some ranks compute slower (``with_slow_ranks``, ``slow_down_prices``)
apart        : some ranks in classes of their own, for faults of one rank (``with_own_classes``)
faster       : calls of one kind or group take another time (``scale_prices``)
host         : hosts are as fast as another one (``scale_hosts``)
moved        : the same programs on another machine (``move_prices``)
slow NICs    : of some nodes or rails (``with_slow_nics``, ``price_slow_nics``)
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import numpy as np

from megatron_prism.core.errors import UsageError
from megatron_prism.core.groups import named_group
from megatron_prism.core.ops import CODE, IS_COLLECTIVE, IS_PAIR, NAMES, OP, UNKNOWN
from megatron_prism.core.program import Program, Programs
from megatron_prism.core.world import World, format_ranks
from megatron_prism.graph.world_graph import WorldGraph
from megatron_prism.replay.costs import Prices, price_ops, relabelled
from megatron_prism.replay.costs.collectives import Calibration
from megatron_prism.replay.costs.host import host_scaled, indices_of, read_host_index
from megatron_prism.replay.costs.kernels import MEASURED
from megatron_prism.replay.costs.machine import Machine
from megatron_prism.replay.network import Topology, crossing

_SLOWED = "slowed x"
_FINEST = 1000  # denominators of factors


def with_own_classes(programs: Programs, ranks: Iterable[int], why: str = "apart") -> Programs:
    """The same world, in which ``ranks`` say at their end what sets them apart: ``why``.

    So they are in other classes than the rest, and whatever they meet splits as far as it must.
    WorldError for a rank that does not exist.
    """
    chosen = np.unique([programs.world.check_rank(int(rank)) for rank in ranks]).astype(np.int64)
    of, more = programs.program_of.copy(), list(programs.programs)
    for index in np.unique(of[chosen]).tolist():
        mine = chosen[of[chosen] == index]
        of[mine] = len(more)
        more.append(_marked(programs.programs[index], int(mine[0]), why))
    return without_unused(dataclasses.replace(programs, programs=tuple(more), program_of=of))


def without_call_times(programs: Programs) -> Programs:
    """The same world without the times that its calls took: in another one they take others."""

    def changed(program: Program) -> Program:
        ops = program.ops.copy()
        ops["ns"][IS_COLLECTIVE[ops["name"]] | IS_PAIR[ops["name"]]] = -1
        return dataclasses.replace(program, ops=ops)

    talk = [
        p.ops["ns"][IS_COLLECTIVE[p.ops["name"]] | IS_PAIR[p.ops["name"]]]
        for p in programs.programs
    ]
    if not any((ns >= 0).any() for ns in talk):
        return programs
    made = dataclasses.replace(programs, programs=tuple(map(changed, programs.programs)))
    return with_assumption(made, "calls as modelled, not as they were traced")


def without_unused(programs: Programs) -> Programs:
    """The same world without programs that no rank runs."""
    kept, of = np.unique(programs.program_of, return_inverse=True)
    left = tuple(programs.programs[index] for index in kept.tolist())
    return dataclasses.replace(programs, programs=left, program_of=of.ravel())


def _marked(program: Program, rank: int, note: str) -> Program:
    """The program with a mark as its last op."""
    row = np.zeros(1, dtype=OP)
    for name in UNKNOWN:
        row[name] = -1
    strings = (*program.strings, note)
    row["name"], row["note"] = CODE["mark"], len(program.strings)
    row["stream"] = strings.index("main") if "main" in strings else 0
    ops = np.concatenate([program.ops, row])
    return dataclasses.replace(program, rank=rank, ops=ops, strings=strings)


def with_slow_ranks(
    programs: Programs, ranks: Iterable[int], factor: Fraction | float | str
) -> Programs:
    """``ranks`` take ``factor`` times as long to compute (3/2: half as long again).

    The programs carry it as a mark; ``slow_down_prices`` puts it into prices.  Twice slow is the
    product.
    """
    ranks = sorted(set(ranks))
    made = with_own_classes(programs, ranks, f"{_SLOWED}{parse_factor(factor)}")
    who = f"rank {ranks[0]} computes" if len(ranks) == 1 else f"ranks {format_ranks(ranks)} compute"
    return with_assumption(made, f"{who} {factor} times as long")


def slow_down_prices(graph: WorldGraph, prices: Prices) -> Prices:
    """Return ``prices`` with segments of slow ranks longer by their factor, rounded up."""
    compute, source = list(prices.compute), list(prices.compute_source)
    sources = list(prices.sources)
    for index, program in enumerate(graph.program_list):
        marks = program.ops["note"][program.ops["name"] == CODE["mark"]]
        notes = [program.strings[note] for note in marks]
        factor = math.prod(
            (Fraction(n.removeprefix(_SLOWED)) for n in notes if n.startswith(_SLOWED)),
            start=Fraction(1),
        )
        if factor != 1:
            segments = program.ops["name"] == CODE["compute"]
            compute[index] = _scaled(prices.compute[index], factor)
            source[index] = relabelled(source[index], segments, f"x {factor}", sources)
    return dataclasses.replace(
        prices, compute=tuple(compute), compute_source=tuple(source), sources=tuple(sources)
    )


def scale_prices(
    graph: WorldGraph,
    prices: Prices,
    factor: Fraction | float | str,
    name: str = "",
    group: str = "",
) -> Prices:
    """Calls of ``name`` (all_reduce, …; send means messages) in ``group`` are ``factor`` times as
    fast; empty: all of them; tp means TENSOR_MODEL_PARALLEL_GROUP, as in faults.  UsageError if
    there are none."""
    speed = parse_factor(factor)
    name = "send" if name == "recv" else name
    meet = graph.matched_calls
    firsts, chosen = meet.start[:-1], np.zeros(len(meet), dtype=bool)
    owners, ops = meet.classes[firsts], meet.ops[firsts]
    for index, program in enumerate(graph.program_list):
        mine = np.flatnonzero(owners == index)
        rows = program.ops[ops[mine]]
        right = np.array([not name or text == name for text in NAMES])[rows["name"]]
        groups = np.array([not group or named_group(group, text) for text in program.strings])
        chosen[mine] = right & groups[rows["group"]]
    if not chosen.any():
        what = " in ".join(filter(None, (name or "calls", group)))
        names = sorted({text for program in graph.program_list for text in program.groups()})
        close = difflib.get_close_matches(group or name, [*NAMES, *names], n=1)
        meant = f"did you mean {close[0]}? " if close and close[0] != (group or name) else ""
        raise UsageError(
            f"the world has no {what}", fix=f"{meant}its groups are {', '.join(names)}"
        )
    sources = list(prices.sources)
    return dataclasses.replace(
        prices,
        collective_ns=np.where(
            chosen, _scaled(prices.collective_ns, 1 / speed), prices.collective_ns
        ),
        collective_source=relabelled(
            prices.collective_source, chosen, f"{speed} x as fast", sources
        ),
        sources=tuple(sources),
    )


def scale_hosts(graph: WorldGraph, prices: Prices, host: str | os.PathLike[str] | float) -> Prices:
    """Hosts are as fast as ``host`` (``host_factors``).

    UsageError if the slices do not say how long their host takes, or how fast it was.
    """
    programs = graph.programs
    if not any(program.knows_host for program in programs.programs):
        raise UsageError(
            "the slices do not say how long their host takes, so it cannot be another one",
            fix="capture the ranks on a GPU, or leave host= out",
        )
    factors = host_factors(programs, host)
    lead, hosts, sources = list(prices.lead), list(prices.host), list(prices.sources)
    source = list(prices.host_source)
    for index, number in enumerate(graph.classes.programs):
        factor = factors[number]
        lead[index], hosts[index] = (
            _scaled(each[index], factor) for each in (prices.lead, prices.host)
        )
        every = np.ones(len(source[index]), dtype=bool)
        said = host_scaled(f"{float(factor):.3g}")
        source[index] = relabelled(source[index], every, said, sources)
    return dataclasses.replace(
        prices, lead=tuple(lead), host=tuple(hosts), host_source=tuple(source),
        sources=tuple(sources),
    )  # fmt: skip


_NUMBER = re.compile(r"([\d./e+-]+)(x?)")


def host_factors(programs: Programs, host: str | os.PathLike[str] | float) -> list[Fraction]:
    """How many times as long as in the slices hosts take, of every program.

    Args:
        host: the index of the host; a file of ``prism calibrate --host``, which has it; ``0.6x``:
            that many times as long.

    Raises:
        UsageError: the slices do not say how fast their host was.
    """
    text = os.fspath(host) if isinstance(host, os.PathLike) else str(host)
    number = None if os.path.exists(text) else _NUMBER.fullmatch(text)
    if number is not None and number[2]:
        return [parse_factor(number[1])] * len(programs.programs)
    target = read_host_index(text).index if number is None else float(parse_factor(number[1]))
    here = indices_of(programs.source)
    if not here:
        raise UsageError(
            "the slices do not say how fast their host was",
            fix="capture them again with this release, or say by how much: host=0.6x",
        )
    usual = statistics.median(here.values())
    return [parse_factor(target / here.get(one.rank, usual)) for one in programs.programs]


def move_prices(
    graph: WorldGraph, here: Machine, there: Machine, calibration: Calibration | None = None
) -> Prices:
    """Prices on ``there`` of programs whose segments were measured on ``here``.

    A measured segment is scaled by what the roofline says of it on the two machines; calls are
    ``there``'s.  A segment of which flops and bytes are unknown keeps its time.
    """
    unknown = [_unmeasured(program) for program in graph.programs.programs]
    bare = dataclasses.replace(graph, programs=_with(graph.programs, unknown))
    old, new = price_ops(graph, here), price_ops(graph, there, calibration)
    # both by roofline alone: one of them may have no op table
    base, roof = (price_ops(bare, dataclasses.replace(one, ops="")) for one in (here, there))
    compute, source, sources = [], [], list(new.sources)
    for index in range(len(graph.classes)):
        measured = old.compute_source[index] == MEASURED
        before, after = base.compute[index], roof.compute[index]
        ratio = after / np.maximum(before, 1)
        ns = np.rint(old.compute[index] * np.where(before > 0, ratio, 1.0)).astype(np.int64)
        compute.append(np.where(measured, ns, new.compute[index]))
        what = f"scaled from {here.name} to {there.name} by their rooflines"
        source.append(relabelled(new.compute_source[index], measured, what, sources))
    return dataclasses.replace(
        new, compute=tuple(compute), compute_source=tuple(source), sources=tuple(sources)
    )


def with_assumption(programs: Programs, what: str) -> Programs:
    """The programs, with one more thing that is not as captured in their source."""
    said = programs.source.get("what-if")
    text = what if said is None else f"{said}; {what}"
    return dataclasses.replace(programs, source={**programs.source, "what-if": text})


def _unmeasured(program: Program) -> Program:
    ops = program.ops.copy()
    known = (ops["flops"] >= 0) | (ops["traffic"] >= 0)
    ops["ns"][known] = -1
    return dataclasses.replace(program, ops=ops)


def _with(programs: Programs, changed: list[Program]) -> Programs:
    return dataclasses.replace(programs, programs=tuple(changed))


_MOST = 10**6  # times as long; more is none that anybody means, and 64 bits of ns end


def parse_factor(factor: Fraction | float | str) -> Fraction:
    """A factor as a ratio of small numbers.  UsageError unless it is one above 0."""
    try:
        found = Fraction(str(factor)).limit_denominator(_FINEST)
    except (ValueError, ZeroDivisionError):
        found = Fraction(0)
    if not 0 < found <= _MOST:
        raise UsageError(
            f"{str(factor)[:40]} is no factor", fix="above 0, at most a million: 1.5, 3/2"
        )
    return found


def _scaled(ns: np.ndarray, factor: Fraction) -> np.ndarray:
    """ns times factor, rounded up."""
    return -(-ns * factor.numerator // factor.denominator)


SIZES = {  # of the model, with Megatron's flag
    "tp": "--tensor-model-parallel-size",
    "cp": "--context-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
}


_MODEL = ("tp", "cp", "pp")  # the ranks of one replica


def check_sizes(
    programs: Programs,
    wanted: Mapping[str, int],
    dp: int | None = None,
    microbatches: int | None = None,
) -> None:
    """UsageError unless ``wanted`` (of ``SIZES``) is what was captured, for ranks of other sizes
    run other kernels: it says which slices would tell, as many as there are stages; ``dp`` and
    ``microbatches``: of that world, None: as captured."""
    old = programs.world
    changed = {axis: size for axis, size in wanted.items() if size != getattr(old, axis)}
    if not changed:
        return
    sizes: dict[str, int | None] = {axis: getattr(old, axis) for axis in SIZES}
    sizes.update(wanted)
    if "tp" in changed and "etp" not in wanted and old.etp == old.tp:
        sizes["etp"] = sizes["tp"]
    size = (dp or old.dp) * math.prod(wanted.get(axis, getattr(old, axis)) for axis in _MODEL)
    new = World(size, order=old.order, **sizes)  # type: ignore[arg-type]
    ranks = format_ranks(int(new.matching(pp=stage)[0]) for stage in range(new.pp))
    asked = " ".join(f"{axis}={size}" for axis, size in changed.items())
    some = f"rank {ranks}" if new.pp == 1 else f"ranks {ranks}, one a stage"
    batch = f"N ({microbatches} microbatches)"
    if "recipe" in programs.source:
        words = " ".join(f"parallel.{axis}={size}" for axis, size in changed.items())
        words += f" parallel.world_size={new.size}"
        words += f" train.global_batch_size={batch}" if microbatches else ""
        fix = f"prism capture {programs.source['recipe']} -o DIR {words}"
    else:
        words = " ".join(f"{SIZES[axis]} {size}" for axis, size in changed.items())
        words += f" --global-batch-size {batch}" if microbatches else ""
        fix = f"the job with {words} --prism-world-size {new.size} --prism-capture DIR"
        fix += f" --prism-ranks {ranks}" if new.pp == 1 else f", for each --prism-ranks of {ranks}"
    raise UsageError(
        f"{asked}: ranks of another size run other kernels, which slices of {old} do not have; "
        f"{new} needs slices of {some}",
        fix=f"{fix}; then prism replay DIR",
    )


SlowNic = tuple[tuple[int, ...], float, int]  # ranks, bandwidth factor, more latency in ns


def oversubscribed(
    graph: WorldGraph, prices: Prices, machine: Machine, topology: Topology
) -> Prices:
    """Calls between leaves take as much longer as NCCL's model says of a network that is slower by
    the oversubscription.  Everybody below a leaf is taken to send at once: pessimistic where they
    do not."""
    if topology.oversubscription == 1:
        return prices
    slower = dataclasses.replace(
        machine, network_rate=machine.network_rate / topology.oversubscription
    )
    before, after = (price_ops(graph, one).collective_ns for one in (machine, slower))
    chosen = crossing(graph, machine.gpus_per_node * topology.leaf_nodes)
    factor = np.where(chosen, after / np.maximum(1, before), 1.0)
    sources = list(prices.sources)
    what = f"between leaves of a {topology}"
    return dataclasses.replace(
        prices,
        collective_ns=np.rint(prices.collective_ns * factor).astype(np.int64),
        collective_source=relabelled(prices.collective_source, chosen, what, sources),
        sources=tuple(sources),
    )


def with_slow_nics(programs: Programs, nics: Sequence[SlowNic]) -> Programs:
    """The same world with the ranks of every slow NIC in classes of their own."""
    for ranks, factor, latency in nics:
        what = f"NIC of {format_ranks(ranks)}: bandwidth x {factor:g}, latency + {latency} ns"
        programs = with_assumption(with_own_classes(programs, ranks, what), what)
    return programs


def price_slow_nics(
    graph: WorldGraph, prices: Prices, machine: Machine, nics: Sequence[SlowNic]
) -> Prices:
    """``prices`` with the calls between nodes of every slow NIC longer."""
    meet = graph.matched_calls
    leaves = crossing(graph, machine.gpus_per_node) if nics else np.zeros(len(meet), dtype=bool)
    calls = np.repeat(np.arange(len(meet)), np.diff(meet.start))  # of every entry of its table
    for ranks, factor, latency in nics:
        classes = np.zeros(len(graph.classes), dtype=bool)
        classes[graph.classes.of[list(ranks)]] = True
        chosen = np.zeros(len(meet), dtype=bool)
        chosen[calls[classes[meet.classes]]] = True
        chosen &= leaves
        slower = np.rint(prices.collective_ns / factor).astype(np.int64) + latency
        sources = list(prices.sources)
        prices = dataclasses.replace(
            prices,
            collective_ns=np.where(chosen, slower, prices.collective_ns),
            collective_source=relabelled(prices.collective_source, chosen, "slow NIC", sources),
            sources=tuple(sources),
        )
    return prices


def with_unreached(
    graph: WorldGraph, machine: Machine, topology: Topology | None, nics: Sequence[SlowNic]
) -> WorldGraph:
    """``graph``, whose what-ifs say so where no call gets to what is slower in them."""
    said = []
    if nics and not crossing(graph, machine.gpus_per_node).any():
        said.append(f"no call leaves a node of {machine.gpus_per_node} GPUs, so no NIC is used")
    if topology is not None and topology.oversubscription > 1:
        leaf = machine.gpus_per_node * topology.leaf_nodes
        if not crossing(graph, leaf).any():
            said.append(f"no call leaves a leaf of {leaf:,} GPUs, so nothing is oversubscribed")
    programs = graph.programs
    for text in said:
        programs = with_assumption(programs, text)
    return dataclasses.replace(graph, programs=programs) if said else graph
