"""The questions as tools of the Model Context Protocol, for agents.

In : a function that answers a command, and the parser of each.  Out: a server whose tools have the
commands' arguments; an answer has the text that people get, figures, their sources, and what to
type next.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any
from unittest import mock

import megatron_prism
from megatron_prism.cli.output import Answer
from megatron_prism.core.errors import PrismError, UsageError

Json = dict[str, Any]  # what becomes JSON, or was
Parser = Callable[[str], argparse.ArgumentParser]
Ask = Callable[[str, list[str]], "tuple[argparse.Namespace, Answer | int]"]
_READ = ("fit", "compare", "replay", "hang")
_RUN = ("capture", "sweep")  # start jobs, or write
_OF_PEOPLE = {
    "help",
    "csv",
    "force",
    "json",
    "html",
    "trace",
    "markdown",
    "truth",
    "prometheus",
    "live",
    "watch",
    "ras",
    "confirm",
    "verbose",
    "slurm",
    "join",
}
_LONG = 16  # entries of a list in an answer
_SOURCES = ("provenance", "memory_provenance", "sources", "source", "evidence", "confidence")
_INSTRUCTIONS = (
    "Answers about Megatron-LM jobs without a GPU. A job is a folder of slices ({}). "
    "Figures say whether they are measured or modelled."
)


def server(run: bool, parser: Parser, ask: Ask) -> Any:
    """The server, an MCPServer of the SDK.

    Args:
        run: whether it has the tools that start jobs.
        parser: name of a command -> the parser of its arguments.
        ask: a command's name and words -> its arguments and what it answers.
    """
    try:
        from mcp.server import MCPServer
        from mcp.types import ToolAnnotations
    except ImportError as error:
        fix = "pip install 'megatron_prism[mcp]'"
        raise UsageError("prism mcp needs the SDK of the protocol, mcp 2", fix=fix) from error
    slices_come_from = "prism capture makes one; or prism mcp --run"
    names = [*_READ, "calls"]
    if run:
        slices_come_from = "make one with the tool capture"
        names += _RUN
    served = MCPServer(
        "prism",
        instructions=_INSTRUCTIONS.format(slices_come_from),
        version=megatron_prism.__version__,
    )
    for name in names:
        hints = ToolAnnotations(read_only_hint=name not in _RUN, destructive_hint=False)
        # no command lists calls: people read them in prism show
        tool: Callable[..., Json] = _calls
        if name != "calls":
            tool = _tool(name, parser(name), ask)
        served.add_tool(tool, name=name, annotations=hints)
    return served


def _tool(name: str, reader: argparse.ArgumentParser, ask: Ask) -> Callable[..., Json]:
    """A command as a function with a parameter for each of its arguments."""
    from pydantic import Field as Described

    hidden = set(_OF_PEOPLE)
    # a question writes no file; what starts a job says where its slices go
    if name not in _RUN:
        hidden.add("out")
    actions = {action.dest: action for action in reader._actions if action.dest not in hidden}
    parameters = [_parameter(action) for action in actions.values()]
    if name in _RUN:
        line = Annotated[str, Described(description="what starts the job: torchrun … script.py …")]
        parameters.append(
            inspect.Parameter("line", inspect.Parameter.KEYWORD_ONLY, default="", annotation=line)
        )

    def answer(line: str = "", **arguments: Any) -> Json:
        words = []
        for dest, value in arguments.items():
            if value is not None:
                words += _words(actions[dest], value)
        if line:
            words += ["--", *shlex.split(line)]
        text = io.StringIO()
        # the command prints as for people; its environment is put back
        with _user_errors(), contextlib.redirect_stdout(text), mock.patch.dict("os.environ"):
            _, reply = ask(name, words)
            assert isinstance(reply, Answer)
            reply.page()
            value = reply.value()
        return _answer(text.getvalue(), value, reply.next)

    answer.__doc__ = reader.description
    # the SDK makes the tool's schema of it
    vars(answer)["__signature__"] = inspect.Signature(parameters, return_annotation=Json)
    return answer


def _parameter(action: argparse.Action) -> inspect.Parameter:
    """An argument of a command as a parameter of its tool."""
    from pydantic import Field as Described

    kind: Any = str | int | float
    # several values
    if action.nargs in ("*", "+") or isinstance(action, argparse._AppendAction):
        kind = list[str]
    elif action.nargs == 0:
        kind = bool
    default = inspect.Parameter.empty
    # what may be left out may be null, too
    if not action.required or action.nargs == "*":
        default, kind = action.default, kind | None
    described: Any = Annotated[kind, Described(description=action.help)]
    return inspect.Parameter(
        action.dest, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=described
    )


def _words(action: argparse.Action, value: Any) -> list[str]:
    """An argument as on a command line."""
    flags = list(action.option_strings[-1:])
    # a switch
    if action.nargs == 0:
        if value:
            return flags
        return []
    values = [str(value)]
    if isinstance(value, list):
        values = [str(element) for element in value]
    # of one value each: the flag comes again
    if flags and action.nargs is None:
        words = []
        for text in values:
            words += [*flags, text]
        return words
    if not values:
        return []
    return [*flags, *values]


def _calls(programs: str, selector: str = "", rank: int = 0) -> Json:
    """Find the calls of a rank that a selector fits: what a breakpoint, a watch or a fault names.

    programs is a folder of slices; selector is like 1B2 all_reduce group=tp nth=3 site=mappings.py,
    words in any order.
    """
    from megatron_prism.core.programs.call_selector import CallSelector
    from megatron_prism.core.programs.collectives import BY_NAME
    from megatron_prism.core.programs.slices import open_programs

    with _user_errors():
        chosen = replace(CallSelector.parse(selector), rank=str(rank))
        job = open_programs(programs)
    labels = [op.call_label for op in job.of(rank) if op.name in BY_NAME]
    fitting = [label for label in labels if chosen.fits(label)]
    calls = []
    for nth, label in enumerate(fitting):
        if chosen.nth in (None, nth):
            calls.append({"nth": nth + 1, **asdict(label)})
    then = f"prism run --prism-debugger --prism-break {shlex.quote(str(chosen))} -- the job's line"
    return _answer("", {"calls": calls, "source": dict(job.source)}, then)


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """An error that a user can act on is one of the tool."""
    from mcp.server.mcpserver.exceptions import ToolError

    try:
        yield
    except PrismError as error:
        raise ToolError(str(error)) from error


def _answer(text: str, value: Any, then: str) -> Json:
    """Text as people get it, figures, where they are from, what to type next."""
    sources = {key: value[key] for key in _SOURCES if key in value}
    figures = {key: entry for key, entry in value.items() if key not in sources}
    # a verdict says itself what would decide, and where to stop
    then = then or value.get("decides") or value.get("stop") or ""
    return {
        "text": text,
        "figures": _shortened(figures),
        "provenance": _shortened(sources),
        "next": then,
    }


def _shortened(value: object) -> object:
    """``value`` with long lists cut; what is left out is counted."""
    if isinstance(value, Mapping):
        return {str(key): _shortened(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [_shortened(entry) for entry in value[:_LONG]]
        if len(value) > _LONG:
            entries.append(f"… and {len(value) - _LONG} more")
        return entries
    return value
