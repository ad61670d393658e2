"""--prism-capture into a folder that holds something: said before the training, not after it."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from megatron_prism.core.errors import UsageError
from megatron_prism.core.programs.ops import Op
from megatron_prism.core.programs.program import Builder, Program
from megatron_prism.core.programs.slices import SliceStore
from megatron_prism.core.world import World
from megatron_prism.emulate.capture import capture as stock_capture
from megatron_prism.emulate.capture import host_benchmark
from megatron_prism.emulate.capture.capture import StockCapture, check_free, first_recorded

TIER = SimpleNamespace(name="cpu")


def options(folder, force=False):
    return SimpleNamespace(capture=folder, world=World(8), rank=4, force=force, num_processes=1)


def test_a_folder_of_another_job_is_refused_before_the_training(tmp_path):
    store = SliceStore(tmp_path, World(8), {"arguments": "old"})
    store.put(Program.from_ops(0, [Op("compute", ns=1)]))
    StockCapture(options(tmp_path), TIER, {"arguments": "old"}, None)
    with pytest.raises(UsageError, match="slice-000000.*arguments old, not new") as caught:
        StockCapture(options(tmp_path), TIER, {"arguments": "new"}, None)
    assert "--prism-force" in caught.value.fix
    StockCapture(options(tmp_path, force=True), TIER, {"arguments": "new"}, None)
    capture = StockCapture(options(tmp_path), TIER, {}, None)  # the arguments are not known yet
    capture.is_of("old")
    with pytest.raises(UsageError, match="slice-000000.*arguments old, not new"):
        capture.is_of("new")
    store.path(0).write_bytes(b"PK")
    with pytest.raises(UsageError, match="slice-000000.*is not a file of programs"):
        StockCapture(options(tmp_path), TIER, {"arguments": "old"}, None)


def test_places_that_are_free_or_not(tmp_path):
    check_free(tmp_path / "new", 4, False)
    StockCapture(options(tmp_path / "new"), TIER, {}, None)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        check_free(tmp_path / "file", 4, True)
    (tmp_path / "slice-000004.prism").write_text("")
    with pytest.raises(UsageError, match="is not overwritten"):
        check_free(tmp_path, 4, False)
    check_free(tmp_path, 4, True)


@pytest.mark.parametrize(
    ("wanted", "first"),
    [(1, 1), (2, 2), (3, 2), (8, 2), (11, 2), (12, 3), (13, 4), (15, 5), (60, 5), (500, 435)],
)
def test_long_jobs_are_timed_after_they_are_warm(wanted, first):
    assert first_recorded(wanted) == first


@dataclass(frozen=True)
class Recorded:
    """Of iteration ``number``; ``builder``: it was written down, ``busy``: it was traced."""

    number: int
    builder: object
    busy: object = None
    launches: object = None
    hosts: tuple = ()


@pytest.fixture
def simulated(tmp_path, monkeypatch):
    """A job's capture: call with the tier, its train steps and those before an evaluation."""
    monkeypatch.setattr(stock_capture, "busy_ns", lambda trace, hosts: trace)
    monkeypatch.setattr(stock_capture, "launches", lambda trace, hosts: f"of {trace}")
    monkeypatch.setattr(stock_capture, "of_running_job", dict)
    # the real one measures this host for a while beside each clocked iteration
    monkeypatch.setattr(host_benchmark, "measure", lambda seconds: SimpleNamespace(index=1.0))

    def run(tier, wanted, evaluated=(), gathered=False):
        options = SimpleNamespace(
            capture=tmp_path / "d", world=World(2, tp=2), rank=0, force=False, num_processes=1
        )
        capture = StockCapture(options, SimpleNamespace(name=tier, live=None), {}, None)
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
            clock, active = Clock(), False

            def start(self, quick, earlier):
                log.append((number, "times" if quick else "written"))
                self.active, self.quick = True, quick

            def stop(self):
                self.active = False
                return Recorded(number - 1, None if self.quick else Builder())

            def own_ns(self):
                log.append((number - 1, "probed"))
                return 5

            def owned_by(self, *owners):
                pass

        class Tracer:
            def stop(self):
                log.append((number - 1, "traced"))
                return "trace"

        monkeypatch.setattr(StockCapture, "_remove", lambda self: None)
        monkeypatch.setattr(
            StockCapture, "_install", lambda self: setattr(self, "_recorder", Recorder())
        )
        monkeypatch.setattr(stock_capture, "Tracer", Tracer)
        for number in range(1, wanted + 1):
            if tier == "meta" and capture._recordings:
                break
            capture.iteration_started(number, wanted, [], None)
            if number in evaluated and number < wanted:
                capture.outside_step(gathered)
        return capture, log

    return run


