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
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_INTEGER = re.compile(r"-?[0-9]{1,20}")
_PLAIN = frozenset({type(None), bool, int, float, str})
_WRITER = json.JSONEncoder(separators=(",", ":"), sort_keys=True)


class DecodeError(ValueError):
    """A document does not have the required form."""


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Field → type, for a dataclass. Cached, because resolving annotations costs more than the rest
    of a decode.
    """
    resolved = typing.get_type_hints(cls)
    return {field.name: resolved[field.name] for field in dataclasses.fields(cls)}


@functools.cache
def _names(kind: type) -> tuple[str, ...] | None:
    """The fields of a dataclass; None: it is none."""
    return tuple(_hints(kind)) if dataclasses.is_dataclass(kind) else None


def encode(value: Any) -> Any:
    """Plain JSON values for a dataclass; fields that are None stay as null."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list or kind is tuple:
        return list(value) if _PLAIN.issuperset(map(type, value)) else [encode(v) for v in value]
    if (names := _names(kind)) is not None:  # type: ignore[arg-type]
        return {
            name: inner if type(inner := getattr(value, name)) in _PLAIN else encode(inner)
            for name in names
        }
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    return [encode(v) for v in value] if isinstance(value, (list, tuple)) else value


def dumps(value: Any) -> bytes:
    return _WRITER.encode(encode(value)).encode()


def loads(cls: type[T], raw: bytes | str) -> T:
    return decode(cls, _parse(cls, raw))


def _parse(cls: type, raw: bytes | str) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"{cls.__name__}: not JSON: {error}") from None


def decode(cls: type[T], document: Any, path: str = "") -> T:
    """Build `cls` from JSON values.

    Raises:
        DecodeError: names the field, what was found and what is expected.
    """
    try:
        found: T = _decoder(cls)(document)  # type: ignore[arg-type]
    except _Wrong as wrong:
        raise DecodeError(f"{path or cls.__name__}{wrong.path}: {wrong}") from None
    return found


class Reader(Generic[T]):
    """Reads documents that hardly differ from one another: what is as in the document before is not
    converted again.
    """

    def __init__(self, cls: type[T]) -> None:
        self._cls = cls
        self._document: Any = None
        self._found: T | None = None

    def read(self, raw: bytes | str) -> T:
        """Like `loads`."""
        document = _parse(self._cls, raw)
        try:
            found: T = _convert(self._cls, document, self._document, self._found)
        except (_Wrong, TypeError):
            found = decode(self._cls, document)  # the error names the place
        self._document, self._found = document, found
        return found


def _convert(hint: Any, raw: Any, former: Any, converted: Any) -> Any:
    """Convert a value, given what a `former` one was `converted` to. Raises `_Wrong`."""
    cls: Any = type(converted)
    if _names(cls) is None or not isinstance(raw, dict):
        return _decoder(hint)(raw)
    known = {
        name: getattr(converted, name)
        if name in former and former[name] == raw[name]
        else _convert(inner, raw[name], former.get(name), getattr(converted, name))
        for name, inner in _hints(cls).items()
        if name in raw
    }
    return cls(**known)


class _Wrong(Exception):
    """A value does not have the required type. `path`: where, as seen from the caller."""

    path = ""

    def inside(self, step: str) -> "_Wrong":
        self.path = step + self.path
        return self


Decoder = Callable[[Any], Any]
"""Returns the value for a JSON value. Raises `_Wrong`."""


