"""What does counting live bytes cost an iteration on tier meta?

``python -m benchmarks.speed.tracking [--times 2]``

Stage 0 of the main job (Llama-3-70B, 4 microbatches, 8 iterations) in fresh processes, in turns:
without the mode that counts, with that mode answering operators but not counting
(``operators.answer`` saves some of what any dispatch mode costs), and as it is.  Processor time of
the fastest iteration.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from benchmarks.report import ROOT, Row, finish

BOUND = 10.0  # percent
CODE = """
import json, sys, time
time.perf_counter, time.perf_counter_ns = time.process_time, time.process_time_ns
from megatron_prism.core import recipe
from megatron_prism.emulate import recipe_rank as rank_job
from megatron_prism.runtime.devices import live_bytes as live
from megatron_prism.runtime.devices import operators
from megatron_prism.emulate.session import Session

known = {}

def answers(self, func, types, args=(), kwargs=None):
    found = known.get(id(func), known)
    if found is known:
        found = known[id(func)] = operators.answer(func)
    out = None if found is None else found(args, kwargs)
    return func(*args, **(kwargs or {})) if out is None else out

if sys.argv[1] == "without":
    live.LiveBytes.__enter__, live.LiveBytes.__exit__ = lambda self: self, lambda self, *_: None
elif sys.argv[1] == "answers":
    live.LiveBytes.__torch_dispatch__ = answers
made = recipe.load("llama3-70b_1024gpu_tp8pp4vp5_h200",
                   ["train.iterations=8", "train.global_batch_size=128"])
found = rank_job.run(Session(), made, 0, lambda *_, **__: None, None)
print(json.dumps(found["iteration_s"]))
"""


def iteration(how: str) -> float:
    """Seconds of the fastest iteration in a fresh process."""
    words = [sys.executable, "-W", "ignore", "-c", CODE, how]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(done.stderr[-1500:])
    return min(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=2, help="processes of each")
    args = parser.parse_args()
    found: dict[str, list[float]] = {"without": [], "answers": [], "tracked": []}
    for _ in range(args.times):
        for how, times in found.items():
            times.append(iteration(how))
    best = {how: min(times) for how, times in found.items()}
    mode, none = best["tracked"] / best["answers"], best["tracked"] / best["without"]
    finish(
        "Counting live bytes on tier meta",
        [
            Row("an iteration without the mode", best["without"], "s"),
            Row("with the mode, not counting", best["answers"], "s"),
            Row("as it is", best["tracked"], "s"),
            Row("counting, over the mode alone", 100 * (mode - 1), "%", BOUND),
            Row("all of it, over no mode", 100 * (none - 1), "%", BOUND),
        ],
    )


if __name__ == "__main__":
    main()
