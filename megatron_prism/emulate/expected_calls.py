"""What do the programs of the world say to a call, and what is the verdict if they say otherwise?

In : programs (``--prism-world``), the plan's faults of virtual ranks.  Out: what ``Rendezvous``
asks (``ProgramPeers``), and the HangError that ends the job.  If the faulty world would come to a
standstill, that is found before the job starts; it ends when the local rank comes to the first of
its calls that never end: by quiescence, not by a time-out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_prism.core.errors import HangError, UsageError
from megatron_prism.core.ops import IS_COLLECTIVE, IS_PAIR, Op
from megatron_prism.core.programs import Programs
from megatron_prism.core.selectors import format_ranks
from megatron_prism.core.slices import open_programs
from megatron_prism.core.world import World
from megatron_prism.hang.fault_plan import Fault

if TYPE_CHECKING:
    from megatron_prism.core.program import Program
    from megatron_prism.graph.stall import Standstill
    from megatron_prism.hang.fault_planting import Hit

__all__ = ["ProgramPeers", "Strict", "disagreement"]

_MOST = 8_000_000  # ops of all ranks that are run to a standstill before the job


class ProgramPeers:
    """What ``programs`` say of the groups of ``rank``."""

    def __init__(self, programs: Programs, rank: int) -> None:
        from megatron_prism.graph.classes import memberships

        self.programs, self.rank = programs, rank
        self.groups = memberships(programs)
        self._known: dict[object, Any] = {}

    def _members(self, desc: str) -> list[int]:
        return self.groups[desc].group(self.rank).tolist() if desc in self.groups else []

    def _ops(self, rank: int, desc: str, pair: bool) -> list[Op]:
        key = ("ops", int(self.programs.program_of[rank]), desc, pair)
        if key not in self._known:
            program = self.programs.of(rank)
            found = program.groups().get(desc)
            wanted = IS_PAIR if pair else IS_COLLECTIVE
            self._known[key] = [
                program[int(i)]
                for i in (() if found is None else found)
                if wanted[program.ops["name"][i]]
            ]
        return self._known[key]

    def own(self, desc: str) -> list[Op]:
        """The collectives of the local rank itself."""
        return self._ops(self.rank, desc, False)

    def order(self) -> list[Op]:
        """All calls of the local rank, as it issues them."""
        return [op for op in self.programs.of(self.rank) if op.group]

    def expected(self) -> dict[tuple[str, str, int], list[Op]]:
        """(group, "" or send or recv, peer) -> what the local rank calls there in an iteration."""
        if "expected" not in self._known:
            found: dict[tuple[str, str, int], list[Op]] = {}
            for op in self.order():
                if len(self._members(op.group)) > 1:
                    pair = op.name in ("send", "recv")
                    key = (op.group, op.name if pair else "", op.peer if pair else 0)
                    found.setdefault(key, []).append(op)
            self._known["expected"] = found
        return self._known["expected"]

    def collectives(self, desc: str) -> list[tuple[int, int, list[Op]]]:
        """(a member, how many call like it, its collectives) for all other members."""
        key = ("collectives", desc)
        if key not in self._known:
            by_program: dict[int, list[int]] = {}
            for rank in self._members(desc):
                if rank != self.rank:
                    by_program.setdefault(int(self.programs.program_of[rank]), []).append(rank)
            self._known[key] = [(ranks[0], len(ranks), self._ops(ranks[0], desc, False))
                                for ranks in by_program.values()]  # fmt: skip
        return self._known[key]

    def position(self, desc: str, rank: int) -> int:
        """Group rank of ``rank``."""
        return int(self.groups[desc].position[rank])

    def messages(self, desc: str, offset: int, name: str) -> tuple[int, list[Op]]:
        """(the rank ``offset`` places further, its counterparts of our ``name``)."""
        members = self._members(desc)
        if not members:
            return -1, []
        size, mine = len(members), self.position(desc, self.rank)
        peer = members[(mine + offset) % size]
        key = ("messages", desc, peer, name)
        if key not in self._known:
            back = "recv" if name == "send" else "send"
            self._known[key] = [
                op for op in self._ops(peer, desc, True)
                if op.name == back and (self.position(desc, peer) + op.peer) % size == mine
            ]  # fmt: skip
        return peer, self._known[key]


class Strict:
    """Healthy peers, and those of the plan with the call at which its world stands still.

    faults : those of virtual ranks;  iteration : in which they happen (None: the first checked);
    dry : they are planted, so that one knows what they would hit, and peers stay healthy
    """

    def __init__(
        self, path: str | Path, world: World, rank: int, faults: Sequence[Fault], seed: int,
        dry: bool = False,
    ) -> None:  # fmt: skip
        programs = open_programs(path)
        if programs.world != world:
            size, same = programs.world.size, "capture the same job"
            fix = same if size == world.size else f"--prism-world-size {size}, or {same}"
            raise UsageError(
                f"--prism-world {path} is of {programs.world}, this job is {world}", fix=fix
            )
        self.healthy = self.faulty = ProgramPeers(programs, rank)
        self.rank, self.faults = rank, tuple(faults)
        numbers = {int(f.select["iter"]) for f in faults if "iter" in f.select}
        if len(numbers) > 1:
            raise UsageError(f"faults of virtual ranks in iterations {sorted(numbers)}: their "
                             "programs are planted once", fix="the same iter= for all")  # fmt: skip
        self.iteration = min(numbers, default=None)
        self.never: dict[tuple[str, str, int, int], int] = {}
        self.state: Standstill | None = None
        self.hits: tuple[Hit, ...] = ()  # what faults of virtual ranks hit
        if faults:
            self._plant(programs, seed, dry)

    def _plant(self, programs: Programs, seed: int, dry: bool) -> None:
        from megatron_prism.graph import stall
        from megatron_prism.hang import fault_planting as faults

        self.planted = faults.plant(programs, self.faults, seed)
        self.hits = self.planted.hits
        if dry:
            return
        self.faulty = ProgramPeers(self.planted.programs, self.rank)
        lengths = [len(program) for program in self.planted.programs.programs]
        if sum(lengths[i] for i in self.planted.programs.program_of) > _MOST:
            return
        state = stall.run(self.planted.programs, self.planted.faults)
        if state.finished:
            return
        self.state = state
        program = self.planted.programs.of(self.rank)
        for index, op in enumerate(program):
            if (op.group or op.name == "host_wait") and not state.done[self.rank][index]:
                self.never = self._key(program, op, index)
                break

    def _key(self, program: Program, op: Op, index: int) -> dict[tuple[str, str, int, int], int]:
        if not op.group:
            return {}
        pair = op.name in ("send", "recv")
        number = int(program.sequence[index])
        return {(op.group, op.name if pair else "", op.peer if pair else 0, number): index}

    def standstill(self, key: tuple[str, str, int, int]) -> None:
        """HangError if the call ``key`` is the first of this rank's that never ends."""
        if key in self.never and self.state is not None:
            from megatron_prism.hang import from_programs

            found = from_programs.of_standstill(self.state, self.healthy.programs)
            raise HangError(f"nobody can go on: rank {self.rank} stands in the first call that "
                            f"never ends\n{found}")  # fmt: skip


