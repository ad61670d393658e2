"""Pacing: virtual ranks answer when they would, so that iterations last as long as in the job."""

from megatron_prism.core.feature import Feature

FEATURE = Feature(flags="flags")
