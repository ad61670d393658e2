"""Device memory of one rank: what communicators would take, running out of it, watching it."""

import pickle
import types
from dataclasses import replace

import pytest
import torch

from megatron_prism.core.errors import NotTrainedError, PrismError, UsageError
from megatron_prism.emulate.command_line import options as flags
from megatron_prism.emulate.rank import device_memory
from megatron_prism.emulate.rank.device_memory import MemoryWatch, NcclReserve
from megatron_prism.emulate.rank.monitor import TrainingMonitor
from megatron_prism.memory.nccl_buffers import BufferCalibration
from megatron_prism.runtime.virtual_world import TrafficCounter

MIB = 1 << 20
CALIBRATION = BufferCalibration(
    process=500,
    once=7,
    alone={
        ("init", 1): 1, ("init", 2): 3,
        ("small", 2): 10, ("ring", 2): 20, ("large", 2): 25, ("all", 2): 40, ("peer", 2): 100,
    },
)  # fmt: skip
CALLS = [
    ("tp", 8, "all_reduce", 4), ("tp", 8, "all_reduce", 4), ("tp", 8, "all_gather", MIB),
    ("tp", 8, "all_reduce", 64 * MIB), ("dp", 1, "all_gather", 5), ("pp", 4, "send", MIB, 1),
    ("pp", 4, "recv", MIB, 3), ("dp_GLOO", 8, "all_reduce", 4), ("ep", 4, "all_to_all_single", 9),
]  # fmt: skip


def device(size):
    """A device of ``size`` bytes, by what was taken of it."""
    taken = []

    def take(num_bytes):
        if sum(taken) + num_bytes > size:
            raise torch.OutOfMemoryError(f"{num_bytes} B are not there")
        taken.append(num_bytes)

    return taken, take


def test_a_communicator_is_paid_for_when_it_is_first_used_in_a_new_way():
    taken, take = device(10**9)
    held, plain = NcclReserve(CALIBRATION, take), TrafficCounter()
    for call in CALLS:
        with held.batch(), plain.batch():
            held.add(*call)
            plain.add(*call)
    # once, init and small; ring beside it; all three together take 40; a lone rank; two neighbours,
    # one by one; three peers
    assert taken == [7 + 3 + 10, 20, 40 - 30, 1, 3 + 100, 100, 3 + 300]
    assert held.held == sum(taken)
    assert held.rows() == plain.rows()
    # what was tallied says the same afterwards
    assert CALIBRATION.nccl(device_memory.connected_by(plain)) == held.held
    assert not held.batched


def test_what_is_not_there_fails_at_the_call_that_would_connect():
    taken, take = device(7 + 3 + 10 + 20)
    held = NcclReserve(CALIBRATION, take)
    for call in CALLS[:3]:
        held.add(*call)
    with pytest.raises(torch.OutOfMemoryError, match="10 B are not there"):
        held.add(*CALLS[3])
    assert held.held == sum(taken) == 40


def test_what_was_not_measured_is_refused():
    held = NcclReserve(BufferCalibration(alone={("init", 1): 1, ("init", 2): 3}), print)
    with pytest.raises(UsageError, match="does not know all_gather among 8 ranks of tp") as error:
        held.add("tp", 8, "all_gather", 4)
    assert "device_memory" in error.value.fix


def options(*words, tier="cuda", **env):
    made = flags.from_command_line(["--prism-emulate", "--prism-world-size", "4", *words], env)
    return replace(made, tier=tier)


def test_a_calibration_without_communicators_holds_nothing(tmp_path):
    file = tmp_path / "bare.json"
    file.write_text('{"format": 1, "source": "x", "rows": [], "process": {"bytes": 5}}')
    with pytest.raises(UsageError, match="has no communicators"):
        device_memory.reserve_from_options(options("--prism-reserve-nccl", str(file)))


# -- running out ----------------------------------------------------------------------------------
def fail(file, line):
    """An out-of-memory raised at ``line`` of ``file``."""
    code = compile("\n" * (line - 1) + "raise error", file, "exec")
    exec(code, {"error": torch.OutOfMemoryError("Tried to allocate 2.00 GiB.\nmore words")})


