"""``prism mcp``: the server of tools for agents."""

from __future__ import annotations

import argparse


def mcp(args: argparse.Namespace) -> int:
    """Serve the questions to agents, on stdin and stdout (Model Context Protocol).

    prism mcp                 does it fit, how long and why, who hangs, which calls
    prism mcp --run           also captures jobs and evaluates layouts: runs their code here

    The tools' arguments are those of the Python functions; a job is named by its folder of slices.
    """
    from megatron_prism.cli.mcp_server import server

    server(run=args.run).run()
    return 0
