"""Stop a rank at one of its calls, in pdb or debugpy.

Virtual peers never time out, so a rank can stand at a call for as long as one likes.
``Breakpoint`` is the call, as ``prism show`` and ``prism hang`` print calls; ``Debugger`` follows
the calls of the rank and opens the prompt in the frame that makes the call; ``Prompt`` is what is
in scope there as ``prism``.
"""

from __future__ import annotations

import builtins
import difflib
import fnmatch
import gc
import pdb
import re
import sys
import traceback
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_prism.core.errors import PrismError, UnsupportedError, UsageError, refuse
from megatron_prism.core.groups import named_group, short_names
from megatron_prism.core.programs.call_selector import CallSelector, NthCall
from megatron_prism.core.programs.collectives import TABLE
from megatron_prism.core.programs.ops import CallLabel, label
from megatron_prism.core.units import counted, format_bytes
from megatron_prism.core.world import World, format_ranks
from megatron_prism.runtime.listeners import LabelledCalls
from megatron_prism.runtime.process_group import arguments
from megatron_prism.runtime.recorder.owners import AllocationOwners

if TYPE_CHECKING:
    from torch import distributed as dist
    from torch._ops import OpOverload
    from torch.utils.hooks import RemovableHandle

    from megatron_prism.emulate.rank.session import Run, Session
    from megatron_prism.features.debugger.options import StopOptions
    from megatron_prism.runtime.listeners import Answer, Args, Kwargs
    from megatron_prism.runtime.process_group import PrismGroup
    from megatron_prism.runtime.recorder.owners import Models

_REMOTE = "--prism-debugger debugpy:5678"
_FIX = "--prism-break '1B2 all_reduce group=tp nth=3', as prism show prints calls"
_KEPT = 10  # calls before the one where it stands
_LISTED = 16  # members of a group
# frames in which pdb never stops; the last wraps functions of torch that are deprecated
_SKIPPED = ["megatron_prism.*", "torch.*", "contextlib", "typing_extensions"]


def add_to(run: Run, session: Session, asked: StopOptions) -> None:
    """Stop this rank at a call, if it is the one that is meant, or at an operator's result."""
    options, world, tier = run.options, run.options.world, run.options.tier
    stops = dict[int, Breakpoint]()
    for text in filter(None, map(str.strip, asked.stop.split(";"))):
        breakpoint = Breakpoint.parse(text)
        named = breakpoint.select.rank
        # without a rank the call is this process's own
        ranks = options.ranks[:1]
        if named:
            ranks = world.select(named)
        # the rank is virtual here: it makes no calls
        if not set(ranks) & set(options.ranks):
            raise UsageError(
                f"--prism-break {text!r}: rank {ranks[0]} has no process here",
                fix=f"--prism-ranks {ranks[0]}",
            )
        stops |= dict.fromkeys(set(ranks) & set(options.ranks), breakpoint)
    if options.rank in stops:
        # each process listens on a port of its own, so that several can stop
        at = debugger_at(asked.debugger)
        if at is not None:
            at = at[0], at[1] + sorted(stops).index(options.rank)
        debugger = Debugger(stops[options.rank], at, options.rank, world, options.values, tier)
        run.follow_calls(debugger)
        run.follow_training(debugger)
    if asked.watch is not None:
        watch = ValueWatch(asked.watch, tier, asked.debugger)
        session.changes.on_undo(watch.stop)
        run.follow_training(watch)


