"""Converts frozen dataclasses to JSON and back. The error for invalid input names the field.

Unknown fields are ignored, because a newer peer may send them. Missing fields get their default,
and wrong types are refused.
"""

import dataclasses
import enum
import functools
import json
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")
_INTEGER = re.compile(r"-?[0-9]{1,20}")
_PLAIN = frozenset({type(None), bool, int, float, str})


class DecodeError(ValueError):
    """A document does not have the required form."""


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Field → type, for a dataclass. Cached, because resolving annotations costs more than the rest
    of a decode.
    """
    resolved = typing.get_type_hints(cls)
    return {field.name: resolved[field.name] for field in dataclasses.fields(cls)}


def encode(value: Any) -> Any:
    """Plain JSON values for a dataclass; fields that are None stay as null."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if dataclasses.is_dataclass(kind):
        held = [(name, getattr(value, name)) for name in _hints(kind)]
        return {name: v if type(v) in _PLAIN else encode(v) for name, v in held}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return list(value) if _PLAIN.issuperset(map(type, value)) else [encode(v) for v in value]
    return value


def dumps(value: Any) -> bytes:
    return json.dumps(encode(value), separators=(",", ":"), sort_keys=True).encode()


def loads(cls: type[T], raw: bytes | str) -> T:
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"{cls.__name__}: not JSON: {error}") from None
    return decode(cls, document)


def decode(cls: type[T], document: Any, path: str = "") -> T:
    """Build `cls` from JSON values.

    Raises:
        DecodeError: names the field, what was found and what is expected.
    """
    where = path or cls.__name__
    if not isinstance(document, Mapping):
        raise DecodeError(f"{where}: expected an object, found {type(document).__name__}")
    known = {}
    for name, hint in _hints(cls).items():  # type: ignore[arg-type]
        if name in document:
            raw = document[name]
            known[name] = raw if type(raw) is hint else _value(hint, raw, f"{where}.{name}")
    try:
        return cls(**known)
    except TypeError as error:
        raise DecodeError(f"{where}: {error}") from None


@functools.cache
def _form(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(hint), typing.get_args(hint)


def _value(hint: Any, raw: Any, path: str) -> Any:
    if type(raw) is hint:
        return raw
    origin, args = _form(hint)
    if origin in (types.UnionType, typing.Union):
        if raw is None and type(None) in args:
            return None
        return _value(next(a for a in args if a is not type(None)), raw, path)
    if hint is Any:
        return raw
    if origin is tuple:
        if not isinstance(raw, list):
            raise DecodeError(f"{path}: expected a list, found {type(raw).__name__}")
        if len(args) == 2 and args[1] is Ellipsis:
            if {args[0]}.issuperset(map(type, raw)):
                return tuple(raw)
            return tuple(_value(args[0], v, f"{path}[{i}]") for i, v in enumerate(raw))
        if len(raw) != len(args):
            raise DecodeError(f"{path}: expected {len(args)} items, found {len(raw)}")
        return tuple(
            _value(a, v, f"{path}[{i}]") for i, (a, v) in enumerate(zip(args, raw, strict=True))
        )
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(raw, Mapping):
            raise DecodeError(f"{path}: expected an object, found {type(raw).__name__}")
        return {_value(args[0], k, path): _value(args[1], v, f"{path}.{k}") for k, v in raw.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return decode(hint, raw, path)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(raw)
        except ValueError:
            expected = ", ".join(str(m.value) for m in hint)
            raise DecodeError(f"{path}: {raw!r} is none of {expected}") from None
    return _scalar(hint, raw, path)


def _scalar(hint: Any, raw: Any, path: str) -> Any:
    if hint is float and isinstance(raw, int) and not isinstance(raw, bool):
        return _to_float(raw, path)
    if hint is int and isinstance(raw, str) and _INTEGER.fullmatch(raw):
        return int(raw)  # keys of JSON objects are always strings
    if isinstance(raw, hint) and not (hint is int and isinstance(raw, bool)):
        return raw
    raise DecodeError(f"{path}: expected {hint.__name__}, found {raw!r:.80}")


def _to_float(raw: int, path: str) -> float:
    try:
        return float(raw)
    except OverflowError:
        raise DecodeError(f"{path}: {raw!r:.80} is too large for a float") from None
