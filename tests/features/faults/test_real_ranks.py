"""Faults of running ranks and the strict check of calls: in process, and on whole jobs."""

import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.needs import TRAINING
from torch import distributed as dist

from megatron_prism.core.errors import HangError, UnsupportedError, UsageError
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program, Programs, save
from megatron_prism.core.world import World
from megatron_prism.emulate.command_line import options as flags
from megatron_prism.features.faults import call_check
from megatron_prism.features.faults.call_check import (
    CallCheck,
    LocalCallCheck,
    gloo_does,
    nccl_lets_through,
)
from megatron_prism.features.faults.call_guard import CallGuard, ProgramPeers
from megatron_prism.features.faults.options import FaultOptions
from megatron_prism.features.hang import fault_plan
from megatron_prism.features.pacing.options import PaceOptions
from megatron_prism.features.pacing.pace import _all_slow_ranks
from megatron_prism.runtime import virtual_world
from megatron_prism.runtime.listeners import CallListener
from megatron_prism.runtime.values import Values

HERE = pathlib.Path(__file__).parent
TP = "TENSOR_MODEL_PARALLEL_GROUP"
WORLD = World(4, tp=4)
OPS = [Op("all_reduce", TP, "fp32", 8, 8, "sum"), Op("broadcast", TP, "fp32", 4, 4, root=0)] * 2


class Seen(CallListener):
    """Calls ``see`` after each answer."""

    def __init__(self, see):
        self.see = see

    def observe(self, group, op, inputs, outputs):
        self.see(group, op, inputs, outputs)


@pytest.fixture
def job(tmp_path):
    """start(faults=…, strict=…) -> (guard, group): rank 1 of 4, one tensor-parallel group."""
    path = save(Programs.one_per_rank([Program.from_ops(r, OPS) for r in range(4)], WORLD),
                tmp_path / "w.prism")  # fmt: skip

    def start(*faults, strict=True, check_order=False, dry=False, policy="strict", truth=None):
        asked = FaultOptions(tuple(map(fault_plan.parse, faults)), 0, dry,
                            path if strict else None, strict, check_order, policy,
                            truth)  # fmt: skip
        options = SimpleNamespace(world=WORLD, rank=1, ranks=(1,))
        guard = CallGuard(options, asked, SimpleNamespace(name="cpu", live=None), None)
        virtual_world.stop()  # of a job before
        virtual_world.start(
            virtual_world.VirtualWorld(
                4, 1, (1,), Values("mirror"), torch.device("cpu"), listeners=(guard,)
            )
        )
        return guard, dist.new_group(range(4), group_desc=TP)

    yield start
    virtual_world.stop()


def iterations(guard, group, wanted=4):
    """What a healthy rank calls."""
    for number in range(1, wanted + 1):
        guard.iteration_started(number, wanted)
        for _ in range(2):
            with guard.scope(phase="forward", microbatch=_):
                tensor = torch.ones(8)
                dist.all_reduce(tensor, group=group)
                dist.broadcast(torch.ones(4), 0, group=group)
    return tensor


def test_a_healthy_rank_is_left_alone(job):
    guard, group = job(check_order=True)
    assert float(iterations(guard, group)[0]) == 4.0
    guard.finished()
    assert guard.banner() == ""


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("dtype@rank=1,iter=2,nth=1", "dtype: fp64 here, fp32 there|dtype: bf16 here"),
        ("shape@rank=1,iter=3,nth=2", "shape: 2 here, 4 there"),
        ("root@rank=1,iter=2", "root: 1 here, 0 there"),
        ("reduce_op@rank=1,iter=2", "reduce op: max here, sum there"),
        ("drop@rank=1,iter=2,nth=1", "operation: broadcast here, all_reduce there"),
        ("op@rank=1,iter=2,nth=1:to=barrier", "operation: barrier here, all_reduce there"),
        ("dtype@rank=1,iter=2,nth=1:to=int32", "dtype: int32 here, fp32 there"),
        ("drop@rank=1,iter=2,nth=4", "the rank did not: 3 of 4 calls"),
        ("skip_microbatch@rank=1,iter=2,mb=1", "2 of 4 calls"),
    ],
)
def test_a_fault_of_this_rank_stops_it_and_is_its_own(fault, says, job, capsys):
    guard, group = job(fault)
    with pytest.raises(HangError, match=says) as caught:
        iterations(guard, group)
    assert "rank 1 differs" in caught.value.message
    said = capsys.readouterr().err
    assert said.count("[prism-fault] fired") == 1
    assert f"id={fault}" in said
    assert fault in guard.banner()