@dataclass(frozen=True)
class Breakpoint:
    """A call at which to stop.

    text   : as it was written
    after  : stop when the call has been answered, not before it is made
    number : of the call in its group since the job began, as dumps and the prompt count; 0: any
    """

    text: str
    select: CallSelector
    after: bool = False
    number: int = 0

    @staticmethod
    def parse(text: str) -> Breakpoint:
        """Read a CallSelector and, beside its words, ``#N`` and ``after``.

        Raises:
            UsageError: a word that is not understood, or an op that is no call.
        """
        words = text.replace(",", " ").split()
        # #N, and on which side of the call: a selector knows neither
        numbers = [word for word in words if re.fullmatch(r"#[1-9]\d{0,11}", word)]
        selector = [word for word in words if word not in (*numbers, "after", "before")]
        subject = f"--prism-break {text!r}"
        select = CallSelector.parse(" ".join(selector), subject)
        if select.op and select.op not in (row.name for row in TABLE):
            raise UsageError(f"{subject}: {select.op} is no call", fix=_FIX)
        # a short name; whole descriptions are in capitals
        if select.group.isalpha() and select.group.islower() and select.group not in short_names():
            raise UsageError(
                f"{subject}: there is no group {select.group}",
                fix=f"group= one of {', '.join(short_names())}",
            )
        number = 0
        if numbers:
            number = int(numbers[-1][1:])
        return Breakpoint(text, select, "after" in words, number)


def debugger_at(text: str | None) -> tuple[str, int] | None:
    """(host, port) of ``debugpy:[host:]port``; None is pdb, which needs a terminal.

    Raises UsageError for another debugger, and for pdb where nobody could type.
    """
    # without a debugger it is pdb, which reads the terminal
    remote, fix = re.fullmatch(r"debugpy:(?:([\w.-]+):)?(\d{1,5})", text or ""), _REMOTE
    refuse(
        (
            remote and not 0 < int(remote[2]) < 65536,
            f"--prism-debugger {text}: no port has that number",
            fix,
        ),
        (
            remote and find_spec("debugpy") is None,
            "--prism-debugger debugpy needs the package debugpy",
            "pip install debugpy",
        ),
        (
            not remote and text not in (None, "pdb"),
            f"--prism-debugger {text}: pdb or debugpy:PORT",
            fix,
        ),
        (
            not remote and not (sys.stdin and sys.stdin.isatty()),
            "--prism-break opens pdb, and this process has no terminal to type in",
            f"{fix}, and attach an editor",
        ),
    )
    if not remote:
        return None
    return remote[1] or "localhost", int(remote[2])


@dataclass
class _Seen:
    """A call that was made, for the list of the last ones."""

    call: CallLabel
    number: int
    shapes: str
    norm: float | None = None

    @property
    def line(self) -> str:
        call = self.call
        step, site = label(call.phase, call.microbatch, call.chunk), call.site or "an unknown line"
        return f"{step} {call.op} #{self.number} of {call.group} at {site}"

    def __str__(self) -> str:
        text = f"{self.line}  {self.shapes}"
        # values of tier meta have no norm
        if self.norm is None:
            return text
        return f"{text}  norm {self.norm:.6g}"


