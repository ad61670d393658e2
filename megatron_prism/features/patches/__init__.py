"""Patches: what an emulated job changes in Megatron, listed (``prism patches``)."""

from megatron_prism.core.feature import Feature

FEATURE = Feature(command="command")
