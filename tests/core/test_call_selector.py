"""Calls are chosen alike by faults, breakpoints and payloads; breakpoints' own words are tested
with the debugger, ranks' with the faults."""

import pytest

from megatron_prism.core.errors import UsageError
from megatron_prism.core.programs.call_selector import CallSelector, NthCall
from megatron_prism.core.programs.ops import CallLabel

TP = "TENSOR_MODEL_PARALLEL_GROUP"
CALL = CallLabel("all_reduce", TP, 2, 1, 0, "backward", "core/mappings.py:31")


@pytest.mark.parametrize(
    "text",
    [
        "1B0 all_reduce",
        "1B group=tp",
        "iter=2 mb=1",
        "@mappings.py:31",
        f"all_reduce of {TP} at core/mappings.py:31",
        "phase=backward",
    ],
)
def test_a_call_fits_what_is_said_of_it(text):
    assert CallSelector.parse(text).fits(CALL)


@pytest.mark.parametrize(
    "text",
    ["2B0", "1F", "1B1", "send", "group=pp", "iter=3", "@mappings.py:3", "phase=forward", "-"],
)
def test_one_wrong_condition_is_enough(text):
    assert not CallSelector.parse(text).fits(CALL)


@pytest.mark.parametrize(
    "text",
    [
        "rank=pp=1,tp=0,iter=3,mb=0,group=tp,op=send,nth=3,site=x",
        "rank=node=2/4,chunk=1,phase=forward",
        "rank=0-7,3",
    ],
)
def test_what_it_prints_it_reads(text):
    assert str(CallSelector.parse(text)) == text


def test_the_nth_of_those_that_fit():
    third = NthCall(CallSelector.parse("all_reduce nth=3"))
    other = CallLabel("send", TP)
    assert [third.hit(c) for c in (CALL, other, CALL, CALL, CALL)] == [False] * 3 + [True, False]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("phase=back", "no phase back"),
        ("nth=-1", "no number"),
        ("nth=0", "counts from 1"),
        ("op=send op=recv", "op is named twice"),
    ],
)
def test_what_no_call_has_is_refused(text, says):
    with pytest.raises(UsageError, match=says):
        CallSelector.parse(text)