class Debugger(LabelledCalls):
    """Follows the calls of one rank and stops at ``breakpoint``.

    at : (host, port) for debugpy to listen on, or None for pdb
    """

    def __init__(
        self,
        breakpoint: Breakpoint,
        at: tuple[str, int] | None,
        rank: int,
        world: World,
        values: str,
        tier: str,
    ) -> None:
        super().__init__()
        self.breakpoint, self.rank, self.world, self.values = breakpoint, rank, world, values
        self.real = tier != "meta"
        self.seen: deque[_Seen] = deque(maxlen=_KEPT)
        self.models: Models = ()
        self.optimizer: object = None
        self._at, self._listening = at, False
        self._aim(breakpoint)
        self._next = False  # stop at the next call, whichever it is
        self._reached = self._inside = False
        self._asked = False  # whether it has stopped once
        self._numbers: Counter[tuple[str, bool]] = Counter()
        self._kinds: dict[str, None] = {}

    def _aim(self, breakpoint: Breakpoint) -> None:
        self._matcher = NthCall(breakpoint.select)
        self._after, self._number = breakpoint.after, breakpoint.number
        self._unfit: list[str] = []  # calls of that number, which the rest does not fit

    def until(self, text: str) -> None:
        """Stop next at ``text``."""
        self.breakpoint = Breakpoint.parse(text)
        self._aim(self.breakpoint)
        self._reached = False

    def iteration_started(self, number: int, wanted: int, model: Models, optimizer: object) -> None:
        super().iteration_started(number, wanted, model, optimizer)
        self.models, self.optimizer = model, optimizer

    def record(
        self, group: PrismGroup, op: str, answer: Answer, args: Args, kwargs: Kwargs
    ) -> dist.Work | None:
        """Make the call; before or after the one that was chosen, stop."""
        pair = op in ("send", "recv")
        # counted from the start of the job, as the Flight Recorder does
        self._numbers[group.desc, pair] += 1
        # calls of the prompt itself, and of the start, are not stopped at
        if self._inside or not self.iteration:
            return self.through(group, op, answer, args, kwargs)
        site = self.sites.find(sys._getframe(2), foreign=True)
        call, number = self.label(op, group.desc, site), self._numbers[group.desc, pair]
        self._kinds[f"{label(call.phase, call.microbatch, call.chunk)} {op} {group.desc}"] = None
        numbered = self._number in (0, number)
        chosen = numbered and self._matcher.hit(call) or self._next
        ins, outs = arguments(op, args)
        seen = _Seen(call, number, _shapes(ins or outs))
        # remembered for the message, should the call never come
        if number == self._number and not chosen:
            self._unfit.append(seen.line)
        after = self._after  # at the prompt another call may be chosen
        if chosen and not after:
            self._stop(Prompt(self, group, seen, ins, outs, None))
        work = self.through(group, op, answer, args, kwargs)
        if self.real:
            seen.norm = _norm(outs or ins)
        self.seen.append(seen)
        if chosen and after:
            if work is not None:
                work.wait()
            # of what has arrived: before the wait the outputs are not filled
            if self.real:
                seen.norm = _norm(outs or ins)
            self._stop(Prompt(self, group, seen, ins, outs, work))
        return work

    def finished(self) -> None:
        """Say that the call never came: UsageError if it is that of ``--prism-break``."""
        # the name was there for prompts
        vars(builtins).pop("prism", None)
        if not self._reached:
            # calls that were made and are spelt alike
            near = difflib.get_close_matches(self.breakpoint.text, list(self._kinds), 3, 0.3)
            group = self.breakpoint.select.group
            unfit = [line for line in self._unfit if named_group(group, line.split()[4])]
            # calls of another group may have had the number
            if self._unfit:
                why = f"its number is that of {'; '.join((unfit or self._unfit)[:3])}"
            else:
                fitting = counted(self._matcher.seen, "call")
                iterations = counted(self.iteration, "iteration")
                why = f"{fitting} of rank {self.rank} fit without nth=, in {iterations}"
            error = UsageError(
                f"--prism-break {self.breakpoint.text!r} was never reached: {why}",
                fix="calls of this rank are: " + "; ".join(near or list(self._kinds)[:3]),
            )
            if not self._asked:
                raise error
            sys.stderr.write(f"prism: {error}\n")  # asked for at a prompt

    def _stop(self, prompt: Prompt) -> None:
        """Open the prompt in the frame of the job that makes the call."""
        self._reached = self._asked = self._inside = True
        self._next = False
        frame = _of_the_job(sys._getframe(2))
        # after the call its results are in scope
        when = "before"
        if self._after:
            when = "after"
        sys.stderr.write(
            f"prism: rank {self.rank}, iteration {self.iteration}, stops {when} "
            f"{prompt.line}; prism says what is in scope\n"
        )
        sys.stderr.flush()
        builtins.prism = prompt  # type: ignore[attr-defined] # in scope of every frame, until the end
        try:
            # a terminal here, or an editor elsewhere
            if self._at is None:
                _Pdb(prompt).stop(frame)
            else:
                self._remote(self._at)
        finally:
            self._inside = False

    def _remote(self, at: tuple[str, int]) -> None:
        import debugpy

        if not self._listening:
            self._listening = True
            try:
                debugpy.listen(at)
            except RuntimeError as error:
                message = f"debugpy cannot listen on {at[0]}:{at[1]}: {error}"
                fix = f"--prism-debugger debugpy:{at[1] % 65535 + 1}"
                raise PrismError(message, fix=fix) from None
            sys.stderr.write(f"prism: waiting for a debugger to attach to {at[0]}:{at[1]}\n")
            sys.stderr.flush()
            debugpy.wait_for_client()
        debugpy.breakpoint()
        return  # the prompt is here: the frame that makes the call is above, ``prism`` is in scope


