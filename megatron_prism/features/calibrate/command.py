"""``prism calibrate``: how long calls take here, and how fast this host is."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_prism.cli import arguments
from megatron_prism.cli.command import Command, HelpGroup, option, switch
from megatron_prism.cli.output import Answer, check_outputs, console
from megatron_prism.core.errors import UsageError
from megatron_prism.core.units import counted, format_share


def calibrate(args: argparse.Namespace) -> Answer:
    """Measure how long calls take among this host's devices, for prism replay, predict and pacing.

    prism calibrate -o h200x4.json [--processes 4]
    prism calibrate --host [-o HOST.json] [--seconds 10]
    prism calibrate --from-nccl-tests all_reduce_perf.txt all_gather_perf.json -o dgx.json

    --host measures this host alone, without a GPU: how fast it issues work, for host= of prism
    replay and predict.  The first line measures this, too; on GPUs also the host's time for a call
    of NCCL, and how much calls and computing slow each other down.  The last line takes output of
    nccl-tests, on any number of hosts; --node-gpus 72 is the number of GPUs that NVLink joins, if
    that is more than a host has.
    """
    if args.out is None and not args.host:
        raise UsageError("a calibration needs a file to write", fix="-o FILE.json")
    check_outputs([args.out], args.force, args.from_nccl_tests or ())
    # no GPU is needed
    if args.host:
        return _host(args)
    # measurements of somebody else's machine
    if args.from_nccl_tests:
        return _from_nccl_tests(args)
    from megatron_prism.features.calibrate import calibrate as calibrating

    talk = console(stderr=args.json)
    calibrating.calibrate(args.out, args.processes, force=args.force, console=talk)
    return Answer(lambda: json.loads(args.out.read_text(encoding="utf-8")), lambda: None)


def _host(args: argparse.Namespace) -> Answer:
    """The index of this host: printed, and written if a file is named."""
    from megatron_prism.core.files import write_whole
    from megatron_prism.emulate.capture import host_benchmark

    console(stderr=args.json).print(f"measuring this host for {args.seconds} s")
    host = host_benchmark.measure(args.seconds)
    if args.out is not None:
        write_whole(args.out, host.to_json(), force=args.force)

    def page() -> None:
        print(f"host index {host.index:.3f}, spread {format_share(host.spread, 0)}: {host.source}")
        for name, times in host.parts.items():
            print(f"  {name:<9} {times:.3f} x as long as the reference host")
        if args.out is not None:
            print(f"wrote {args.out}")

    then = "" if args.out is None else f"prism replay DIR host={args.out}"
    return Answer(lambda: json.loads(host.to_json()), page, next=then)


def _from_nccl_tests(args: argparse.Namespace) -> Answer:
    from megatron_prism.core.files import write_whole
    from megatron_prism.features.calibrate import nccl_tests

    runs = [nccl_tests.read(file) for file in args.from_nccl_tests]
    stored = nccl_tests.calibration(runs, args.node_gpus)
    write_whole(args.out, json.dumps(stored, indent=1) + "\n", force=args.force)

    def page() -> None:
        for run in runs:
            where = "one host" if run.per_node == run.ranks else f"{run.per_node} per host"
            ranks, sizes = counted(run.ranks, "rank"), counted(len(run.rows), "size")
            print(f"{run.path}: {run.op}, {ranks}, {where}, {sizes}")
        print(f"wrote {args.out}: {stored['source']}")

    return Answer(lambda: stored, page)


COMMANDS = {
    "calibrate": Command(
        calibrate,
        (
            (("-o", "--out"), {"metavar": "FILE", "type": Path, "help": "calibration to write"}),
            switch("--host", "measure this host alone, without a GPU"),
            (
                ("--from-nccl-tests",),
                {"nargs": "+", "metavar": "FILE", "help": "output of nccl-tests"},
            ),
            option(
                "processes",
                arguments.count(0, 9999, "--processes 4"),
                "N",
                "processes, one per GPU",
            ),
            option(
                "seconds",
                arguments.count(1, 3600, "--seconds 10"),
                "N",
                "duration of --host",
                default=10,
            ),
            option(
                "node-gpus",
                arguments.count(1, 9999, "--node-gpus 72"),
                "N",
                "GPUs that NVLink joins, with --from-nccl-tests",
            ),
        ),
        group=HelpGroup.MAINTAIN,
    ),
}
