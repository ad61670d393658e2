"""What inputs that differ between ranks do: other lengths, fewer microbatches, no more data."""

from megatron_prism.core.feature import Feature

FEATURE = Feature(
    command="command",
    files="drawn_words",
    drawn_steps="drawn_words",
    uses="hang",
    api={"uneven": "uneven:uneven"},
)