def _of_the_job(frame: FrameType) -> FrameType:
    """The first frame from ``frame`` outwards in which pdb stops."""
    for outer, _ in traceback.walk_stack(frame):
        module = outer.f_globals.get("__name__", "")
        if not any(fnmatch.fnmatch(module, pattern) for pattern in _SKIPPED):
            return outer
    return frame


class _Pdb(pdb.Pdb):
    """pdb at a frame that has called us: it may be stepped on from there."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(nosigint=True, skip=_SKIPPED)
        self.prompt = "(prism) "
        self._mine = prompt

    def stop(self, frame: FrameType) -> None:
        """Ask until the user goes on; ``q`` ends the job."""
        self.reset()
        # pdb steps where each frame up to the outermost is traced
        for back, _ in traceback.walk_stack(frame):
            back.f_trace = self.trace_dispatch
            self.botframe = back
        self.set_step()
        self.interaction(frame, None)
        if self.stoplineno != -1 or self.breaks:  # n, s, r, until
            sys.settrace(self.trace_dispatch)
        else:
            self.set_continue()

    def set_next(self, frame: FrameType) -> None:
        """The next line of the job's code, also after ``up`` into a frame of torch."""
        super().set_next(_of_the_job(frame))

    def do_quit(self, arg: str) -> None:
        """End the job."""
        sys.settrace(None)
        raise PrismError("the job was ended at its breakpoint", fix="c goes on, q ends the job")

    do_q = do_exit = do_EOF = do_quit

    def default(self, line: str) -> bool:  # type: ignore[override] # True: no further prompt
        super().default(line)
        if self._mine._goes_on:
            self._mine._goes_on = False
            return bool(self.do_continue(""))
        return False


class Prompt:
    """What is in scope at a breakpoint, as ``prism``.

    call    : op, group, phase, microbatch, chunk, site, iteration
    inputs  : tensors that the call sends;  outputs : those that it fills
    work    : its handle, after the call
    """

    def __init__(
        self,
        debugger: Debugger,
        group: PrismGroup,
        seen: _Seen,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        work: dist.Work | None,
    ) -> None:
        self._debugger, self._made, self.group = debugger, seen, group
        self.call, self.inputs, self.outputs, self.work = seen.call, inputs, outputs, work
        self.line, self._goes_on = seen.line, False

    def __repr__(self) -> str:
        return (
            f"{self.line}\n"
            "prism.where()        the call, its group, what the peers deliver\n"
            "prism.calls()        the last calls, with shapes and norms\n"
            "prism.memory()       bytes alive by module\n"
            "prism.inputs, prism.outputs, prism.call, prism.group, prism.work\n"
            "prism.step()         go on to the next call\n"
            "prism.until('2F0')   go on to that call\n"
            "c goes on, q ends the job, n and s step through Megatron's code"
        )

    def where(self) -> None:
        """Print what this call is in the program, who its peers are and what they would deliver."""
        ranks, me = list(self.group.ranks), self._debugger.rank
        local = [ranks[position] for position in self.group.local]
        shown = format_ranks(sorted(ranks))
        # long lists of ranks are cut
        if len(ranks) > _LISTED:
            shown = f"{len(ranks)} ranks, {ranks[0]} to {ranks[-1]}"
        print(f"{self.line}, iteration {self.call.iteration}")
        print(f"  rank {me} is member {ranks.index(me)} of {len(ranks)}: {shown}")
        virtual = len(ranks) - len(local)
        holders = "this rank holds"
        # local ranks hold what virtual ones mirror
        if local != [me]:
            holders = f"ranks {format_ranks(sorted(local))} hold"
        policies = {
            "mirror": f"hold what {holders} (mirror)",
            "noise": "hold noise of the same scale",
        }
        answer = policies.get(self._debugger.values, f"answer by {self._debugger.values}")
        if virtual:
            print(f"  {virtual} of them virtual: they {answer}")
        else:
            print("  all of them are real")
        print(f"  sends {_shapes(self.inputs) or 'nothing'}, fills {_shapes(self.outputs) or '-'}")

    def calls(self, count: int = _KEPT) -> None:
        """Print the last ``count`` calls, oldest first."""
        for seen in list(self._debugger.seen)[-count:]:
            print(f"  {seen}")

    def memory(self, depth: int = 4) -> None:
        """Print bytes alive by module (``depth`` parts of its name), largest first."""
        for name, size in _alive(self._debugger.models, self._debugger.optimizer, depth):
            print(f"  {format_bytes(size):>12}  {name}")

    def step(self) -> None:
        """Go on to the next call."""
        self._debugger._next = self._goes_on = True

    def until(self, text: str) -> None:
        """Go on to the call that ``text`` selects."""
        try:
            self._debugger.until(text)
            self._goes_on = True
        except UsageError as error:  # at a prompt a line, not a traceback
            print(error)


