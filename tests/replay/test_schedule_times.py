"""``prism schedule`` and its unit times: textbooks' bubbles, drawings, bad words."""

import json
import warnings
from fractions import Fraction

import pytest

from megatron_prism.cli import main as cli
from megatron_prism.cli import schedule
from megatron_prism.core import program
from megatron_prism.core.errors import ProgramError
from megatron_prism.core.program_text import parse
from megatron_prism.replay.timeline import ScheduleStep, ScheduleTimeline, schedule_timeline

HAND = """
prism-program 1
world size=2 pp=2
program rank=0 ranks=0
0F compute
0F send PIPELINE_MODEL_PARALLEL_GROUP peer=1 handle=1
0F wait handle=1
0B recv PIPELINE_MODEL_PARALLEL_GROUP peer=1 handle=3
0B wait handle=3
0B compute
program rank=1 ranks=1
0F recv PIPELINE_MODEL_PARALLEL_GROUP peer=-1 handle=0
0F wait handle=0
0F compute
0B compute
0B send PIPELINE_MODEL_PARALLEL_GROUP peer=-1 handle=4
0B wait handle=4
"""


def test_a_schedule_by_hand():
    times = schedule_timeline(parse(HAND))
    assert [(s.label, s.start, s.end) for s in times.stages[0]] == [("0F", 0, 1), ("0B", 4, 6)]
    assert [(s.label, s.start, s.end) for s in times.stages[1]] == [("0F", 1, 2), ("0B", 2, 4)]
    assert (times.total, times.bubble, times.busy) == (6, Fraction(1, 2), (3, 3))
    assert schedule_timeline(parse(HAND), {"forward": 1, "backward": 1}).total == 4


def test_a_send_without_its_receive_is_a_deadlock():
    text = HAND.replace(
        "0F recv PIPELINE_MODEL_PARALLEL_GROUP peer=-1 handle=0\n0F wait handle=0\n", ""
    )
    with pytest.raises(ProgramError, match=r"wait for each other: rank 0 at op 2 \(wait\)"):
        schedule_timeline(parse(text))


def test_parts_of_a_step_share_its_time_and_streams_run_side_by_side():
    text = """
    prism-program 1
    world size=1
    program rank=0 ranks=0
    0F compute
    -  record handle=1
    1F compute stream=s1
    -  wait handle=1 stream=s1
    0F compute
    0B compute stream=s1
    -  host_wait note=device
    2F compute
    """
    first = schedule_timeline(parse(text)).stages[0]
    steps = {step.label: (step.start, step.end) for step in first}
    assert steps == {"0F": (0, 1), "1F": (0, 1), "0B": (1, 3), "2F": (3, 4)}
    assert schedule_timeline(parse(text)).busy == (4,)


def drawn(stages, total, width=80):
    return schedule.chart(ScheduleTimeline(stages, tuple(Fraction() for _ in stages), total), width)


def step(phase, microbatch, start, end, chunk=-1):
    return ScheduleStep(phase, microbatch, chunk, Fraction(start), Fraction(end))


def test_the_drawing():
    one = (step("forward", 0, 0, 1), step("backward", 0, 3, 5))
    assert drawn((one,), 6) == ["stage 0  0f....0B--.."]
    chunks = (step("forward", 9, 0, 1, 1), step("backward", 10, 1, 3, 2))
    assert drawn((chunks,), 3) == ["stage 0  9b-10C---"]


def test_a_wide_drawing_loses_its_middle():
    many = tuple(step("forward", n % 10, n, n + 1) for n in range(100))
    line, note = drawn((many,), 100, width=40)
    assert line == "stage 0  0f1f2f3f4f5f6f … 3f4f5f6f7f8f9f"
    assert note == "         …: 86 of 100 units not shown"
    assert all(len(x) < 30 for x in drawn((many,), 100, width=5)[:1])  # no terminal is too narrow


def test_overlapping_forwards_and_backwards_get_lines_of_their_own():
    both = (step("forward", 1, 0, 2), step("backward", 0, 1, 3))
    assert drawn((both,), 3) == ["stage 0 F  1f--..", "stage 0 B  ..0B--"]


@pytest.fixture(scope="module")
def megatron():
    pytest.importorskip("megatron.core")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron_prism.emulate.schedule import schedules
    return schedules


@pytest.mark.megatron
@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 8), (3, 5), (4, 4), (4, 8), (8, 32), (16, 64)])
def test_the_bubble_of_1f1b_is_the_textbooks(megatron, p, m):
    """(p-1)/(m+p-1), as in arXiv:2104.04473 2.2.1."""
    assert schedule_timeline(megatron(p, microbatches=m)).bubble == Fraction(p - 1, m + p - 1)


