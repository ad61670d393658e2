"""Memory that a stream still reads: ``--prism-streams`` and ``prism check --streams``."""

from megatron_prism.core.feature import Feature

FEATURE = Feature(flags="flags", checks="checks", rank_files=r"streams-\d{6,}\.npz")
