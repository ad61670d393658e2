"""--prism-capture into a folder that holds something: said before the training, not after it."""

from types import SimpleNamespace

import pytest

from megatron_prism.errors import UsageError
from megatron_prism.ops import Op
from megatron_prism.plugin.stock_capture import StockCapture, check_free, first_recorded
from megatron_prism.program import Program
from megatron_prism.slices import SliceStore
from megatron_prism.world import World

TIER = SimpleNamespace(name="cpu")


def options(folder, force=False):
    return SimpleNamespace(capture=folder, world=World(8), rank=4, force=force)


def test_a_folder_of_another_job_is_refused_before_the_training(tmp_path):
    store = SliceStore(tmp_path, World(8), {"arguments": "old"})
    store.put(Program.from_ops(0, [Op("compute", ns=1)]))
    StockCapture(options(tmp_path), TIER, {"arguments": "old"})
    with pytest.raises(UsageError, match="slice-000000.*arguments old, not new") as caught:
        StockCapture(options(tmp_path), TIER, {"arguments": "new"})
    assert "--prism-force" in caught.value.fix
    StockCapture(options(tmp_path, force=True), TIER, {"arguments": "new"})
    store.path(0).write_bytes(b"PK")
    with pytest.raises(UsageError, match="slice-000000.*damaged"):
        StockCapture(options(tmp_path), TIER, {"arguments": "old"})


def test_places_that_are_free_or_not(tmp_path):
    check_free(tmp_path / "new", 4, False)
    StockCapture(options(tmp_path / "new"), TIER, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        check_free(tmp_path / "file", 4, True)
    (tmp_path / "slice-000004.prism").write_text("")
    with pytest.raises(UsageError, match="is not overwritten"):
        check_free(tmp_path, 4, False)
    check_free(tmp_path, 4, True)


@pytest.mark.parametrize(
    ("wanted", "first"),
    [(1, 1), (2, 2), (3, 2), (8, 2), (11, 3), (12, 4), (14, 5), (60, 5), (500, 435)],
)
def test_long_jobs_are_timed_after_they_are_warm(wanted, first):
    assert first_recorded(wanted) == first


def test_a_folder_that_cannot_be_is_bad_usage(tmp_path):
    with pytest.raises(UsageError, match="cannot be used: File name too long"):
        check_free(tmp_path / ("a" * 300), 0, False)


def test_iterations_without_an_evaluation_are_preferred(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from megatron_prism.plugin import stock_capture

    options = SimpleNamespace(capture=tmp_path / "d", world=World(2, tp=2), rank=0, force=False)

    def kept(evaluated, wanted=8):
        """(which iterations count, which were written down) of a job that evaluates after these."""
        capture = StockCapture(options, SimpleNamespace(name="cpu", live=None), {})
        started = []

        class Recorder:
            clock = SimpleNamespace(running=False)

            def start(self, quick):
                started.append((number, quick))

            def stop(self):
                return started[-1]

            def owned_by(self, *owners):
                pass

        monkeypatch.setattr(stock_capture.StockCapture, "_remove", lambda self, proof: None)
        monkeypatch.setattr(
            stock_capture.StockCapture,
            "_install",
            lambda self, proof: setattr(self, "_recorder", Recorder()),
        )
        for number in range(1, wanted + 1):
            if capture._recorder is not None and number > wanted:
                break
            capture.before(number, wanted, None)
            if number in evaluated and number < wanted:
                capture.beside(False)
        return capture._recordings or capture._others

    assert kept(set())[:2] == [(2, False), (3, True)]
    assert kept({2, 4, 6})[:2] == [(3, False), (5, True)]  # 2 has an evaluation: not counted
    assert kept(set(range(1, 9)))[:3] == [(2, False), (3, False), (4, True)]  # all have one


def test_on_a_gpu_every_second_iteration_is_only_clocked(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from megatron_prism.plugin import stock_capture

    options = SimpleNamespace(capture=tmp_path / "d", world=World(2, tp=2), rank=0, force=False)
    capture = StockCapture(options, SimpleNamespace(name="cuda", live=None), {})
    log = []

    class Clock:
        running = False

        def start(self):
            log.append((number, "clock"))
            self.running = True

        def stop(self):
            self.running = False
            return 1_000 + number - 1

    class Recorder:
        clock = Clock()

        def start(self, quick):
            log.append((number, "times" if quick else "written"))

        def stop(self):
            return SimpleNamespace(hosts=[])

        def own_ns(self):
            return 5

        def owned_by(self, *owners):
            pass

    def install(self, proof):
        self._recorder = Recorder()

    monkeypatch.setattr(StockCapture, "_remove", lambda self, proof: None)
    monkeypatch.setattr(StockCapture, "_install", install)
    monkeypatch.setattr(stock_capture, "Tracer", lambda: SimpleNamespace(stop=lambda: None))
    for number in range(1, 12):
        capture.before(number, 11, None)
        if number == 7:
            capture.beside(False)  # an evaluation: no steady iteration
    assert log == [
        (3, "written"), (4, "times"), (5, "clock"), (6, "times"), (7, "clock"), (8, "times"),
        (9, "clock"), (10, "times"),
    ]  # fmt: skip
    assert capture._clocks == [1_005, 1_009]
    assert len(capture._recordings) == 5


def test_requests_are_not_written_down_for_ever(tmp_path):
    from types import SimpleNamespace

    live = SimpleNamespace(history="rows")
    options = SimpleNamespace(capture=tmp_path / "d", world=World(2, tp=2), rank=0, force=False)
    capture = StockCapture(options, SimpleNamespace(name="meta", live=live), {})
    capture._remove(SimpleNamespace())
    assert live.history is None
