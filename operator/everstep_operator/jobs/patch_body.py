"""The body of a status write: the shorter of two patches with the same result. Pure.

A merge patch contains whole lists: for a job with 2,000 slots all of them, although one has
changed. A JSON patch names the changed places, so it fits only the object that it was made for.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Operation = dict[str, Any]
MOST_OPERATIONS = 1000
"""The API server takes 10,000; long before that a merge patch is the shorter one."""


def build_bodies(
    version: str, old: Mapping[str, Any], patch: Mapping[str, Any]
) -> list[dict[str, Any] | list[Operation]]:
    """Bodies to try in this order; `patch` is a merge patch (RFC 7386) of the status `old` of that
    resourceVersion.

    Each contains the version: the API server answers 409 if the object has changed. A JSON
    patch whose places no longer exist is rejected as invalid before that, so the merge patch
    follows it.
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
    """From a merge patch: fields that it does not name stay."""
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
        # Each operation repeats the path: an object with most of its fields changed is replaced as
        # a whole.
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
