"""``prism hang``: who made a job hang, from its dumps or from its programs.

In : a folder of Flight Recorder dumps, or programs as a folder of slices, a file or a text.  Out:
the verdict in one line, then the picture; or one JSON object.  Nothing here imports torch.
"""

from __future__ import annotations

import argparse

from megatron_prism.cli_output import print_json
from megatron_prism.errors import UsageError

__all__ = ["hang"]


def hang(args: argparse.Namespace) -> int:
    """Who made the job hang?  Culprits, not victims, with what speaks for it.

    prism hang --dumps DIR      from Flight Recorder dumps, one per rank, alone
    prism hang PROGRAMS         would these programs hang?  as prism check, with a verdict

    Exit status: 0 nobody waits, 1 a fault, 3 several explanations remain (never 0).  Dumps are read
    without executing anything in them.
    """
    from megatron_prism import hang as judge

    if (args.dumps is None) == (args.programs is None):
        raise UsageError("name dumps or programs", fix="prism hang --dumps DIR, or prism hang DIR")
    if args.dumps is not None:
        from megatron_prism import flight_recorder

        found = judge.of_dumps(flight_recorder.read(args.dumps))
    else:
        from megatron_prism import graph
        from megatron_prism.slices import open_programs

        found = judge.of_graph(graph.build(open_programs(args.programs)))
    if args.json:
        print_json(found.to_json())
    else:
        print(found)
    return found.exit_code