def test_a_call_that_was_left_out_is_said_of_the_program_alone(job):
    """The rank makes no call there, so nothing it makes is compared."""
    guard, group = job("drop@rank=1,iter=2,nth=4")
    with pytest.raises(HangError) as caught:
        iterations(guard, group)
    said = str(caught.value)
    assert "iteration 2, rank 1's derived program calls " in said
    assert "rank 1 calls" not in said
    assert "the derived program of this rank calls" not in said


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("dtype@rank=2,iter=3,nth=2", "dtype"),
        ("drop@rank=3,iter=2,nth=1", "skipped call"),
        ("gil@rank=0,iter=2,nth=3", "host stuck"),
        ("sigkill@rank=2,nth=2", "missing dump"),
        ("data_end@rank=2,iter=2,nth=3", "missing dump"),
        ("sigstop@rank=0,nth=4", "missing dump"),
        ("op@rank=0,nth=1:to=barrier", "operation"),
    ],
)
def test_a_virtual_rank_is_met_where_nobody_can_go_on(fault, kind, job):
    guard, group = job(fault)
    with pytest.raises(HangError, match="nobody can go on") as caught:
        iterations(guard, group)
    culprit = fault_plan.parse(fault).select.rank
    assert f"rank {culprit} ({kind})" in caught.value.message
    assert "rank 1 stands in the first call that never ends" in caught.value.message


@pytest.mark.parametrize(("made", "short"), [(2, None), (1, "recv"), (0, "recv")])
def test_messages_that_were_not_posted_are_missed_at_the_end_of_the_iteration(made, short):
    """Virtual ranks answer at once, so a receive that is not made holds nobody up."""
    ops = [[Op(name, TP, "fp32", 4 if name == "send" else -1, 4 if name == "recv" else -1, peer=1)]
           * 2 for name in ("send", "recv")]  # fmt: skip
    said = []
    programs = Programs.one_per_rank([Program.from_ops(r, ops[r]) for r in (0, 1)], World(2, tp=2))
    one = CallCheck(ProgramPeers(programs, 1), lambda *a: said.append(a))
    one.begin()
    for _ in range(made):
        one.check(ops[1][0], 1, 2)
    one.end()
    assert [(kind, call.name, number) for kind, call, number, *_ in said] == (
        [("missing", short, made)] if short else []
    )


def test_the_sanitizer_stops_at_the_first_call_out_of_order(job):
    guard, group = job("drop@rank=1,iter=2,nth=2", check_order=True)
    with pytest.raises(HangError, match="divergence: rank 1 differs") as caught:
        iterations(guard, group)
    assert "rank 1 stands at" in caught.value.message
    assert "iterations" in caught.value.message  # this test's own function, on the stack


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("exception@rank=1,iter=2", RuntimeError),
        ("data_end@rank=1,iter=2", StopIteration),
    ],
)
def test_a_rank_that_raises(fault, error, job):
    guard, group = job(fault, strict=False)
    with pytest.raises(error, match="prism-fault"):
        iterations(guard, group)


def test_nan_reaches_the_result_and_delay_does_not_change_it(job):
    guard, group = job("nan@rank=1,iter=4,op=all_reduce,nth=2", "delay@rank=1:ms=1", strict=False)
    assert torch.isnan(iterations(guard, group)[0])
    guard.finished()


def test_a_dry_run_says_which_call_and_changes_nothing(job, capsys):
    guard, group = job("drop@rank=1,iter=2,mb=1,op=broadcast", dry=True)
    iterations(guard, group)
    line = capsys.readouterr().err
    assert "would fire" in line
    assert "iter=2 mb=1 op=broadcast" in line
    assert "seq=8" in line


@pytest.mark.parametrize("number", [1, 4, 9])
def test_iterations_that_are_not_compared_are_named(number, job):
    guard, group = job(f"drop@rank=3,iter={number}")
    iterations(guard, group)
    with pytest.raises(UsageError, match="of 4 iterations 2,3 were compared") as caught:
        guard.finished()
    assert caught.value.fix == "iter= one of 2,3"


def test_nan_among_whole_numbers_is_refused(job):
    """It said that it fired, and nothing was wrong."""
    guard, group = job("nan@rank=1,op=broadcast", strict=False)
    guard.iteration_started(1, 1)
    with pytest.raises(UnsupportedError, match="gives no fractions"):
        dist.broadcast(torch.ones(4, dtype=torch.int64), 0, group=group)


