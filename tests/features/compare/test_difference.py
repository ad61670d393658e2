"""Two runs of a rank, op by op."""

import json

import pytest

from megatron_prism.cli.main import main
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program, Programs, save
from megatron_prism.core.world import World
from megatron_prism.graph.difference import ComparedOp, difference

TP = "TENSOR_MODEL_PARALLEL_GROUP"


def reduced(num=8, site="mappings.py:31", **more):
    return Op("all_reduce", group=TP, dtype="bf16", num_in=num, num_out=num, phase="forward",
              microbatch=0, site=site, **more)  # fmt: skip


def computed(flops=10, ns=5):
    return Op("compute", phase="forward", microbatch=0, flops=flops, ns=ns)


BEFORE = (computed(), reduced(), computed(), reduced(), Op("mark", note="x"))


def found(*after):
    programs = [Program.from_ops(0, ops) for ops in (BEFORE, after)]
    return difference(0, *map(ComparedOp.of_program, programs))


def test_times_lines_and_events_are_no_difference():
    same = (computed(ns=7), reduced(site="mappings.py:40"), computed(), reduced())
    assert found(*same) is None


@pytest.mark.parametrize(
    ("after", "at", "differ"),
    [
        ((computed(), reduced(16), computed(), reduced()), 1, ("num_in", "num_out")),
        ((computed(), reduced(), computed(12), reduced()), 2, ("flops",)),
        ((computed(), reduced(reduce="max"), computed(), reduced()), 1, ("reduce",)),
        ((computed(), computed(), reduced()), 1, ("name",)),
        (BEFORE[:2], 2, ("one has ended",)),
    ],
)
def test_the_first_difference_is_named(after, at, differ):
    made = found(*after)
    assert made.at == at
    assert set(differ) <= set(made.differ)


def test_what_only_one_has_is_counted():
    made = found(computed(), reduced(), computed(), Op("barrier", group=TP, phase="forward"))
    assert made.only == ((f"all_reduce of {TP}", 1), (f"barrier of {TP}", -1))
    assert json.dumps(made.to_json())
    assert "A has 1 more" in made.to_text()


@pytest.mark.parametrize(("norm", "differs"), [(0.0, True), (1e-3, False), (1e-6, True)])
def test_values_are_compared_by_norm(norm, differs):
    a, b = (
        [ComparedOp("1F", "all_reduce", {"norm": text, "values": text})]
        for text in ("1.0", "1.0001")
    )
    assert (difference(0, a, b, norm) is not None) is differs


def test_the_exit_status_says_whether_runs_differ(tmp_path, capsys):
    for name, ops in (("a", BEFORE), ("b", BEFORE[:3])):
        one = Programs.one_per_rank([Program.from_ops(0, ops)], World(1))
        save(one, tmp_path / name)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert main(["compare", a, a, "--exit-code"]) == 0
    assert "every op of the ranks that both have is alike" in capsys.readouterr().out
    assert main(["compare", a, b, "--json", "--exit-code"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert value["first"][0]["alike"] == 3
    (tmp_path / "payload-000000.bin").touch()
    assert main(["compare", a, str(tmp_path)]) == 2
