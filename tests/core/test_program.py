"""Programs: their text and their file give back exactly what went in, and say what is wrong."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_prism.core.errors import ProgramError
from megatron_prism.core.programs import program
from megatron_prism.core.programs.ops import DTYPES, NAMES, PHASES, REDUCE, Op
from megatron_prism.core.programs.program import Builder, Program, Programs
from megatron_prism.core.programs.program_text import dump, parse

TEXT = """
prism-program 1
world size=4 tp=2 pp=2
source megatron_core=0.16.1 tier=meta  # a comment
group MY 0,1;2,3
program rank=0 ranks=0-1
-    alloc       storage=3 bytes=2MiB note="act:decoder.layers.0 @core/x.py:3"
0F0  compute     ns=412us kernels=9 note="a \\"b\\" # c"
0F0  all_reduce  TENSOR_MODEL_PARALLEL_GROUP bf16 n=4096 reduce=sum @mappings.py:31
0F0  all_to_all  MY bf16 n=8 to=4,4 from=2,6
0F0  send        PIPELINE_MODEL_PARALLEL_GROUP bf16 in=4096 peer=1 handle=3
0F0  wait        handle=3
-    free        storage=3 bytes=2MiB
program ranks=2,3
0F0  recv        PIPELINE_MODEL_PARALLEL_GROUP bf16 out=4096 peer=-1
O    compute     stream=side
"""

NOTE = "act:decoder.layers.0 @core/x.py:3"

words = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=9)
names = words.filter(lambda w: not set(w) & set('=@#"') and w not in DTYPES)
number = st.integers(-1, 2**40)
small = st.integers(-1, 1000)
rows = st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple)
ops = st.builds(
    Op,
    name=st.sampled_from(NAMES),
    group=st.just("") | names,
    dtype=st.sampled_from(list(DTYPES)),
    num_in=number,
    num_out=number,
    reduce=st.sampled_from(REDUCE),
    peer=st.integers(-1000, 1000),
    root=small,
    splits=st.none() | st.tuples(rows, rows),
    stream=names,
    handle=small,
    batch=small,
    phase=st.sampled_from(list(PHASES)),
    microbatch=small,
    chunk=small,
    ns=number,
    flops=number,
    traffic=number,
    host=number,
    lead=number,
    products=number,
    kernels=small,
    shape=st.just("") | names,
    site=st.just("") | names,
    note=st.just("") | st.text(st.characters(codec="utf-8", exclude_categories=("C",)), max_size=9),
)


def world_of(*programs_):
    return Programs.one_per_rank([Program.from_ops(r, p) for r, p in enumerate(programs_)])


notes = st.lists(st.tuples(st.integers(1, 2**40), ops.map(lambda op: op.note)), max_size=3)


def test_a_group_may_be_called_as_a_field_is():
    head = "prism-program 1\nworld size=1\nprogram ranks=0\n"
    text = f"{head}0-0 all_reduce n fp32 n=7 reduce=sum"
    (op,) = parse(text).programs[0]
    assert (op.group, op.num_in) == ("n", 7)


@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(st.lists(ops, max_size=5), st.lists(ops, max_size=5), notes)
def test_text_and_file_give_back_what_went_in(tmp_path_factory, first, second, memory):
    made = world_of(first, second)
    assert [list(p) for p in made.programs] == [first, second]
    build = Builder()
    for storage, (num_bytes, note) in enumerate(memory):
        build.memory(storage, num_bytes, note)
        build.add("mark", note="m")
    made = Programs.one_per_rank([made.programs[0], dataclasses.replace(build.build(1))])
    assert parse(dump(made)) == made
    path = tmp_path_factory.mktemp("p") / "x.prism"
    program.save(made, path)
    assert program.load(path) == made


def test_a_program_written_by_hand():
    made = parse(TEXT)
    assert parse(dump(made)) == made
    first = made.programs[0]
    assert made.of(1) is first
    assert made.of(3).rank == 2
    assert first[0] == Op("compute", phase="forward", microbatch=0, chunk=0, ns=412_000, kernels=9,
                          note='a "b" # c')  # fmt: skip
    assert first[2].splits == ((4, 4), (2, 6))
    assert first[3].peer == 1
    assert first.bytes_in.tolist() == [0, 8192, 16, 8192, 0]
    assert first.allocations.tolist() == [
        (0, 3, 2 << 20, first.strings.index(NOTE)),
        (5, 3, -2 << 20, 0),
    ]
    assert first.live_bytes().tolist() == [2 << 20, 0]
    assert made.programs[1][1].stream == "side"
    assert made.programs[1][1].label == "O"


@pytest.mark.parametrize("note", ["\u2028", "a\u2029b", "\x85", "a\r\nb", "\n", "\x0b", "a\\nb"])
def test_a_note_may_hold_any_line_break(note):
    made = world_of([Op("mark", note=note)], [Op("mark", note=note)])
    assert parse(dump(made)) == made
    assert parse(dump(made).replace("\n", "\r\n")) == made  # as an editor on Windows saves it


def test_sequence_counts_each_fifo():
    made = Program.from_ops(
        0,
        [
            Op("all_reduce", "A"), Op("send", "P", peer=1), Op("compute"), Op("all_gather", "A"),
            Op("recv", "P", peer=1), Op("send", "P", peer=-1), Op("send", "P", peer=1),
            Op("broadcast", "B"), Op("recv", "P", peer=1),
        ],
    )  # fmt: skip
    assert made.sequence.tolist() == [0, 0, -1, 1, 0, 0, 1, 0, 1]
    assert {k: v.tolist() for k, v in made.groups().items()} == {
        "A": [0, 3], "P": [1, 4, 5, 6, 8], "B": [7]
    }  # fmt: skip


def test_equality_does_not_depend_on_the_order_of_strings():
    one, two = Builder(), Builder()
    two.add("mark", note="first")  # numbers its strings differently
    two._rows.clear()
    for builder in (one, two):
        builder.add("all_reduce", "A", site="x:1")
        builder.add("wait", stream="s")
    assert one.build(0) == two.build(0) != Program.from_ops(0, [Op("wait")])
    assert one.build(0) != Program.from_ops(0, [Op("all_reduce", "A", site="x:2"), Op("wait")])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("0F0 comptue", "x:16:5: there is no op comptue.*did you mean compute"),
        ("0F0 compute ns=3qs", "x:16:13: .*no unit of a duration"),
        ("0X0 compute", "x:16:1: '0X0' is no label"),
        ("0F0", "x:16:1: a line is LABEL OP"),
        ("0F0 send P bf16 bf17", "x:16:17: there is no dtype bf17.*bf16"),
        ("0F0 send P perr=1", "x:16:12: an op has no perr.*peer="),
        ("0F0 all_reduce A reduce=mean", "x:16:18: there is no reduction mean"),
        ("0F0 all_to_all A to=1,2", "splits need to= and from="),
        ("0F0 all_to_all A to=a", "x:16:18: 'a' are no rows"),
        ("- alloc storage=1", "x:16:3: storage and bytes are needed"),
        ("program", "x:16:1: whose program is this"),
        ("group X", "x:16:1: a group has a name and members"),
        ("world size=6 tp=4", "tp 4 x cp 1 x pp 1 = 4 does not divide 6"),
        ("world size=4", "x:16:1: there is a world already"),
        ("world size=2097153", "x:16:7: that is too large a world"),
        ("group MY 1,0", "x:16:7: group MY is given twice"),
        ("program rank=1", "x:16:1: rank 1 has a program already"),
        ("0F0 compute ns=1 ns=2", "x:16:18: ns is given twice"),
        ("0F0 compute ns=-5", "x:16:13: -5 is out of range"),
        ("0F0 compute ns=" + "9" * 5000, "is no duration|out of range"),
        ('- compute note="a b', "x:16:16: this quote has no end"),
    ],
)
def test_a_typo_is_named_with_line_and_column(line, says):
    with pytest.raises(ProgramError, match=f"(?s){says}") as caught:
        parse(TEXT.strip("\n") + "\n" + line, "x")
    assert caught.value.fix
    assert "^ here" in caught.value.message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty"),
        ("hello", "this is no program"),
        ("prism-program 2\n", "version 2"),
        ("prism-program 1\nprogram rank=0", "the world must come first"),
        ("prism-program 1\nworld size=1\n0F compute", "an op before the first program"),
        ("prism-program 1\nworld size=2\nprogram rank=0\n", "ranks 1 have no program"),
        ("prism-program 1\nworld size=2\n", "no world or no program"),
    ],
)
def test_what_is_no_program_says_so(text, says):
    with pytest.raises(ProgramError, match=says):
        parse(text)


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ({"ops0": {"name": 200}}, "name 200 outside 0 to 19"),
        ({"ops1": {"lead": 1 << 62}}, "program 1 has lead"),
        ({"head": {"source": {"a": 1}}}, r"source\[\.\.\.\]: expected `str`, got `int`"),
    ],
)
def test_a_file_of_values_that_no_program_has(tmp_path, odd, says):
    """They were met later, as an IndexError of whoever looked; the text form refuses them too."""
    path = tmp_path / "x.prism"
    program.save(parse(TEXT), path)
    with np.load(path) as stored:
        arrays = {name: stored[name].copy() for name in stored.files}
    for name, value in odd.items():
        if name == "head":
            whole = json.loads(arrays["head"].tobytes())
            text = value if isinstance(value, str) else json.dumps(whole | value)
            arrays["head"] = np.frombuffer(text.encode(), dtype=np.uint8)
        else:
            for column, number in value.items():
                arrays[name][column][:1] = number
    with path.open("wb") as file:
        np.savez(file, **arrays)
    with pytest.raises(ProgramError, match=says):
        program.load(path)
