"""The training state of one boundary, and what of it is copied at once.

Until a step is applied it changes only what is small (`rewind.py`). That is copied at the boundary; the
parameters of modules, their large buffers and the state of optimizers are copied while the next step
computes. Should a script change one of these all the same, its version tells.
"""

from dataclasses import dataclass
from typing import Any

import torch

from everstep import state
from everstep.buffers import Buffers

STAY = ("module", "optimizer")
"""Kinds of tracked objects whose tensors stay as they are until a step is applied, but for small buffers
and the settings of optimizers.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The whole training state as of one boundary; tensors by reference unless cloned."""

    tree: dict[str, Any]
    tensors: state.Tensors

    def cloned(self) -> "Capture":
        return Capture(tree=self.tree, tensors={n: _copy(t) for n, t in self.tensors.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A capture whose small tensors are copies."""

    held: Capture
    versions: dict[str, int]
    """Of the tensors that are still to be copied."""

    def find_changed(self) -> str:
        """Name of a tensor that has changed since; empty: none has."""
        tensors = self.held.tensors
        return next((n for n, v in self.versions.items() if tensors[n]._version != v), "")


def take(held: Capture, buffers: Buffers) -> Snapshot:
    small = {ref.tensor.data_ptr() for ref in buffers.small}
    kinds = {name: found["kind"] for name, found in held.tree["objects"].items()}
    stays = {
        n
        for n, t in held.tensors.items()
        if kinds.get(n.partition("/")[0]) in STAY
        and "/param_groups/" not in n
        and t.data_ptr() not in small
    }
    tensors = {n: t if n in stays else _copy(t) for n, t in held.tensors.items()}
    versions = {n: tensors[n]._version for n in stays}
    return Snapshot(held=Capture(tree=held.tree, tensors=tensors), versions=versions)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)
