"""``prism uneven``: what comes of inputs that differ between ranks."""

from __future__ import annotations

import argparse

from megatron_prism.cli.command import (
    CALIBRATION,
    LIMIT,
    MACHINE,
    PROGRAMS,
    Command,
    HelpGroup,
    settings,
)
from megatron_prism.cli.memory_arguments import limit_of
from megatron_prism.cli.output import Answer


def uneven(args: argparse.Namespace) -> Answer:
    """Do calls still match if some ranks get other lengths, fewer microbatches, or no more data?

    prism uneven DIR microbatches=dp=3:7
    prism uneven DIR loader=dp=3:5
    prism uneven DIR lengths=dp=1:4096,2048,4096,1024 capture=DIR2048 capture=DIR1024
    prism uneven DIR microbatches=0-63:6-8 lengths=0-63:1024-4096 capture=DIR1024
    prism uneven DIR programs=dp=0:EVALUATION

    DIR is a capture in which all ranks get the same.  Exit status 1 if the job would hang or its
    calls do not fit, with the first call and its line in Megatron, and the smallest example.

    What ranks get (each as often as needed; a rank in one of them, or in several of
    microbatches=, lengths= and loader=):
      microbatches=RANKS:N      their loop has N turns: captured steps in the order of Megatron's
                                scheduler
      loader=RANKS:N            their data iterator raises StopIteration after N microbatches
      lengths=RANKS:L,L,…       tokens of a sample, of each microbatch (of several iterations one
                                after the other), or one for all
      …=RANKS:LOW-HIGH          each dp rank of RANKS draws its count, or one of the captured
                                lengths for each microbatch: a combination that stops is looked for
      lengths=FILE              the same, a line for each dp rank: {"dp": 1, "lengths": [4096]}
      lengths=FILE              how often lengths occur: {"length": 4096, "count": 17}, or packed
                                {"documents": [1000, 3096]}; "dp": 1 for that dp rank alone
      lengths=DATA.idx          the documents of a data set, packed as Megatron packs them
      iterations=N seed=N       how often is drawn (200), and with which seed
      capture=DIR               the job at another --seq-length; two or more say what lengths in
                                between do, and how long steps take
      programs=RANKS:DIR        they do what was captured in DIR: another kind of batch, images, an
                                evaluation
    """
    from megatron_prism.core.programs.slices import open_programs
    from megatron_prism.features.uneven import uneven as uneven_inputs

    result = uneven_inputs.uneven(
        open_programs(args.programs),
        args.settings,
        machine=args.machine,
        calibration=args.calibration,
        limit=limit_of(args.limit) or 0,
    )
    return Answer(
        result.to_json,
        lambda: print(result.to_text()),
        result.rows,
        status=int(result.stops),
    )


_LIMIT = LIMIT[0], {**LIMIT[1], "help": "memory of a GPU that drawn batches may exceed"}
_INPUTS = settings("what ranks get: microbatches=dp=3:7, loader=dp=3:5, lengths=dp=1:4096,2048")
COMMANDS = {
    "uneven": Command(
        uneven,
        (PROGRAMS, _INPUTS, MACHINE, CALIBRATION, _LIMIT),
        group=HelpGroup.DEBUG,
        programs=0,
        shows_progress=True,
    ),
}
