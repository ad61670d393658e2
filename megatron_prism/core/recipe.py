"""Which job does this file describe?  ``load(path, overrides)`` turns YAML into a checked Recipe.

In : a path or the name of a shipped recipe, and ``section.key=value`` overrides.  Out: the
dataclasses of ``recipe_schema.py``.  This is the only module that imports OmegaConf; none of its
types leave it. OmegaConf is strict about types and keys; what it would take silently (a token
without ``=``, octal
``012``, base-60 ``1:30``) is refused here.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard, get_type_hints

from omegaconf import DictConfig, OmegaConf, errors
from yaml import YAMLError

from megatron_prism.core import guards, recipe_checks, recipe_schema
from megatron_prism.core.errors import RecipeError
from megatron_prism.core.recipe_schema import Hardware, Model, Parallel, Prism, Recipe, Train

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["Hardware", "Model", "Parallel", "Prism", "Recipe", "Train", "find", "given",
           "keys", "load",
           "load_prism_section", "shipped", "summary"]  # fmt: skip

_OVERRIDE = re.compile(r"(?P<key>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)=(?P<value>.*)", re.DOTALL)
# YAML 1.1 reads these as base 8 and base 60; nobody who writes a recipe means that
_ODD_NUMBER = re.compile(r"[-+]?0\d+|[-+]?\d+(?::[0-5]?\d)+")
_LINE = re.compile(r"^\s*(?:-\s+)?(?:[\w.]+\s*:\s+)?(?P<value>[-+\d:]+)\s*(?:#.*)?$")


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply ``section.key=value`` overrides, check everything.

    ``path`` is a file, or the name of a shipped recipe with or without ``.yaml``.  A relative
    ``train.data`` is looked up beside the recipe, then here.  Raises RecipeError or WorldError.
    """
    file = find(path)
    config = _merge(OmegaConf.structured(Recipe), _read(file), f"{file}")
    for token in overrides:
        config = _merge(config, _override(token), f"override {token!r}")
    recipe = _plain(config, file)
    recipe.name = recipe.name or file.stem
    if recipe.train.data != "mock":
        recipe.train.data = str(_data_file(recipe.train.data, file))
    return recipe


def load_prism_section(path: str | Path) -> dict[str, object]:
    """What a file says for the --prism-* flags: the keys of ``prism:`` it sets, and ``world_size``.

    The file may be a whole recipe or hold only these sections.  Raises RecipeError.
    """
    file = find(path)
    given = _read(file)
    _merge(OmegaConf.structured(Recipe), given, f"{file}")  # for its errors
    held = OmegaConf.to_container(given.get("prism") or OmegaConf.create({}), resolve=True)
    section = {str(key): value for key, value in held.items()} if isinstance(held, dict) else {}
    if (parallel := given.get("parallel")) is not None and "world_size" in parallel:
        section["world_size"] = parallel.world_size
    if section.get("ranks") is not None:
        section["ranks"] = str(section["ranks"])
    return section


def given(recipe: Recipe | str | os.PathLike[str]) -> Recipe:
    """``recipe`` itself, or the one of that name or file."""
    return recipe if isinstance(recipe, Recipe) else load(os.fspath(recipe))