def test_tokens_and_flops_are_those_of_the_iteration_that_is_written_down(simulated, monkeypatch):
    """--step-batch-size-schedule: at the end the batch may be twice as large."""
    batches = iter([8, 16, 32])
    monkeypatch.setattr(stock_capture, "of_running_job", lambda: {"batch": next(batches)})
    capture, log = simulated("cpu", 8)
    assert [what for _, what in log].count("written") == 1
    assert capture._flops == {"batch": 8}
    assert next(batches) == 16  # nobody asked later
    batches = iter([8, 16, 32])
    capture, log = simulated("cpu", 8, evaluated=range(1, 9))
    assert [what for _, what in log].count("written") == 2  # and the first counts
    assert capture._flops == {"batch": 8}


def test_iterations_without_an_evaluation_are_preferred(simulated):
    def kept(evaluated):
        capture, _ = simulated("cpu", 8, evaluated)
        return [(one.number, one.builder is None) for one in capture.kept()]

    assert kept(set())[:2] == [(2, False), (3, True)]
    assert kept({2, 4, 6})[:2] == [(3, False), (5, True)]  # 2 has an evaluation: not counted
    assert kept(set(range(1, 9)))[:3] == [(2, False), (3, False), (4, True)]  # all have one


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("tier", ["cuda", "cpu", "meta"])
@pytest.mark.parametrize(
    ("wanted", "interval"),
    [(12, 4), (20, 5), (100, 5), (100, 7), (100, 35), (100, 2), (30, 2), (9, 3), (6, 1), (3, 1)],
)
def test_what_is_kept_was_written_down_once(simulated, tier, wanted, interval, gathered):
    capture, log = simulated(tier, wanted, range(interval, wanted + 1, interval), gathered)
    assert any(one.builder is not None for one in capture.kept())
    if tier == "cuda" and wanted >= 12 and interval > 1 and (interval > 2 or not gathered):
        # evaluations do not fall on what is timed, clocked or traced alone
        assert capture._written
        timed = [one for one in capture.kept() if one.builder is None and one.busy is None]
        assert timed
        assert any(one.busy is not None for one in capture.kept())
        if wanted >= 20:
            assert 0 < len(capture._clocks) <= len(timed)


@pytest.mark.parametrize("wanted", [*range(3, 20), 26, 40, 75])
def test_what_is_timed_does_not_follow_a_clocked_iteration(simulated, wanted):
    """At its power limit a GPU that rested behind every call of one is quicker in the next."""
    ones = [{number} for number in range(2, min(wanted, 30))]
    for evaluated in [(), {10, 20, 30}, {7, 14, 21, 28}, {7, 8, 15, 16}, *ones]:
        capture, log = simulated("cuda", wanted, evaluated)
        clocked = {number for number, what in log if what == "clock"}
        assert not {number for number, what in log if what == "times" and number - 1 in clocked}
        timed = [one for one in capture.kept() if one.builder is None and one.busy is None]
        if not evaluated:
            assert (len(capture._clocks) >= 2) == (wanted >= 10)
            assert len(timed) >= (3 if wanted in (10, 11) else min(4, wanted - 4))


def test_an_iteration_in_which_somebody_made_the_job_wait_is_left_out(simulated, monkeypatch):
    """``run.py --alone-steps 26 --between 5``: stops behind steps 5, 10, 15, 20 and 25."""
    monkeypatch.setattr(stock_capture, "_running", [])
    stock_capture.disturbed()  # nobody captures
    capture, log = simulated("cuda", 26, (5, 10, 15, 20, 25))
    numbers = [one.number for one in capture.kept()]
    assert not {5, 10, 15, 20, 25} & set(numbers)
    assert len(numbers) > 8
    assert [what for _, what in log].count("traced") == 1
    assert not {5, 10, 15, 20, 25} & {ns - 1_000 for ns in capture._clocks}
    heard = []
    monkeypatch.setattr(
        stock_capture,
        "_running",
        [SimpleNamespace(outside_step=lambda gathered: heard.append(gathered))],
    )
    stock_capture.disturbed()
    assert heard == [False]


@pytest.mark.parametrize("wanted", [1, 2, 4])
def test_an_evaluation_itself_is_not_recorded(simulated, monkeypatch, wanted):
    """It was, up to twelve times an iteration, where no step came behind it."""
    capture, log = simulated("cpu", wanted)
    before = len(log)
    assert capture._recorder.active == (wanted <= 2)
    for _ in range(2):  # of validation, of the test set
        capture.outside_step(False, begun=True)
        assert not capture._recorder.active
    assert len(capture.kept()) == {1: 1, 2: 1, 4: 2}[wanted]
    assert len(log) == before
    capture.iteration_started(wanted + 1, wanted + 9, [], None)
    assert not capture._beside