@functools.cache
def _decoder(hint: Any) -> Decoder:
    """Made once for each type: to look at a type costs more than to convert a value."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _optional(_decoder(next(a for a in args if a is not type(None))), args)
    if hint is Any:
        return _same
    if origin is tuple:
        return _list_of(args[0]) if len(args) == 2 and args[1] is Ellipsis else _fixed(args)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(_decoder(args[0]), _decoder(args[1]))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _object(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _member(hint)
    return functools.partial(_scalar, hint)


def _same(raw: Any) -> Any:
    return raw


def _optional(inner: Decoder, args: tuple[Any, ...]) -> Decoder:
    def decode(raw: Any) -> Any:
        return None if raw is None and type(None) in args else inner(raw)

    return decode


def _list_of(hint: Any) -> Decoder:
    inner, plain = _decoder(hint), {hint}

    def decode(raw: Any) -> Any:
        _require_list(raw)
        if plain.issuperset(map(type, raw)):
            return tuple(raw)
        done: list[Any] = []
        try:
            for value in raw:
                done.append(inner(value))  # noqa: PERF401 the error has to name the place
        except _Wrong as wrong:
            raise wrong.inside(f"[{len(done)}]") from None
        return tuple(done)

    return decode


def _fixed(args: tuple[Any, ...]) -> Decoder:
    items = [_decoder(a) for a in args]

    def decode(raw: Any) -> Any:
        _require_list(raw)
        if len(raw) != len(items):
            raise _Wrong(f"expected {len(items)} items, found {len(raw)}")
        done: list[Any] = []
        try:
            for inner, value in zip(items, raw, strict=True):
                done.append(inner(value))
        except _Wrong as wrong:
            raise wrong.inside(f"[{len(done)}]") from None
        return tuple(done)

    return decode


def _require_list(raw: Any) -> None:
    if not isinstance(raw, list):
        raise _Wrong(f"expected a list, found {type(raw).__name__}")


def _mapping(key: Decoder, value: Decoder) -> Decoder:
    def decode(raw: Any) -> Any:
        _require_object(raw)
        done = {}
        for name, inner in raw.items():
            known = key(name)
            try:
                done[known] = value(inner)
            except _Wrong as wrong:
                raise wrong.inside(f".{name}") from None
        return done

    return decode


@functools.cache
def _fields(cls: type) -> list[tuple[str, Any, Decoder]]:
    """Not called before the first document, or `prepare`: a class may contain itself."""
    return [(name, hint, _decoder(hint)) for name, hint in _hints(cls).items()]


def prepare(cls: type) -> None:
    """Resolve the types of a dataclass and of all that it contains now, not while its first document is read or
    written: that takes up to 0.3 ms for each class.
    """
    _prepare(cls, set())


def _prepare(hint: Any, done: set[Any]) -> None:
    if hint in done:
        return
    done.add(hint)
    inside: Iterable[Any] = typing.get_args(hint)
    if isinstance(hint, type) and _names(hint) is not None:
        inside = [kind for _, kind, _ in _fields(hint)]
    for inner in inside:
        _prepare(inner, done)


def _object(cls: type) -> Decoder:
    def decode(raw: Any) -> Any:
        _require_object(raw)
        known = {}
        for name, hint, inner in _fields(cls):
            if name in raw:
                value = raw[name]
                try:
                    known[name] = value if type(value) is hint else inner(value)
                except _Wrong as wrong:
                    raise wrong.inside(f".{name}") from None
        try:
            return cls(**known)
        except TypeError as error:
            raise _Wrong(str(error)) from None

    return decode


def _require_object(raw: Any) -> None:
    if type(raw) is not dict and not isinstance(raw, Mapping):
        raise _Wrong(f"expected an object, found {type(raw).__name__}")


def _member(hint: type[enum.Enum]) -> Decoder:
    def decode(raw: Any) -> Any:
        try:
            return hint(raw)
        except ValueError:
            expected = ", ".join(str(m.value) for m in hint)
            raise _Wrong(f"{raw!r:.80} is none of {expected}") from None

    return decode


def _scalar(hint: Any, raw: Any) -> Any:
    if type(raw) is hint:
        return raw
    if hint is float and isinstance(raw, int) and not isinstance(raw, bool):
        return _to_float(raw)
    if hint is int and isinstance(raw, str) and _INTEGER.fullmatch(raw):
        return int(raw)  # keys of JSON objects are always strings
    if isinstance(raw, hint) and not (hint is int and isinstance(raw, bool)):
        return raw
    raise _Wrong(f"expected {hint.__name__}, found {raw!r:.80}")


def _to_float(raw: int) -> float:
    try:
        return float(raw)
    except OverflowError:
        raise _Wrong(f"{raw!r:.80} is too large for a float") from None
