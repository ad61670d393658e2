"""Groups that share a name: in dumps of processes that count their groups by themselves.

In : dumps of one job.  Out: the same, with a name for each group.  To torch 2.3, and where only the
members make a group, name "3" of one rank may be another group than name "3" of another.  What
tells them apart is who belongs to them: ranks that list disjoint members speak of several groups.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from megatron_prism.features.hang.dumps import Dump, DumpSet, Group, Status

Members = tuple[int, ...]
# description, members, and which of the groups of a rank that are alike in both
Identity = tuple[str, Members, int]


def with_names_apart(observed: DumpSet) -> DumpSet:
    """Return dumps in which no two groups have one name."""
    names_of_rank: dict[int, dict[str, str]] = {}
    if _are_counted_by_process(observed):
        names_of_rank = _names_by_members(observed)
    else:
        shared_names = _shared_names(observed)
        for rank, dump in observed.dumps.items():
            names_of_rank[rank] = _names_of_shared(dump, shared_names)
    if not any(names_of_rank.values()):
        return observed
    dumps: dict[int, Dump] = {}
    for rank, dump in observed.dumps.items():
        new_names = names_of_rank[rank]
        dumps[rank] = _renamed(dump, new_names) if new_names else dump
    return replace(observed, dumps=dumps)


# -- numbers that each process counts by itself ---------------------------------------------------
def _are_counted_by_process(observed: DumpSet) -> bool:
    """Tell whether names are numbers of the processes: there are fewer of them than groups.

    Ranks of the first stage, say, are in more groups than others, so one group may have several
    numbers, and one number be of groups that overlap.  A rank that made two groups in another order
    than the others uses their two names for two groups.
    """
    names_of_group = defaultdict[tuple[str, Members], set[str]](set)
    ranks_of_group = defaultdict[tuple[str, Members], set[int]](set)
    # these may be in groups that their dumps do not list
    ranks_with_partial_groups: set[int] = set()
    for rank, dump in observed.dumps.items():
        for name, group in dump.groups.items():
            # a rank that knows of itself alone does not list a group
            if group.partial or len(group.ranks) < 2:
                ranks_with_partial_groups.add(rank)
                continue
            key = group.desc, group.ranks
            names_of_group[key].add(name)
            ranks_of_group[key].add(rank)

    # a group that some member with a dump does not list is a mistake of those that list it: of a
    # rank with other parallel sizes, or of a dump of another job
    names: set[str] = set()
    num_groups = 0
    for key, names_of_this in names_of_group.items():
        _, members = key
        ranks_without_it = observed.dumps.keys() & set(members)
        ranks_without_it -= ranks_of_group[key]
        ranks_without_it -= ranks_with_partial_groups
        if not ranks_without_it:
            names |= names_of_this
            num_groups += 1
    return len(names) < num_groups and all(name.isdecimal() for name in names)


def _names_by_members(observed: DumpSet) -> dict[int, dict[str, str]]:
    """Name each group after its first member that left a dump: rank -> old name -> new name."""
    new_name_of_group: dict[Identity, str] = {}
    names_of_rank: dict[int, dict[str, str]] = {}
    for rank, dump in sorted(observed.dumps.items()):
        new_names: dict[str, str] = {}
        for name, identity in _identities(dump).items():
            new_name = new_name_of_group.setdefault(identity, f"{name} of rank {rank}")
            new_names[name] = new_name
        names_of_rank[rank] = new_names
    return names_of_rank


def _identities(dump: Dump) -> dict[str, Identity]:
    """Tell the groups of a rank apart: name -> what all members know of the group."""
    numbered: list[tuple[int, str]] = []
    for name, group in dump.groups.items():
        if name.isdecimal() and dump.rank in group.ranks and not group.partial:
            numbered.append((int(name), name))
    identities: dict[str, Identity] = {}
    alike = Counter[tuple[str, Members]]()
    for _, name in sorted(numbered):
        group = dump.groups[name]
        key = group.desc, group.ranks
        # members make groups of the same ranks in the same order
        identities[name] = (*key, alike[key])
        alike[key] += 1
    return identities


# -- names that several groups share --------------------------------------------------------------
def _shared_names(observed: DumpSet) -> set[str]:
    """Find names that ranks use for groups without a common member."""
    shared_names: set[str] = set()
    for name, written in observed.listed.items():
        members_of_name = [group.ranks for group in written if not group.partial]
        if _are_several(members_of_name):
            shared_names.add(name)
    return shared_names


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


def _names_of_shared(dump: Dump, shared_names: set[str]) -> dict[str, str]:
    """Return new names for a rank's groups whose names others use for theirs."""
    new_names: dict[str, str] = {}
    for name in shared_names & dump.groups.keys():
        members = dump.groups[name].ranks
        if dump.rank in members:
            new_names[name] = f"{name} of rank {min(members)}"
    return new_names


def _renamed(dump: Dump, new_names: dict[str, str]) -> Dump:
    """Return a dump with other names of its groups."""
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
