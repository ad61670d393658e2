"""``prism mcp``: serve the questions to agents."""

from __future__ import annotations

import argparse

from megatron_prism.cli.command import Command, HelpGroup, switch


def mcp(args: argparse.Namespace) -> int:
    """Serve the questions to agents, on stdin and stdout (Model Context Protocol).

    prism mcp                 does it fit, how long and why, who hangs, which calls
    prism mcp --run           also captures jobs and evaluates layouts: runs their code here

    The tools' arguments are those of the commands; a job is named by its folder of slices.
    """
    from megatron_prism.cli.main import ask, parser
    from megatron_prism.features.agents.server import server

    server(args.run, parser, ask).run()
    return 0


COMMANDS = {
    "mcp": Command(
        mcp,
        (switch("--run", "also capture jobs and evaluate layouts"),),
        group=HelpGroup.MAINTAIN,
        takes_common=False,
    ),
}