def test_running_out_names_rank_step_and_line(imported_at):
    imported_at("megatron.core", "/x/megatron/core")
    monitor = TrainingMonitor()
    monitor.who, monitor.held = "rank 517 (pp=2 tp=5)", lambda: 4096
    with pytest.raises(NotTrainedError) as caught, monitor.training(None):  # noqa: PT012, SIM117
        with monitor.iteration(None, [torch.nn.Linear(2, 2)]):
            with monitor.step({"phase": "forward", "microbatch": 0, "chunk": 1}):
                pass
            with monitor.step({"phase": "backward", "microbatch": 3, "chunk": 1}):
                fail("/x/megatron/core/transformer/mlp.py", 77)
    assert caught.value.message == (
        "rank 517 (pp=2 tp=5) ran out of device memory in iteration 1, phase backward, "
        "microbatch 3, chunk 1, at core/transformer/mlp.py:77\n"
        "  Tried to allocate 2.00 GiB.\n"
        "  4,096 B of it are held for the large job's communicators"
    )
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert caught.value.exit_code == 1


# -- watching -------------------------------------------------------------------------------------
class FakeCuda:
    """A device whose peaks are what the test says they are."""

    def __init__(self):
        self.peak, self.history = 0, []
        self.memory = types.SimpleNamespace(
            _record_memory_history=lambda **more: self.history.append(more),
            _snapshot=lambda: {"segments": [], "device_traces": [[{"action": "alloc"}]]},
        )

    def max_memory_allocated(self):
        return self.peak

    def max_memory_reserved(self):
        return 2 * self.peak

    def reset_peak_memory_stats(self):
        self.peak = 0


def test_peaks_by_phase_and_a_snapshot(tmp_path):
    cuda = FakeCuda()
    monitor = TrainingMonitor()
    watch = MemoryWatch(tmp_path / "m" / "rank-000003.pickle", cuda=cuda)
    monitor.listen(watch)
    cuda.peak = 900  # building the model
    for number in (1, 2):
        with monitor.iteration(None, [torch.nn.Linear(2, 2)], wanted=2):
            for microbatch, peak in enumerate((10, 30, 20)):
                with monitor.step({"phase": "forward", "microbatch": microbatch}):
                    cuda.peak = peak * number
            cuda.peak = 5
            with monitor.phase("optimizer"):
                cuda.peak = 40
        assert len(cuda.history) == number - 1  # from the second one on
    assert watch.iterations == [
        {"between": 5, "forward": 30, "optimizer": 40},
        {"between": 5, "forward": 60, "optimizer": 40},
    ]
    watch.finished()
    assert (watch.allocated, watch.reserved) == (900, 1800)
    with open(watch.path, "rb") as file:
        assert pickle.load(file)["device_traces"] == [[{"action": "alloc"}]]
    with pytest.raises(UsageError, match="exists and is not overwritten"):
        device_memory.watch_from_options(
            options("--prism-memory-snapshot", str(tmp_path / "m"), "--prism-ranks", "3")
        )


def test_parts_of_a_job_have_peaks_of_their_own(tmp_path):
    """Evaluation counts in no train step; the optimizer step counts in its own too."""
    cuda = FakeCuda()
    monitor = TrainingMonitor()
    watch = MemoryWatch(tmp_path / "x.pickle", cuda=cuda)
    monitor.listen(watch)
    for number in (1, 2, 3):
        which = "first iteration" if number == 1 else "steady iteration"
        with monitor.iteration(None, [torch.nn.Linear(2, 2)], wanted=3), monitor.part(which):
            with monitor.step({"phase": "forward", "microbatch": 0}):
                cuda.peak = 10 * number
            with monitor.phase("optimizer"), monitor.part("optimizer step"):
                cuda.peak = 25
        with monitor.part("evaluation"), monitor.step({"phase": "forward", "microbatch": 0}):
            cuda.peak = 70
    assert watch.parts == {"first iteration": 25, "steady iteration": 30, "optimizer step": 25,
                           "evaluation": 70}  # fmt: skip
    assert max(max(phases.values()) for phases in watch.iterations) == 30


def test_a_snapshot_is_written_when_memory_runs_out(tmp_path):
    monitor = TrainingMonitor()
    watch = MemoryWatch(tmp_path / "x.pickle", cuda=FakeCuda())
    monitor.listen(watch)
    with pytest.raises(PrismError, match="ran out"):  # noqa: SIM117
        with monitor.iteration(None, [torch.nn.Linear(2, 2)]):
            fail("/x/megatron/core/a.py", 1)
    assert watch.path.exists()
