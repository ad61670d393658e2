"""What changes with scale: planted changes of the larger job are listed, and nothing else is."""

import pytest

from megatron_prism.core.programs.program_text import parse
from megatron_prism.features.compare.scale import scale_changes
from megatron_prism.replay.priced_graph import price

JOB = """prism-program 1
world size={size} tp=2 pp=2
program rank=0 ranks=0-{half}
0F0 compute ns=1000
0F0 all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=4096 reduce=sum @mappings.py:31
0F0 all_gather TENSOR_MODEL_PARALLEL_GROUP bf16 in=512 out=1024 @mappings.py:90
-   send PIPELINE_MODEL_PARALLEL_GROUP bf16 n=2048 peer=1 @p2p.py:12
{more}1F0 all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=4096 reduce=sum @mappings.py:31
1F0 all_gather TENSOR_MODEL_PARALLEL_GROUP bf16 in=512 out=1024 @mappings.py:90
{more}1B0 reduce_scatter DATA_PARALLEL_GROUP fp32 in=65536 out={shard} reduce=sum @buffer.py:7
1B0 reduce_scatter DATA_PARALLEL_GROUP fp32 in=32768 out={small} reduce=sum @buffer.py:7
O   all_reduce TENSOR_MODEL_PARALLEL_GROUP fp32 n=1 reduce=max @norm.py:4
O   all_reduce TENSOR_MODEL_PARALLEL_GROUP fp32 n=1 reduce=sum @norm.py:9
O   all_gather DATA_PARALLEL_GROUP bf16 in={shard} out=65536 @buffer.py:20
program rank={first} ranks={first}-{last}
-   recv PIPELINE_MODEL_PARALLEL_GROUP bf16 n=2048 peer=-1 @p2p.py:12
0F0 compute ns=1000
0F0 broadcast TENSOR_MODEL_PARALLEL_GROUP int64 n=64 root=0 @data.py:5
"""
USUAL = {("group", "DATA_PARALLEL_GROUP")}


def job(size, text=JOB):
    dp = size // 4
    sizes = {"half": size // 2 - 1, "first": size // 2, "last": size - 1}
    return text.format(size=size, shard=65536 // dp, small=32768 // dp, more="", **sizes)


def changes(larger):
    jobs = [price(parse(text), machine="h200") for text in (job(32), larger)]
    return scale_changes(*jobs)


def test_of_a_job_that_is_only_larger_its_groups_and_ways_are_listed():
    found = changes(job(512))
    assert {(one.kind, one.what) for one in found if one.kind != "way"} == USUAL
    assert {one.what.partition(" at ")[0] for one in found if one.kind == "way"} <= {
        "all_gather of DATA_PARALLEL_GROUP", "reduce_scatter of DATA_PARALLEL_GROUP"
    }  # fmt: skip
    assert str(found[0]) == (
        "group: DATA_PARALLEL_GROUP: 8 ranks on 2 nodes -> 128 ranks on 32 nodes"
    )


@pytest.mark.parametrize(
    ("old", "new", "kind", "what"),
    [
        ("bf16 n=4096", "fp32 n=4096", "type", "mappings.py:31"),
        ("bf16 in=512", "fp8e4m3 in=512", "type", "mappings.py:90"),
        ("fp32 in=65536", "bf16 in=65536", "type", "buffer.py:7"),
        ("int64 n=64", "int32 n=64", "type", "data.py:5"),
        ("bf16 n=2048", "fp32 n=2048", "type", "p2p.py:12"),
        ("fp32 n=1 reduce=max", "fp64 n=1 reduce=max", "type", "norm.py:4"),
        ("n=4096", "n=4224", "elements", "mappings.py:31"),
        ("in=65536 out=512", "in=66048 out=516", "elements", "buffer.py:7"),
        ("in=32768 out=256", "in=33024 out=258", "elements", "buffer.py:7"),
        ("in=512 out=65536", "in=516 out=66048", "elements", "buffer.py:20"),
        ("in=512 out=1024", "in=1024 out=2048", "elements", "mappings.py:90"),
        ("n=64 root", "n=128 root", "elements", "data.py:5"),
        ("n=1 reduce=max", "n=2 reduce=max", "elements", "norm.py:4"),
        ("n=2048", "n=4096", "elements", "p2p.py:12"),
        ("mappings.py:90", "mappings.py:99", "code", "mappings.py:99"),
        ("n=1 reduce=sum @norm.py:9", "n=1 reduce=sum @norm.py:77", "code", "norm.py:77"),
        ("O   all_reduce TENSOR_MODEL_PARALLEL_GROUP fp32 n=1 reduce=max @norm.py:4\n", "", "code",
         "norm.py:4"),
        ("O   all_gather", "O   barrier DATA_PARALLEL_GROUP @b.py:1\nO   all_gather", "code",
         "b.py:1"),
        ("TENSOR_MODEL_PARALLEL_GROUP fp32 n=1 reduce=max",
         "DATA_PARALLEL_GROUP fp32 n=1 reduce=max", "code", "all_reduce of DATA_PARALLEL_GROUP"),
        ("broadcast TENSOR_MODEL", "broadcast DATA", "code", "broadcast of DATA_PARALLEL"),
    ],
)  # fmt: skip
def test_a_planted_change_is_listed_and_nothing_else(old, new, kind, what):
    larger = job(512)
    assert old in larger
    before = {str(one) for one in changes(larger)}
    found = [one for one in changes(larger.replace(old, new)) if str(one) not in before]
    assert any(one.kind == kind and what in one.what for one in found), found
    lines = {one.what for one in found if one.kind != "group"}
    assert len(lines) <= 2  # a call that is another one is one that is gone and one that is new


def test_more_microbatches_are_no_change():
    more = JOB.replace("{more}", "{more}" + "2F0 all_reduce TENSOR_MODEL_PARALLEL_GROUP bf16 n=4096"
                       " reduce=sum @mappings.py:31\n", 1)  # fmt: skip
    assert [str(one) for one in changes(job(512, more))] == [str(one) for one in changes(job(512))]
