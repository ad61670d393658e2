"""Distributions of the iteration time, after PRISM (arXiv 2510.15596): serial
parts add, parallel parts take the maximum, one draw per call for all that take part, one network
regime per iteration.

    distributions.py  quantiles with intervals that cover, fitted distributions
    variability.py    how much calls, computing and hosts vary: published, or measured here
    sampler.py        draws of iterations of the whole world
    predict.py        quantiles, what moves them, where a slow GPU hurts
"""

from megatron_prism.predict.distributions import Quantile, needed, quantile
from megatron_prism.predict.predict import Prediction, predict
from megatron_prism.predict.sampler import Sampler
from megatron_prism.predict.variability import CallSpread, call_spread

__all__ = [
    "CallSpread",
    "Prediction",
    "Quantile",
    "Sampler",
    "call_spread",
    "needed",
    "predict",
    "quantile",
]
