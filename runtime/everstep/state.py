"""State as JSON and tensors. Nothing is pickled; what cannot be stored is refused by name.

JSON values stand for themselves. Everything else is an object with one key that begins with `$`:
`$tensor` (name of a stored tensor), `$array` (the same, numpy), `$tuple`, `$dict` (pairs, for keys
that are not strings, or whose order counts), `$counter`, `$ordered` (an OrderedDict), `$default` (a
defaultdict), `$named` (a named tuple), `$float` (nan, inf, -inf), `$bytes`, `$bytearray`, `$complex`,
`$scalar` (numpy), `$dtype`.
"""

import base64
import collections
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from everstep import containers
from everstep.errors import StateError
from everstep.sharded import is_sharded
from everstep_contract.manifest import ITEM_BYTES

Tensors = dict[str, torch.Tensor]
"""Tensors by name; a DTensor stands for its local tensor (`sharded.py`)."""
_PLAIN = frozenset({type(None), bool, int, str})
_ITEM_BYTES = 32
"""A number of Python and the reference to it."""


def list_tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a state."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from list_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from list_tensors(item)


def count_bytes(value: Any) -> int:
    """About how many bytes a state takes: tensors, arrays, and what its lists and dicts hold."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.nbytes
    if isinstance(value, dict):
        return len(value) * _ITEM_BYTES + sum(map(count_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return len(value) * _ITEM_BYTES + sum(map(count_bytes, value))
    return 0


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def encode(value: Any, path: str, tensors: Tensors, *, exact: bool = False) -> Any:
    """Encode `value` as a tree; its tensors are added to `tensors` under names that begin with `path`.

    Args:
        exact: keep the order of the keys of dicts, and the types of the standard library's containers.
            The documents that carry the tree sort the keys of JSON objects, so a dict whose keys are
            not sorted becomes pairs.

    Raises:
        StateError: something cannot be stored; the message names its path.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, np.generic):
        return _number(value)
    if isinstance(value, torch.Tensor):
        return _tensor(value, path, tensors)
    if isinstance(value, Mapping):
        return _mapping(value, path, tensors, exact)
    if isinstance(value, (list, tuple)):
        if _PLAIN.issuperset(map(type, value)):
            items: list[Any] = list(value)
        else:
            items = [encode(v, f"{path}/{i}", tensors, exact=exact) for i, v in enumerate(value)]
        if exact and containers.is_named(value):
            return {"$named": [*containers.describe_named(value), items]}
        return {"$tuple": items} if isinstance(value, tuple) else items
    return _other(value, path, tensors)


def _number(value: int | float) -> Any:
    if isinstance(value, int) or math.isfinite(value):
        return value + 0 if isinstance(value, int) else float(value)
    return {"$float": repr(float(value))}


def _tensor(value: torch.Tensor, path: str, tensors: Tensors) -> Any:
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and not is_sharded(
        value
    ):
        raise StateError(
            f"{path}: cannot store a {type(value).__name__}; only plain tensors and DTensors"
        )
    if value.is_meta:
        raise StateError(
            f"{path}: this tensor is on the device meta, so it holds no numbers; call to_empty(device=job.device) and "
            "set its values before job.track"
        )
    if value.layout != torch.strided or value.is_quantized:
        raise StateError(f"{path}: cannot store a sparse or quantised tensor; make it dense")
    if value.is_conj() or value.is_neg():  # its memory does not hold its numbers
        raise StateError(
            f"{path}: cannot store a tensor that torch conjugates or negates only when it is read; call "
            ".resolve_conj().resolve_neg() before it is tracked"
        )
    if dtype_name(value.dtype) not in ITEM_BYTES:
        raise StateError(
            f"{path}: cannot store a tensor of {value.dtype}; convert it, or leave it out of state_dict()"
        )
    name = _free_name(path, tensors)
    # A DTensor's `detach` is dispatched like its operators, which takes a hundred times as long;
    # nothing here needs it.
    tensors[name] = value if is_sharded(value) else value.detach()
    tag = {"$tensor": name}
    return tag if value.device.type == "cpu" else {**tag, "device": value.device.type}


def _free_name(path: str, tensors: Tensors) -> str:
    name, number = path, 2
    while name in tensors:
        name, number = f"{path}#{number}", number + 1
    return name


def _mapping(value: Mapping[Any, Any], path: str, tensors: Tensors, exact: bool) -> Any:
    items = [(k, encode(v, f"{path}/{k}", tensors, exact=exact)) for k, v in value.items()]
    if isinstance(value, collections.Counter):
        return {"$counter": _pairs(items, path)}
    if exact and isinstance(value, collections.OrderedDict):
        return {"$ordered": _pairs(items, path)}
    if exact and isinstance(value, collections.defaultdict):
        return {"$default": [containers.name_factory(value, path), _pairs(items, path)]}
    if all(isinstance(k, str) and not k.startswith("$") for k, _ in items):
        found = dict(items)
        if not exact or list(found) == sorted(found):
            return found
    return {"$dict": _pairs(items, path)}


