"""More labelled hangs, as production has them: several iterations, an evaluation, a checkpoint.

``cases`` plants one fault in one iteration; here whole phases are skipped, several ranks stand
still, and the dumps are those that people really hand in: some lost, cut off, of another moment, of
another job, of old formats.  Every case says what is done, and what ``prism hang --dumps`` must
say of the files; the expectation was written down before the first run.
"""

import dataclasses
import functools
import json
import pickle
import random
from dataclasses import dataclass, field

from helpers.hang_worlds import world

from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Program, Programs
from megatron_prism.core.programs.program_text import parse
from megatron_prism.features.hang import export
from megatron_prism.graph import stall
from megatron_prism.graph.stall import RankFault

TP, EP = "TENSOR_MODEL_PARALLEL_GROUP", "EXPERT_MODEL_PARALLEL_GROUP"
PP, DP = "PIPELINE_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP_WITH_CP"
CP, EMBEDDING = "CONTEXT_PARALLEL_GROUP", "EMBEDDING_GROUP"
TEP, EDP = "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "EXPERT_DATA_PARALLEL_GROUP"
AT_END = 1 << 30  # a place behind all ops
EVERYBODY, NORM = "default_pg", "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"


# -- a job of several iterations ------------------------------------------------------------------
@dataclass
class Job:
    """parts: rank -> [(what: "1", "2", "evaluation", "3", "save"; its ops)]"""

    base: Programs
    parts: dict

    def of(self, rank, what):
        return next(ops for name, ops in self.parts[rank] if name == what)

    def programs(self):
        made = []
        for rank, parts in self.parts.items():
            ops = []
            for number, (_, mine) in enumerate(parts):
                shift = {"handle": 10_000 * number, "batch": 10_000 * number}
                ops += [
                    dataclasses.replace(
                        op,
                        **{k: getattr(op, k) + n for k, n in shift.items() if getattr(op, k) >= 0},
                    )
                    for op in mine
                ]
            made.append(Program.from_ops(rank, ops))
        return Programs.one_per_rank(made, self.base.world)


def job(name="moe"):
    """Two iterations, an evaluation, one more iteration, a checkpoint that ends in a barrier."""
    base, parts = world(name), {}
    for rank in range(base.world.size):
        ops = list(base.of(rank))
        forward = [op for op in ops if op.group and op.label == "0F"]
        loss = Op("all_reduce", DP, "fp32", 2, 2, "sum", site="training/training.py:2547")
        item = Op("host_wait", note="device", site="training/training.py:2548")
        save = Op("barrier", EVERYBODY, "uint8", 1, 1, site="training/checkpointing.py:700")
        parts[rank] = [("1", list(ops)), ("2", list(ops)), ("evaluation", [*forward, loss, item]),
                       ("3", list(ops)), ("save", [save])]  # fmt: skip
    return Job(base, parts)


def index(ops, name, group, nth=0):
    return [i for i, op in enumerate(ops) if (op.name, op.group) == (name, group)][nth]


def applied_later(change):
    """``change(it, …)`` as ``change(…)``, which waits for ``it``: a Job, or the dumps by rank."""
    return lambda *args, **more: lambda it: change(it, *args, **more)


# -- what goes wrong ------------------------------------------------------------------------------
# each takes a Job and returns the standstill's faults
def nothing(it):
    return {}


@applied_later
def without(it, rank, part):
    """Rank skips a whole part."""
    it.parts[rank] = [(n, o) for n, o in it.parts[rank] if n != part]
    return {}


@applied_later
def without_calls(it, rank, part, name, group, which=None):
    """Rank leaves out calls of a part: all of a name and group, or the ``which``-th."""
    ops = it.of(rank, part)
    gone = [op for op in ops if (op.name, op.group) == (name, group)]
    gone = gone if which is None else [gone[which]]
    handles = {op.handle for op in gone if op.handle >= 0}
    ops[:] = [op for op in ops if not any(op is g for g in gone)
              and not (op.name == "wait" and op.handle in handles)]  # fmt: skip
    return {}


@applied_later
def another(it, rank, part, name, group, nth=0, /, **fields):
    """Rank makes one call otherwise."""
    ops = it.of(rank, part)
    at = index(ops, name, group, nth)
    ops[at] = dataclasses.replace(ops[at], **fields)
    return {}


@applied_later
def more(it, ranks, part, at, *calls):
    """Ranks make calls that nobody else makes."""
    for rank in ranks:
        it.of(rank, part)[at:at] = calls
    return {}


@applied_later
def microbatch_more(it, rank):
    """One more forward of the second microbatch, as where one rank's data has more of them."""
    ops = it.of(rank, "3")
    forward = [op for op in ops if op.label == "1F"]
    at = next(i for i, op in enumerate(ops) if op is forward[-1])
    ops[at + 1 : at + 1] = forward
    return {}


