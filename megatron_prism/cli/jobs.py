"""The commands of core: run a rank of a job, run a recipe, list the recipes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_prism.cli.command import (
    OUT,
    OVERRIDES,
    RECIPE,
    VERBOSE,
    Command,
    HelpGroup,
    make_parser,
)
from megatron_prism.cli.output import Answer, console, print_table


def run(argv: Sequence[str]) -> int:
    """Run a training script as one rank of its large job; all other ranks are virtual.

    prism run [--prism-...] -- pretrain_gpt.py <the job's own arguments>
    prism run [--prism-...] torchrun --nnodes 128 --nproc-per-node 8 pretrain_gpt.py <the same>

    --prism-emulate is implied.  Launchers before the script are not started: their options say how
    many ranks there are.  The same script started with python or torchrun and --prism-emulate
    among its arguments does the same.
    """
    if not argv or argv[0] in ("-h", "--help"):
        from megatron_prism.emulate.command_line import options as flags

        flags.add_flags(make_parser("run", COMMANDS["run"])).print_help()
        # help that was asked for is an answer; in place of a line it is bad usage
        return 0 if argv else 2
    from megatron_prism.emulate.rank import launch

    return launch.run_script(list(argv))


def emulate(args: argparse.Namespace) -> Answer:
    """Run a recipe: build the model with megatron-core and train one rank per stage, no GPU needed.

    RECIPE is a YAML file or the name of a shipped recipe (prism recipes).  Prints, per stage,
    parameters, communication by group and the peak of live memory; -o keeps it all in a folder.
    """
    from megatron_prism.core.jobs import recipe as recipes

    recipe = recipes.load(args.recipe, args.settings)
    out = args.out
    # the recipe may say where its artefact goes
    if out is None and recipe.prism.out:
        out = Path(recipe.prism.out)
    from megatron_prism.emulate.jobs import recipe_job

    # with --json stdout is one JSON value, so the lines about ranks go to stderr
    result = recipe_job.emulate(
        recipe, out, force=args.force, console=console(stderr=args.json), verbose=args.verbose
    )
    return Answer(result.to_json, lambda: None, lambda: [dict(rank) for rank in result.ranks])


def recipes(args: argparse.Namespace) -> Answer:
    """List the recipes that come with the package, one line each."""
    from megatron_prism.core.jobs import recipe

    summaries = {name: recipe.summary(file) for name, file in recipe.shipped().items()}
    return Answer(
        lambda: summaries,
        lambda: print_table(("recipe", "what it shows"), summaries.items()),
        lambda: [{"recipe": name, "shows": text} for name, text in summaries.items()],
    )


COMMANDS = {
    "run": Command(run, group=HelpGroup.RUN, takes_common=False, raw=True),
    "emulate": Command(emulate, (RECIPE, OUT, VERBOSE, OVERRIDES), group=HelpGroup.RUN),
    "recipes": Command(recipes, group=HelpGroup.RUN),
}
