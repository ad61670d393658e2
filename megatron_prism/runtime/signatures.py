"""What passes between a caller of c10d and who answers?  Types that many signatures share.

For annotations alone: modules import it where types are checked and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import distributed as dist

from megatron_prism.runtime.process_group import PrismGroup

__all__ = ["Answer", "Args", "Kwargs", "Listener"]

# Of one of c10d's methods: tensors, lists of them, splits, ranks, options.  Each method has others.
Args = Sequence[Any]
Kwargs = Mapping[str, Any]
Answer = Callable[..., dist.Work | None]  # called with the group, then args and kwargs


class Listener(Protocol):
    """Makes calls itself, or has them made when and as it likes: a Recorder, a Pacer, a Guard."""

    def record(
        self, group: PrismGroup, op: str, answer: Answer, args: Args, kwargs: Kwargs, /
    ) -> dist.Work | None: ...
