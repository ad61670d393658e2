"""One answer of replay and predict."""

from megatron_prism.features.predict.predict import predict
from megatron_prism.features.predict.variability import Variability

STILL = Variability("none", 0.0, 0.0, 0.0, 0.0, "nothing varies")


def assert_one_answer(priced, samples=100):
    """Every quantile of a prediction without variation is the replay's iteration."""
    found = predict(priced, variability=STILL, samples=samples, levels=(0.2, 0.5, 0.8), slow_by=2)
    expected = priced.timeline.iteration_ns
    assert found.steady == expected
    assert {one.ns for one in found.quantiles} == {expected}
    assert set(found.draws.tolist()) == set(found.times) == {expected}
    assert set(found.halved.values()) == {expected}
    return found
