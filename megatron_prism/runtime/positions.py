"""Where does a rank stand in a group of evenly spaced ranks?  Without a dict of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

__all__ = ["Positions"]


class Positions(Mapping[int, int]):
    """Global rank -> group rank of evenly spaced ranks; as a dict 65,536 of them take 9 MB."""

    def __init__(self, ranks: range) -> None:
        self._ranks = ranks

    def __getitem__(self, rank: int) -> int:
        try:
            return self._ranks.index(int(rank))
        except ValueError:
            raise KeyError(rank) from None

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def items(self) -> Iterator[tuple[int, int]]:  # type: ignore[override]
        return zip(self._ranks, range(len(self._ranks)), strict=True)  # c10d only walks over it
