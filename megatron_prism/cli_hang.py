"""``prism hang``: who made a job hang, from its dumps or from its programs.

In : a folder of Flight Recorder dumps, or programs as a folder of slices, a file or a text, perhaps
with faults planted in them.  Out: the verdict in one line, then the picture; or one JSON object.
Nothing here imports torch.
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron_prism.cli_output import print_json
from megatron_prism.errors import UsageError

__all__ = ["hang"]


def hang(args: argparse.Namespace) -> int:
    """Who made the job hang?  Culprits, not victims, with what speaks for it.

    prism hang --dumps DIR      from Flight Recorder dumps, one per rank, alone
    prism hang PROGRAMS         would these programs hang?  as prism check, with a verdict
    prism hang PROGRAMS fault=drop@rank=37,group=tp,nth=2 [plan=FILE seed=0]
                                plants faults, runs all ranks until nobody can go on, and judges
                                the dumps that they would leave; -o DIR keeps these

    Exit status: 0 nobody waits, 1 a fault, 3 several explanations remain (never 0).  Dumps are read
    without executing anything in them.
    """
    from megatron_prism import hang as judge

    if (args.dumps is None) == (args.programs is None):
        raise UsageError("name dumps or programs", fix="prism hang --dumps DIR, or prism hang DIR")
    if args.dumps is not None:
        from megatron_prism import flight_recorder

        found: Any = judge.of_dumps(flight_recorder.read(args.dumps))
        planted = None
    else:
        found, planted = _of_programs(args)
    if args.json:
        more = {} if planted is None else {"planted": [str(hit) for hit in planted.hits]}
        print_json(found.to_json() | more)
    else:
        for hit in planted.hits if planted is not None else ():
            print(f"planted: {hit}")
        print(found)
    return int(found.exit_code)


def _of_programs(args: argparse.Namespace) -> tuple[Any, Any]:
    """(verdict, what was planted or None)."""
    from megatron_prism import graph
    from megatron_prism import hang as judge
    from megatron_prism.slices import open_programs

    faults, seed = _faults(args.settings)
    programs = open_programs(args.programs)
    if not faults:
        if args.out is not None:
            raise UsageError("without a fault there are no dumps to write", fix="fault=KIND@…")
        return judge.of_graph(graph.build(programs)), None
    from megatron_prism import faults as planting
    from megatron_prism import flight_export, hang_world, quiescence

    planted = planting.plant(programs, faults, seed)
    state = quiescence.run(planted.programs, planted.faults)
    if args.out is not None:
        flight_export.write(state, args.out, force=args.force)
    return hang_world.of_standstill(state), planted


def _faults(words: list[str]) -> tuple[list[Any], int]:
    from megatron_prism.fault_plan import load_plan, parse

    found, seed = [], 0
    for word in words:
        key, equals, value = word.partition("=")
        if key == "fault" and value:
            found.append(parse(value))
        elif key == "plan" and value:
            found += load_plan(value)
        elif key == "seed" and value.isdigit():
            seed = int(value)
        else:
            raise UsageError(f"{word} is not understood", fix="fault=KIND@…, plan=FILE, seed=N")
    return found, seed
