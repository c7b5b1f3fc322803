"""Frozen data as JSON files, checked field by field when read: people edit such files.

Long columns of whole numbers that nobody would edit are packed into text where their field asks for it; a list is taken
as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from autobalance.packing import pack, unpack

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_SCHEMA = 1
PACKED = {"packed": True}
"""Metadata of a field of whole numbers that is packed where it is long."""
IN_MEMORY = {"in_memory": True}
"""Metadata of a field that is not saved."""
# Below this, a list is as short as its packed text, and can be read.
_LONG = 32

T = TypeVar("T")


def save(path: str | Path, kind: str, data: DataclassInstance, *, indent: int | None = None) -> None:
    """Write a dataclass as JSON.

    Example:
        >>> save("plan.json", "plan", plan)

    Args:
        path: the file.
        kind: what the file is to be known as.
        data: made of numbers, text, tuples, mappings and further dataclasses.
        indent: spaces of each level, for a file that people read; None: all in one line, which is faster.
    """
    text = json.dumps({"schema": _SCHEMA, "kind": kind, **_plain(data)}, indent=indent)
    Path(path).write_text(text, encoding="utf-8")


def load(path: str | Path, kind: str, cls: type[T]) -> T:
    """Read what `save` wrote.

    Example:
        >>> load("plan.json", "plan", Plan)

    Args:
        path: the file.
        kind: as it was saved.
        cls: the dataclass; the types of its fields are checked.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else, was saved by another version, or is damaged.
    """
    content = Path(path).read_bytes()
    try:
        data = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{path} is not a {kind} saved by autobalance: it is not JSON ({error})") from error
    if not isinstance(data, dict) or data.pop("kind", None) != kind:
        raise ValueError(f"{path} is not a {kind} saved by autobalance")
    if data.pop("schema", None) != _SCHEMA:
        raise ValueError(f"{path} was saved by another version of autobalance; make the {kind} again")
    try:
        made: T = _read(data, cls, kind)
    except ValueError as error:
        raise ValueError(f"{path} is damaged, or was edited: {error}") from error
    return made


def _plain(value: Any) -> Any:
    """`value` as JSON has it."""
    if is_dataclass(value):
        return {field.name: _plain_field(field, getattr(value, field.name)) for field in _saved_fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _saved_fields(data: Any) -> list[Field[Any]]:
    return [field for field in fields(data) if not field.metadata.get("in_memory")]


def _plain_field(field: Field[Any], value: Any) -> Any:
    return pack(value) if field.metadata.get("packed") and len(value) > _LONG else _plain(value)


def _read(value: Any, wanted: Any, where: str) -> Any:
    """`value` from JSON as an instance of the annotation `wanted`."""
    if is_dataclass(wanted):
        return _read_dataclass(value, wanted, where)
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin is tuple and isinstance(value, list):
        if inner[-1] is ...:
            return tuple(_read(item, inner[0], f"{where}[{index}]") for index, item in enumerate(value))
        if len(inner) == len(value):
            return tuple(_read(item, kind, where) for item, kind in zip(value, inner, strict=True))
    elif origin is Mapping and isinstance(value, dict):
        return {key: _read(item, inner[1], f"{where}[{key!r}]") for key, item in value.items()}
    elif type(value) is wanted:
        return value
    elif wanted is float and type(value) is int:
        return float(value)
    raise ValueError(f"{where} is {_shortened(value)}, which is not {_in_words(wanted)}")


def _read_dataclass(value: Any, cls: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_shortened(value)}, which is no set of fields")
    hints = get_type_hints(cls)
    lacking = [
        field.name
        for field in _saved_fields(cls)
        if field.name not in value and field.default is MISSING and field.default_factory is MISSING
    ]
    unknown = [name for name in value if name not in {field.name for field in _saved_fields(cls)}]
    if lacking or unknown:
        told = [f"lacks {', '.join(lacking)}"] * bool(lacking) + [f"has the unknown {', '.join(unknown)}"] * bool(
            unknown
        )
        raise ValueError(f"{where} {' and '.join(told)}")
    packed = {field.name for field in _saved_fields(cls) if field.metadata.get("packed")}
    return cls(
        **{
            name: _unpacked(item, f"{where}.{name}")
            if name in packed and isinstance(item, str)
            else _read(item, hints[name], f"{where}.{name}")
            for name, item in value.items()
        }
    )


def _unpacked(text: str, where: str) -> tuple[int, ...]:
    try:
        return unpack(text)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from error


def _in_words(wanted: Any) -> str:
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if get_origin(wanted) is tuple:
        return "a list" if get_args(wanted)[-1] is ... else f"a list of {len(get_args(wanted))}"
    return words.get(wanted, "a set of names and values")


def _shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]} ..."
