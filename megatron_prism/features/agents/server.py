"""The questions as tools of the Model Context Protocol, for agents.

In : the table of commands.  Out: a server whose tools have the commands' arguments; an answer has
the text that people get, figures, their sources, and what to type next.
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
        parser: gives the reader of a command's words.
        ask: a command's name and words -> its arguments and what it answers.
    """
    try:
        from mcp.server import MCPServer
        from mcp.types import ToolAnnotations
    except ImportError as error:
        fix = "pip install 'megatron_prism[mcp]'"
        raise UsageError("prism mcp needs the SDK of the protocol, mcp 2", fix=fix) from error
    how = "make one with the tool capture" if run else "prism capture makes one; or prism mcp --run"
    served = MCPServer(
        "prism", instructions=_INSTRUCTIONS.format(how), version=megatron_prism.__version__
    )
    for name in (*_READ, "calls", *(_RUN if run else ())):
        hints = ToolAnnotations(read_only_hint=name not in _RUN, destructive_hint=False)
        tool = _calls if name == "calls" else _tool(name, parser(name), ask)
        served.add_tool(tool, name=name, annotations=hints)
    return served


def _tool(name: str, reader: argparse.ArgumentParser, ask: Ask) -> Callable[..., Json]:
    """A command as a function with a parameter for each of its arguments."""
    from pydantic import Field as Described

    hidden = _OF_PEOPLE if name in _RUN else {*_OF_PEOPLE, "out"}
    actions = {one.dest: one for one in reader._actions if one.dest not in hidden}
    parameters = []
    for dest, action in actions.items():
        several = action.nargs in ("*", "+") or isinstance(action, argparse._AppendAction)
        kind: Any = list[str] if several else bool if action.nargs == 0 else str | int | float
        needed = action.required and action.nargs != "*"
        default = inspect.Parameter.empty if needed else action.default
        kind = kind if needed else kind | None
        described: Any = Annotated[kind, Described(description=action.help)]
        parameters.append(
            inspect.Parameter(
                dest, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=described
            )
        )
    if name in _RUN:
        line = Annotated[str, Described(description="what starts the job: torchrun … script.py …")]
        parameters.append(
            inspect.Parameter("line", inspect.Parameter.KEYWORD_ONLY, default="", annotation=line)
        )

    def answer(line: str = "", **given: Any) -> Json:
        words = [
            word
            for dest, value in given.items()
            if value is not None
            for word in _words(actions[dest], value)
        ]
        text = io.StringIO()
        with _told(), contextlib.redirect_stdout(text), mock.patch.dict("os.environ"):
            _, made = ask(name, [*words, *(["--"] if line else []), *shlex.split(line)])
            assert isinstance(made, Answer)
            made.page()
            value = made.value()
        return _answer(text.getvalue(), value, made.next)

    answer.__doc__ = reader.description
    vars(answer)["__signature__"] = inspect.Signature(parameters, return_annotation=Json)
    return answer


def _words(action: argparse.Action, value: Any) -> list[str]:
    """An argument as on a command line."""
    if action.nargs == 0:
        return list(action.option_strings[-1:]) if value else []
    values = [str(one) for one in value] if isinstance(value, list) else [str(value)]
    if not action.option_strings:
        return values
    flag = action.option_strings[-1]
    if action.nargs is None:
        return [word for one in values for word in (flag, one)]
    return [flag, *values] if values else []


def _calls(programs: str, selector: str = "", rank: int = 0) -> Json:
    """Find the calls of a rank that a selector fits: what a breakpoint, a watch or a fault names.

    programs is a folder of slices; selector is like 1B2 all_reduce group=tp nth=3 site=mappings.py,
    words in any order.
    """
    from megatron_prism.core.call_selector import CallSelector
    from megatron_prism.core.collectives import BY_NAME
    from megatron_prism.core.slices import open_programs

    with _told():
        chosen = replace(CallSelector.parse(selector), rank=str(rank))
        job = open_programs(programs)
    labels = [one.call_label for one in job.of(rank) if one.name in BY_NAME]
    fitting = enumerate(one for one in labels if chosen.fits(one))
    calls = [{"nth": nth + 1, **asdict(one)} for nth, one in fitting if chosen.nth in (None, nth)]
    then = f"prism run --prism-debugger --prism-break {shlex.quote(str(chosen))} -- the job's line"
    return _answer("", {"calls": calls, "source": dict(job.source)}, then)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """An error that a user can act on is one of the tool."""
    from mcp.server.mcpserver.exceptions import ToolError

    try:
        yield
    except PrismError as error:
        raise ToolError(str(error)) from error


def _answer(text: str, value: Any, then: str) -> Json:
    """Text as people get it, figures, where they are from, what to type next."""
    sources = {key: value[key] for key in _SOURCES if key in value}
    figures = {key: one for key, one in value.items() if key not in sources}
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
        return {str(key): _shortened(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        more = [f"… and {len(value) - _LONG} more"] if len(value) > _LONG else []
        return [*map(_shortened, value[:_LONG]), *more]
    return value
