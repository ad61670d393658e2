"""Predicted beside real: where the error is; and graphs that others read back."""

import json
import struct

import pytest
from helpers.kineto import two_ranks

from megatron_prism.cli.main import main
from megatron_prism.core.program_text import parse
from megatron_prism.replay.priced_graph import replay
from megatron_prism.traces.chakra import write_chakra
from megatron_prism.traces.compare import compare_traces
from megatron_prism.traces.programs import import_traces

PREDICTED = """prism-program 1
world size=2
source device="NVIDIA H200"
program rank=0 ranks=0-1
0F0  compute ns=900us
0F0  all_reduce DATA_PARALLEL_GROUP bf16 n=1024 ns=100us
0F0  all_reduce DATA_PARALLEL_GROUP bf16 n=4096 ns=500us handle=2
0B0  compute ns=400us
-    wait handle=2
O    compute ns=400us
"""


def test_the_error_is_found_where_it_was_put(tmp_path):
    two_ranks(tmp_path, slow=1.5)
    made = compare_traces(import_traces([tmp_path]), replay(parse(PREDICTED)))
    assert made.predicted_ns == 1_900_000
    assert made.real_ns == pytest.approx(2_600_000, rel=1e-3)
    first, second = made.ranks
    assert (first.aligned, first.first) == ((3, 2, 2), "")
    parts = {part.what: round(part.error / 1000) for part in first.parts}
    assert parts["computing"] == -100
    assert sum(parts.values()) == pytest.approx(-700, abs=2)
    assert first.ops[0].what.endswith("waiting for others")
    assert round(first.ops[0].error / 1000) == -500
    assert second.ops[0].what.startswith("computing before all_reduce")
    assert round(second.ops[0].error / 1000) == -600


def test_the_first_call_without_a_counterpart_is_named(tmp_path):
    two_ranks(tmp_path)
    more = PREDICTED.replace("0B0  compute", "0F0  barrier DATA_PARALLEL_GROUP\n0B0  compute")
    made = compare_traces(import_traces([tmp_path]), replay(parse(more)))
    assert made.ranks[0].aligned == (3, 3, 2)
    assert "call 2 is predicted as barrier" in made.ranks[0].first


def test_the_command_writes_a_page_and_a_trace_with_both(tmp_path, capsys):
    two_ranks(tmp_path)
    predicted, page, both = (tmp_path / name for name in ("p.txt", "page.html", "both.json.out"))
    predicted.write_text(PREDICTED)
    traces = [str(tmp_path / f"rank{rank}.json.gz") for rank in (0, 1)]
    words = ["compare", *traces, str(predicted), "--html", str(page), "--trace", str(both)]
    assert main(words) == 0
    assert "an iteration: predicted 1.9 ms" in capsys.readouterr().out
    events = json.loads(both.read_text())["traceEvents"]
    titles = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert titles == ["rank 0, predicted", "rank 0, real", "rank 1, predicted", "rank 1, real"]
    assert "default-src &#x27;none&#x27;" in page.read_text()
    assert main(["compare", *traces, str(predicted), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "prism.compare/1"
    assert main(["compare", traces[0]]) == 2


def messages(path):
    """The messages of a file, each behind its length."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        size = shift = 0
        while True:
            (byte,) = struct.unpack_from("B", data, at)
            size, shift, at = size | (byte & 127) << shift, shift + 7, at + 1
            if byte < 128:
                break
        yield data[at : at + size]
        at += size


def chakra_types():
    """Node as mlcommons/chakra's et_def.proto has it, for protobuf's own parser."""
    pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")
    from google.protobuf import descriptor_pool, message_factory

    file = pb2.FileDescriptorProto(name="et.proto", package="chakra", syntax="proto3")
    kinds = pb2.FieldDescriptorProto
    fields = {
        "Attribute": [("name", 1, "STRING"), ("int32_val", 7, "INT32"), ("int64_val", 9, "INT64"),
                      ("uint64_val", 13, "UINT64"), ("bool_val", 27, "BOOL"),
                      ("string_val", 29, "STRING")],
        "Node": [("id", 1, "UINT64"), ("name", 2, "STRING"), ("type", 3, "INT32"),
                 ("data_deps", 5, "UINT64"), ("start_time_micros", 6, "UINT64"),
                 ("duration_micros", 7, "UINT64"), ("attr", 10, "MESSAGE")],
    }  # fmt: skip
    for name, rows in fields.items():
        message = file.message_type.add(name=name)
        for field, number, kind in rows:
            many = field in ("data_deps", "attr")
            made = message.field.add(
                name=field, number=number, type=getattr(kinds, f"TYPE_{kind}"),
                label=kinds.LABEL_REPEATED if many else kinds.LABEL_OPTIONAL,
            )  # fmt: skip
            if kind == "MESSAGE":
                made.type_name = ".chakra.Attribute"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("chakra.Node"))


def test_protobuf_reads_chakra_traces_back(tmp_path):
    node = chakra_types()
    timeline = replay(parse(PREDICTED))
    assert write_chakra(timeline, tmp_path) == [0, 1]
    assert json.loads((tmp_path / "comm_groups.json").read_text()) == {"0": [0, 1]}
    _, *rest = messages(tmp_path / "job.1.et")
    found = [node.FromString(one) for one in rest]
    assert [(one.id, one.type, list(one.data_deps)) for one in found] == [
        (0, 4, []), (1, 7, [0]), (2, 7, [1]), (3, 4, [1]), (5, 4, [2, 3])
    ]  # fmt: skip
    assert [one.duration_micros for one in found] == [900, 100, 500, 400, 400]
    attributes = {one.name: one for one in found[2].attr}
    assert attributes["comm_size"].int64_val == 8192
    assert attributes["comm_type"].int64_val == 0
    assert attributes["pg_name"].string_val == "0"
