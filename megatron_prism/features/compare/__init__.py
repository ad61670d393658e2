"""Compare: what differs between two jobs in time, memory, sizes and ops (``prism compare``).

compare.py  two jobs -> Comparison
cost.py     what tokens of both cost
scale.py    what changes with the number of ranks
report.py   a comparison as text and page
command.py  prism compare
"""

from megatron_prism.core.feature import Feature

FEATURE = Feature(
    command="command",
    renderers="report",
    api={"compare": "compare:compare", "Comparison": "compare:Comparison"},
)
