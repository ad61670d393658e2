"""``prism import`` and ``prism compare``: traces of a real job, from the command line."""

from __future__ import annotations

import argparse
import dataclasses
import json

from megatron_prism.cli.command import OUT, Command, HelpGroup
from megatron_prism.cli.output import console, write_data
from megatron_prism.core.errors import UsageError
from megatron_prism.core.files import write_whole


def import_(args: argparse.Namespace) -> int:
    """Turn profiler traces of a real job into programs with times, and say what varies in it.

    prism import rank*.json.gz -o job       of torch.profiler (Megatron: --profile
                                            --use-pytorch-profiler), one file per rank
    prism import report.sqlite -o job       of nsys export --type sqlite
    prism import dumps -o job               of NCCL's Flight Recorder (TORCH_NCCL_ENABLE_TIMING=1)
    prism import traces --slices llama -o job   llama, captured, says what the job does (its groups,
                                            waits and phases), the traces how long
    prism replay job
    prism predict job variability=job/variability.json

    Prints the measured iteration beside the replayed one, and the spreads between GPUs, iterations
    and calls.  GPUs, nodes and iterations that stand out follow with what each costs; then what did
    not align or had to be inferred.  Waiting for the last rank does not count as time on the wire.
    -o keeps the programs, variability.json and import.json.
    """
    from megatron_prism.core.programs.slices import open_programs
    from megatron_prism.features.traces.programs import import_traces, write
    from megatron_prism.features.traces.variance import vary

    if args.out is None:
        raise UsageError("an import needs a folder for its programs", fix="-o DIR")
    captured = None
    if args.slices is not None:
        captured = open_programs(args.slices)
    imported = import_traces(args.traces, captured)
    varies = vary(imported)
    write(imported, args.out, force=args.force)
    # prism predict reads variability.json; import.json is what is printed
    for name, value in (("variability", varies.variability()), ("import", varies.to_json())):
        write_whole(args.out / f"{name}.json", json.dumps(value, indent=1) + "\n", force=True)
    if not write_data(
        args, varies.to_json(), [dataclasses.asdict(component) for component in varies.components]
    ):
        print(varies.to_text(), end="")
    console(stderr=True).print(f"wrote {args.out}")
    return 0


COMMANDS = {
    "import": Command(
        import_,
        (
            (("traces",), {"metavar": "TRACE", "nargs": "+", "help": "files, or folders of them"}),
            (("--slices",), {"metavar": "DIR", "help": "captured programs of the same job"}),
            OUT,
        ),
        group=HelpGroup.RUN,
    ),
}