@pytest.mark.parametrize(
    ("where", "says", "fix"),
    [
        ("iter=7", "4 iterations ran, and 0 calls in them fit", "iter= from 1 to 4"),
        ("iter=2,op=all_reduce,nth=3", "and 2 calls in them fit", "nth= from 1 to 2"),
        ("iter=2,op=send", "and 0 calls in them fit", "write KIND@rank=R"),
    ],
)
def test_a_fault_that_never_fires_is_an_error(where, says, fix, job):
    guard, group = job(f"drop@rank=1,{where}", strict=False)
    iterations(guard, group)
    with pytest.raises(UsageError, match="never fired") as caught:
        guard.finished()
    assert says in caught.value.message
    assert caught.value.fix.startswith(fix)


def test_what_a_running_rank_cannot_do_is_refused(job):
    for fault in ("gpu_error@rank=1", "gpu_hang@rank=1", "oom@rank=1:at_bytes=5",
                  "nic@rank=1:bw_factor=0.5"):  # fmt: skip
        with pytest.raises(UnsupportedError):
            job(fault, strict=False)


# -- faults that nothing here would notice -------------------------------------------------------
@pytest.mark.parametrize(
    "fault",
    [
        "drop@rank=1,iter=2",
        "skip_microbatch@rank=1,iter=2,mb=1",
        "swap@rank=1,iter=2,op=all_reduce:with=tp:broadcast:1",
        "shape@rank=1,iter=2",
        "op@rank=1,iter=2",
        "root@rank=1,iter=2",
    ],
)
def test_a_run_that_only_virtual_peers_let_through_is_no_pass(fault, job):
    """Without --prism-world it ended as trained, with status 0."""
    guard, group = job(fault, strict=False)
    iterations(guard, group)
    with pytest.raises(HangError, match="went on only because virtual ranks answer at once"):
        guard.finished()


def test_a_call_among_nobody_else_holds_nobody_up(job, capsys):
    """Groups of one, as tensor-parallel ones of tp 1: the real job would go on, too."""
    guard, group = job("drop@rank=1,iter=2,group=dp", strict=False)
    alone = dist.new_group([1], group_desc="DATA_PARALLEL_GROUP")
    for number in (1, 2):
        guard.iteration_started(number, 2)
        dist.all_reduce(torch.ones(1), group=alone)
    guard.finished()
    assert "and the job went on" in capsys.readouterr().err


def test_what_nccl_lets_through_goes_on_and_says_what_it_led_to(job, capsys):
    guard, group = job(
        "dtype@rank=1,iter=2,op=all_reduce:to=int32", "delay@rank=1:ms=1", strict=False
    )
    losses = [7.5, float("nan"), 7.25, 7.125]
    guard.steps = lambda: [
        SimpleNamespace(number=n + 1, skipped=n == 1, grad_norm=None, losses={"lm loss": loss})
        for n, loss in enumerate(losses)
    ]
    iterations(guard, group)
    guard.finished()
    said = capsys.readouterr().err
    went = "and the job went on: 1 of 4 steps skipped; in step"
    assert f"{went} 2 lm loss nan, gradient norm unknown; in step 4 lm loss 7.125" in said
    assert f"{went} 1 lm loss 7.5, " in said


def test_swapped_calls_change_places(job, capsys):
    guard, group = job("swap@rank=1,iter=2,op=all_reduce:with=tp:broadcast:1", check_order=True)
    with pytest.raises(HangError, match="operation: broadcast here, all_reduce there|divergence"):
        iterations(guard, group)
    guard, group = job("swap@rank=1,iter=2,op=all_reduce,nth=2:with=tp:reduce:1", strict=False)
    iterations(guard, group)
    with pytest.raises(UsageError, match="only one of the two calls came"):
        guard.finished()


def test_a_bit_flips_and_the_value_is_far_away(job):
    guard, group = job("bitflip@rank=1,iter=4,op=all_reduce,nth=2", strict=False)
    tensor = iterations(guard, group)
    assert tensor[0] > 1e30
    assert float(tensor[1]) == 4.0