def disagreement(
    rank: int, iteration: int, kind: str, call: Op, number: int, theirs: Op | None,
    found: Sequence[str], peer: int | None, own: Op | None,
) -> HangError:  # fmt: skip
    """The verdict on a call that does not fit; the prediction votes.

    own : what this rank's derived program has there; without it nobody is named
    """
    from megatron_prism.hang.verdict import Blamed, Diagnosis, Waiting
    from megatron_prism.runtime.call_check import differences

    here = f"{call.name} #{number + 1} of {call.group}"
    if kind == "divergence":
        here = f"{call.name} of {call.group}, call {number + 1} of the iteration"
    evidence = [f"iteration {iteration}, rank {rank} {_text(call)}"]
    if peer is not None and theirs is not None:
        evidence.append(f"rank {peer} {_text(theirs)}")
    evidence += list(found)
    odd: list[int] = []
    if kind == "divergence":
        odd = [rank]
    elif own is not None:
        mine = differences(call, own) or kind == "missing" and theirs is None and peer is None
        evidence.append("the derived program of this rank "
                        + ("calls otherwise" if mine else "calls the same"))  # fmt: skip
        odd = [rank] if mine else [peer] if peer is not None else []
    culprits = tuple(Blamed(r, kind, found[0] if found else kind) for r in odd)
    victims = tuple(Waiting(r, (), call.name, call.group, number + 1)
                    for r in (rank, peer) if r is not None and r not in odd)  # fmt: skip
    verdict = Diagnosis("mismatch", culprits, victims, call.group, call.name, number + 1,
                        "likely" if odd else "possible", tuple(evidence))  # fmt: skip
    who = f"rank {format_ranks(odd)} is odd" if odd else "who is wrong is undetermined"
    return HangError(f"{here}, {kind}: {who}\n{verdict}",
                     fix="--prism-rendezvous off goes on, as far as it can")  # fmt: skip


def _text(op: Op) -> str:
    size = "" if op.name == "barrier" else f" {op.dtype} in={op.num_in} out={op.num_out}"
    return f"calls {op.name}{size}" + (f" at {op.site}" if op.site else "")
