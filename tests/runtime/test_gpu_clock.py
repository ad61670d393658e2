"""The state of a GPU while iterations are timed: sampled, kept in slices, read back."""

from megatron_prism.core.programs.gpu_state import GpuState, states_of
from megatron_prism.runtime.recorder.gpu_clock import ClockSampler, Sample


def test_only_samples_inside_of_timed_iterations_count():
    rows = iter([Sample(10, 1980, 200.0, False, 40), Sample(20, 1500, 690.0, True, 60),
                 Sample(30, 1600, 700.0, True, 62)])  # fmt: skip

    sampler = ClockSampler(rows.__next__, 1980, 700.0)  # the fourth question fails
    sampler.join(10)
    assert sampler.state([(15, 25), (25, 35)]) == GpuState(1550, 1980, 695, 700, 1.0, 61)
    assert sampler.state([(100, 200)]) is None


def test_slices_say_it_for_each_rank_and_a_file_may_lie():
    state = GpuState(1702, 1980, 671, 700, 0.93, 58)
    text = f"0={state} 3={state._replace(mhz=1980, limited=0.0)}"
    assert states_of({"gpu_clock": text}) == {0: state, 3: state._replace(mhz=1980, limited=0.0)}
    assert states_of({"gpu_clock": "0=x 1=0/0MHz,1/1W,0,0C 2=1/1MHz,1/1W,9,9C"}) == {}
    assert states_of({}) == {}