@pytest.mark.parametrize("kind", ["nan", "inf", "bitflip"])
def test_the_models_output_is_spoilt(kind, job):
    guard, _ = job(f"{kind}@rank=1,iter=2,mb=1:tensor=act", strict=False)
    model = torch.nn.Linear(2, 2)
    found = {}
    for number in (1, 2):
        guard.iteration_started(number, 2, [model])
        for mb in range(2):
            with guard.scope(phase="forward", microbatch=mb):
                found[number, mb] = model(torch.ones(1, 2))[0, 0].item()
    odd = {key for key, value in found.items() if not abs(value) < 1e9}
    assert odd == {(2, 1)}
    guard.finished()
    guard, _ = job("nan@rank=1:tensor=loss", strict=False)
    with pytest.raises(UsageError, match="rank 1 has no loss"):
        guard.iteration_started(1, 1, [model])


def test_the_truth_is_written_before_it_happens(job, tmp_path):
    path = tmp_path / "truth"
    guard, group = job("sigkill@rank=2,iter=2,nth=2", "exception@rank=1,iter=1", truth=path)
    with pytest.raises(RuntimeError, match="prism-fault"):
        iterations(guard, group)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["where"], r["rank"], r["iteration"], r["op"]) for r in rows] == [
        ("virtual", 2, 2, "broadcast"), ("local", 1, 1, "all_reduce")
    ]  # fmt: skip
    assert {row["schema"] for row in rows} == {"prism.fault-truth/1"}
    assert rows[0]["members"] == rows[1]["members"] == [0, 1, 2, 3]


# -- local ranks among themselves -----------------------------------------------------------------
def test_neighbours_compare_before_they_call():
    store, said = dist.HashStore(), []
    ranks = [LocalCallCheck(store, r, lambda *a: said.append(a), 0.1) for r in (0, 1)]
    calls = [Op("broadcast", TP, "int32", 1, 1, root=0), Op("broadcast", TP, "int64", 1, 1, root=0)]
    ranks[0].check(calls[0], "k", {0: 0, 1: 1}, "a.py:1")
    assert said[0][0] == "missing"  # rank 1 does not come in time
    ranks[1].check(calls[1], "k", {0: 0, 1: 1}, "b.py:2")
    kind, _, number, theirs, found, peer = said[1]
    assert (kind, number, theirs.site, peer) == ("dtype", 0, "a.py:1", 0)
    assert found[:2] == ["dtype: int64 here, int32 there", "rank 1 stands at"]
    assert "test_real_ranks.py" in found[2]
    store.set("call_check/k/0/stack/0", json.dumps(["c.py:3 g"]))  # now rank 0 has said it too
    ranks[1].counts.clear()
    ranks[1].check(calls[1], "k", {0: 0, 1: 1}, "b.py:2")
    assert said[2][4][-2:] == ["rank 0 stands at", "  c.py:3 g"]


@pytest.mark.parametrize(("share", "says"), [(6, []), (7, ["splits: 7 rows sent, 6 expected"])])
def test_neighbours_may_give_a_gather_more_than_others(share, says):
    """dist_muon's was a wrong shape, with its numbers."""
    store, said = dist.HashStore(), []
    shares = [(4, (4, 4, 6)), (4, (4, 4, 6)), (share, (4, 4, 6))]
    calls = [
        Op("all_gather", TP, "bf16", own, 14, splits=((own,) * 3, all_)) for own, all_ in shares
    ]
    ranks = [LocalCallCheck(store, r, lambda *a: said.append(a), 0.1) for r in range(3)]
    for rank in (2, 0, 1):
        ranks[rank].check(calls[rank], "k", {0: 0, 1: 1, 2: 2}, "a.py:1")
    met = [call for call in said if call[0] != "missing"]
    assert all(call[0] == "splits" for call in met)
    assert bool(met) == bool(says)
    assert not nccl_lets_through(calls[0], calls[2])


# -- flags ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--prism-fault", "drop@rank=5"], "rank 5 is virtual"),
        (["--prism-mismatch", "strict"], "nothing to compare"),
        (["--prism-check-order"], "compares with the programs"),
        (["--prism-fault-seed", "3"], "--prism-fault-seed without a fault"),
        (["--prism-fault", "drop@rank=0", "--prism-fault-truth", "/tmp"], "is a folder"),
        (["--prism-fault", "slow@rank=5:factor=2"], "virtual ranks answer at once"),
        (["--prism-fault", "env@rank=5:A=B"], "what a variable changes on a virtual rank"),
        (["--prism-fault", "slow@rank=5,iter=2:factor=2", "--prism-pace", "x"], "in every iter"),
    ],
)
def test_flags_that_cannot_be(words, says):
    with pytest.raises(UsageError, match=says) as caught:
        flags.from_command_line(["--prism-emulate", "--prism-world-size", "8", *words], {})
    assert caught.value.fix


