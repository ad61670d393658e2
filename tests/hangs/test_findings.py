"""What dumps prove is said, also where something else explains the waits."""

from test_doubts import Dump, said, verdict


def pairs(count=8):
    return {r: Dump({"tp": (r - r % 2, r - r % 2 + 1), "dp": tuple(range(r % 2, count, 2))})
            for r in range(count)}  # fmt: skip


def test_a_call_that_differs_is_said_beside_a_dump_that_was_lost():
    """Ranks 0 and 1 call otherwise; that 7 left no dump explains who waits for it."""
    dumps = pairs()
    for rank, dump in dumps.items():
        dump.call("tp", done=True)
        if rank < 2:
            dump.call("tp", "all_gather" if rank else "all_reduce")
        else:
            dump.call(*(("tp", "broadcast") if rank == 6 else ("dp",)))
    del dumps[7]
    named, found = verdict(dumps)
    assert (named, found.verdict, found.confidence) == ({7}, "missing dump", "possible")
    (line,) = said(found, "besides")
    assert "#2 of TENSOR_MODEL_PARALLEL_GROUP: rank 0 calls all_reduce 8 Float" in line
    assert "rank 1 calls all_gather 8 Float" in line
    assert "no majority decides" in line


def test_what_names_the_culprit_is_said_once():
    dumps = pairs()
    for rank, dump in dumps.items():
        dump.call("dp", done=True)
        dump.call("dp", "all_gather" if rank == 3 else "all_reduce")
    named, found = verdict(dumps)
    assert named == {3}
    assert len(said(found, "rank 3 calls all_gather")) == 1
    assert said(found, "besides") == []