def _pairs(items: list[tuple[Any, Any]], path: str) -> list[list[Any]]:
    return [[_key(k, path), v] for k, v in items]


def _key(key: Any, path: str) -> Any:
    if key is None or isinstance(key, (bool, int, float, str, bytes, tuple)):
        return encode(key, path, {})
    raise StateError(
        f"{path}: cannot store the key {key!r:.80} of type {type(key).__name__}; use text or numbers as keys"
    )


def _other(value: Any, path: str, tensors: Tensors) -> Any:
    match value:
        case bytes() | bytearray():
            tag = "$bytes" if isinstance(value, bytes) else "$bytearray"
            return {tag: base64.b64encode(value).decode()}
        case complex():
            return {"$complex": [value.real, value.imag]}
        case torch.dtype():
            return {"$dtype": dtype_name(value)}
        case np.ndarray() if value.dtype.kind in "biufc" and not np.ma.isMaskedArray(value):
            if not value.dtype.isnative or value.dtype.name not in ITEM_BYTES:
                raise StateError(
                    f"{path}: cannot store an array of dtype {value.dtype!r}; convert it with astype, or leave it out "
                    "of state_dict()"
                )
            plain = torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape)
            return {"$array": _tensor(plain, path, tensors)["$tensor"]}
        case np.generic() if value.dtype.kind in "biufc":
            return {"$scalar": [str(value.dtype), base64.b64encode(value.tobytes()).decode()]}
    raise StateError(
        f"{path}: cannot store a {type(value).__module__}.{type(value).__qualname__}. Everstep "
        "stores numbers, text, bytes, tensors, arrays, and lists, tuples and dicts of them (never "
        "pickle); leave it out of state_dict()"
    )


def list_names(tree: Any) -> Iterator[str]:
    """The names of a tree's tensors."""
    if isinstance(tree, list):
        for item in tree:
            yield from list_names(item)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            if key in ("$tensor", "$array"):
                yield value
            else:
                yield from list_names(value)


def decode(tree: Any, fetch: Callable[[str], torch.Tensor], device: torch.device) -> Any:
    """Decode a tree.

    Args:
        fetch: returns the tensor of a name.
        device: for tensors that were on an accelerator.

    Raises:
        StateError: the tree has a tag that this version does not know.
    """
    if isinstance(tree, list):
        return [decode(item, fetch, device) for item in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next((k for k in tree if k.startswith("$")), None)
    if tag is None:
        return {k: decode(v, fetch, device) for k, v in tree.items()}
    return _untag(tag, tree, fetch, device)


def _untag(
    tag: str, tree: dict[str, Any], fetch: Callable[[str], torch.Tensor], device: torch.device
) -> Any:
    body = tree[tag]
    match tag:
        case "$tensor":
            return fetch(body).to(device) if "device" in tree else fetch(body)
        case "$array":
            return fetch(body).numpy()
        case "$tuple":
            return tuple(decode(item, fetch, device) for item in body)
        case "$named":
            module, name, fields, items = body
            again = [decode(item, fetch, device) for item in items]
            return containers.make_named(module, name, fields, again)
        case "$dict":
            return dict(_decode_pairs(body, fetch, device))
        case "$counter":
            return collections.Counter(dict(_decode_pairs(body, fetch, device)))
        case "$ordered":
            return collections.OrderedDict(_decode_pairs(body, fetch, device))
        case "$default":
            factory, pairs = containers.find_factory(body[0]), body[1]
            return collections.defaultdict(factory, _decode_pairs(pairs, fetch, device))
        case "$float":
            return float(body)
        case "$bytes":
            return base64.b64decode(body)
        case "$bytearray":
            return bytearray(base64.b64decode(body))
        case "$complex":
            return complex(*body)
        case "$dtype":
            return getattr(torch, body)
        case "$scalar":
            return np.frombuffer(base64.b64decode(body[1]), dtype=body[0])[0]
    raise StateError(
        f"this version of everstep does not know {tag!r} in a state tree: install the one that wrote the checkpoint"
    )


def _decode_pairs(
    pairs: list[list[Any]], fetch: Callable[[str], torch.Tensor], device: torch.device
) -> Iterator[tuple[Any, Any]]:
    for key, value in pairs:
        yield decode(key, fetch, device), decode(value, fetch, device)
