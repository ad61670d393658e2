"""Records of messages and calls that were issued in one batch have the state of their batch."""

from megatron_prism.features.hang.calls import Calls, Entry
from megatron_prism.features.hang.dumps import of_batches


def entry(record, op, group="0", seq=1, to=-1, state="scheduled", done=False):
    """A record as torch leaves it."""
    return Entry(record, group, "", op, seq, seq, to, ((), ()), (), state, done, "", 0, 0)


def send(record, **more):
    return entry(record, "send", to=1, **more)


def ended(record, op="coalesced", **more):
    return entry(record, op, **{"state": "completed", "done": True} | more)


def states(entries):
    return {one.record: one.state for one in of_batches(Calls.of(entries))}


def later(*entries):
    """Their states behind another call: a ring that begins with the first record is whole."""
    found = states([ended(0, "barrier", group="9"), *entries])
    assert found.pop(0) == "completed"
    return found


def test_messages_have_the_state_of_the_record_that_closes_their_batch():
    both = [send(1), send(2)]
    assert later(*both, ended(3)) == dict.fromkeys((1, 2, 3), "completed")
    assert later(*both, entry(3, "coalesced", state="started"))[1] == "started"
    batch = Calls.of((send(0), send(1), ended(2)))
    assert all(one.done for one in of_batches(batch))


def test_a_batch_takes_only_what_was_issued_in_it():
    """One batch of a group after the other: a place among its messages is that of the batch."""
    first, second = [send(1), send(2), ended(3)], [send(4, seq=2), entry(5, "coalesced", seq=2)]
    found = later(*first, *second)
    assert [found[i] for i in (1, 2, 4)] == ["completed", "completed", "scheduled"]


def test_records_of_other_groups_may_lie_between():
    other = [ended(2, "all_reduce", group="1"), entry(4, "all_reduce", group="1", seq=2)]
    found = later(send(1), other[0], send(3), other[1], ended(5))
    assert [found[i] for i in (1, 3, 5)] == ["completed"] * 3
    assert found[4] == "scheduled"  # its own state, it was not in the batch
    crossed = later(send(1), send(2, group="1"), ended(3, group="1"), ended(4))
    assert set(crossed.values()) == {"completed"}


def test_collectives_of_a_batch_before_torch_2_7_have_no_record():
    """What is recorded before its end is another call, which keeps its state."""
    found = later(entry(1, "all_gather", seq=4, state="started"), ended(2, seq=5))
    assert found == {1: "started", 2: "completed"}
    inside = later(*(entry(i, "all_gather", seq=5) for i in (1, 2)), ended(3, seq=5))
    assert set(inside.values()) == {"completed"}


def test_a_ring_that_begins_within_a_batch_that_ended_leaves_its_rest_out():
    rest = [send(7), ended(8), ended(9, "all_reduce")]
    assert states(rest) == {9: "completed"}
    assert states([one._replace(record=one.record - 7) for one in rest]).keys() == {0, 1, 2}


def test_of_outstanding_records_those_of_batches_that_ended_are_left_out():
    """Batches that ended are there without the record that says so; a single call is not one."""
    gone, waiting = [send(1), send(2)], entry(9, "all_reduce", group="1", seq=3)
    assert states([*gone, waiting]) == {9: "scheduled"}
    assert states([*(entry(i, "all_gather", seq=5) for i in (1, 2)), waiting]) == {9: "scheduled"}
    # calls without a number are not known to belong together
    assert len(states(entry(i, "all_gather", seq=-1) for i in (1, 2))) == 2
    # the batch that is still open has its record
    still = [send(5, seq=2), send(6, seq=2), entry(7, "coalesced", seq=2)]
    assert states([*gone, *still, waiting]).keys() == {5, 6, 7, 9}
    # a message alone is one of a batch where the group's others are
    assert states([send(4), *still]).keys() == {5, 6, 7}
    assert states([send(4), waiting]).keys() == {4, 9}
    # what has begun is outstanding, whatever it was issued with
    assert 1 in states([gone[0]._replace(state="started"), gone[1], waiting])
