"""The questions as tools of the Model Context Protocol, for agents.

In : the public functions.  Out: a server whose tools have their signatures; programs are named by
their path.  An answer has the text that people get, figures, their sources, and what to type next.
"""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import megatron_prism
from megatron_prism.core.call_selector import CallSelector
from megatron_prism.core.collectives import BY_NAME
from megatron_prism.core.errors import PrismError, UsageError
from megatron_prism.core.program import Programs
from megatron_prism.core.slices import open_programs

Json = dict[str, Any]  # what becomes JSON, or was
_PLAIN = (str, int, float, bool)
_LONG = 16  # entries of a list in an answer
_SOURCES = ("provenance", "memory_provenance", "sources", "source", "evidence", "confidence")
_INSTRUCTIONS = ("Answers about Megatron-LM jobs without a GPU. A job is a folder of slices ({}). "
                 "Figures say whether they are measured or modelled.")  # fmt: skip


@dataclass(frozen=True)
class Tool:
    """A question: a public function, or one of this file; and what one asks or types after it."""

    name: str
    function: Callable[..., object] | str  # of this file, or the name of a public one
    next: Callable[[Any, Json], str]
    runs: bool = False  # starts jobs, or writes


def server(run: bool) -> Any:
    """The server, an MCPServer of the SDK; ``run``: with the tools that start jobs."""
    try:
        from mcp.server import MCPServer
        from mcp.types import ToolAnnotations
    except ImportError as error:
        fix = "pip install 'megatron_prism[mcp]'"
        raise UsageError("prism mcp needs the SDK of the protocol, mcp 2", fix=fix) from error
    how = "make one with the tool capture" if run else "prism capture makes one; or prism mcp --run"
    made = MCPServer("prism", instructions=_INSTRUCTIONS.format(how),
                     version=megatron_prism.__version__)  # fmt: skip
    for tool in _tools():
        if run or not tool.runs:
            hints = ToolAnnotations(read_only_hint=not tool.runs, destructive_hint=False)
            made.add_tool(_served(tool), annotations=hints)
    return made


def _tools() -> list[Tool]:
    of = "prism {} {}".format
    return [
        Tool("capture", capture, lambda made, given: of("fit", given["out"]), runs=True),
        Tool("fit", "fit", lambda made, given: of("replay", given["programs"]) if made.fits else
             of("capture -o DIR -- the job's line", made.changes[0].words if made.changes else "")),
        Tool("compare", "compare", lambda made, given: of("fit", given["b"])),
        Tool("replay", "replay",
             lambda made, given: of("replay", f"{given['programs']} --html replay.html")),
        Tool("hang", "hang", lambda made, given: made.decides or made.stop),
        Tool("sweep", "sweep", lambda made, given: " ".join(
            made.commands[made.rows[0].result["key"]]) if made.rows else "other axes", runs=True),
        Tool("calls", calls, lambda made, given: "prism run --prism-debugger --prism-break "
             f"{shlex.quote(made['break'])} -- the job's line"),
    ]  # fmt: skip


def capture(line: str, out: str) -> Json:
    """Capture the programs of a job, without its GPUs: what one rank of each stage does.

    Args:
        line: what starts the job: torchrun --nnodes 128 --nproc-per-node 8 pretrain_gpt.py …, or
            the name of a recipe.
        out: folder for the slices, which the other tools then take as ``programs``.
    """
    words = shlex.split(line)
    command = [sys.executable, "-m", "megatron_prism", "capture", "-o", out, *words]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        what = "\n".join((done.stderr or done.stdout).splitlines()[-12:])
        raise UsageError(what or "the capture failed", fix=shlex.join(["prism", *command[3:]]))
    programs = open_programs(out)
    return {"programs": out, "world": str(programs.world), "source": dict(programs.source)}


