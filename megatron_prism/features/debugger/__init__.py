"""The debugger: stop a rank at a call or at a value, and keep or give back what calls deliver."""

from megatron_prism.core.feature import Feature

FEATURE = Feature(flags="flags")
