"""``prism import`` and ``prism compare``: traces of a real job, from the command line."""

from __future__ import annotations

import argparse
import dataclasses
import json

from megatron_prism.cli import arguments
from megatron_prism.cli.output import check_outputs, console, write_data, write_outputs
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
    from megatron_prism.core.slices import open_programs
    from megatron_prism.traces.programs import import_traces, write
    from megatron_prism.traces.variance import vary

    if args.out is None:
        raise UsageError("an import needs a folder for its programs", fix="-o DIR")
    captured = None if args.slices is None else open_programs(args.slices)
    found = import_traces(args.traces, captured)
    varies = vary(found)
    write(found, args.out, force=args.force)
    for name, value in (("variability", varies.variability()), ("import", varies.to_json())):
        write_whole(args.out / f"{name}.json", json.dumps(value, indent=1) + "\n", force=True)
    if not write_data(
        args, varies.to_json(), [dataclasses.asdict(one) for one in varies.components]
    ):
        print(varies.to_text(), end="")
    console(stderr=True).print(f"wrote {args.out}")
    return 0


def compare(args: argparse.Namespace) -> int:
    """Compare the timeline of a real job with the predicted one: where the error comes from.

    prism compare rank*.json.gz llama
    prism compare traces llama machine=h200 calibration=calibration.json
    prism compare traces llama --html page.html --trace both.json

    The last of the paths is the prediction: programs, as prism replay takes them.  Prints how many
    calls have kernels and how many are paired.  From 95 % on it prints the parts of every traced
    rank's iteration, predicted and real (computing: kernels ran; exposed calls, waiting; host: what
    is left), and the segments and calls that differ most.  --trace has both tracks for
    ui.perfetto.dev.
    """
    from megatron_prism.core.slices import open_programs
    from megatron_prism.replay.priced_graph import replay
    from megatron_prism.traces.compare import compare_traces

    paths: list[str] = []
    keys = {"machine": arguments.name, "calibration": arguments.name}
    how = arguments.read(args.paths, keys, "compare", names=paths)
    if len(paths) < 2:
        raise UsageError(
            "a comparison needs traces and a prediction", fix="prism compare TRACES DIR"
        )
    check_outputs([args.html, args.trace], args.force, paths)
    made = compare_traces(paths[:-1], replay(open_programs(paths[-1]), **how))
    if not write_data(args, made.to_json(), made.rows()):
        print(made.to_text(), end="")
    if made.compared:
        write_outputs(args.force, (args.html, made.to_html), (args.trace, made.to_chrome_trace))
    return 0