def test_plans(tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "- drop@rank=0,group=tp,nth=3\n- {kind: delay, at: {rank: 0, iter: 2}, ms: 5}\n"
    )
    words = ["--prism-emulate", "--prism-world-size", "8", "--prism-fault-plan", str(plan)]
    found = flags.from_command_line(words, {}).of(FaultOptions).faults
    assert [str(f) for f in found] == [
        "drop@rank=0,group=tp,nth=3", "delay@rank=0,iter=2:ms=5",
    ]  # fmt: skip
    paced = [*words[:3], "--prism-pace", "x", "--prism-slow", "7:3"]
    found = flags.from_command_line([*paced, "--prism-fault", "slow@rank=1-5:factor=1.5"], {})
    faults = found.of(FaultOptions)
    assert faults.slow_ranks(found.world, found.ranks) == "1-5:1.5"
    assert _all_slow_ranks(found, found.of(PaceOptions)) == "7:3;1-5:1.5"
    env = {"PRISM_FAULT": "drop@rank=0"}
    assert len(flags.from_command_line(words[:3], env).of(FaultOptions).faults) == 1
    assert flags.from_command_line(words[:3], {}).of(FaultOptions) is None


# -- A2: Megatron 0.16.1 as it is -----------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.skipif("PRISM_MEGATRON" not in os.environ, reason="PRISM_MEGATRON names no checkout")
def test_a2_sft_broadcasts_of_two_real_ranks():
    """M#3268: 0.16.1 stops before data moves; a later release makes every broadcast."""
    checkout = os.environ["PRISM_MEGATRON"]
    job = """--sft --tensor-model-parallel-size 2 --num-layers 2 --hidden-size 64
        --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1
        --global-batch-size 2 --train-iters 3 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer
        --vocab-size 1000 --no-gradient-accumulation-fusion --no-masked-softmax-fusion
        --no-rope-fusion --no-create-attention-mask-in-dataloader --transformer-impl local
        --no-persist-layer-norm""".split()
    path = os.pathsep.join(filter(None, (checkout, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
         "29719", "-m", "megatron_prism", "run", "--prism-tier", "cpu", "--prism-mismatch",
         "strict", "--", str(HERE.parents[1] / "helpers" / "sft_batch.py"), *job],
        capture_output=True, text=True, check=False, timeout=200,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if "MINOR = 16" in pathlib.Path(checkout, "megatron/core/package_info.py").read_text():
        assert f"broadcast #7 of {TP}, dtype: who is wrong is undetermined" in done.stderr
        assert "calls broadcast int64 in=1 out=1 at training/utils.py:523" in done.stderr
        assert "calls broadcast int32 in=1 out=1 at training/utils.py:523" in done.stderr
    else:
        assert done.stdout.count("every broadcast of the batch was made") == 2, done.stderr[-2000:]


# -- whole jobs -----------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.megatron
@TRAINING
def test_a_job_with_a_world_trains_or_stops_with_the_verdict(tmp_path):
    from helpers.pretrain import JOB, forked

    new = {"--pipeline-model-parallel-size": "2", "--train-iters": "4", "--num-layers": "2",
           "--global-batch-size": "8"}  # fmt: skip
    job = [new.get(before, word) for before, word in zip(["", *JOB], JOB, strict=False)]
    base = ("--prism-emulate", "--prism-world-size", "8", "--prism-tier", "meta")
    for rank in ("0", "4"):
        here = ("--prism-ranks", rank, "--prism-capture", str(tmp_path / "w"))
        status, said = forked(*base, *here, job=job)
        assert status == 0, said[-2000:]
    strict = (*base, "--prism-ranks", "4", "--prism-world", str(tmp_path / "w"))
    status, said = forked(*strict, "--prism-check-order", job=job)
    assert status == 0, said[-2000:]
    status, said = forked(*strict, "--prism-fault", "dtype@rank=5,iter=3,group=tp,nth=3", job=job)
    assert status == 1
    assert "FAULT INJECTION: dtype@rank=5,iter=3" in said
    assert f"HANG at broadcast #3 of {TP}: rank 5 (dtype)" in said


# -- what NCCL does with calls that differ ---------------------------------------------------------
def floats(n, dtype="fp32", name="all_reduce", **more):
    return Op(name, TP, dtype, n, -1 if name == "send" else n, **more)


@pytest.mark.parametrize(
    ("mine", "theirs", "passes"),
    [  # measured on 2 x H200, NCCL 2.28.9, 2026-11-21
        (floats(5), floats(6), True),
        (floats(4), floats(5), False),
        (floats(5), floats(4), False),
        (floats(4), floats(1 << 22), False),
        (floats(1024), floats(1024, "int32"), True),
        (floats(1024), floats(2048, "bf16"), True),
        (floats(5, name="send"), Op("recv", TP, "fp32", -1, 6), True),
        (floats(4, name="send"), Op("recv", TP, "fp32", -1, 5), False),
        # not measured: taken for a hang
        (floats(8), floats(8, reduce="max"), False),
        (floats(8), floats(8, name="broadcast"), False),
        (floats(1 << 20), floats((1 << 20) + 1), False),
        (floats(8), None, False),
    ],
)
def test_what_nccl_lets_through(mine, theirs, passes):
    assert nccl_lets_through(mine, theirs) is passes


@pytest.mark.parametrize(("elements", "passes"), [(7, True), (6, False)])
def test_policy_nccl_stops_only_where_nccl_would(job, capsys, elements, passes):
    guard, group = job(policy="nccl")
    guard.iteration_started(1, 3)
    guard.iteration_started(2, 3)
    call = lambda: dist.all_reduce(torch.ones(elements), group=group)  # noqa: E731 - of 8 in the world
    if passes:
        call()
        assert "NCCL would not notice: all_reduce #1" in capsys.readouterr().err
    else:
        with pytest.raises(HangError, match="shape"):
            call()


@pytest.mark.parametrize(
    ("mine", "theirs", "sends", "does"),
    [  # measured between two processes, torch 2.13, 2026-11-21
        (floats(5), floats(6), None, "aborts"),
        (floats(1024), floats(1024, "int32"), None, "passes"),
        (floats(1024), floats(2048, "bf16"), None, "passes"),
        (floats(1024), floats(1024, "bf16"), None, "aborts"),
        (floats(8), floats(8, reduce="max"), None, "passes"),
        (floats(4, name="broadcast"), floats(5, name="broadcast"), True, "passes"),
        (floats(5, name="broadcast"), floats(4, name="broadcast"), True, "aborts"),
        (floats(5, name="broadcast"), floats(4, name="broadcast"), False, "passes"),
        (floats(4, name="broadcast"), floats(5, name="broadcast"), None, "aborts"),
        (floats(8, name="broadcast", root=0), floats(8, name="broadcast", root=1), True, "hangs"),
        (floats(8, name="all_gather"), floats(8, "int32", name="all_gather"), None, "passes"),
        (floats(4, name="send"), Op("recv", TP, "fp32", -1, 5), None, "passes"),
        (floats(5, name="send"), Op("recv", TP, "fp32", -1, 4), None, "aborts"),
        (Op("recv", TP, "fp32", -1, 5), floats(4, name="send"), None, "passes"),
        (floats(8), floats(8, name="broadcast"), None, "hangs"),
        (floats(8), None, None, "hangs"),
    ],
)
def test_what_gloo_does(mine, theirs, sends, does):
    assert gloo_does(mine, theirs, sends) == does


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("reduce_op@rank=1,iter=2", None),
        ("shape@rank=1,iter=2:n=7", "gloo aborts"),
        ("root@rank=1,iter=2", "gloo hangs"),
        ("shape@rank=1,iter=2,nth=2:n=6", None),  # as a receiver of 4 it has room to spare
    ],
)
def test_policy_gloo_stops_only_where_gloo_would(fault, says, job, capsys):
    guard, group = job(fault, policy="gloo")
    if says is None:
        iterations(guard, group)
        assert "gloo would not notice" in capsys.readouterr().err
    else:
        with pytest.raises(HangError, match=says):
            iterations(guard, group)


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("/home/me/megatron_prism/jobs/train.py", ["jobs/train.py:2 call"]),
        ("/x/megatron_prism/lib/site-packages/megatron/core/a.py", ["megatron/core/a.py:2 call"]),
        ("/opt/dist-packages/torch/nn/modules.py", []),
        (call_check.__file__, []),
    ],
)  # fmt: skip
def test_a_stack_shows_the_jobs_frames_whatever_its_folder_is_called(file, shown, imported_at):
    imported_at("megatron", "/x/megatron_prism/lib/site-packages/megatron")
    scope = {}
    exec(compile("def call(f):\n    return f()", file, "exec"), scope)
    stack = scope["call"](call_check.frames)
    here = next(i for i, frame in enumerate(stack) if "faults/test_real_ranks.py" in frame)
    assert stack[:here] == shown