def _alive(models: Models, optimizer: object, depth: int) -> list[tuple[str, int]]:
    """(kind and module, bytes) of every storage that a tensor holds, the largest first."""
    # storages of parameters, gradients and states, by their addresses
    owners = AllocationOwners(models or (), optimizer).parts()
    bytes_by_module: Counter[str] = Counter()
    counted_storages: set[int] = set()
    for candidate in gc.get_objects():
        # isinstance would ask proxies for their class, and run code of theirs
        if not issubclass(type(candidate), torch.Tensor):
            continue
        storage = candidate.untyped_storage()
        key = storage._cdata
        if key in counted_storages:
            continue
        counted_storages.add(key)
        left_bytes = storage.nbytes()
        parts = owners.get(key, [("other", "activations and temporaries", left_bytes)])
        # a buffer of gradients has those of many modules
        for kind, module, size in parts:
            held = min(size, left_bytes)
            bytes_by_module[f"{kind} {'.'.join(module.split('.')[:depth])}"] += held
            left_bytes -= held
        bytes_by_module[f"{parts[0][0]} padding"] += left_bytes
    return (+bytes_by_module).most_common()


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    """``2x4 float32, 8 int64, +3``: of the first four tensors."""
    words = ["x".join(map(str, t.shape)) + f" {str(t.dtype)[6:]}" for t in tensors[:4]]
    if len(tensors) > 4:
        words.append(f"+{len(tensors) - 4}")
    return ", ".join(words)


def _norm(tensors: Sequence[torch.Tensor]) -> float | None:
    """Of the first tensor of fractions; None if there is none."""
    for tensor in tensors:
        if tensor.is_floating_point():
            return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32))
    return None


# -- values that are not finite ------------------------------------------------------------------
# Stop at the first operator whose result is not finite, or too large, and say where that is.
#
# A TorchDispatchMode looks at the result of every operator, forward and backward, from the first
# train step on; views and fresh memory are not results. Each look waits for the device, so a job
# takes several times as long.


_FRESH = re.compile(r"aten::(new_)?(empty|resize|set_|_resize|_to_copy\.out)")


