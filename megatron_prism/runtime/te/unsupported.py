"""What the virtual Transformer Engine lacks, refused by name when used, and its release."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import NoReturn

from megatron_prism.core.errors import UnsupportedError
from megatron_prism.core.megatron_source import ENGINE, engine_release

# Whose memory the modules have.  Where another one keeps something else, they ask ``since``.
release = engine_release(ENGINE)
asked: set[tuple[int, int]] = set()  # what decided bytes of this job


def since(major: int, minor: int) -> bool:
    """Whether the release that is stood in for has what came with this one."""
    asked.add((major, minor))
    return release >= (major, minor)


_FIX = "leave that option out, or use --prism-tier cuda with the real Transformer Engine"


def refuse(what: str, fix: str = _FIX) -> NoReturn:
    """Raise UnsupportedError that names ``what``."""
    raise UnsupportedError(f"the virtual Transformer Engine has no {what}", fix=fix)


def absent_function(name: str, fix: str = _FIX) -> Callable[..., NoReturn]:
    """A function that refuses to run."""

    def absent(*args: object, **kwargs: object) -> NoReturn:
        refuse(name, fix)

    absent.__name__ = absent.__qualname__ = name.rpartition(".")[2]
    return absent


def absent_class(name: str, *bases: type, fix: str = _FIX) -> type:
    """A class that isinstance() and annotations can name, and that refuses to be made."""

    def new(cls: type, *args: object, **kwargs: object) -> NoReturn:
        refuse(name, fix)

    return type(name.rpartition(".")[2], bases, {"__new__": new})


class Lazy(types.ModuleType):
    """A module each of whose public names is an absent class, made when it is first asked for."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("_"):
            raise AttributeError(name)
        # Megatron's uses of te.pytorch.ops, the one module of this kind
        fix = "leave --use-transformer-engine-op-fuser and --use-te-activation-func out"
        made = absent_class(f"{self.__name__}.{name}", fix=fix)
        setattr(self, name, made)
        return made
