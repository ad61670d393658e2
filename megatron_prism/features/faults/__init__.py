"""Faults of a running job: make them happen, and check every call against programs or peers."""

from megatron_prism.core.feature import Feature

FEATURE = Feature(flags="flags", uses="hang")
