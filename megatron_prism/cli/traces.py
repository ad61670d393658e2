"""``prism import``: traces of a real job, from the command line."""

from __future__ import annotations

import argparse
import json

from megatron_prism.cli.output import console, print_json
from megatron_prism.core.errors import UsageError
from megatron_prism.core.files import write_whole

__all__ = ["import_"]


def import_(args: argparse.Namespace) -> int:
    """Turn profiler traces of a real job into programs with times, and say what varies in it.

    prism import rank*.json.gz -o job       of torch.profiler (Megatron: --profile
                                            --use-pytorch-profiler), one file per rank
    prism import report.sqlite -o job       of nsys export --type sqlite
    prism replay job
    prism predict job variability=job/variability.json

    Prints the measured iteration and the replayed one, spreads between GPUs, iterations and calls,
    GPUs, nodes and iterations that stand out with what each costs, time on the wire apart from
    waiting for the last rank, and what did not align or had to be inferred.  -o keeps the programs,
    variability.json and import.json.
    """
    from megatron_prism.traces.programs import import_traces, write
    from megatron_prism.traces.variance import vary

    if args.out is None:
        raise UsageError("an import needs a folder for its programs", fix="-o DIR")
    found = import_traces(args.traces)
    varies = vary(found)
    write(found, args.out, force=args.force)
    for name, value in (("variability", varies.variability()), ("import", varies.to_json())):
        write_whole(args.out / f"{name}.json", json.dumps(value, indent=1) + "\n", force=True)
    if args.json:
        print_json(varies.to_json())
    else:
        print(varies.to_text(), end="")
    console(stderr=True).print(f"wrote {args.out}")
    return 0
