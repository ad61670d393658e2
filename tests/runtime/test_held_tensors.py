"""Where a step replaces a tensor that an object of the model holds."""

from types import SimpleNamespace

import pytest
import torch

from megatron_prism.runtime.devices.live_bytes import History, LiveBytes
from megatron_prism.runtime.recorder.held_tensors import StepMoment, Watch, find


class Dispatcher:
    """Holds a map of where tokens go until the next one comes."""

    def __init__(self):
        self.config = SimpleNamespace(limit=3)
        self.map = None

    def dispatch(self):
        before = torch.empty(100, device="meta")
        self.map = torch.empty(256, dtype=torch.uint8, device="meta")
        return before


@pytest.fixture
def live():
    with LiveBytes("meta") as made:
        made.history = History(lambda: 0)
        yield made


@pytest.fixture
def layer(live):
    made = torch.nn.Module()
    made.dispatcher = Dispatcher()
    made.dispatcher.dispatch()
    return made


def here(live):
    return StepMoment(len(live.history), live.history.launches, 0, 0, 0)


def test_what_helpers_of_a_module_hold_is_found(live, layer):
    (held,) = find(layer, live, 0)
    assert (held.num_bytes, [holder.name for holder in held.holders]) == (256, ["map"])
    assert not find(layer, live, held.number + 1)


def test_the_old_one_goes_where_it_is_replaced(live, layer):
    (held,) = find(layer, live, 0)
    start = len(live.history)
    watch = Watch([held], lambda: here(live))
    kept = layer.dispatcher.dispatch()
    (gone,) = watch.finish()
    assert gone.held == held
    rows = live.history.rows(start)[:, :2].tolist()
    # one for the moment, the new one, and then the old one goes
    assert [size for _, size in rows] == [400, 256, -256]
    assert gone.end.history == start + 2
    assert rows[2][0] == held.number
    assert kept.shape == (100,)


def test_what_stays_is_put_back(live, layer):
    before, start = layer.dispatcher.map, len(live.history)
    watch = Watch(find(layer, live, 0), lambda: here(live))
    assert layer.dispatcher.map is not before
    assert watch.finish() == []
    assert layer.dispatcher.map is before
    assert len(live.history) == start


def test_what_goes_untold_counts_until_it_is_told(live, layer):
    (held,) = find(layer, live, 0)
    now = live.now
    went = live.without_telling(lambda: setattr(layer.dispatcher, "map", None))
    assert went == [(held.number, 256)]
    assert live.now == now
    assert len(live.history.rows()) == len(live.history)
    assert live.history.rows()[-1, 0] != held.number or live.history.rows()[-1, 1] > 0
