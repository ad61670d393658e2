"""Groups that share a name: in dumps of processes that count their groups by themselves.

In : dumps of one job.  Out: the same, with a name for each group.  To torch 2.3, and where only the
members make a group, name "3" of one rank may be another group than name "3" of another.  What
tells them apart is who belongs to them: ranks that list disjoint members speak of several groups.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_prism.features.hang.dumps import Dump, DumpSet, Group, Status

Members = tuple[int, ...]


def with_names_apart(observed: DumpSet) -> DumpSet:
    """Return dumps in which no two groups have one name."""
    shared_names: set[str] = set()
    for name, written in observed.listed.items():
        members_of_name = [group.ranks for group in written if not group.partial]
        if _are_several(members_of_name):
            shared_names.add(name)
    if not shared_names:
        return observed
    dumps: dict[int, Dump] = {}
    for rank, dump in observed.dumps.items():
        dumps[rank] = _renamed(dump, shared_names)
    return replace(observed, dumps=dumps)


def _are_several(members_of_name: list[Members]) -> bool:
    """Tell whether lists of members are of several groups: no rank is in two of them."""
    distinct_members = set(members_of_name)
    sizes = [len(members) for members in distinct_members]
    # ranks that know of themselves alone may all be of one group
    if len(distinct_members) < 2 or min(sizes) < 2:
        return False
    ranks: set[int] = set()
    for members in distinct_members:
        ranks.update(members)
    return len(ranks) == sum(sizes)


def _renamed(dump: Dump, shared_names: set[str]) -> Dump:
    """Return a dump with names of its own for groups whose names others use for theirs."""
    new_names: dict[str, str] = {}
    for name in shared_names & dump.groups.keys():
        members = dump.groups[name].ranks
        if dump.rank in members:
            new_names[name] = f"{name} of rank {min(members)}"
    if not new_names:
        return dump
    groups: dict[str, Group] = {}
    for name, group in dump.groups.items():
        new_name = new_names.get(name, name)
        groups[new_name] = replace(group, name=new_name)

    status: dict[str, Status] = {}
    for name, counters in dump.status.items():
        new_name = new_names.get(name, name)
        status[new_name] = counters

    ids: dict[str, str] = {}
    for number, name in dump.ids.items():
        ids[number] = new_names.get(name, name)

    assumed: set[str] = set()
    for name in dump.assumed:
        new_name = new_names.get(name, name)
        assumed.add(new_name)
    entries = dump.entries.with_groups(new_names)
    messages = dump.messages.with_groups(new_names)
    return replace(
        dump,
        groups=groups,
        status=status,
        ids=ids,
        assumed=frozenset(assumed),
        entries=entries,
        messages=messages,
    )
