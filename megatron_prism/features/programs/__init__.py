"""Programs: captured, shown and checked (``prism capture``, ``show``, ``check``)."""

from megatron_prism.core.feature import Feature

FEATURE = Feature(command="command", uses="hang")
