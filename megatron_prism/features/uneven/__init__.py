"""What inputs that differ between ranks do: other lengths, fewer microbatches, no more data."""

from megatron_prism.core.feature import Feature

FEATURE = Feature(command="command", uses="hang", api={"uneven": "uneven:uneven"})
