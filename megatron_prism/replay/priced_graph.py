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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from megatron_prism.core.errors import UsageError
from megatron_prism.core.jobs import job_settings
from megatron_prism.core.programs.collectives import BY_NAME
from megatron_prism.core.programs.program import Programs
from megatron_prism.core.programs.slices import HOST_INDEX
from megatron_prism.graph.world_graph import WorldGraph
from megatron_prism.replay import whatif
from megatron_prism.replay.costs import Prices, price_ops
from megatron_prism.replay.costs.collectives import Calibration, read_calibration
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
from megatron_prism.replay.overlap import replay_with_overlap
from megatron_prism.replay.replicas import with_data_parallel
from megatron_prism.replay.timeline import Timeline
from megatron_prism.replay.whatif import Edit

NO_NETWORK = "none"  # of WhatIf.network: links are not shared
_BUFFSIZE = 4 << 20  # NCCL's default
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
            read them ("pp=3,tp=0").  A mapping, or pairs; a rank that is named twice is slow
            twice.
        faster: calls -> how many times as fast: a collective, a group, or collective@group.
        moved: the machine that it runs on instead of the one that it was measured on.
        host: the index of the host that the job will run on, a file that has it (``prism calibrate
            --host``), or ``0.6x``: hosts take that many times as long; None: as in the slices.
        nccl: settings of NCCL that differ from the captured job's, ``NCCL_ALGO=Ring``.
        network: ``rails`` or ``fat-tree:2``: calls share the links of their ranks, and those above
            leaf switches; ``none``: no call holds another one up; None: as the recipe says
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

    Attributes:
        programs: The programs without the what-ifs.
        what_if: What was changed.
        measured_on: The machine that the programs are of.
        machine: The machine that they run on: the same, unless ``what_if.moved``.
        calibration: Of ``machine``; None: calls are modelled.
        timeline: When everything happens.
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
        """Durations of every op and call, ns, with the cost of overlapping."""
        return self.timeline.prices

    def again(self, **changes: object) -> PricedGraph:
        """Price the same programs with other what-ifs: ``again(dp=64)``."""
        what_if = dataclasses.replace(self.what_if, **changes)  # type: ignore[arg-type]
        return price(
            self.programs,
            machine=self.measured_on,
            calibration=self.calibration,
            what_if=what_if,
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
        network = _network_of_recipe(programs)
        what_if = dataclasses.replace(what_if, network=network)

    # the machine that the segments were measured on, and the one that they run on
    named_machine = machine
    if named_machine is None:
        named_machine = machine_of(programs)
    target_name = named_machine
    if what_if.moved is not None:
        target_name = what_if.moved
    measured_on = with_nodes_of(_machine(named_machine), programs.world)
    target = with_nodes_of(_machine(target_name), programs.world)
    target_calibration = _calibration(calibration)
    if target_calibration is not None:
        tier = programs.source.get("tier", "")
        _check_calibration(target_calibration.source, _name(target_name), tier)
    _check_machine(programs, machine)

    # segments are priced on the machine that measured them; if the programs move, the edit
    # ``whatif.moved`` scales segments and prices all calls again on the target
    topology = None
    if what_if.network != NO_NETWORK:
        topology = read_topology(str(what_if.network), target)
    edits = _edits(programs, what_if, measured_on, target, target_calibration, topology)
    graph = whatif.edited(programs, edits)
    prices = price_ops(graph, measured_on, target_calibration)
    for edit in edits:
        prices = edit.prices(graph, prices, target)

    # computing and calls slow each other down, as far as that was measured
    buffered = _buffered_bytes(graph, target_calibration)
    factors, factors_source = {}, ""
    if target_calibration is not None:
        factors, factors_source = target_calibration.overlap, target_calibration.source
    timeline = replay_with_overlap(graph, prices, factors, factors_source, iterations, buffered)

    # calls share links
    if topology is not None:
        prices = whatif.oversubscribed(graph, timeline.prices, target, topology)
        links = ports(graph, target.gpus_per_node)
        timeline = replay_network(graph, prices, iterations, links, buffered)
    return PricedGraph(programs, what_if, measured_on, target, target_calibration, timeline)


def replay(
    programs: Programs,
    *,
    machine: MachineLike | None = None,
    calibration: CalibrationLike | None = None,
    what_if: WhatIf | None = None,
    iterations: int = 2,
) -> Timeline:
    """Replay an iteration of the whole world; arguments and errors are those of ``price``.

    Returns:
        The timeline of ``iterations`` iterations in a row; its figures are of the last one, from
        the end of the one before to its own end.
    """
    priced = price(
        programs,
        machine=machine,
        calibration=calibration,
        what_if=what_if,
        iterations=iterations,
    )
    return priced.timeline


def _machine(machine: MachineLike) -> Machine:
    """Read a machine, unless it is read already."""
    if isinstance(machine, Machine):
        return machine
    return read_machine(machine)


def _calibration(calibration: CalibrationLike | None) -> Calibration | None:
    """Read a calibration, unless it is read already or there is none."""
    if calibration is None or isinstance(calibration, Calibration):
        return calibration
    return read_calibration(calibration)


def _network_of_recipe(programs: Programs) -> str:
    """Give the network that the recipe names; else none, whose links are not shared."""
    settings = job_settings.values(programs.source.get("settings", ""))
    return settings.get("hardware.network") or NO_NETWORK


# -- what-ifs -------------------------------------------------------------------------------------
def _pairs(pairs: Pairs) -> list[tuple[int | str, Factor]]:
    """List pairs of a mapping or of any iterable."""
    if isinstance(pairs, Mapping):
        return list(pairs.items())
    return list(pairs)


def _calls(words: int | str) -> tuple[str, str]:
    """Read (collective, group) of ``all_reduce``, ``GROUP`` or ``all_reduce@GROUP``; "": any."""
    name, _, group = str(words).partition("@")
    is_group = bool(name) and name not in BY_NAME
    if is_group and not group:
        return "", name
    return name, group


def _edits(
    programs: Programs,
    what_if: WhatIf,
    measured_on: Machine,
    target: Machine,
    calibration: Calibration | None,
    topology: Topology | None,
) -> list[Edit]:
    """List what is not as captured, in the order in which it applies.

    Args:
        programs: The captured programs.
        what_if: What differs.
        measured_on: The machine that measured their segments.
        target: The machine that they run on.
        calibration: Of the target.
        topology: Of the network, if calls share links.
    """
    # the size of the world
    dp, nccl = what_if.dp, what_if.nccl
    edits: list[Edit] = []
    if dp is not None or what_if.moved is not None or nccl:
        edits.append(whatif.modelled_calls(programs))
    if dp is not None:
        resized = Edit(programs=lambda captured: with_data_parallel(captured, dp))
        edits.append(resized)
        programs = resized.programs(programs)

    # where it runs
    if what_if.moved is not None:
        edits.append(whatif.moved(measured_on, calibration, target))

    # slow ranks
    for ranks, factor in _pairs(what_if.slow):
        selected = programs.world.select(str(ranks))
        edits.append(whatif.slow_ranks(selected, factor))

    # what its calls cost
    for words, factor in _pairs(what_if.faster):
        name, group = _calls(words)
        edits.append(whatif.faster_calls(factor, name, group))
    if topology is not None:
        edits.append(Edit(f"calls share links: {topology}"))
    if nccl:
        settings = parse(programs.source.get(NCCL_ENV, ""), *nccl)
        edits.append(_with_nccl(f"NCCL with {' '.join(nccl)}", str(settings)))

    # hosts, which take time before they take another one
    edits.append(Edit(programs=_with_modelled_hosts))
    host = what_if.host
    is_meta = programs.source.get("tier") == "meta"
    if host is not None:
        edits.append(whatif.other_host(host, f"on a host: {host}"))
    elif target.host_index and (is_meta or indices_of(programs.source)):
        edits.append(whatif.other_host(target.host_index))

    # anything else
    edits += what_if.edits
    edits += [Edit(ranks=(rank,)) for rank in what_if.alone]
    return edits


def _with_nccl(text: str, settings: str) -> Edit:
    """Make the edit that gives programs other settings of NCCL."""

    def with_settings(programs: Programs) -> Programs:
        """Say in the programs under which settings they run."""
        source = {**programs.source, NCCL_ENV: settings}
        return dataclasses.replace(programs, source=source)

    return Edit(text, programs=with_settings)


def _with_modelled_hosts(programs: Programs) -> Programs:
    """Give programs without a GPU a host that takes time; others stay as they are."""
    if programs.source.get("tier") != "meta":
        return programs
    hosted = tuple(with_modelled_host(program) for program in programs.programs)
    indices = [f"{program.rank}={MODELLED_INDEX}" for program in hosted]
    source = {**programs.source, HOST_INDEX: " ".join(indices)}
    # kernels alone say how long the host of some program takes
    if not all(program.knows_host for program in programs.programs):
        source[BY_KERNELS] = "yes"
    return dataclasses.replace(programs, programs=hosted, source=source)


def _buffered_bytes(graph: WorldGraph, calibration: Calibration | None) -> int:
    """Count the bytes on their way to a peer that NCCL's buffers hold; 0: sends wait.

    That is what the calibration measured, in proportion to the job's buffers.
    """
    if calibration is None or not calibration.held:
        return 0
    settings = parse(graph.programs.source.get(NCCL_ENV, ""))
    job_buffer = settings.buffer_bytes or _BUFFSIZE
    calibrated_buffer = _BUFFSIZE
    if calibration.nccl is not None:
        calibrated_buffer = calibration.nccl.buffer_bytes or _BUFFSIZE
    return calibration.held * job_buffer // calibrated_buffer


# -- do machine, calibration and programs belong together? ----------------------------------------
def _name(machine: MachineLike) -> str:
    """Give the name of a machine, or its file."""
    if isinstance(machine, Machine):
        return machine.name
    return os.fspath(machine)


def machine_of(programs: Programs) -> str:
    """Name the machine that the programs were measured on, or that their recipe names."""
    device, hardware = _machine_words(programs)
    return default_machine(device, hardware)


def machine_is_assumed(programs: Programs) -> bool:
    """Say whether neither the programs nor their recipe name the machine of ``machine_of``."""
    return not any(named_in(words) for words in _machine_words(programs))


def _machine_words(programs: Programs) -> tuple[str, str]:
    """Give the device, and the recipe's hardware, in their words."""
    settings = job_settings.values(programs.source.get("settings", ""))
    return programs.source.get("device", ""), settings.get("hardware.name", "")


def _check_machine(programs: Programs, machine: MachineLike | None) -> None:
    """Raise UsageError if ``machine`` is another one than the programs were measured on."""
    if machine is None:
        return
    # slices of shapes may be priced as any machine
    measured_on = named_in(programs.source.get("device", ""))
    if not measured_on or not _is_another(_name(machine), measured_on):
        return
    # times that were measured are not those of another machine
    if any((program.ops["ns"] >= 0).any() for program in programs.programs):
        name = _name(machine)
        raise UsageError(
            f"the segments were measured on {programs.source['device']}; --machine "
            f"{name} would price only the calls as that machine's",
            fix=f"--machine {measured_on} moved={name} scales the segments too",
        )


def _check_calibration(source: str, machine: str, tier: str) -> None:
    """Raise UsageError for a calibration that is not of a machine.

    Args:
        source: What the calibration says of itself.
        machine: The machine's name.
        tier: What ran the slices.
    """
    # processes of a CPU for slices of GPUs
    if " x CPU, " in source and tier in ("cuda", "meta"):
        raise UsageError(
            f"the calibration is of processes without GPUs, the slices are of {machine}: {source}",
            fix=f"leave --calibration out, or prism calibrate on {machine}",
        )

    # another GPU
    calibrated_on = named_in(source)
    if calibrated_on and _is_another(machine, calibrated_on):
        raise UsageError(
            f"the calibration is of another machine than {machine}: {source}",
            fix=f"--machine {calibrated_on}, or leave --calibration out, or prism calibrate on "
            f"{machine}",
        )


def _is_another(machine: str, known_machine: str) -> bool:
    """Say whether ``machine`` is shipped, so that its GPU is known, and has another GPU."""
    if machine not in machines():
        return False
    gpu, _, _ = machine.partition("_")
    known_gpu, _, _ = known_machine.partition("_")
    return gpu != known_gpu
