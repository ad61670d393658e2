"""Predict: distributions of the iteration time, after PRISM (arXiv 2510.15596).

Serial parts add, parallel parts take the maximum, a call has one draw for all that take part, and
an iteration one regime of the network.

    distributions.py  quantiles with intervals that cover, fitted distributions
    variability.py    how much calls, computing and hosts vary: published, or measured here
    sampler.py        draws of iterations of the whole world
    step_draws.py     draws of iterations whose inputs differ from step to step
    predict.py        quantiles, what moves them, where a slow GPU hurts
    report.py         a prediction as a page
    command.py        prism predict
"""

from megatron_prism.core.feature import Feature

FEATURE = Feature(command="command", renderers="report", api={"predict": "predict:predict"})
