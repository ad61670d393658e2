"""Agents: the questions as tools of the Model Context Protocol (``prism mcp``)."""

from megatron_prism.core.feature import Feature

FEATURE = Feature(command="command")
