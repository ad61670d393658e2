"""At which place of its pipeline does every rank stand?  Ranks at one place run the same program.

In : the groups of a world's dumps, and in which of them there were messages.  Out: rank -> place.
Megatron's description says which groups are pipelines.  Elsewhere it is a device mesh's word, and
where nothing is described the groups in which ranks send messages: ranks that stand at different
places there are not compared, for a stage's calls are no other stage's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping

from megatron_prism.hang.dumps import Group

__all__ = ["stages"]

_MEGATRON = "PIPELINE_MODEL_PARALLEL_GROUP"
_WORDS = re.compile(r"(?:^|mesh[_-])pp$|pipeline", re.IGNORECASE)


def stages(groups: Mapping[str, Group], messages: Collection[str]) -> dict[int, int]:
    """rank -> its place; empty if there is no pipeline."""
    known = list(groups.values())
    lines = [g for g in known if g.desc == _MEGATRON] or [g for g in known if _WORDS.search(g.desc)]
    if not lines and not any("_PARALLEL_GROUP" in g.desc for g in known):
        lines = [g for g in known if g.name in messages]
    places: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for group in lines:
        for place, rank in enumerate(group.ranks):
            places[rank].append((group.desc.partition(" (group ")[0], place))
    if all(len(found) == 1 for found in places.values()):
        return {rank: found[0][1] for rank, found in places.items()}
    keys = {rank: tuple(sorted(found)) for rank, found in places.items()}
    numbers = {key: i for i, key in enumerate(sorted(set(keys.values())))}
    return {rank: numbers[key] for rank, key in keys.items()}