@applied_later
def ring_turned(it, rank):
    """Rank sends its keys and values to the previous rank of the ring, and expects the next's."""
    ops = it.of(rank, "2")
    ops[:] = [dataclasses.replace(o, peer=-o.peer) if o.group == CP else o for o in ops]
    return {}


@applied_later
def swapped(it, rank, part, first, second):
    """Two calls (name, group, nth) change places."""
    ops = it.of(rank, part)
    a, b = index(ops, *first), index(ops, *second)
    ops[a], ops[b] = ops[b], ops[a]
    return {}


@applied_later
def stands(it, *ranks, part="3", at=40, silent=False):
    """The hosts of these ranks stop there."""
    faults = {}
    for rank in ranks:
        before = 0
        for name, ops in it.parts[rank]:
            if name == part:
                break
            before += len(ops)
        faults[rank] = RankFault(host=before + at, silent=silent)
    return faults


def before_first_call(stuck, waiting):
    """The host of a rank stops 30 ops before the first call of a group, to which another came."""

    def change(it):
        faults = {}
        for rank, ops_before in ((stuck, 30), (waiting, 0)):
            first_call = index(it.of(rank, "1"), "all_reduce", EMBEDDING)
            faults |= stands(rank, part="1", at=first_call - ops_before)(it)
        return faults

    return change


def device_stops(rank, part="3", at=40):
    """A kernel there does not end; its host goes on."""
    stop = stands(rank, part=part, at=at)
    return lambda it: {r: stall.RankFault(device=f.host) for r, f in stop(it).items()}


@applied_later
def both(it, *changes):
    faults = {}
    for one in changes:
        faults |= one(it)
    return faults


# -- what becomes of the files --------------------------------------------------------------------
@applied_later
def lost(values, *ranks):
    for rank in ranks:
        del values[rank]


@applied_later
def spares(values, *ranks):
    """Ranks that wait in the store until one dies: they are in no group."""
    for rank in ranks:
        values[rank] = values[0] | {"entries": [], "pg_config": {}, "pg_status": {}}