def calls(programs: Programs, selector: str = "", rank: int = 0) -> Json:
    """Find the calls of a rank that a selector fits: what a breakpoint, a watch or a fault names.

    Args:
        programs: of the job.
        selector: 1B2 all_reduce group=tp nth=3 site=mappings.py, words in any order.
        rank: whose calls.
    """
    chosen = replace(CallSelector.parse(selector), rank=str(rank))
    labels = [one.call_label for one in programs.of(rank) if one.name in BY_NAME]
    fitting = enumerate(one for one in labels if chosen.fits(one))
    found = [{"nth": nth, **asdict(one)} for nth, one in fitting if chosen.nth in (None, nth)]
    return {"calls": found, "break": str(chosen), "source": dict(programs.source)}


# -- a public function as a tool -------------------------------------------------------------------
def _served(tool: Tool) -> Callable[..., Json]:
    """The function that the server calls: JSON in, an answer out."""
    from mcp.server.mcpserver.exceptions import ToolError
    from pydantic import Field as Described

    public = tool.function
    function = getattr(megatron_prism, public) if isinstance(public, str) else public
    hints = get_type_hints(function)
    about = {**_described(megatron_prism.price), **_described(function)}
    readers: dict[str, Callable[..., object]] = {}
    parameters = []
    for name, one in inspect.signature(function).parameters.items():
        kind, reader = _kind(hints[name])
        if kind is not None:
            readers[name] = reader
            field = Described(description=about.get(name, ""))
            parameters.append(one.replace(kind=one.KEYWORD_ONLY, annotation=Annotated[kind, field]))

    def ask(**given: object) -> Json:
        try:
            values = {key: one if one is None else readers[key](one) for key, one in given.items()}
            made = function(**values)
            return _answer(made, tool.next(made, given))
        except PrismError as error:
            raise ToolError(str(error)) from error

    ask.__name__, ask.__doc__ = tool.name, inspect.getdoc(function)
    vars(ask)["__signature__"] = inspect.Signature(parameters, return_annotation=Json)
    return ask


def _kind(hint: object) -> tuple[object, Callable[..., object]]:
    """(what stands for an argument in JSON, what makes the argument of it); None for what only
    Python can give."""
    union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds: list[object] = [one for one in union if one in _PLAIN]
    origins = [origin for one in union if isinstance(origin := get_origin(one), type)]
    options = [one for one in union if isinstance(one, type) and is_dataclass(one) and all(
        of.default is not of.empty for of in inspect.signature(one).parameters.values()
    )]  # fmt: skip
    reader: Callable[..., object] = lambda value: value  # noqa: E731
    if Programs in union:
        kinds, reader = [str], open_programs
    elif not kinds and options:
        kinds, reader = [Json], lambda value: options[0](**value)
    else:
        kinds += [Json] * any(issubclass(one, Mapping) for one in origins)
        kinds += [list[object]] * any(issubclass(one, Sequence) for one in origins)
    kinds += [None] * (bool(kinds) and NoneType in union)
    return Union[tuple(kinds)] if kinds else None, reader  # noqa: UP007


def _described(function: object) -> dict[str, str]:
    """Argument -> what the docstring says about it."""
    section = re.search(r"Args:\n(.*?)(?:\n\S|\Z)", inspect.getdoc(function) or "", re.DOTALL)
    rows = re.findall(r"^    (\w[\w, ]*): (.*?)(?=^    \w|\Z)", section[1] if section else "",
                      re.DOTALL | re.MULTILINE)  # fmt: skip
    return {name: " ".join(text.split()) for names, text in rows for name in names.split(", ")}


def _answer(made: Any, then: str) -> Json:
    """Text as people get it, figures, where they are from, what to type next."""
    value = made if isinstance(made, dict) else made.to_json() if hasattr(made, "to_json") else {}
    text = made.to_text() if hasattr(made, "to_text") else "" if value is made else str(made)
    sources = {key: value[key] for key in _SOURCES if key in value}
    figures = {key: one for key, one in value.items() if key not in sources}
    return {"text": text, "figures": _shortened(figures), "provenance": _shortened(sources),
            "next": then}  # fmt: skip


def _shortened(value: object) -> object:
    """``value`` with long lists cut; what is left out is counted."""
    if isinstance(value, Mapping):
        return {str(key): _shortened(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        more = [f"… and {len(value) - _LONG} more"] if len(value) > _LONG else []
        return [*map(_shortened, value[:_LONG]), *more]
    return value
