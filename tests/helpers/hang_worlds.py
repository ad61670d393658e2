"""Labelled hangs: what is done to a healthy world, and what a verdict must say.

    PYTHONPATH=. python tests/helpers/hang_worlds.py   # docs/measurements.md, with fr_trace

Every case is a world (``worlds/*.txt``: what Megatron's own ranks call, captured on shapes; see
``make_worlds``) and faults.  The world runs until nobody can go on, every rank's Flight Recorder
dump is written, and the judge gets these files and nothing else.  ``score`` compares the verdict
with the truth, which is computed here from the two worlds, by code that shares nothing with the
judge: the rank at fault, its group, op and sequence, the kind of fault, the call site.  C.. are
rows of the catalogue of real issues that motivated the case.
"""

import ast
import contextlib
import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass

from megatron_prism.core import groups
from megatron_prism.core.programs.program_text import parse
from megatron_prism.features.hang import analyze as hang
from megatron_prism.features.hang import dumps, export, fault_plan
from megatron_prism.features.hang import planting as faults
from megatron_prism.features.hang.diagnose import diagnose_graph
from megatron_prism.graph import stall, world_graph

HERE = pathlib.Path(__file__).parents[1] / "features" / "hang"


@dataclass(frozen=True)
class Case:
    """verdict: the fault class that must be found; where: how exactly the call is known

    where = "first" : group, op, sequence and site of the first call that the fault changes
            "after" : some call of the culprit from the fault on, since it makes none of them
            "group" : the group only (either of two whose order is inverted)
            "programs" : as first, but dumps alone cannot say it (they have no splits)
    """

    name: str
    about: str
    world: str
    faults: tuple[str, ...]
    verdict: str
    where: str = "first"


CASES = (
    Case("A3 microbatch skipped", "C05: counts differ over DP", "moe",
         ("skip_microbatch@rank=5,mb=1",), "mismatch"),
    Case("A4 inversion", "C09, C10: DP before EP on one rank", "moe",
         ("swap@rank=5,group=ep,op=all_to_all,nth=24:with=dp:reduce_scatter:1",), "order", "group"),
    Case("A5 send lost", "C06", "interleaved", ("p2p_lost@rank=2,op=send,nth=4",), "order"),
    Case("A5 receive lost", "C06", "interleaved", ("p2p_lost@rank=5,op=recv,nth=3",), "order"),
    Case("A5 prev and next swapped", "C07", "interleaved",
         ("p2p_swap@rank=2,op=send,nth=4",), "order"),
    Case("A5 sent twice", "C07", "interleaved", ("p2p_dup@rank=2,op=send,nth=4",), "order"),
    Case("A6 one rank raises", "C22: NaN on one rank; it leaves no dump", "moe",
         ("exception@rank=9,mb=1,phase=backward",), "missing dump", "after"),
    Case("call dropped", "C02, C03", "moe", ("drop@rank=6,group=tp,nth=5",), "mismatch"),
    Case("wrong shape", "C01, C18", "moe", ("shape@rank=3,group=tp,nth=3",), "mismatch"),
    Case("wrong dtype", "C02", "moe", ("dtype@rank=12,group=tp,nth=2",), "mismatch"),
    Case("wrong operation", "C19", "moe", ("op@rank=4,group=ep,nth=3:to=all_reduce",), "mismatch"),
    Case("wrong group", "C17", "moe", ("group@rank=7,group=tp,nth=4:to=ep",), "mismatch", "group"),
    Case("uneven splits", "C18: equal totals", "moe", ("splits@rank=5,group=ep,nth=3",), "mismatch",
         "programs"),
    Case("data ends", "C23", "moe", ("data_end@rank=1,mb=1",), "missing dump", "after"),
    Case("killed", "C15", "interleaved", ("sigkill@rank=9,nth=21",), "missing dump", "after"),
    Case("host stuck", "GIL, data loader", "moe",
         ("gil@rank=10,group=tp,nth=4",), "host stuck", "after"),
    Case("device stuck", "kernel that does not end", "moe",
         ("gpu_hang@rank=2,group=tp,nth=4",), "device stuck", "after"),
    Case("completions unseen", "as NVRx's GPU_ERROR", "moe",
         ("gpu_error@rank=13,group=tp,nth=4",), "device stuck", "after"),
    Case("two at once", "as NVRx's sets", "moe",
         ("gil@rank=2,group=tp,nth=4", "gil@rank=7,group=tp,nth=4"), "host stuck", "after"),
)  # fmt: skip


@functools.cache
def world(name):
    """A healthy world."""
    return parse((HERE / "worlds" / f"{name}.txt").read_text(encoding="utf-8"), name)


def planted(case):
    """(the standstill, the truth)."""
    found = faults.plant(world(case.world), [fault_plan.parse(f) for f in case.faults])
    return stall.run_until_stalled(found.programs, found.faults), found


def judged(case, folder, state, **how):
    """The verdict from the dumps of ``state`` in ``folder``, and nothing else."""
    export.write(state, folder, **how)
    if case.where != "programs":
        return hang.diagnose_dumps(dumps.read_in_process(folder))
    return diagnose_graph(world_graph.build(state.programs))