def clocks_apart(values):
    """The clocks of the nodes, of four ranks each, differ by seconds."""
    rng = random.Random(1)
    apart = {node: rng.randrange(-(10**10), 10**10) for node in range(len(values))}
    for rank, value in values.items():
        for entry in value["entries"]:
            entry["time_created_ns"] += apart[rank // 4]


@applied_later
def lost_but_for(values, culprit, count, seed=1):
    """Half of the dumps did not make it to the file system."""
    rest = [rank for rank in values if rank != culprit]
    for rank in random.Random(seed).sample(rest, count):
        del values[rank]


@applied_later
def of_version(values, version):
    """As that torch wrote them."""
    number = int(version.partition(".")[2])
    for rank, value in values.items():
        mine = version if version != "mixed" else ("2.3", "2.10")[rank % 2]
        value["version"] = mine
        for entry in value["entries"]:
            if number < 9:
                entry.pop("thread_id", None)
                entry.pop("thread_name", None)
            if number < 3:
                entry.pop("retired")
                entry.pop("timeout_ms")
            if number < 2:
                entry.pop("is_p2p")
        if number < 2:
            value.pop("pg_status")


def no_entries(values):
    for value in values.values():
        value["entries"] = []


@applied_later
def ring_of(values, length):
    """Only the last calls are kept."""
    for value in values.values():
        value["entries"] = value["entries"][-length:]


@applied_later
def rings(values, *lengths):
    """The same, of ranks that keep different numbers of calls."""
    for rank, value in values.items():
        value["entries"] = value["entries"][-lengths[rank % len(lengths)] :]


@applied_later
def of_an_earlier_moment(values, rank, calls):
    """The dump of ``rank`` was asked for by hand before the others': it ends ``calls`` earlier."""
    value = values[rank]
    value["entries"] = value["entries"][:-calls]
    for number, status in value["pg_status"].items():
        mine = [e for e in value["entries"] if str(e["pg_id"]) == number]
        counts = [e["collective_seq_id"] for e in mine]
        status["last_enqueued_collective"] = max(counts, default=-1)
        done = [e["collective_seq_id"] for e in mine if e["retired"]]
        status["last_completed_collective"] = max(done, default=-1)


@applied_later
def recorder_off(values, *ranks):
    """TORCH_FR_BUFFER_SIZE=0 there, or reset: neither calls nor counters."""
    for rank in ranks:
        values[rank]["entries"], values[rank]["pg_status"] = [], {}


@applied_later
def failed_calls_counted(values, *ranks):
    """As gloo does: a call that failed is counted as completed, though its record is open."""
    for rank in ranks:
        for status in values[rank]["pg_status"].values():
            status["last_completed_collective"] = status["last_enqueued_collective"]


@applied_later
def earlier_of(values, rank, calls, outstanding_only):
    """The same, of dumps that may have outstanding calls only."""
    of_an_earlier_moment(rank, calls)(values)
    for value in values.values() if outstanding_only else ():
        value["entries"] = [e for e in value["entries"] if not e["retired"]]


@applied_later
def other_names(values, rank, a, b):
    """Rank made two groups in the other order: their names are exchanged there."""
    value = values[rank]
    names = {c["desc"]: n for n, c in value["pg_config"].items()}
    one, two = names[a], names[b]
    other = {one: two, two: one}
    value["pg_config"] = {
        other.get(n, n): c | {"name": other.get(n, n)} for n, c in value["pg_config"].items()
    }
    for entry in value["entries"]:
        name, desc = entry["process_group"]
        entry["process_group"] = (other.get(name, name), desc)


@applied_later
def of_another_job(values, ranks, name="interleaved"):
    state = stall.run_until_stalled(job(name).programs(), {ranks[0]: RankFault(host=100)})
    for rank, value in export.dumps_of(state, active_only=True):
        if rank in ranks:
            values[rank] = value


@applied_later
def started_again(values, rank):
    """The rank was restarted alone: it counts from the beginning and waits for its first step."""
    values[rank]["entries"] = []
    for status in values[rank]["pg_status"].values():
        for word in status:
            status[word] = -1


@applied_later
def called(values, words):
    """The groups have other descriptions: a device mesh's, or none."""
    for value in values.values():
        for config in value["pg_config"].values():
            config["desc"] = words.get(config["desc"], config["desc"])
        for entry in value["entries"]:
            name, desc = entry["process_group"]
            entry["process_group"] = (name, words.get(desc, desc))


def of_a_larger_job(values):
    """Ranks 16 to 31 of an earlier job of 32 lie in the folder."""
    state = stall.run_until_stalled(dynamic(), {20: RankFault(host=9)})
    values |= {r: v for r, v in export.dumps_of(state, active_only=True) if r > 15}


@applied_later
def aborted_but(values, *ranks):
    """All others were written down when their watchdogs had aborted what was outstanding."""
    for rank in values.keys() - set(ranks):
        entries = values[rank]["entries"]
        values[rank]["entries"] = [e | {"retired": True} for e in entries]
        for status in values[rank]["pg_status"].values():
            status["last_completed_collective"] = status["last_enqueued_collective"]


@applied_later
def unbatched(values, rank):
    """Rank posts its messages one by one where the others post them as a batch; the fault that
    stopped the world at one of them (1000 elements) is taken back."""
    value = values[rank]
    left, inside = [], []
    for entry in value["entries"]:
        for side in ("input_sizes", "output_sizes"):
            entry[side] = [[1024] if size == [1000] else size for size in entry[side]]
        if entry["profiling_name"] == "nccl:coalesced":
            for place, message in enumerate(inside):  # by itself each has a state of its own
                message |= {k: entry[k] for k in ("state", "retired")}
                message["p2p_seq_id"] = 2 * message["p2p_seq_id"] + place
            left += inside
        inside = [*inside, entry] if entry["is_p2p"] else []
        left += [] if entry["is_p2p"] else [entry]
    value["entries"] = left


@dataclass(frozen=True)
class Case:
    """named: exactly these ranks, or a predicate's name; see ``judge``.

    verdict : the class, of several that are right;  group, op: "" for not asked
    """

    name: str
    about: str
    fault: object
    named: frozenset
    verdict: tuple
    group: str = ""
    op: str = ""
    world: str = "moe"
    files: object = None  # what becomes of the dumps
    how: dict = field(default_factory=dict)
    as_json: bool = False
    at_most: bool = False  # nobody but these, and perhaps none of them
    exit: tuple = (1,)


def case(name, about, fault, named, verdict, group="", op="", **more):
    words = (verdict,) if isinstance(verdict, str) else verdict
    return Case(name, about, fault, frozenset(named), words, group, op, **more)


ACTIVE = {"active_only": True, "stacks": False}
GIL = stands(10, part="3", at=40)
LAYER = both(*3 * [without_calls(5, "2", "all_to_all", EP, 3)], without_calls(
    5, "2", "all_gather", TEP, 1))  # fmt: skip
CASES = (
    # experts exchange outside NCCL: a partner of the culprit's pipeline waits there, without a call
    case("a message left out, experts exchange outside NCCL", "DeepEP leaves no record",
         without_calls(3, "2", "send", PP, 0), {3}, ("order", "mismatch"), world="flex"),
    # phases
    case("evaluation skipped", "C22: --eval-interval differs on one rank", without(5, "evaluation"),
         {5}, ("mismatch", "order"), DP, "all_reduce"),
    case("evaluation alone", "one rank evaluates once more",
         lambda it: it.parts[5].insert(3, ("again", list(it.of(5, "evaluation")))) or {},
         {5}, ("mismatch", "order"), TP),
    case("a microbatch more", "C05: counts differ over DP", microbatch_more(5), {5},
         ("mismatch", "order"), TP),
    case("data ends early, process gone", "C23: train-iters differ by data", both(
         without(3, "3"), stands(3, part="save", at=0, silent=True)), {3}, "missing dump"),
    case("data ends early, waits in teardown", "C22, C23: no calls any more", both(
         without(3, "3"), stands(3, part="save", at=0)), {3}, "host stuck"),
    case("optimizer step skipped", "one rank's loss scaler saw an overflow, C02", both(
         without_calls(6, "2", "all_gather", DP), without_calls(
             6, "2", "all_gather", "EXPERT_DATA_PARALLEL_GROUP")), {6}, ("mismatch", "order"),
         DP, "all_gather"),
    case("gradient norm skipped", "C03: early return before an all_reduce", without_calls(
         9, "2", "all_reduce", NORM), {9}, ("mismatch", "order"), NORM, "all_reduce"),
    case("save too slow on one rank", "a file system that stands still", stands(
         0, part="save", at=0), {0}, "host stuck", EVERYBODY, "barrier"),
    case("rank 0 finalises a save alone", "C15: async save", more(
         [0], "3", 0, Op("barrier", EVERYBODY, "uint8", 1, 1)), {0},
         ("mismatch", "order"), EVERYBODY, "barrier"),
    case("new_group by a subset", "its barrier is of everybody", more(
         [0, 1, 2, 3], "3", 0, Op("barrier", EVERYBODY, "uint8", 1, 1)), {0, 1, 2, 3}, "mismatch",
         EVERYBODY, "barrier"),
    case("gradients reduced once too often", "no_sync forgotten on one rank", more(
         [5], "2", 60, Op("reduce_scatter", DP, "fp32", 17664, 4416, "sum")), {5},
         ("mismatch", "order")),
    # calls
    case("barrier for all_reduce", "one branch synchronises otherwise", another(
         3, "2", "all_reduce", TP, 0, name="barrier", dtype="uint8", num_in=1, num_out=1,
         reduce=""), {3}, "mismatch", TP),
    case("another type of as many bytes", "int32 for fp32; NCCL would not notice", another(
         12, "3", "all_reduce", "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", 0, dtype="int32"),
         {12}, "mismatch", "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "all_reduce"),
    case("fewer rows sent than expected", "C18: totals differ", another(
         5, "3", "all_to_all", EP, 4, num_in=20, splits=((5, 5, 5, 5), (8, 8, 8, 8))), {5},
         "mismatch", EP, "all_to_all"),
    case("an expert without tokens", "C18: skips one all-to-all of backward", without_calls(
         5, "2", "all_to_all", EP, 14), {5}, ("mismatch", "order"), EP, "all_to_all"),
    case("buckets in another order", "C26: parameters gathered in another order", swapped(
         5, "2", ("all_gather", DP, 0), ("all_gather", DP, 1)), {5}, "mismatch", DP, "all_gather"),
    case("another root", "the recorder does not keep roots", both(
         lambda it: [it.of(r, "3").insert(0, Op("broadcast", TP, "int64", 8, 8, root=0))
                     for r in it.parts] and {},
         another(9, "3", "broadcast", TP, 0, root=1)), {9}, ("undetermined", "mismatch"), TP,
         "broadcast", at_most=True, exit=(1, 3)),
    case("unbatched messages", "isend against batch_isend_irecv: two communicators", another(
         4, "2", "send", PP, 0, num_in=1000), {4}, "mismatch", PP, "send", files=unbatched(4)),
    case("unbatched messages, outstanding only", "no other message to compare with", another(
         4, "2", "send", PP, 0, num_in=1000), {4}, ("mismatch", "undetermined"), PP, "send",
         files=unbatched(4), how=ACTIVE, at_most=True, exit=(1, 3)),
    case("a pair skips an evaluation", "both ranks of a tensor-parallel group", both(
         without(4, "evaluation"), without(5, "evaluation")), {4, 5}, ("mismatch", "order"), DP,
         "all_reduce"),
    case("two ranks inverted", "C09, C10 on two replicas", both(*(swapped(
         r, "2", ("reduce_scatter", DP, 0), ("all_to_all", EP, 23)) for r in (5, 7))), {5, 7},
         "order", DP),
    case("a stage skips a barrier", "rank-dependent branch after a save", both(*(
         without(r, "save") for r in range(8))), range(8), ("host stuck", "mismatch"), EVERYBODY,
         "barrier"),
    case("a rank calls alone behind the last save", "pytorch 88000: a call under if rank == 0",
         more([0], "save", AT_END, Op("all_reduce", EVERYBODY, "fp32", 1, 1, "sum")), {0},
         "mismatch", EVERYBODY, "all_reduce"),
    case("a host stops before a group's first call", "a sibling makes its communicator, unrecorded",
         before_first_call(0, 8), {0}, "host stuck"),
    case("a member skips a barrier of gloo", "the others of its group wait there, unrecorded",
         stands(1, 3, 5, part="3", at=0), (), "undetermined", exit=(3,)),
    case("inversion in a mesh's pipeline", "not Megatron's words: 8 innocents were named", swapped(
         5, "2", ("reduce_scatter", DP, 0), ("all_to_all", EP, 23)), {5}, "order", DP,
         files=called({PP: "mesh_pp"})),
    case("a receive lost in a mesh's pipeline", "stages were compared with one another",
         without_calls(12, "2", "recv", PP, 1), {12}, ("mismatch", "order"), "mesh_pp",
         files=called({PP: "mesh_pp"})),
    case("a send lost where nothing is described", "stages are known by their messages",
         without_calls(6, "2", "send", PP, 2), {6}, ("mismatch", "order", "undetermined",
         "deadlock"), world="interleaved", files=called(dict.fromkeys((PP, DP, TP, NORM,
         "EMBEDDING_GROUP"), "undefined")), at_most=True, exit=(1, 3)),
    case("half of the replicas have a microbatch more", "nobody can tell which half is right", both(
         *(microbatch_more(r) for r in range(4))), (), ("deadlock", "undetermined"),
         exit=(1, 3)),
    case("the last receive is lost", "the rank goes on, and waits for who waits for it",
         without_calls(4, "1", "recv", PP, -1), {4}, ("mismatch", "order"), PP, "send"),
    # ranks that stand still
    case("killed for memory", "the kernel's OOM killer; no dump", stands(
         10, part="2", at=77, silent=True), {10}, "missing dump"),
    case("a node loses power", "8 of 16 ranks without a dump", stands(
         *range(8, 16), part="2", at=30, silent=True), range(8, 16), "missing dump"),
    case("data loader of a whole stage", "all first stages wait for storage", stands(
         *range(8), part="3", at=0), range(8), "host stuck"),
    case("one of two waits for data", "tp rank 0 reads for both", stands(6, part="3", at=0), {6},
         "host stuck", TP, "reduce_scatter"),
    case("two faults of two kinds", "rank 3 another type, rank 12 killed", both(
         another(3, "3", "all_reduce", TP, 0, dtype="bf16"),
         stands(12, part="2", at=50, silent=True)), {12}, "missing dump"),
    case("stuck in a pipeline without replicas", "only messages tell", stands(
         2, part="3", at=5), {2}, "host stuck", world="line"),
    case("killed in a pipeline without replicas", "only messages tell", stands(
         2, part="3", at=5, silent=True), {2}, "missing dump", world="line"),
    case("receives before it sends", "no replica, no majority: its own earlier iterations tell",
         swapped(2, "3", ("send", PP, 1), ("recv", PP, 2)), {2}, "order", PP, world="line"),
    case("killed while a stage waits for it outside NCCL", "gloo; its stage was named with it",
         both(stands(8, 9, 10, 11, 13, 14, 15, part="3", at=0), stands(
             12, part="3", at=0, silent=True)), {12}, "missing dump", PP, "send"),
    case("killed while its replicas save with it", "they wait for nobody in NCCL", both(
         stands(0, 2, 4, part="3", at=0), stands(6, part="3", at=0, silent=True)), {6},
         "missing dump", TP),
    case("two stuck and one killed", "no group of theirs is whole without others", both(
         stands(2, 7, part="3", at=40), stands(12, part="3", at=60, silent=True)), {2, 7, 12},
         ("host stuck", "missing dump")),
    case("messages on the default group", "its counters count messages, too", stands(
         6, part="save", at=0), {6}, "host stuck", EVERYBODY, "barrier", world="default",
         how={"active_only": True, "stacks": False}),
    # experts, context parallelism, optimizers
    case("a layer of experts left out", "C18, C19: also its token counts; nobody was named",
         LAYER, {5}, ("order", "mismatch"), TEP, "all_gather"),
    case("a layer of experts left out, outstanding only", "", LAYER, {5}, ("order", "mismatch"),
         TEP, "all_gather", how=ACTIVE),
    case("a ring turned round", "context parallelism with messages", ring_turned(5), {5}, "order",
         CP, world="ring"),
    case("a step of a ring left out", "", both(without_calls(5, "2", "recv", CP, 1), without_calls(
         5, "2", "send", CP, 1)), {5}, ("order", "mismatch"), world="ring"),
    case("killed within a ring", "", stands(5, part="2", at=9, silent=True), {5}, "missing dump",
         world="ring"),
    case("parameters not gathered", "the last bucket of one rank", without_calls(
         6, "2", "all_gather", DP, -1), {6}, ("mismatch", "order"), DP, "all_gather", how=ACTIVE),
    case("an embedding's gradients left out", "tied weights: last stage alone", without_calls(
         12, "2", "all_reduce", EMBEDDING, 0), {12}, ("mismatch", "order"), EMBEDDING,
         "all_reduce"),
    case("three ranks rerun a step", "C22: the rerun state machine asks everybody", more(
         (5, 6, 11), "3", 0, Op("all_reduce", EVERYBODY, "fp32", 1, 1, "sum")), {5, 6, 11},
         ("mismatch", "order"), EVERYBODY, "all_reduce", how=ACTIVE),
    case("exits a step early", "a signal reached one rank: it saves", without(9, "3"), {9},
         ("order", "mismatch"), how=ACTIVE),
    case("a replica exits a step early", "its second stage waits with the first in the barrier",
         both(*(without(r, "3") for r in (4, 5, 12, 13))), {4, 5, 12, 13}, ("order", "mismatch"),
         how=ACTIVE, at_most=True),
    # files
    case("counters only, an iteration skipped", "13 waits in a message that nothing shows; it was "
         "named", without(5, "2"), {5}, ("order", "mismatch"), files=no_entries),
    case("rings of one call, evaluation skipped", "the other stage was named", without(
         5, "evaluation"), {5}, ("host stuck", "mismatch"), DP, "all_reduce", files=ring_of(1)),
    case("counters only, in a pipeline", "nobody waited: it was healthy", stands(
         2, part="3", at=5), (), "undetermined", world="line", files=no_entries, exit=(3,)),
    case("inverted, three dumps lost", "4 and 7 were named", swapped(
         5, "2", ("reduce_scatter", DP, 0), ("all_to_all", EP, 23)), {5}, "order", DP,
         files=lost(4, 7, 15)),
    case("a microbatch more, three dumps lost", "4 and 7 were named", microbatch_more(5), {5},
         ("order", "mismatch"), files=lost(4, 7, 15), how=ACTIVE),
    case("a replica killed where replicas differ", "their orders differ anyway", stands(
         4, 5, 12, 13, part="2", at=9, silent=True), {4, 5, 12, 13}, "missing dump",
         world="dynamic"),
    case("one rank of each pair dumped", "a folder per local rank", GIL, {10}, "missing dump",
         files=lost(*range(0, 16, 2))),
    case("clocks apart", "times of two nodes say nothing", without(5, "evaluation"), {5},
         ("mismatch", "order"), DP, "all_reduce", files=clocks_apart),
    case("spare ranks", "their dumps are of nobody's groups", GIL, {10}, "host stuck",
         files=spares(16, 17), how=ACTIVE),
    case("dumps of one moment, one earlier", "kill -USR to one rank before", GIL, {10},
         "host stuck", files=of_an_earlier_moment(9, 30)),
    case("half of the dumps lost", "node-local folders", GIL, {10}, "host stuck",
         files=lost_but_for(10, 8)),
    case("the culprit's dump and three others lost", "", GIL, {10}, ("missing dump",
         "undetermined"), files=lost(10, 3, 7, 12), at_most=True, exit=(1, 3)),
    case("two jobs mixed", "an old folder written over", GIL, (), ("undetermined",),
         files=of_another_job(range(8, 16)), exit=(2, 3)),
    case("groups made in another order", "new_group out of order on one rank", GIL, {7, 10},
         ("mismatch", "host stuck", "undetermined"), files=other_names(7, TP, EP), at_most=True,
         exit=(1, 3)),
    case("restarted alone", "counters begin again", stands(4, part="3", at=0), {4}, "host stuck",
         files=started_again(4)),
    case("entries empty", "counters only", GIL, {10}, "host stuck", files=no_entries),
    case("a short ring", "TORCH_FR_BUFFER_SIZE=20", GIL, {10}, "host stuck", files=ring_of(20)),
    case("rings that begin within a batch", "the rest of one was like no sibling's; 9 and 15 were "
         "named", without_calls(4, "1", "recv", PP, -1), {4}, ("mismatch", "order", "undetermined",
         "deadlock"), files=rings(40, 2000, 70), at_most=True, exit=(1, 3)),
    case("a stage skips a barrier, a dump is lost", "7 who came are not a few beside 8", both(*(
         without(r, "save") for r in range(8))), range(8), "host stuck", EVERYBODY, "barrier",
         files=lost(15)),
    case("JSON only, outstanding only", "HTTP handler", GIL, {10}, "host stuck", as_json=True,
         how=ACTIVE),
    *(case(f"version {v}", "old torch", GIL, {10}, "host stuck", files=of_version(v))
      for v in ("2.1", "2.2", "2.4", "2.7", "2.9", "2.10")),
    case("a larger job's files", "ranks 16 to 31 of another attempt", GIL,
         (), "undetermined", files=of_a_larger_job, exit=(3,)),
    case("all aborted but the culprit and a victim", "the victim was named", GIL, {10},
         ("host stuck", "undetermined"), files=aborted_but(9, 10), at_most=True, exit=(1, 3)),
    # nobody
    case("two dumps of an earlier moment", "", GIL, {10}, "host stuck", files=lambda values: [
         of_an_earlier_moment(r, 45)(values) for r in (4, 13)]),
    case("failed calls counted as completed", "gloo", GIL, {10}, "host stuck",
         files=failed_calls_counted(8)),
    case("failed calls counted by one, outstanding only", "gloo", GIL, {10}, "host stuck",
         files=failed_calls_counted(14), how=ACTIVE),
    case("killed, and another's dump lost", "a message waits for the one, a call for the other",
         stands(10, part="2", at=77, silent=True), {10}, "missing dump", files=lost(12)),
    case("half a node of tensor parallel pairs lost", "ranks 4 to 7 without a dump", stands(
         4, 5, 6, 7, part="2", at=30, silent=True), range(4, 8), "missing dump"),
    case("recorder off on two ranks", "they say nothing, also not that they are late", stands(
         6, part="3", at=70), {6}, "host stuck", world="interleaved", files=recorder_off(4, 5)),
    case("recorder off on two ranks, one killed", "the dump that is not there says more", stands(
         6, part="3", at=30, silent=True), {6}, "missing dump", world="interleaved",
         files=recorder_off(4, 5)),
    case("recorder off on two ranks beside a device", "nobody is known to be late", device_stops(
         6, part="3", at=30), (), "undetermined", world="interleaved", exit=(3,),
         files=recorder_off(4, 5)),
    case("replicas with other numbers of microbatches", "two with fewer were named",
         without_calls(13, "2", "all_reduce", NORM), {13}, ("mismatch", "order"),
         world="dynamic"),
    case("stuck among replicas of other sizes", "their counters differ anyway", stands(
         13, part="2", at=9), {13}, "host stuck", world="dynamic"),
    case("replicas of other sizes, a send lost", "their orders differ anyway", without_calls(
         12, "2", "send", PP, 1), {12}, ("mismatch", "order", "deadlock", "undetermined"),
         world="dynamic", at_most=True, exit=(1, 3)),
    case("healthy", "everything ended", nothing, (), "healthy", exit=(0,)),
    case("healthy, outstanding only", "everything ended", nothing, (), "healthy", how=ACTIVE,
         exit=(0,)),
    case("a running job", "all ranks stand in the same call", stands(*range(16), part="2", at=1),
         (), ("undetermined", "healthy"), exit=(0, 3)),
)  # fmt: skip

LINE = """prism-program 1
world size={n} pp={n}
"""


@functools.cache
def line(stages):
    """A pipeline of single ranks without batches: two microbatches forward, then backward."""
    text = LINE.format(n=stages)
    move = "PIPELINE_MODEL_PARALLEL_GROUP bf16"
    for rank in range(stages):
        text += f"program ranks={rank}\n"
        first, last = rank == 0, rank == stages - 1
        for way, back in ((1, -1), (-1, 1)):
            begins, ends = (first, last) if way == 1 else (last, first)
            for mb in (0, 1):
                label = f"{mb}{'F' if way == 1 else 'B'}"
                text += (
                    "" if begins else f"- recv {move} out=64 peer={back}\n- host_wait note=device\n"
                )
                text += f"{label} compute ns=1\n"
                text += "" if ends else f"- send {move} in=64 peer={way}\n"
        text += "O all_reduce MODEL_PARALLEL_GROUP fp32 n=1 reduce=sum\n- host_wait note=device\n"
    return parse(text, "line")


@functools.cache
def ring():
    """Two rings of four, of pairs: keys and values go round in every layer, forward and back."""
    text = "prism-program 1\nworld size=16 tp=2 cp=4\n"
    for rank in range(16):
        text += f"program ranks={rank}\n"
        for number, label in enumerate(("0F", "0B", "1F", "1B")):
            text += f"{label} all_gather {TP} bf16 in=32 out=64\n"
            for step in range(3):
                batch = 3 * number + step
                both = [f"{label} send {CP} bf16 in=64 peer=1 handle={2 * batch} batch={batch}\n",
                        f"{label} recv {CP} bf16 out=64 peer=-1 handle={2 * batch + 1} "
                        f"batch={batch}\n"]  # fmt: skip
                text += "".join(both[:: -1 if rank // 2 % 2 else 1]) + f"{label} compute ns=1\n"
                text += "".join(f"{label} wait handle={2 * batch + i}\n" for i in (0, 1))
            text += f"{label} reduce_scatter {TP} bf16 in=64 out=32 reduce=sum\n"
        text += f"O reduce_scatter {DP} fp32 in=64 out=8 reduce=sum\n"
        text += f"O all_reduce {NORM} fp32 n=1 reduce=sum\n- host_wait note=device\n"
        text += f"O all_gather {DP} fp32 in=8 out=64\n"
    return parse(text, "ring")


@functools.cache
def dynamic():
    """Four replicas of a pipeline with tensor parallelism, of 4, 3, 4 and 2 microbatches."""
    text = "prism-program 1\nworld size=32 tp=2 pp=4\n"
    for rank in range(32):
        text += f"program ranks={rank}\n"
        stage, replica = rank // 8, rank % 8 // 2
        for way in (1, -1):
            begins, ends = (stage == 0, stage == 3)[::way]
            for mb in range((4, 3, 4, 2)[replica]):
                label = f"{mb}{'F' if way == 1 else 'B'}"
                text += "" if begins else f"- recv {PP} bf16 out=64 peer={-way}\n"
                text += "" if begins else "- host_wait note=device\n"
                text += f"{label} all_gather {TP} bf16 in=32 out=64\n{label} compute ns=1\n"
                text += f"{label} reduce_scatter {TP} bf16 in=64 out=32 reduce=sum\n"
                text += "" if ends else f"- send {PP} bf16 in=64 peer={way}\n"
        text += f"O reduce_scatter {DP} fp32 in=64 out=16 reduce=sum\n"
        text += f"O all_reduce {NORM} fp32 n=1 reduce=sum\n- host_wait note=device\n"
        text += f"O all_gather {DP} fp32 in=16 out=64\n"
    return parse(text, "dynamic")


@functools.cache
def flex():
    """Two stages of four replicas, of two microbatches; experts exchange tokens outside NCCL."""
    text = "prism-program 1\nworld size=8 pp=2 ep=2\n"
    experts = "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP bf16 in=64 out=64\n- host_wait note=device\n"
    for rank in range(8):
        text += f"program ranks={rank}\n"
        for way in (1, -1):
            begins = (rank < 4) == (way == 1)
            for mb in range(2):
                label = f"{mb}{'F' if way == 1 else 'B'}"
                text += "" if begins else f"- recv {PP} bf16 out=64 peer={-way}\n"
                text += f"{label} dispatch {experts}{label} compute ns=1\n"
                text += f"{label} combine {experts}"
                text += f"- send {PP} bf16 in=64 peer={way}\n" if begins else ""
        text += f"O reduce_scatter {DP} fp32 in=64 out=16 reduce=sum\n"
        text += f"O all_reduce {NORM} fp32 n=1 reduce=sum\n- host_wait note=device\n"
        text += f"O all_gather {DP} fp32 in=16 out=64\n"
    return parse(text, "flex")


@functools.cache
def standstill(fault, name):
    bases = {"line": lambda: line(4), "dynamic": dynamic, "ring": ring, "flex": flex}
    it = plain_job(bases[name]()) if name in bases else (
        _on_default() if name == "default" else job(name))  # fmt: skip
    faults = fault(it) or {}  # changes the programs, too
    return stall.run_until_stalled(it.programs(), faults)


def dumps(one, place):
    """Write the files of a case."""
    state = standstill(one.fault, one.world)
    values = dict(export.dumps_of(state, **one.how))
    if one.files is not None:
        one.files(values)
    place.mkdir(parents=True)
    for rank, value in values.items():
        if one.as_json:
            (place / f"_dump_{rank}.json").write_text(json.dumps(value | {"nccl_comm_state": {}}))
        else:
            (place / f"_dump_{rank}").write_bytes(pickle.dumps(value, protocol=2))
    return state


def _on_default():
    """The interleaved job, with its messages on the default group."""
    it = job("interleaved")
    for ops in (ops for parts in it.parts.values() for _, ops in parts):
        ops[:] = [dataclasses.replace(op, group=EVERYBODY, peer=4 * op.peer)
                  if op.name in ("send", "recv") else op for op in ops]  # fmt: skip
    return it


def plain_job(base):
    parts = {}
    for rank in range(base.world.size):
        ops = list(base.of(rank))
        parts[rank] = [(n, list(ops)) for n in ("1", "2", "3")]
    return Job(base, parts)


def judge(one, code, found):
    """What is wrong with the verdict of a case; "" if nothing is."""
    exits = (3,) if found.get("verdict") == "missing dump" else one.exit  # a file may be lost
    if code not in exits:
        return f"exit {code}, not {exits}"
    if code == 2:
        return ""
    named = frozenset(row["rank"] for row in found["culprits"])
    if code == 1 or found["verdict"] == "missing dump":  # who possibly is one, too
        named |= one.named.intersection(found["candidates"])
    if named != one.named and not (one.at_most and named < one.named):
        return f"names {sorted(named)}, not {sorted(one.named)}: {found['verdict']}"
    if found["verdict"] not in one.verdict:
        return f"{found['verdict']}, not {one.verdict}"
    if named & {row["rank"] for row in found["victims"]}:
        return "a culprit is a victim"
    if one.group and (found["group"] != one.group):
        return f"group {found['group']}"
    if one.op and found["op"] != one.op:
        return f"op {found['op']}"
    return ""
