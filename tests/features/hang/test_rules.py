"""Each rule of a hang decides the cases that its row names, and no other.

Cases are kinds of faults that are planted in drawn programs of 16 ranks, with the recorder's
history (and timing), with outstanding calls only, or by what the job would print alone; hangs that
were recorded on 2 x H100; hangs of production, planted in captured worlds, that a row names; and
lines of public reports.
"""

from pathlib import Path

import pytest
from helpers import production, random_hangs, rendered_logs
from helpers.random_hangs import dumps_of

from megatron_prism.core.world import World
from megatron_prism.features.hang import export, logs, rules
from megatron_prism.features.hang.analyze import diagnose_dumps
from megatron_prism.graph import stall

RECORDED = Path(__file__).parents[2] / "golden" / "flight" / "h100"
SEED = 3
# what rank 0 of the recorded job printed that waits in a save which rank 1 does not enter
SAVE_LOG = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "megatron/training/checkpointing.py", line 694, in save_checkpoint
[rank0]:     optimizer.save_parameter_state(optim_checkpoint_name)
[rank0]:   File "megatron/core/optimizer/distrib_optimizer.py", line 1380, in {function}
[rank0]:     torch.distributed.gather(
[rank0]:   File "torch/distributed/distributed_c10d.py", line 4273, in gather
[rank0]:     work.wait()
[rank0]: RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms for recv
"""
# what public reports print of a monitored barrier: nothing else in the log names a rank
PUBLIC_LOGS = {
    "wenet-e2e/wenet#2552": "RuntimeError: Rank 1 failed to pass monitoredBarrier in 1200000 ms",
    "NVIDIA/nccl#849": (
        "RuntimeError: [Rank 0]: Ranks 4, 5, 6, 7 failed to pass monitoredBarrier in 2000000 ms"
    ),
}
HISTORY = {"timing": True}
ACTIVE = {"active_only": True, "stacks": False}
TABLES = {"RULES": rules.RULES, "EXCEPTIONS": rules.EXCEPTIONS}


def answer(dumps):
    """What of a verdict a rule may decide."""
    verdict = diagnose_dumps(dumps)
    culprits = [(culprit.rank, culprit.kind) for culprit in verdict.culprits]
    return verdict.verdict, culprits, verdict.candidates, verdict.confidence


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Name of a case -> its dumps."""
    path = tmp_path_factory.mktemp("logs") / "job.log"
    world = World(16, tp=2, pp=2, ep=2)
    dumps = {}
    for kind in random_hangs.KINDS:
        programs, faults, culprits = random_hangs.draw(kind, world, SEED)
        state = stall.run_until_stalled(programs, faults)
        dumps[f"drawn {kind}, history"] = dumps_of(state, **HISTORY)
        dumps[f"drawn {kind}, active"] = dumps_of(state, **ACTIVE)
        values = dict(export.dumps_of(state, **ACTIVE))
        path.write_text(rendered_logs.text(values, world, culprits if kind == "killed" else ()))
        dumps[f"drawn {kind}, logs"] = logs.read_logs([path])
    for folder in sorted(path for path in RECORDED.iterdir() if path.is_dir()):
        dumps[f"recorded {folder.name}"] = logs.read_folder(folder)
    named = {name for rows in TABLES.values() for row in rows for name in row.decides}
    for number, case in enumerate(production.CASES):
        name = f"production {case.name}"
        if name in named:
            folder = path.parent / f"production{number}"
            production.dumps(case, folder)
            dumps[name] = logs.read_folder(folder)
        if f"{name}, logs" in named:
            state = production.standstill(case.fault, case.world)
            silent = {rank for rank, fault in state.faults.items() if fault.silent}
            values = dict(export.dumps_of(state, **ACTIVE))
            path.write_text(rendered_logs.text(values, state.programs.world, silent))
            dumps[f"{name}, logs"] = logs.read_logs([path])
    for report, line in PUBLIC_LOGS.items():
        path.write_text(f"{line}\n")
        dumps[f"public {report}"] = logs.read_logs([path])
    path.write_text(SAVE_LOG.format(function="get_parameter_state_dp_zero"))
    dumps["recorded nosave, with a log"] = logs.together(dumps["recorded nosave"], [path])
    return dumps


@pytest.fixture(scope="module")
def answers(cases):
    """Name of a case -> the answer of all rules."""
    return {name: answer(dumps) for name, dumps in cases.items()}


ROWS = [(table, row) for table, rows in TABLES.items() for row in rows]


def test_every_row_decides_a_case():
    assert [row.name for _, row in ROWS if not row.decides] == []


@pytest.mark.parametrize(("table", "row"), ROWS, ids=[row.name for _, row in ROWS])
def test_a_rule_decides_its_cases_and_no_other(table, row, cases, answers, monkeypatch):
    remaining = tuple(other for other in TABLES[table] if other is not row)
    monkeypatch.setattr(rules, table, remaining)
    changed = {name for name, dumps in cases.items() if answer(dumps) != answers[name]}
    assert changed == set(row.decides)