class ValueWatch(LabelledCalls):
    """Looks for ``subject``: ``nan``, ``inf``, or ``norm>X``.

    tier     : meta has no values, and is refused
    debugger : "pdb" opens a prompt at the place; None ends the job there

    Raises UsageError for another subject.
    """

    def __init__(self, subject: str, tier: str, debugger: str | None = None) -> None:
        super().__init__()
        # a limit of the norm, or values that are not finite
        norm = re.fullmatch(r"norm>(\d+(\.\d+)?([eE][+-]?\d+)?)", subject)
        if subject not in ("nan", "inf") and norm is None:
            message = f"--prism-watch {subject}: nan, inf or norm>X"
            raise UsageError(message, fix="--prism-watch nan")
        if tier == "meta":
            raise UnsupportedError(
                "--prism-watch: tier meta has shapes only, and no values",
                fix="--prism-tier cpu, with a smaller model",
            )
        self.subject = subject
        self.limit = 0.0
        if norm:
            self.limit = float(norm[1])
        self._debugger = debugger
        self._owners = AllocationOwners()
        self._mode = _Mode(self)
        self._looks = self._entered = False
        self._module = ""
        self._hooks: list[RemovableHandle] = []

    def iteration_started(self, number: int, wanted: int, model: Models, optimizer: object) -> None:
        super().iteration_started(number, wanted, model, optimizer)
        if not self._entered:
            self._entered = self._looks = True
            self._owners = AllocationOwners(model)
            # the model is known now: names of modules for the message
            self._owners.follow_forwards()
            for chunk in self._owners.models:
                for module in chunk.modules():
                    self._hooks.append(module.register_forward_hook(self._forward))
            self._mode.__enter__()

    def _forward(self, module: torch.nn.Module, args: object, output: object) -> None:
        """Remember whose backward it is that begins with this output."""
        name = self._owners.name_of(module)
        for tensor in pytree.tree_leaves(output):
            if not isinstance(tensor, torch.Tensor):
                continue
            node: Any = tensor.grad_fn
            # the innermost module's, once
            if node is not None and "prism" not in node.metadata:
                node.metadata["prism"] = name
                node.register_prehook(lambda _, name=name: setattr(self, "_module", name))

    def finished(self) -> None:
        self.stop()
        sys.stderr.write(
            f"prism: no operator of {counted(self.iteration, 'iteration')} gave {self.subject}\n"
        )

    def stop(self) -> None:
        """Look no longer; harmless a second time."""
        self._looks = False
        if self._entered:
            self._entered = False
            self._mode.__exit__(None, None, None)
            self._owners.remove()
            while self._hooks:
                self._hooks.pop().remove()

    def is_bad(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` has what is looked for."""
        if not tensor.is_floating_point() or tensor.is_meta or not tensor.numel():
            return False
        if self.subject in ("nan", "inf"):
            return bool(getattr(torch, f"is{self.subject}")(tensor).any())
        return float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) > self.limit

    def found(self, operator: OpOverload, inputs: list[torch.Tensor], result: torch.Tensor) -> None:
        """Say where it is, and stop: at a prompt, or the job."""
        labels = self._labels
        step = label(labels.get("phase", ""), labels.get("microbatch", -1), labels.get("chunk", -1))
        module = self._owners.module() or self._module
        node = torch._C._current_autograd_node()
        site = self._owners.sites.find(sys._getframe(2), foreign=True)
        shape = "x".join(map(str, result.shape)) or "1"
        lines = [
            f"iteration {self.iteration}, {step}: {operator} gave the first {self.subject} "
            f"({shape} {str(result.dtype)[6:]})"
        ]
        module_line = f"  module  {module or 'none'}"
        # only backward has a node that runs
        if node is not None:
            module_line += f", in {node.name()}"
        lines += [module_line, f"  line    {site or 'unknown'}"]
        bad_inputs = sum(map(self.is_bad, inputs))
        if bad_inputs:
            lines.append(f"  inputs  {bad_inputs} of {len(inputs)} have it already")
        else:
            lines.append("  inputs  none of them has it")
        self._looks = False  # the mode itself cannot be left from inside
        if self._debugger == "pdb":
            sys.stderr.write("\n".join(["prism: " + lines[0], *lines[1:], ""]))
            pdb.set_trace()
            return
        raise PrismError("\n".join(lines), fix="--prism-debugger pdb opens a prompt there")


class _Mode(TorchDispatchMode):
    def __init__(self, watch: ValueWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # views and new memory hold no new values
        if self._watch._looks and not func.is_view and not _FRESH.match(func.name()):
            for tensor in pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and self._watch.is_bad(tensor):
                    inputs = [
                        t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
                    ]
                    self._watch.found(func, inputs, tensor)
        return result
