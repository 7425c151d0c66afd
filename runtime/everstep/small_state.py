"""State that is cheap to copy at every step: the settings of optimizers (learning rates), and tracked
objects without large tensors (schedules, counters).
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from everstep import state
from everstep.tracked import Tracked


class SmallState:
    """A copy of the small state."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (group, {k: _copy(v) for k, v in group.items() if k != "params"})
            for _, optimizer in tracked.of_kind("optimizer")
            for group in optimizer.param_groups
        ]
        self._tensors = [
            (value, value.detach().clone())
            for _, settings in self._groups
            for value in settings.values()
            if isinstance(value, torch.Tensor)
        ]
        self._objects = [(o, _copy_state(own)) for o, own in tracked.small_states()]

    def put_back(self) -> None:
        for group, settings in self._groups:
            for name in group.keys() - settings.keys() - {"params"}:
                del group[name]
            group.update({k: _copy(v) for k, v in settings.items()})
        with torch.no_grad():
            for tensor, value in self._tensors:
                tensor.copy_(value)
        for thing, own in self._objects:
            thing.load_state_dict(copy.deepcopy(own))

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """A context in which the state is as it was copied; at its end
        the present state is restored.
        """
        now = SmallState(self._tracked)
        self.put_back()
        try:
            yield
        finally:
            now.put_back()


def _copy_state(own: Any) -> Any:
    """Copy an object's state. `deepcopy` refuses a tensor that a computation with gradients has made, such as
    a loss that the script keeps; of these the values are copied.
    """
    made = {id(t): t.detach().clone() for t in state.list_tensors(own) if not t.is_leaf}
    return copy.deepcopy(own, made)


def _copy(value: Any) -> Any:
    """Copy a setting. Most are plain numbers, and `deepcopy` takes as long
    for one as for a small dict. A tensor stays the same one: the script may hold it, to set it.
    """
    kept = type(value) in _PLAIN or isinstance(value, torch.Tensor)
    return value if kept else copy.deepcopy(value)


_PLAIN = frozenset({type(None), bool, int, float, str})
