"""Replay: when everything of an iteration happens, and what its time is made of."""

from megatron_prism.core.feature import Feature

FEATURE = Feature(command="command")
