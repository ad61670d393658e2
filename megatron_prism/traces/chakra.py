"""A job as Chakra execution traces, which ASTRA-sim and others read.

In : Timeline.  Out: one file per rank, ``job.RANK.et``, and ``comm_groups.json``, the ranks of each
group by the number that nodes call it.  A node is a segment, a call or a message; it depends on
what its stream, its group's stream and its waits make it wait for.  Segments last as long as in the
timeline; calls have their sizes and, as ``duration_micros``, their time on the wire.

Format: messages of schema/protobuf/et_def.proto @mlcommons/chakra, each behind its length
(src/third_party/utils/protolib.py); attributes as src/feeder/et_feeder_node.cpp reads them.  Its
few types of fields are written here: the wire format of protocol buffers is varints.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from megatron_prism.core.ops import CODE, IS_COLLECTIVE, IS_PAIR, NAMES, PHASE_NAMES, label
from megatron_prism.core.program import Program
from megatron_prism.replay.timeline import Timeline

_MOST_RANKS = 1024  # files; of a larger job those of one rank per class are written
_COMPUTE, _SEND, _RECV, _COLLECTIVE = 4, 5, 6, 7  # NodeType
_TYPES = {  # CollectiveCommType
    "all_reduce": 0, "reduce": 1, "all_gather": 2, "gather": 3, "scatter": 4, "broadcast": 5,
    "all_to_all": 6, "reduce_scatter": 7, "barrier": 9,
}  # fmt: skip
_INT32, _INT64, _UINT64, _BOOL, _TEXT = 7, 9, 13, 27, 29  # fields of AttributeProto


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes((*found, value))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _attribute(name: str, kind: int, value: int | str) -> bytes:
    body = _bytes(1, name.encode())
    body += _bytes(kind, value.encode()) if isinstance(value, str) else _number(kind, value)
    return _bytes(10, body)


def write_chakra(timeline: Timeline, folder: Path) -> list[int]:
    """Write a timeline into ``folder``, which exists; returns the ranks that have a file."""
    classes, world = timeline.graph.classes, timeline.graph.programs.world
    ranks = range(world.size) if world.size <= _MOST_RANKS else classes.representatives
    numbers: dict[tuple[int, ...], str] = {}
    for rank in ranks:
        with open(folder / f"job.{rank}.et", "wb") as file:
            head = _bytes(1, b"0.0.4") + _bytes(2, _bytes(1, b"schema") + _bytes(_TEXT, b"1.1.0"))
            for message in (head, *_nodes(timeline, rank, numbers)):
                file.write(_varint(len(message)) + message)
    groups = {number: list(members) for members, number in numbers.items()}
    (folder / "comm_groups.json").write_text(json.dumps(groups, indent=1) + "\n")
    return list(ranks)


def _nodes(timeline: Timeline, rank: int, numbers: dict[tuple[int, ...], str]) -> Iterator[bytes]:
    """The messages of one rank."""
    index = int(timeline.graph.classes.of[rank])
    program: Program = timeline.graph.program_list[index]
    took = np.zeros(len(program), dtype=np.int64)
    begins = np.zeros(len(program), dtype=np.int64)
    spans = timeline.spans(index)
    took[spans["op"]] = spans["end"] - spans["start"]
    begins[spans["op"]] = np.maximum(0, spans["start"])
    tags: dict[tuple[int, int], int] = {}
    for number, name, before in _ordered(program):
        row = program.ops[number]
        step = label(PHASE_NAMES[row["phase"]], int(row["microbatch"]), int(row["chunk"]))
        title = NAMES[name] + f" {step}" * (step != "-")
        size = int(max(program.bytes_in[number], program.bytes_out[number]))
        more = [_attribute("is_cpu_op", _BOOL, 0)]
        kind = _COMPUTE
        if name == CODE["compute"]:
            more.append(_attribute("num_ops", _INT64, max(0, int(row["flops"]))))
            more.append(_attribute("tensor_size", _UINT64, max(0, int(row["traffic"]))))
        else:
            group = timeline.graph.groups[program.strings[row["group"]]]
            members = group.group(rank).tolist()
            more.append(_attribute("comm_size", _INT64, size))
            if IS_PAIR[name]:
                kind = _SEND if name == CODE["send"] else _RECV
                place = members.index(rank)
                peer = members[(place + int(row["peer"])) % len(members)]
                ends = (rank, peer) if kind == _SEND else (peer, rank)
                tag = tags[ends] = tags.get(ends, -1) + 1
                more += [_attribute("comm_src", _INT32, ends[0]),
                         _attribute("comm_dst", _INT32, ends[1]),
                         _attribute("comm_tag", _INT32, tag)]  # fmt: skip
            else:
                kind = _COLLECTIVE
                more.append(_attribute("comm_type", _INT64, _TYPES[NAMES[name]]))
                own = numbers.setdefault(tuple(members), str(len(numbers)))
                more.append(_attribute("pg_name", _TEXT, own))
        fields = [_number(1, number), _bytes(2, title.encode()), _number(3, kind)]
        if before:
            fields.append(_bytes(5, b"".join(map(_varint, sorted(before)))))
        fields += [
            _number(6, int(begins[number]) // 1000),
            _number(7, -(-int(took[number]) // 1000)),
        ]
        yield b"".join([*fields, *more])


def _ordered(program: Program) -> Iterator[tuple[int, int, Iterable[int]]]:
    """(op, its code, the ops it waits for) of every segment and call, by CUDA's rules."""
    ops = program.ops
    streams: dict[int, set[int]] = {}
    comms: dict[tuple[int, int], set[int]] = {}
    handles: dict[int, set[int]] = {}
    rows = zip(*(ops[c].tolist() for c in ("name", "stream", "group", "peer", "handle", "batch")),
               strict=True)  # fmt: skip
    batch_of: dict[int, tuple[set[int], set[int]]] = {}  # what a batch waits for, its calls
    for op, (name, stream, group, peer, handle, batch) in enumerate(rows):
        queue = streams.get(stream, set())
        if name == CODE["compute"]:
            yield op, name, queue
            streams[stream] = {op}
        elif IS_COLLECTIVE[name] or IS_PAIR[name]:
            comm = group, peer if IS_PAIR[name] and batch < 0 else 0
            before, together = queue | comms.get(comm, set()), {op}
            if batch >= 0:
                before, together = batch_of.setdefault(batch, (before, set()))
                together.add(op)
            yield op, name, before
            comms[comm] = together
            if handle >= 0:
                handles[handle] = together
            else:
                streams[stream] = set(together)
        elif name == CODE["wait"]:
            streams[stream] = queue | handles.get(handle, set())
        elif name == CODE["record"]:
            handles[handle] = set(queue)