# -- the truth, without the judge -----------------------------------------------------------------
def calls(programs, rank):
    """[(group, op, what else must agree, sequence as the recorder counts, site)] in order."""
    count, batches, found = Counter(), set(), []
    for op in programs.of(rank):
        if not op.group:
            continue
        pair = op.name in ("send", "recv")
        if op.batch < 0 or op.batch not in batches:
            count[op.group, pair] += 1
            batches.add(op.batch)
        said = (op.dtype, op.num_in, op.num_out, op.reduce, op.peer, op.splits)
        found.append((op.group, op.name, said, count[op.group, pair], op.site))
    return found


def first_changed(healthy, faulty, rank, group):
    """The first call in ``group`` which the fault changes: as it should be, and as it is."""
    both = [[c for c in calls(p, rank) if c[0] == group] for p in (healthy, faulty)]
    for before, after in zip(*both, strict=False):
        if before[:4] != after[:4]:
            return before, after
    longer = max(both, key=len)
    return (longer[min(map(len, both))],) * 2


def places(case, truth):
    """The calls (group, op, sequence, site) that may be named."""
    healthy = world(case.world)
    found: set[tuple[str, str, int, str]] = set()
    for hit in truth.hits:
        found.add((hit.group, hit.op, hit.seq, hit.site))
        if case.where == "after":
            found |= {(g, o, s, site) for g, o, _, s, site in calls(healthy, hit.rank)[_at(hit) :]}
        elif case.where != "group":
            for call in first_changed(healthy, truth.programs, hit.rank, hit.group):
                found.add((*call[:2], *call[3:]))
    return found


def _at(hit):
    healthy = world(next(c.world for c in CASES if hit.fault in c.faults))
    return sum(1 for op in list(healthy.of(hit.rank))[: hit.index] if op.group)


COLUMNS = ("ranks", "class", "group", "op", "seq", "site", "innocent")


def score(case, truth, found):
    """column -> whether it is right; "innocent": nobody innocent is named."""
    named = {c.rank for c in found.culprits}
    right = places(case, truth)
    text = " ".join((*found.evidence, *found.chain))
    here = [p for p in right if p[0] == found.group]
    seen = {
        "ranks": named == truth.culprits,
        "class": found.verdict == case.verdict,
        "group": bool(here) or (case.where == "group" and found.group in _groups(case)),
        "op": any(p[1] == found.op for p in here),
        "seq": any(p[1:3] == (found.op, found.seq) for p in here),
        "site": any(p[1:3] == (found.op, found.seq) and p[3] in text for p in here),
        "innocent": not named - truth.culprits,
    }
    return seen | dict.fromkeys(("op", "seq", "site"), None) if case.where == "group" else seen


def _groups(case):
    words = re.findall(r"(?:group|to|with)=([a-z]+)", " ".join(case.faults))
    descs = world(case.world).programs[0].groups()
    return {desc for desc in descs for word in words if groups.named_group(word, desc)}


# -- PyTorch's analyser ---------------------------------------------------------------------------
def fr_trace(folder):
    """The ranks that torch's fr_trace blames: missing and culprit ranks of all its reports; if it
    fails, a text that says where."""
    with tempfile.TemporaryDirectory() as stub:
        if not _has_tabulate():  # it prints with it, and cannot do without
            text = "def tabulate(rows, headers=(), **k):\n    return '\\n'.join(map(str, rows))\n"
            pathlib.Path(stub, "tabulate.py").write_text(text)
        path = os.pathsep.join(filter(None, (stub, os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder),
             "-p", "_dump_", "--allow-incomplete-ranks", "--mismatch_cap", "1000"],
            capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
    if done.returncode:
        lines = re.findall(r'flight_recorder/(?:components/)?(\w+\.py)", line (\d+)', done.stderr)
        error = done.stderr.strip().splitlines()[-1].partition(":")[0]
        return f"fails ({error} in its {':'.join(lines[-1])})" if lines else f"fails ({error})"
    said = done.stdout + done.stderr
    blamed = {int(r) for r in re.findall(r"Culprit rank (\d+)", said)}
    for ranks in re.findall(r"missing ranks: (\{[\d, ]*\})", said):
        blamed |= set(ast.literal_eval(ranks))
    return blamed


def _has_tabulate():
    with contextlib.suppress(ImportError):
        import tabulate  # noqa: F401

        return True
    return False


# -- the table ------------------------------------------------------------------------------------
def rows():
    """(case, the columns of the score, fr_trace) of every case, from full dumps."""
    for case in CASES:
        state, truth = planted(case)
        with tempfile.TemporaryDirectory() as place:
            folder = pathlib.Path(place, "d")
            found = judged(case, folder, state, timing=True)
            theirs = fr_trace(folder)
        yield case, score(case, truth, found), found, _verbal(theirs, truth.culprits)


def _verbal(blamed, culprits):
    if isinstance(blamed, str):
        return blamed
    if not blamed:
        return "nobody"
    if blamed == culprits:
        return "exact"
    innocent = len(blamed - culprits)
    return f"{'finds it, and ' if culprits <= blamed else 'misses it, '}{innocent} innocents"


def table():
    """Lines of Markdown."""
    made = ["| case | after | verdict | right | fr_trace names |", "|---|---|---|---|---|"]
    for case, seen, found, theirs in rows():
        wrong = [name for name, right in seen.items() if right is False]
        asked = sum(right is not None for right in seen.values())
        right = "all" if not wrong else f"{asked - len(wrong)} of {asked}: not {', '.join(wrong)}"
        made.append(f"| {case.name} | {case.about} | {found.verdict} | {right} | {theirs} |")
    return made


if __name__ == "__main__":
    print("\n".join(table()))
