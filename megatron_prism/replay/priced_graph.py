"""Price every op of a world and replay it: the one way from programs to times.

``price`` applies what-ifs, joins programs, checks that all calls fit together and gives every op a
duration on a machine, calls and overlaps as a calibration measured them where there is one.
``replay`` is ``price`` and its timeline.  Commands, predictions, pacing and benchmarks use these.

What-ifs are edits (``whatif.Edit``) and apply in the order in which they make sense: the size of
the world, then where it runs, then who is slow in it, then what its calls cost.  Each is named in
``Programs.source["what-if"]``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from megatron_prism.core import job_settings
from megatron_prism.core.collectives import BY_NAME
from megatron_prism.core.errors import UsageError
from megatron_prism.core.ops import CODE
from megatron_prism.core.program import Program, Programs
from megatron_prism.core.slices import HOST_INDEX
from megatron_prism.graph.world_graph import WorldGraph
from megatron_prism.replay import whatif
from megatron_prism.replay.costs import Prices, price_ops, relabelled
from megatron_prism.replay.costs.collectives import (
    ATTENTION,
    Calibration,
    OverlapFactors,
    read_calibration,
)
from megatron_prism.replay.costs.host import (
    BY_KERNELS,
    MODELLED_INDEX,
    indices_of,
    with_modelled_host,
)
from megatron_prism.replay.costs.machine import (
    Machine,
    default_machine,
    machines,
    named_in,
    with_nodes_of,
)
from megatron_prism.replay.costs.machine import machine as read_machine
from megatron_prism.replay.costs.nccl_settings import NCCL_ENV, parse
from megatron_prism.replay.network import Topology, ports, read_topology, replay_network
from megatron_prism.replay.replicas import with_data_parallel
from megatron_prism.replay.timeline import Timeline, build_timeline, durations_of, evaluate
from megatron_prism.replay.whatif import Edit

NO_NETWORK = "none"  # of WhatIf.network: links are not shared
Factor = Fraction | float | str
Pairs = Mapping[int | str, Factor] | Iterable[tuple[int | str, Factor]]
MachineLike = str | os.PathLike[str] | Machine
CalibrationLike = str | os.PathLike[str] | Calibration


@dataclass(frozen=True)
class WhatIf:
    """What differs from what was captured.

    Args:
        dp: data-parallel size; None: as captured.
        slow: ranks -> how many times as long they compute: a rank (517) or ranks as selectors
            read them ("pp=3,tp=0").  A mapping, or pairs; who is named twice is slow twice.
        faster: calls -> how many times as fast: a collective, a group, or collective@group.
        moved: the machine that it runs on instead of the one that it was measured on.
        host: the index of the host that the job will run on, a file that has it (``prism calibrate
            --host``), or ``0.6x``: hosts take that many times as long; None: as in the slices.
        nccl: settings of NCCL that differ from the captured job's, ``NCCL_ALGO=Ring``.
        network: ``rails`` or ``fat-tree:2``: calls share the links of their ranks, and those above
            leaf switches; ``none``: nobody holds anybody up; None: as the recipe says
            (hardware.network), else ``none``.
        alone: ranks that become classes of their own, each.
        edits: anything else.
    """

    dp: int | None = None
    slow: Pairs = ()
    faster: Pairs = ()
    moved: MachineLike | None = None
    host: str | os.PathLike[str] | float | None = None
    nccl: tuple[str, ...] = ()
    network: str | None = None
    alone: tuple[int, ...] = ()
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True)
class PricedGraph:
    """A world whose ops all have durations.

    programs    : as given, without the what-ifs
    what_if     : what was changed
    measured_on : the machine that the programs are of
    machine     : the machine that they run on: the same, unless ``what_if.moved``
    calibration : of ``machine``; None: calls are modelled
    timeline    : when everything happens
    """

    programs: Programs
    what_if: WhatIf
    measured_on: Machine
    machine: Machine
    calibration: Calibration | None
    timeline: Timeline

    @property
    def graph(self) -> WorldGraph:
        """The joined programs, with the what-ifs."""
        return self.timeline.graph

    @property
    def prices(self) -> Prices:
        """Of every op and call, ns, the cost of overlapping included."""
        return self.timeline.prices

    def again(self, **changes: object) -> PricedGraph:
        """The same with other what-ifs: ``again(dp=64)``."""
        return price(
            self.programs,
            machine=self.measured_on,
            calibration=self.calibration,
            what_if=dataclasses.replace(self.what_if, **changes),  # type: ignore[arg-type]
            iterations=self.timeline.iterations,
        )


def price(
    programs: Programs,
    *,
    machine: MachineLike | None = None,
    calibration: CalibrationLike | None = None,
    what_if: WhatIf | None = None,
    iterations: int = 2,
) -> PricedGraph:
    """Give every op and call of a world its duration in ns, with provenance.

    Args:
        programs: what ``load`` or ``capture`` returned.
        machine: name of a shipped one, a JSON file like it, or a Machine; default: the one that
            the programs were measured on, or that their recipe names (hardware.name), else h200.
        calibration: what ``prism calibrate`` wrote, a path or read; its measured calls come before
            the machine's model, and computing and calls that overlap slow each other down as it
            measured.  None: calls inside a node are as other GPUs of the machine's kind measured
            them, where it has such a table, else modelled; overlap costs nothing.
        what_if: what differs from what was captured.
        iterations: in a row, of which the last one is looked at.

    Raises:
        PrismError: the calls of the ranks do not fit together, or the job hangs.
        UsageError: the machine or the calibration is not that of the programs.
    """
    what_if = what_if or WhatIf()
    if what_if.network is None:
        settings = job_settings.values(programs.source.get("settings", ""))
        meant = settings.get("hardware.network") or NO_NETWORK
        what_if = dataclasses.replace(what_if, network=meant)
    own = machine_of(programs) if machine is None else machine
    here = own if isinstance(own, Machine) else read_machine(own)
    moved = what_if.moved
    there = here if moved is None else moved if isinstance(moved, Machine) else read_machine(moved)
    here, there = (with_nodes_of(one, programs.world) for one in (here, there))
    measured = calibration
    if measured is not None and not isinstance(measured, Calibration):
        measured = read_calibration(measured)
    if measured is not None:
        tier = programs.source.get("tier", "")
        _check_calibration(measured.source, _name(own if moved is None else moved), tier)
    _check_machine(programs, machine)
    topology = None
    if what_if.network != NO_NETWORK:
        topology = read_topology(str(what_if.network), there)
    edits = _edits(programs, what_if, here, there, measured, topology)
    graph = whatif.edited(programs, edits)
    prices = price_ops(graph, here, measured)
    for edit in edits:
        prices = edit.prices(graph, prices, there)
    buffered = _buffered(graph, measured)
    factors, who = ({}, "") if measured is None else (measured.overlap, measured.source)
    timeline = replay_with_overlap(graph, prices, factors, who, iterations, buffered)
    if topology is not None:
        prices = whatif.oversubscribed(graph, timeline.prices, there, topology)
        links = ports(graph, there.gpus_per_node)
        timeline = replay_network(graph, prices, iterations, links, buffered)
    return PricedGraph(programs, what_if, here, there, measured, timeline)


def replay(
    programs: Programs,
    *,
    machine: MachineLike | None = None,
    calibration: CalibrationLike | None = None,
    what_if: WhatIf | None = None,
    iterations: int = 2,
) -> Timeline:
    """Replay an iteration of the whole world; arguments and errors as of ``price``.

    Returns the timeline of ``iterations`` iterations in a row; its figures are of the last one,
    from the end of the one before to its own end.
    """
    return price(
        programs,
        machine=machine,
        calibration=calibration,
        what_if=what_if,
        iterations=iterations,
    ).timeline


# -- computing and calls that slow each other down -------------------------------------------------
PASSES, SETTLED = 50, 1e-4  # of the iteration and of all calls; a few passes, as a rule
_UNKNOWN_SHARE = 0.5  # of a segment: products
_CALLS = "calls and computing overlap"
_SEGMENT_KINDS = ("gemm", "memory")  # of KINDS: what slices tell apart
# their exchanges run beside attention; of a2a+p2p the second
_RINGS = "CONTEXT_PARALLEL_GROUP", "HIERARCHICAL_CONTEXT_PARALLEL_GROUP"


def replay_with_overlap(
    graph: WorldGraph,
    prices: Prices,
    factors: Mapping[str, OverlapFactors],
    source: str,
    iterations: int = 2,
    buffered: int = 0,
) -> Timeline:
    """The timeline with every overlap's cost; ``source`` says who measured the factors.

    A replay says for how long each segment had calls of its rank beside it; during that time it
    gets 1 / factor as far.  So it takes overlap x (1 - 1 / factor) longer, which changes the
    timeline: replay and correction alternate until the iteration settles.  A call is as slow as on
    its slowest member.  Products and other kernels of a segment lose differently; the slice says
    how much of it is products.  Segments that were recorded among paced ranks had the job's calls
    beside them: they lose no more.

    Segments of several streams share their GPU: while another one computes, each gets half as far.

    Messages take the factors that were measured of an exchange, else those of an all-to-all, which
    NCCL runs with the same kernel (SendRecv).  What runs beside calls of context-parallel ranks is
    attention.  Only calls that move data count, not those that wait
    for a rank; several at once count each, and of several segments beside a call each counts in
    part.
    """
    streams = _on_streams(graph)
    if not factors and not streams:
        return build_timeline(graph, prices, iterations, buffered)
    costs = [_lost(graph, index, factors) for index in range(len(graph.classes))]
    found = build_timeline(graph, prices, iterations, buffered)
    for _ in range(PASSES):
        now = _corrected(found, prices, costs, source, streams)
        times = evaluate(found.dag, durations_of(found.dag, now))
        before, found = found, Timeline(graph, now, found.dag, *times, iterations)
        moved = np.abs(now.collective_ns - before.prices.collective_ns).sum()
        same = abs(found.iteration_ns - before.iteration_ns) <= SETTLED * found.iteration_ns
        if same and moved <= SETTLED * now.collective_ns.sum():
            break
    return found


def corrected_once(found: Timeline, factors: Mapping[str, OverlapFactors], source: str) -> Prices:
    """Prices with what the overlaps of ``found`` would cost, as they are now."""
    costs = [_lost(found.graph, index, factors) for index in range(len(found.graph.classes))]
    return _corrected(found, found.prices, costs, source, frozenset())


def _on_streams(graph: WorldGraph) -> frozenset[int]:
    """Classes that compute on several streams, of segments that were timed one by one."""
    if graph.programs.source.get("from") == "traces":
        return frozenset()  # what ran beside a segment is in its time
    return frozenset(
        index
        for index, program in enumerate(graph.program_list)
        if len(np.unique(program.ops["stream"][program.ops["name"] == CODE["compute"]])) > 1
    )


def _lost(graph: WorldGraph, index: int, factors: Mapping[str, OverlapFactors]) -> np.ndarray:
    """float64 [kind of computing, computing or call, op of a class]: 1 - 1 / factor; 0 for what is
    no call, or was not measured.
    """
    program = graph.program_list[index]
    sizes = program.num_bytes
    found = np.zeros((len(_SEGMENT_KINDS), 2, len(program)))
    messages = factors.get("exchange", factors.get("all_to_all"))
    if messages is not None:
        factors = {"send": messages, "recv": messages, **factors}
    rings = [*(text.startswith(_RINGS) for text in program.strings), False]  # -1: in no group
    ring = np.array(rings)[program.ops["group"]]
    for name, one in factors.items():
        called = program.ops["name"] == CODE[name] if name in CODE else np.zeros(len(ring), bool)
        for kind, rows in zip(_SEGMENT_KINDS, found, strict=True):
            for beside, mine in ((kind, called & ~ring), (ATTENTION, called & ring)):
                each, which = np.unique(sizes[mine], return_inverse=True)
                known = [one.factors(size, beside) for size in each.tolist()]
                rows[:, mine] = 1 - 1 / np.array(known).reshape(-1, 2)[which].T
    return found


def _parts(program: Program, segments: np.ndarray) -> np.ndarray:
    """float64 [kind of computing, segments]: which part of each is of that kind."""
    ns, products = (program.ops[name][segments].astype(float) for name in ("ns", "products"))
    known = (products >= 0) & (ns > 0)
    part = np.where(known, np.clip(products / np.maximum(ns, 1), 0, 1), _UNKNOWN_SHARE)
    return np.stack([part, 1 - part])


def _corrected(
    found: Timeline, prices: Prices, costs: list[np.ndarray], source: str, streams: frozenset[int]
) -> Prices:
    """``prices``, and what the overlaps of ``found`` cost; ``streams``: classes whose segments may
    share a GPU.
    """
    sources, overlapped = list(prices.sources), _slower(_CALLS, f"overlap: {source}; ")
    meetings = prices.collective_ns.copy()
    compute, compute_source = [], []
    for index, (program, lost) in enumerate(zip(found.graph.program_list, costs, strict=True)):
        spans = found.spans(index)
        is_compute = program.ops["name"][spans["op"]] == CODE["compute"]
        segments, calls = spans[is_compute], spans[~is_compute]
        calls = calls[lost.sum(axis=(0, 1))[calls["op"]] > 0]
        more, slower = np.zeros(len(segments)), np.zeros(len(calls))
        ones = np.ones(len(segments))
        for part, (of_compute, of_call) in zip(
            _parts(program, segments["op"]), lost[:, :, calls["op"]], strict=True
        ):
            more += part * _covered(calls, segments, of_compute)
            slower += of_call * _covered(segments, calls, part, shared=True)
        late = np.zeros(len(program), dtype=np.int64)
        late[segments["op"]] = np.rint(more)
        said = relabelled(prices.compute_source[index], late > 0, overlapped, sources)
        if index in streams:
            shared = np.zeros(len(program), dtype=np.int64)
            shared[segments["op"]] = np.rint(_shared(segments))
            said = relabelled(said, shared > 0, _slower("streams share the GPU"), sources)
            late += shared
        compute.append(prices.compute[index] + late)
        compute_source.append(said)
        met = found.graph.matched_calls.of[index][calls["op"]]
        took = calls["end"] - calls["start"]
        within = _covered(segments, calls, ones, shared=True) >= took - 1
        alone = prices.collective_ns[met]
        # within segments it is as much slower throughout: no need to come nearer pass by pass
        whole = alone / (1 - np.where(within, slower / np.maximum(1, took), 0))
        longer = np.where(within, whole, alone + slower)
        np.maximum.at(meetings, met, np.rint(longer).astype(np.int64))
    return dataclasses.replace(
        prices,
        compute=tuple(compute),
        compute_source=tuple(compute_source),
        collective_ns=meetings,
        collective_source=relabelled(
            prices.collective_source, meetings > prices.collective_ns, overlapped, sources
        ),
        sources=tuple(sources),
    )


def _covered(
    under: np.ndarray, over: np.ndarray, weights: np.ndarray, shared: bool = False
) -> np.ndarray:
    """Per span of ``over``: ns that spans of ``under`` cover of it, each times its weight;
    ``shared``: of several at once their mean.
    """
    if not len(under) or not len(over):
        return np.zeros(len(over))
    times = np.concatenate([under["start"], under["end"]])
    slopes = np.concatenate([weights, -weights])
    order = np.argsort(times, kind="stable")
    times, slope = times[order], np.cumsum(slopes[order])
    if shared:
        slope = slope / np.maximum(1, np.cumsum(np.where(order < len(under), 1, -1)))
    so_far = np.concatenate(([0.0], np.cumsum(slope[:-1] * np.diff(times))))
    begin, end = (np.interp(over[key], times, so_far) for key in ("start", "end"))
    return np.asarray(end - begin)


def _shared(segments: np.ndarray) -> np.ndarray:
    """float64 [segments]: ns that each takes longer because other streams of its rank compute."""
    more = np.zeros(len(segments))
    for lane in np.unique(segments["lane"]).tolist():
        mine = segments["lane"] == lane
        others = segments[~mine]
        more[mine] = _covered(others, segments[mine], np.full(len(others), 0.5))
    return more


def _slower(where: str, who: str = "") -> Callable[[str], str]:
    """What a source says of entries that are slower there."""

    def text(source: str) -> str:
        what, _, more = source.partition(" (")
        said = f"{what}, slower where {where}"
        return f"{said} ({who}{more or ')'}" if who or more else said

    return text


# -- what-ifs -------------------------------------------------------------------------------------
def _pairs(pairs: Pairs) -> list[tuple[int | str, Factor]]:
    return list(pairs.items() if isinstance(pairs, Mapping) else pairs)


def _calls(words: int | str) -> tuple[str, str]:
    """(collective, group) of ``all_reduce``, ``GROUP`` or ``all_reduce@GROUP``; "": any."""
    name, _, group = str(words).partition("@")
    return ("", name) if not group and name and name not in BY_NAME else (name, group)


def _edits(
    programs: Programs,
    what_if: WhatIf,
    here: Machine,
    there: Machine,
    calibration: Calibration | None,
    topology: Topology | None,
) -> list[Edit]:
    """What is not as captured: the size of the world, where it runs, who is slow in it, what its
    calls cost.
    """
    dp, nccl, host, edits = what_if.dp, what_if.nccl, what_if.host, list[Edit]()
    if dp is not None or what_if.moved is not None or nccl:
        edits.append(whatif.modelled_calls(programs))
    if dp is not None:
        edits.append(Edit(programs=lambda given: with_data_parallel(given, dp)))
        programs = edits[-1].programs(programs)
    if what_if.moved is not None:
        edits.append(whatif.moved(here, calibration, there))
    for ranks, factor in _pairs(what_if.slow):
        edits.append(whatif.slow_ranks(programs.world.select(str(ranks)), factor))
    for words, factor in _pairs(what_if.faster):
        edits.append(whatif.faster_calls(factor, *_calls(words)))
    if topology is not None:
        edits.append(Edit(f"calls share links: {topology}"))
    if nccl:
        settings = str(parse(programs.source.get(NCCL_ENV, ""), *nccl))
        text = f"NCCL with {' '.join(nccl)}"
        edits.append(Edit(text, programs=lambda given: _with_source(given, NCCL_ENV, settings)))
    edits.append(Edit(programs=_with_modelled_hosts))
    if host is not None:
        edits.append(whatif.other_host(host, f"on a host: {host}"))
    elif there.host_index and (
        programs.source.get("tier") == "meta" or indices_of(programs.source)
    ):
        edits.append(whatif.other_host(there.host_index))
    return [*edits, *what_if.edits, *(Edit(ranks=(rank,)) for rank in what_if.alone)]


def _with_source(programs: Programs, key: str, text: str) -> Programs:
    return dataclasses.replace(programs, source={**programs.source, key: text})


def _with_modelled_hosts(programs: Programs) -> Programs:
    """Programs without a GPU get a host that takes time; others stay as they are."""
    if programs.source.get("tier") != "meta":
        return programs
    hosted = tuple(with_modelled_host(program) for program in programs.programs)
    indices = " ".join(f"{program.rank}={MODELLED_INDEX}" for program in hosted)
    source = {**programs.source, HOST_INDEX: indices}
    if not all(program.knows_host for program in programs.programs):
        source[BY_KERNELS] = "yes"
    return dataclasses.replace(programs, programs=hosted, source=source)


_BUFFSIZE = 4 << 20  # NCCL's default


def _buffered(graph: WorldGraph, calibration: Calibration | None) -> int:
    """Bytes on their way to a peer that NCCL's buffers hold, so that sends do not wait for their
    receivers: what the calibration measured, in proportion to the job's buffers; else 0.
    """
    if calibration is None or not calibration.held:
        return 0
    each = parse(graph.programs.source.get(NCCL_ENV, "")).buffer_bytes or _BUFFSIZE
    usual = calibration.nccl.buffer_bytes if calibration.nccl is not None else None
    return calibration.held * each // (usual or _BUFFSIZE)


# -- do machine, calibration and programs belong together? ----------------------------------------
def _name(machine: MachineLike) -> str:
    return machine.name if isinstance(machine, Machine) else os.fspath(machine)


def machine_of(programs: Programs) -> str:
    """The machine that the programs were measured on, or that their recipe names."""
    return default_machine(*_named(programs))


def machine_is_assumed(programs: Programs) -> bool:
    """Whether neither the programs nor their recipe name the machine of ``machine_of``."""
    return not any(map(named_in, _named(programs)))


def _named(programs: Programs) -> tuple[str, str]:
    """Device and recipe's hardware, in their words."""
    settings = job_settings.values(programs.source.get("settings", ""))
    return programs.source.get("device", ""), settings.get("hardware.name", "")


