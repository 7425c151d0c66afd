"""An optimizer's state by the names of its parameters; torch numbers them."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from everstep.errors import Misuse, StateError
from everstep.sharded import is_sharded

Parameters = Mapping[str, torch.nn.Parameter]
"""The tracked parameters by name."""


def by_name(
    name: str, optimizer: Any, own: dict[str, Any], parameters: Parameters
) -> dict[str, Any]:
    """What `state_dict` returned, with names instead of numbers. `name`: of the optimizer, for messages."""
    called = list_names(name, optimizer, parameters)
    packed = [number for group in own["param_groups"] for number in group["params"]]
    names = dict(zip(packed, [n for group in called for n in group], strict=True))
    groups = [{**g, "params": n} for g, n in zip(own["param_groups"], called, strict=True)]
    values = {names.get(k, k): v for k, v in own["state"].items()}
    return {**own, "state": values, "param_groups": groups}


def by_number(
    name: str, optimizer: Any, value: dict[str, Any], parameters: Parameters
) -> dict[str, Any]:
    """What `load_state_dict` takes. Raises `StateError` if the optimizer has other parameter groups."""
    called = list_names(name, optimizer, parameters)
    stored = [g["params"] for g in value["param_groups"]]
    if [sorted(g) for g in stored] != [sorted(g) for g in called]:
        gone = sorted({n for g in stored for n in g} ^ {n for g in called for n in g})
        raise StateError(
            f"{name}: its parameter groups are not those of the checkpoint"
            + (f"; they differ in {', '.join(gone[:5])}" if gone else "")
            + ". Build it as it was when it was saved, or start another run (--run, checkpoint.run)"
        )
    numbers = {n: i for i, n in enumerate(n for group in called for n in group)}
    groups = [
        {**group, "params": [numbers[n] for n in own]}
        for group, own in zip(value["param_groups"], called, strict=True)
    ]
    values = {numbers.get(k, k): v for k, v in value["state"].items()}
    return {**value, "state": values, "param_groups": groups}


def list_names(name: str, optimizer: Any, parameters: Parameters) -> list[list[str]]:
    """The names of the parameters in each group. Raises `Misuse` if no tracked module has one of them."""
    known = {id(p): n for n, p in parameters.items()}
    called = []
    for group in optimizer.param_groups:
        missing = [tuple(p.shape) for p in group["params"] if id(p) not in known]
        if missing:
            raise Misuse(
                f"track({name}=…): it holds a parameter of shape {missing[0]} that no tracked "
                "module has; track that module, too, in the same call or an earlier one"
            )
        called.append([known[id(p)] for p in group["params"]])
    return called


def list_states(tree: Any, parameters: Parameters) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Stored name → parameter, for the parts of an optimizer's state that are divided like a
    DTensor. The count of steps stays plain, as in torch.
    """
    for name, values in tree["state"].items():
        parameter = parameters.get(name)
        if parameter is None or not is_sharded(parameter) or not isinstance(values, dict):
            continue
        for key, tag in values.items():
            if key != "step" and isinstance(tag, dict) and "$tensor" in tag:
                yield tag["$tensor"], parameter


def load(optimizer: Any, given: dict[str, Any]) -> None:
    """Load the state, and keep the objects that a script or a wrapper may hold. torch's `load_state_dict`
    replaces them all: the groups and their list, a learning rate that is a tensor, and the dict of the state.
    """
    groups, held = optimizer.param_groups, optimizer.state
    optimizer.load_state_dict(given)
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    for group, new in zip(groups, optimizer.param_groups, strict=True):
        settings = {key: _keep_tensor(group.get(key), value) for key, value in new.items()}
        group.clear()
        group.update(settings)
    loaded = dict(optimizer.state)
    held.clear()
    held.update(loaded)
    optimizer.param_groups, optimizer.state = groups, held


def load_settings(optimizer: Any, stored: Iterable[Mapping[str, Any]]) -> None:
    """Load only the settings of the parameter groups."""
    for group, new in zip(optimizer.param_groups, stored, strict=True):
        settings = {k: _keep_tensor(group.get(k), v) for k, v in new.items() if k != "params"}
        group.update(settings)


def _keep_tensor(held: Any, value: Any) -> Any:
    """The loaded value, in the tensor that the optimizer holds for it, if there is one."""
    if not isinstance(held, torch.Tensor):
        return value
    with torch.no_grad():
        if type(value) in (int, float):
            return held.fill_(value)
        same = isinstance(value, torch.Tensor) and value.shape == held.shape
        return held.copy_(value) if same else value


def keep_layouts(optimizer: Any, given: Mapping[str, Any], converted: Collection[int]) -> None:
    """Give the loaded state its stored dtypes back: torch's `load_state_dict` casts all but `step` to
    the dtype of the parameter, such as the float32 moments of half-precision weights, also in lists and
    dicts (the factors of Shampoo and SOAP), and it breaks texts. And lay it out in memory like its
    parameter: a fused optimizer pairs their numbers as they lie.
    """
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        loaded = optimizer.state.get(parameter, {})
        cast = id(parameter) in converted
        for key, stored in given["state"].get(number, {}).items():
            loaded[key] = _keep_layout(parameter, loaded[key], stored, cast=cast)


def _keep_layout(parameter: torch.Tensor, loaded: Any, stored: Any, *, cast: bool) -> Any:
    """`cast`: leave the dtypes as torch has cast them."""
    if isinstance(stored, torch.Tensor):
        held = loaded if cast or stored.dtype == loaded.dtype else stored.to(loaded.device)
        return _lay_like(parameter, held)
    if isinstance(stored, dict):
        return {k: _keep_layout(parameter, loaded[k], v, cast=cast) for k, v in stored.items()}
    if isinstance(stored, (list, tuple)):
        pairs = zip(loaded, stored, strict=True)
        return type(stored)(_keep_layout(parameter, was, v, cast=cast) for was, v in pairs)
    return stored


def _lay_like(parameter: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    if is_sharded(held) or held.shape != parameter.shape or held.stride() == parameter.stride():
        return held
    return torch.empty_like(parameter, dtype=held.dtype, device=held.device).copy_(held)
