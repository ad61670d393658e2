"""How near are modelled calls between nodes to what others published of nccl-tests?

``python -m benchmarks.accuracy.network_calls``

Nothing is fitted: the model is NCCL's own estimate on the rates of ``machine=h100``.  The published
times are in ``results/h100_nccl_tests.json``.  Prints the table of docs/accuracy.md.
"""

from __future__ import annotations

import json

from benchmarks.report import ROOT
from megatron_prism.replay.costs.collectives import Shape, modelled
from megatron_prism.replay.costs.machine import machine

STORED = ROOT / "benchmarks" / "results" / "h100_nccl_tests.json"


def main() -> None:
    here = machine("h100")
    print("| cluster | bytes | published | modelled | error |\n|---|---|---|---|---|")
    for table in json.loads(STORED.read_text(encoding="utf-8"))["tables"]:
        for row in table["rows"]:
            shape = Shape(row["nodes"] * here.gpus_per_node, here.gpus_per_node)
            us = modelled(row["op"], shape, row["bytes"], here) / 1e3
            error = f"{100 * (us / row['us'] - 1):+.0f} %".replace("-", "−")
            size = f"{row['bytes'] / (1 << 20):,.0f} MiB"
            print(f"| {table['where']} | {size} | {row['us']:,.0f} us | {us:,.0f} us | {error} |")


if __name__ == "__main__":
    main()
