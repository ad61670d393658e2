"""Virtual groups answer what a real gloo group answers, for every row of the table of collectives.

With x[j] the tensor of group rank j, R the reduce op, c_p(t) the p-th of n equal chunks of t and
s_p(t) the rows of t that are meant for p, the result on group rank p is:

=================  ===========================
all_reduce         R over j of x[j]
reduce             the same, on the root
all_gather         concatenation over j of x[j]
gather             the same, on the root
reduce_scatter     R over j of c_p(x[j])
all_to_all         concatenation over j of s_p(x[j])
broadcast          x[root]
scatter            c_p(x[root])
send / recv        x[p - 1] (in a ring)
=================  ===========================

All local: bitwise.  Some local: bitwise what a real run gives in which the process of each virtual
rank is fed the inputs of the local rank that it mirrors; all-to-all, in-place gathers and receives
only promise that for the slots of local members, the others are finite and of the right size.
``collective_cases.py`` holds the cases; all of them run in one spawn of four processes.
"""

import inspect
import json
import tempfile
from collections import Counter

import pytest
from helpers.collective_cases import CASES, DTYPES, NUM_PROCESSES, OPS, run
from torch import distributed as dist
from torch import multiprocessing

from megatron_prism.core.programs.collectives import BY_METHOD, TABLE
from megatron_prism.runtime.process_group import PrismGroup

pytestmark = pytest.mark.ci  # real processes, a minute
NAMES = [case.name for case in CASES]
# What gloo itself refuses in every variation: the formula alone judges.
GLOO_REFUSES = {"all_to_all_of_lists", "all_to_all_of_columns", "scatter_of_columns"}
GLOO_REFUSES |= {"all_reduce_strided"}


@pytest.fixture(scope="module")
def results():
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, args=(folder,), nprocs=NUM_PROCESSES)
        found = []
        for rank in range(NUM_PROCESSES):
            with open(f"{folder}/result_{rank}.json", encoding="utf-8") as file:
                found.append(json.load(file))
        return found


def total(results, what):
    return sum((Counter(result[what]) for result in results), Counter())


@pytest.mark.slow
def test_every_process_came_to_the_end(results):
    assert [result["error"] for result in results] == [None] * NUM_PROCESSES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_virtual_is_real(results, name):
    wrong = [p["what"] for result in results for p in result["problems"] if p["case"] == name]
    assert not wrong, f"{len(wrong)} wrong, such as\n" + "\n".join(wrong[:3])


@pytest.mark.slow
def test_gloo_was_asked(results):
    agreed = total(results, "agreed")
    assert {name for name in NAMES if agreed[name] < NUM_PROCESSES} <= GLOO_REFUSES
    assert sum(agreed.values()) > 2_450


@pytest.mark.slow
def test_whatever_gloo_refuses_has_an_answer(results):
    answered = total(results, "refused")
    for name, count in total(results, "raised").items():
        assert answered[name] >= count, name


def test_every_row_has_a_case():
    others = {"recv", "dispatch", "combine"}  # send is both; calls of other libraries
    assert {case.row for case in CASES} == {row.name for row in TABLE} - others


def test_every_row_is_tried_with_every_dtype():
    for row in {case.row for case in CASES} - {"barrier"}:
        assert set(DTYPES) in [set(case.dtypes) for case in CASES if case.row == row], row
    for row in (row for row in TABLE if row.reduces):
        assert OPS in [case.ops for case in CASES if case.row == row.name], row.name


def test_every_collective_of_this_torch_has_a_row():
    """A method of ProcessGroup that takes tensors is in the table, or is refused by name."""
    about_the_group = {
        *("BackendType", "abort", "bound_device_id", "boxed", "get_group_store", "group_desc"),
        *("group_name", "merge_remote_group", "name", "rank", "set_timeout", "shutdown", "size"),
        *("split_group", "unbox", "use_pg_for_symm_mem_rendezvous"),
    }
    refused = {"monitored_barrier"}
    for name in dir(dist.ProcessGroup):
        if (name.startswith("_") and name not in BY_METHOD) or name.isupper():
            continue
        if name not in about_the_group | refused:
            assert name in BY_METHOD, f"torch's {name} has no row in collectives.TABLE"
        if name in BY_METHOD or name in refused:
            assert name in vars(PrismGroup), f"torch's {name} is not ours"


def test_both_names_of_a_renamed_method_mean_the_same():
    for old, new in (
        ("_allgather_base", "all_gather_single"),
        ("_reduce_scatter_base", "reduce_scatter_single"),
        ("alltoall_base", "all_to_all_single"),
        ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    ):
        assert BY_METHOD[old] is BY_METHOD[new]
        plain = [inspect.getclosurevars(vars(PrismGroup)[n]).nonlocals["plain"] for n in (old, new)]
        ours = [inspect.getclosurevars(call).nonlocals["answer"] for call in plain]
        assert ours[0] is ours[1]
