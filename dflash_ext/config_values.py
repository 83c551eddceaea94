"""Values of configuration fields: from YAML or command-line text to the field's type."""

from __future__ import annotations

import reprlib
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml

HUB_PREFIX = "hf:"  # of a data set's name


class UserError(Exception):
    """Bad configuration or input. The message is one line: ``place: found X, want Y``."""


# What PyYAML lets through of its conversions: `!!float ""`, `!!bool x`, 5,000 digits, deep nesting.
_CONVERSION_ERRORS = (
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    ArithmeticError,
    RecursionError,
)


class StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a name that stands twice in one mapping is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[object] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    problem = f"the name {key.value} twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                names.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> object:
    """What a YAML file holds, {} if nothing. Raises UserError."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), StrictLoader)
    except OSError as error:
        raise UserError(f"{path}: found {error.strerror}, want a YAML file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: found bytes that are not UTF-8, want a YAML file") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(f"{place}: found an error ({problem or error}), want YAML") from None
    except _CONVERSION_ERRORS as error:
        raise UserError(f"{path}: found an error ({error}), want YAML") from None
    return {} if data is None else data


_short = reprlib.Repr()  # not repr: YAML's aliases can nest a list in itself, or 2^60 times
_short.maxlevel, _short.maxlist, _short.maxdict, _short.maxtuple = 4, 12, 12, 12
_short.maxstring = _short.maxother = _short.maxlong = 200


def shown(value: object) -> str:
    """A value as an error message shows it."""
    text = _short.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def type_name(hint: Any) -> str:
    """How a type is named to a user: ``integer or null``, ``list of strings``, ``auto or ids``."""
    if get_origin(hint) is Literal:
        return " or ".join(get_args(hint))
    if get_origin(hint) is list:
        return f"list of {type_name(get_args(hint)[0])}s"
    if get_args(hint):
        return " or ".join(type_name(arg) for arg in get_args(hint))
    names = {int: "integer", float: "number", bool: "true or false", str: "string"}
    return names.get(hint, "null")


def split_weight(entry: str) -> tuple[float, str]:
    """Weight and name of an entry of data.train: ``0.5 * code.parquet``; 1 if it says none."""
    weight, star, name = entry.partition("*")
    try:
        return (float(weight), name.strip()) if star else (1.0, entry)
    except ValueError:  # a star in a file's name
        return 1.0, entry


def from_text(value: object) -> object:
    """Command-line text as YAML reads it; other values, and text that is no YAML, as they are."""
    if not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value)
    except (yaml.YAMLError, *_CONVERSION_ERRORS):  # 2024-13-45 is a date to YAML
        return value


def coerce(hint: Any, value: object) -> object:
    """``value`` as type ``hint``; ValueError if it is not one.

    Text is accepted for every type, as that is what a command line holds.
    """
    if get_origin(hint) is Literal:
        # YAML 1.1 reads an unquoted `off` as false.
        choice = "off" if value is False else value
        if choice in get_args(hint):
            return choice
        raise ValueError
    if get_origin(hint) is list:
        return _coerce_list(get_args(hint)[0], value)
    if NoneType in get_args(hint):
        inner = next(arg for arg in get_args(hint) if arg is not NoneType)
        return None if value is None or value == "null" else coerce(inner, value)
    if hint is str:
        if isinstance(value, str):
            return value
        raise ValueError
    return _coerce_number(hint, value)


def _coerce_number(hint: type, value: object) -> object:
    parsed = from_text(value)
    if hint is float and type(parsed) in (int, float, str):
        return float(parsed)  # type: ignore[arg-type]  # text: YAML 1.1 reads 1e-3 as such
    if type(parsed) is hint:  # not isinstance: true is no integer
        return parsed
    raise ValueError


def _coerce_list(item: Any, value: object) -> list[object]:
    """A list; a single value is a list of one, and so is text that is not a YAML list."""
    parsed = from_text(value) if isinstance(value, str) and value.startswith("[") else value
    if parsed is None or isinstance(parsed, dict):
        raise ValueError
    return [coerce(item, v) for v in (parsed if isinstance(parsed, list) else [parsed])]


def coerce_devices(value: object) -> list[str]:
    """A list of "cpu" and "cuda:i" from one device or a list; an integer i is "cuda:i", and i+j are
    several that hold one model together."""
    parsed = from_text(value)
    items = parsed if isinstance(parsed, list) else [parsed]
    return ["+".join(map(_coerce_device, str(item).split("+"))) for item in items]


def devices_of(entry: str) -> list[str]:
    """The devices of an entry of topology: ``cuda:0+cuda:1`` names two."""
    return entry.split("+")


def _coerce_device(text: str) -> str:
    text = text.strip()
    text = f"cuda:{text}" if text.isdecimal() else text
    text = "cuda:0" if text == "cuda" else text
    kind, _, index = text.partition(":")
    if text == "cpu" or (kind == "cuda" and index.isdecimal()):
        return text
    raise ValueError
