"""The body of a status write: the shorter of two patches with the same result. Pure.

A merge patch contains complete lists: for a job with 2,000 slots all of them, although only one has
changed. A JSON patch contains only what has changed and its path, so it fits only the object for
which it was made.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Operation = dict[str, Any]
MOST_OPERATIONS = 1000
"""The API server accepts 10,000; a merge patch is shorter long before that."""


def build_bodies(
    version: str, old: Mapping[str, Any], patch: Mapping[str, Any]
) -> list[dict[str, Any] | list[Operation]]:
    """The bodies to try, in this order; `patch` is a merge patch (RFC 7386) of the status `old` of
    that resourceVersion.

    Each body contains the version: the API server answers 409 if the object has changed. A JSON
    patch with a path that no longer exists is rejected as invalid before that check, so the merge
    patch follows it.
    """
    whole = {"metadata": {"resourceVersion": version}, "status": dict(patch)}
    lists = any(isinstance(value, list) and old.get(key) for key, value in patch.items())
    operations = _of_object("/status", old, patch) if lists else []
    if not lists or len(operations) > MOST_OPERATIONS:
        return [whole]
    guarded = [_operation("replace", "/metadata/resourceVersion", version), *operations]
    return [guarded, whole] if _size(guarded) < _size(whole) else [whole]


def _size(body: Any) -> int:
    return len(json.dumps(body))


def _operation(op: str, path: str, value: Any = None) -> Operation:
    return {"op": op, "path": path} | ({} if op == "remove" else {"value": value})


def _of_object(path: str, old: Mapping[str, Any], patch: Mapping[str, Any]) -> list[Operation]:
    """Operations from a merge patch; fields that the patch does not name stay."""
    found: list[Operation] = []
    for key, value in patch.items():
        place = f"{path}/{_escape(key)}"
        if value is None:
            found += [_operation("remove", place)] if key in old else []
        elif key not in old:
            found.append(_operation("add", place, _without_nulls(value)))
        elif isinstance(value, Mapping) and isinstance(old[key], Mapping):
            found += _of_object(place, old[key], value)
        else:
            found += _of_value(place, old[key], value)
    return found


def _of_value(path: str, old: Any, new: Any) -> list[Operation]:
    if old == new:
        return []
    if isinstance(old, list) and isinstance(new, list):
        return _of_list(path, old, new)
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found = [_operation("remove", f"{path}/{_escape(k)}") for k in old if k not in new]
        found += _of_object(path, old, new)
        # Each operation repeats the path, so an object is replaced as a whole if most of its fields
        # have changed.
        return found if _size(found) < _size(new) else [_operation("replace", path, new)]
    return [_operation("replace", path, new)]


def _of_list(path: str, old: Sequence[Any], new: Sequence[Any]) -> list[Operation]:
    """Entry by entry; surplus entries are removed from the end, so that the earlier indices stay
    valid.
    """
    found: list[Operation] = []
    for index, (before, after) in enumerate(zip(old, new, strict=False)):
        found += _of_value(f"{path}/{index}", before, after)
    found += [_operation("remove", f"{path}/{i}") for i in range(len(old) - 1, len(new) - 1, -1)]
    return found + [_operation("add", f"{path}/-", entry) for entry in new[len(old) :]]


def _without_nulls(value: Any) -> Any:
    """A null in a merge patch means that the field is absent."""
    if not isinstance(value, Mapping):
        return value
    return {k: _without_nulls(v) for k, v in value.items() if v is not None}


def _escape(key: str) -> str:
    """RFC 6901."""
    return key.replace("~", "~0").replace("/", "~1")