def _check_machine(programs: Programs, machine: MachineLike | None) -> None:
    """UsageError if ``machine`` is another one than the programs were measured on."""
    there = named_in(programs.source.get("device", ""))
    measured = any((program.ops["ns"] >= 0).any() for program in programs.programs)
    if machine is not None and measured and there and _is_another(_name(machine), there):
        raise UsageError(
            f"the segments were measured on {programs.source['device']}; --machine "
            f"{_name(machine)} would price only the calls as that machine's",
            fix=f"--machine {there} moved={_name(machine)} scales the segments too",
        )


def _check_calibration(source: str, machine: str, tier: str) -> None:
    """UsageError if the calls were measured on another machine than ``machine``, or among processes
    of a CPU for slices of GPUs.
    """
    if " x CPU, " in source and tier in ("cuda", "meta"):
        raise UsageError(
            f"the calibration is of processes without GPUs, the slices are of {machine}: {source}",
            fix=f"leave --calibration out, or prism calibrate on {machine}",
        )
    there = named_in(source)
    if there and _is_another(machine, there):
        raise UsageError(
            f"the calibration is of another machine than {machine}: {source}",
            fix=f"--machine {there}, or leave --calibration out, or prism calibrate on {machine}",
        )


def _is_another(machine: str, there: str) -> bool:
    """Whether ``machine`` is shipped, so that its GPU is known, and has another GPU."""
    return machine in machines() and machine.partition("_")[0] != there.partition("_")[0]
