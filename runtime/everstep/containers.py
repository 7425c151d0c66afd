"""Containers of the standard library in a script's own state: what is stored of their types. No class
is imported: it is looked up among the modules that the process has loaded already.
"""

import collections
import sys
from collections.abc import Sequence
from typing import Any

from everstep.errors import StateError

_FACTORIES = {f.__name__: f for f in (bool, bytes, complex, dict, float, int, list, str, tuple)}


def name_factory(value: "collections.defaultdict[Any, Any]", path: str) -> str | None:
    """The name of what makes the missing values of a defaultdict. Raises `StateError` if it has none."""
    factory = value.default_factory
    name = getattr(factory, "__name__", "")
    if factory is None or _FACTORIES.get(name) is factory:
        return name or None
    raise StateError(
        f"{path}: cannot store a defaultdict that makes its missing values with {factory!r:.80}; give it one of "
        f"{', '.join(_FACTORIES)}, or store dict(…) of it in state_dict() and make it anew in load_state_dict()"
    )


def find_factory(name: str | None) -> Any:
    """The reverse of `name_factory`. Raises `StateError` if this version does not know the name."""
    if name is not None and name not in _FACTORIES:
        raise StateError(
            f"this version of everstep cannot make a defaultdict of {name!r}: install the one that wrote the checkpoint"
        )
    return _FACTORIES[name] if name is not None else None


def is_named(value: object) -> bool:
    """Whether this is a named tuple."""
    return isinstance(value, tuple) and isinstance(getattr(value, "_fields", None), tuple)


def describe_named(value: Any) -> list[Any]:
    """Module, name and fields of the class of a named tuple."""
    made = type(value)
    return [made.__module__, made.__qualname__, list(made._fields)]


def make_named(module: str, name: str, fields: Sequence[str], items: Sequence[Any]) -> Any:
    """A named tuple again. If its class is not loaded, or has other fields now, it gets a class with the
    same fields.
    """
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    known = isinstance(found, type) and issubclass(found, tuple)
    if known and getattr(found, "_fields", None) == tuple(fields):
        return found._make(items)
    like_it: Any = collections.namedtuple(name.rpartition(".")[2], fields)  # type: ignore[misc]
    return like_it._make(items)