def shipped() -> dict[str, Path]:
    """Name -> file of the recipes that come with the package, installed or in a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "recipes", package.parent / "recipes"):
        if files := sorted(folder.glob("*.yaml")):
            return {file.stem: file for file in files}
    return {}


def summary(path: str | Path) -> str:
    """The first comment line of a recipe: what it shows."""
    first = Path(path).read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def find(path: str | Path) -> Path:
    """The file meant: itself, or a shipped recipe by name.  RecipeError naming the closest ones."""
    file = Path(path)
    if file.is_file():
        return file
    known = shipped()
    if (name := file.name.removesuffix(".yaml")) in known and file.parent.name in ("", "recipes"):
        return known[name]
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.4)
    raise RecipeError(
        f"there is no recipe {path}",
        fix=f"did you mean {' or '.join(close)}?"
        if close
        else "see the shipped ones: prism recipes",
    )


def keys(section: type[DataclassInstance] = Recipe, prefix: str = "") -> list[str]:
    """Every key a recipe may set, dotted, in the order of the schema."""
    hints = get_type_hints(section, vars(recipe_schema))
    found: list[str] = []
    for item in fields(section):
        kind = hints[item.name]
        key = f"{prefix}{item.name}"
        found += keys(kind, f"{key}.") if _is_section(kind) else [key]
    return found


def _is_section(kind: object) -> TypeGuard[type[DataclassInstance]]:
    return isinstance(kind, type) and is_dataclass(kind)


def _read(file: Path) -> DictConfig:
    try:
        text = guards.read_yaml_text(file)
        for number, line in enumerate(text.splitlines(), 1):
            if match := _LINE.match(line):
                _refuse_odd(match["value"], f"{file}, line {number}")
        config = OmegaConf.create(text)
    except AssertionError:  # a number, a date: OmegaConf takes it for no text
        config = None
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"cannot read {file}: {error}", fix="give the path of a YAML file"
        ) from None
    except YAMLError as error:
        raise RecipeError(f"{file} is no YAML: {error}", fix="correct the marked place") from None
    if not isinstance(config, DictConfig):
        raise RecipeError(f"{file} is no recipe: it has no sections", fix="see prism recipes")
    return config


def _override(token: str) -> DictConfig:
    match = _OVERRIDE.fullmatch(token)
    if match is None:
        key = token.lstrip("-").partition("=")[0]
        key = key.replace(" ", "_") or "section.key"
        fix = f"write {key}={token.partition('=')[2] or 'VALUE'}"
        why = "an override has no dashes" if token.startswith("-") else "an override is key=value"
        raise RecipeError(f"{token!r}: {why}", fix=fix)
    _refuse_odd(match["value"], f"override {token!r}")
    try:
        return OmegaConf.from_dotlist([guards.flat(token)])
    except (ValueError, YAMLError, errors.OmegaConfBaseException) as error:
        reason = str(error).partition("\n")[0]
        raise RecipeError(
            f"override {token!r}: {reason}", fix="quote the value for YAML and for the shell"
        ) from None


def _refuse_odd(value: str, where: str) -> None:
    if _ODD_NUMBER.fullmatch(value):
        plain = value.lstrip("+-").lstrip("0") or "0"
        fix = f"write '{value}' in quotes if it is text" if ":" in value else f"write {plain}"
        base = 60 if ":" in value else 8
        raise RecipeError(f"{where}: YAML reads {value} as a number in base {base}", fix=fix)


def _merge(config: DictConfig, more: DictConfig, where: str) -> DictConfig:
    try:
        merged = OmegaConf.merge(config, more)
    except errors.ConfigKeyError as error:
        raise _unknown(str(error.full_key), where) from None
    except errors.OmegaConfBaseException as error:
        raise _wrong_type(error, where) from None
    except TypeError as error:  # a list where a mapping is
        raise RecipeError(f"{where}: {error}", fix="give the key a value of its type") from None
    assert isinstance(merged, DictConfig)
    return merged


def _plain(config: DictConfig, file: Path) -> Recipe:
    try:
        recipe = OmegaConf.to_object(config)
    except errors.MissingMandatoryValue as error:
        key = str(error.full_key)
        if _is_section(kind := get_type_hints(Recipe, vars(recipe_schema)).get(key)):
            key = keys(kind, f"{key}.")[0]
        raise RecipeError(
            f"{file}: {key} is missing", fix=f"add {key}=VALUE, or put it there"
        ) from None
    except errors.OmegaConfBaseException as error:
        raise _wrong_type(error, str(file)) from None
    assert isinstance(recipe, Recipe)
    return recipe


def _unknown(key: str, where: str) -> RecipeError:
    """An unknown key: the same name in another section, or a name like it."""
    known, leaf = keys(), key.rpartition(".")[2]
    close = [name for name in known if name.rpartition(".")[2] == leaf]
    sections = [item.name for item in fields(Recipe)]
    if leaf in recipe_checks.RENAMED:  # Megatron's own word
        close = [recipe_checks.RENAMED[leaf]]
    close = close or difflib.get_close_matches(key, [*known, *sections], n=2, cutoff=0.75)
    fix = (
        f"did you mean {' or '.join(close)}?"
        if close
        else f"the sections are {', '.join(sections)}"
    )
    taken = {*recipe_checks.RENAMED, *(name.rpartition(".")[2] for name in known)}
    if key.startswith("model.") and leaf not in taken:
        verbatim = f"a field of TransformerConfig goes to model.extra.{leaf}"
        fix = f"{fix} Or: {verbatim}" if close else verbatim
    return RecipeError(f"{where}: a recipe has no {key}", fix=fix)


def _wrong_type(error: errors.OmegaConfBaseException, where: str) -> RecipeError:
    """OmegaConf's own words, its first line, with what to type for the slips we know."""
    said = str(error).partition("\n")[0].replace("'", "")
    key = error.full_key or ""
    number = re.search(r"Value ([-+\d.eE]+) of type float", said)
    if number and "Integer" in said:
        value = float(number[1])
        fix = f"write {key}={value:.0f}" if value.is_integer() else f"{key} is a whole number"
        return RecipeError(f"{where}: {key}: {number[1]} is no whole number to YAML", fix=fix)
    if "is not a subclass of" in said:
        what = f"{where}: {key} is" if key else f"{where}: this is"  # OmegaConf may not say which
        return RecipeError(
            f"{what} a section, not a value",
            fix=f"set one of its keys, as {key}.KEY=VALUE" if key else "write train.lr=1e-4",
        )
    return RecipeError(f"{where}: {key}: {said}", fix=f"give {key} a value of the type named")


def _data_file(data: str, file: Path) -> Path:
    for place in (file.parent / data, Path(data)):
        if place.is_file():
            return place.resolve()
    raise RecipeError(
        f"train.data: there is no file {data}, neither beside {file.name} nor here",
        fix="give the path of a text file, or train.data=mock",
    )