@pytest.mark.megatron
@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 5, 16), (8, 2, 32), (8, 4, 8)])
@pytest.mark.parametrize("how", [{}, {"warmup_flush": True}, {"overlap_p2p": False}])
def test_the_bubble_of_interleaving_is_the_textbooks(megatron, p, v, m, how):
    """The same with m v instead of m (2.2.2): every chunk is a v-th of the stage."""
    if p > 2 or how != {"overlap_p2p": False}:
        assert schedule_timeline(megatron(p, v, m, **how)).bubble == Fraction(p - 1, m * v + p - 1)


def run(*words, capsys):
    status = cli.main(["schedule", *words])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.megatron
def test_the_command_draws(megatron, capsys):
    status, out, err = run("pp=2", "microbatches=2", "shape=8x1x4", capsys=capsys)
    assert (status, err) == (0, "")
    assert out.splitlines()[1].startswith("33.33 % bubble, 9 units")
    assert out.splitlines()[-2:] == ["stage 0  0f1f....0B--..1B--", "stage 1  ..0f0B--1f1B--...."]
    assert "Megatron's scheduler without a model" in out


@pytest.mark.megatron
def test_the_command_says_what_chunks_are_made_of(megatron, capsys):
    _, out, _ = run("pp=2", "microbatches=4", "layout=Et|tt|t|tL", capsys=capsys)
    assert out.splitlines()[-2:] == [
        "stage 0  a: embedding, 1 decoder; b: 1 decoder",
        "stage 1  a: 2 decoder; b: 1 decoder, loss",
    ]


@pytest.mark.megatron
def test_the_command_draws_combined_schedules(megatron, capsys):
    words = ("pp=1", "microbatches=2", "ep_overlap=true", "delay_wgrad=1")
    status, out, _ = run(*words, capsys=capsys)
    assert status == 0
    assert "(forward 1, backward 1, weight 1, transfers 0)" in out
    assert "stage 0 F  0f1f" in out
    assert "stage 0 B  ..0B" in out


@pytest.mark.megatron
def test_the_command_keeps_the_programs_and_overwrites_nothing(megatron, tmp_path, capsys):
    out = tmp_path / "a.prism"
    words = ("pp=4", "vpp=2", "microbatches=8", "-o", str(out))
    assert run(*words, capsys=capsys)[0] == 0
    assert program.load(out) == megatron(4, 2, 8)
    status, _, err = run(*words, capsys=capsys)
    assert status == 2
    assert "exists and is not overwritten" in err
    assert run(*words, "--force", capsys=capsys)[0] == 0
    assert cli.main(["check", str(out)]) == 0


@pytest.mark.megatron
def test_the_command_as_json(megatron, capsys):
    status, out, _ = run("pp=4", "microbatches=4", "--json", capsys=capsys)
    value = json.loads(out)
    assert status == 0
    assert value["bubble"] == pytest.approx(3 / 7)
    assert value["source"]["pp"] == "4"
    assert value["stages"][3]["steps"][:2] == [["0F", 3.0, 4.0], ["0B", 4.0, 6.0]]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("pp=8", "needs microbatches"),
        ("vpp=2 microbatches=8", "needs pp"),
        ("pp=8 microbatch=32", "did you mean microbatches=32?"),
        ("pp=8 microbatches", "does not understand microbatches"),
        ("pp=8 colour=red", "use pp, vpp"),
        ("pp=eight microbatches=32", "pp=eight: 'eight' is no count"),
        ("pp=4 microbatches=8 overlap=maybe", "overlap=maybe: 'maybe' is neither true nor false"),
        ("pp=4 microbatches=8 shape=4096x1", "fix: tokens x micro-batch x hidden"),
        ("pp=1000 microbatches=100000", "too many to record and draw"),
        ("pp=1e6 microbatches=1", "stages are too many to draw"),
    ],
)
def test_bad_words_end_with_status_2_and_a_fix(words, says, capsys):
    status, out, err = run(*words.split(), capsys=capsys)
    assert (status, out) == (2, "")
    assert says in err
    assert "fix: " in err


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("pp=0 microbatches=8", "pp=0: a number of at least 1"),
        ("pp=4 microbatches=-8", "microbatches=-8: a number of at least 1"),
        ("pp=4 vpp=2 microbatches=9", "fix: microbatches=8 or microbatches=12"),
        ("pp=1 vpp=2 microbatches=8", "fix: pp=2 or more, or leave vpp out"),
        ("pp=2 vpp=2 microbatches=8 overlap=false", "fix: overlap=true, or pp=4"),
        ("pp=2 microbatches=8 layout=Et|x", "Invalid layer character: x"),
        ("pp=4 layers=6 microbatches=4", "Megatron refuses"),
    ],
)
def test_what_cannot_be_scheduled_ends_with_status_2_and_a_fix(megatron, words, says, capsys):
    test_bad_words_end_with_status_2_and_a_fix(words, says, capsys)
