"""The training state of one boundary, and which of it is copied at once.

Until a step is applied, it changes only small state (`rewind.py`). That is copied at the boundary.
The parameters of modules, their large buffers and the state of optimizers are listed and copied
while the next step computes. If a script does change one of these in that time, its version shows
it. Tensors that stand in for those of a module while it computes (`torch.func.functional_call`) are
left out. A module with DTensors is listed at the boundary, because FSDP2 replaces them by full
parameters while it computes.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from everstep import device, rewind, state
from everstep.buffers import Buffers
from everstep.sharded import copy_to_host, local_of, version_of, with_local
from everstep.tracked import Tracked


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The complete training state as of one boundary; tensors by reference unless cloned."""

    tree: dict[str, Any]
    tensors: state.Tensors
    own: state.Tensors = field(default_factory=dict)
    """State that belongs to this rank alone; always copies."""

    def cloned(self) -> "Capture":
        copies = {n: copy_to_host(t) for n, t in self.tensors.items()}
        return Capture(tree=self.tree, tensors=copies, own=self.own)


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """What was copied at the boundary, and where the rest is found later."""

    tracked: Tracked
    rest: Capture
    """The tree without its objects, and that tree's tensors."""
    objects: dict[str, Capture] = field(default_factory=dict)
    """Objects that may change at any time, copied completely; modules with DTensors, listed only."""
    buffers: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Module → key in its state_dict → copy of a small buffer."""
    held: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Module → key in its state_dict → a parameter or large buffer, by reference."""
    settings: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Optimizer → the settings of each of its parameter groups."""
    parameters: dict[str, int] = field(default_factory=dict)
    """Parameter → its version at the boundary."""
    versions: dict[str, int] = field(default_factory=dict)
    """Tensor that is not copied → its version when it was listed."""
    marked: torch.cuda.Event | None = None
    """On a device: an event in the script's stream, after the copies that were made at
    the boundary (`device.beside`).
    """

    def list_state(self) -> Capture:
        """List the state as of the boundary; possible until the next step is applied."""
        tensors: state.Tensors = {}
        objects = {name: self._list_object(name, tensors) for name in self.tracked.objects}
        tensors |= self.rest.tensors
        tree = {**self.rest.tree, "objects": objects}
        return Capture(tree=tree, tensors=tensors, own=self.rest.own)

    def find_changed(self, held: Capture) -> str:
        """Name of a tensor that has changed since the boundary; empty: none has."""
        now = rewind.list_versions(self.tracked)
        for name, version in self.parameters.items():
            if now.get(name) != version:
                return name.replace(".", "/", 1)
        return next((n for n, v in self.versions.items() if version_of(held.tensors[n]) != v), "")

    def list_now(self, name: str) -> None:
        """List the state of an object that cannot be listed later."""
        tensors: state.Tensors = {}
        tree = self._list_object(name, tensors)
        self.objects[name] = Capture(tree=tree, tensors=tensors)

    def _list_object(self, name: str, tensors: state.Tensors) -> Any:
        if name in self.objects:
            held = self.objects[name]
            tensors |= held.tensors
            return held.tree
        _, thing = self.tracked.objects[name]
        own = thing.state_dict()
        if name in self.settings:
            pairs = zip(own["param_groups"], self.settings[name], strict=True)
            own["param_groups"] = [{**kept, "params": group["params"]} for group, kept in pairs]
        else:
            named = self.held.get(name, {}).items()
            own.update({key: tensor.detach() for key, tensor in named if key in own})
            own.update(self.buffers.get(name, {}))
        listed: state.Tensors = {}
        tree = self.tracked.capture_one(name, listed, own)
        copied = {local_of(t).data_ptr() for t in self.buffers.get(name, {}).values()}
        self.versions |= {
            n: version_of(t) for n, t in listed.items() if local_of(t).data_ptr() not in copied
        }
        tensors |= listed
        return tree


def take(tracked: Tracked, buffers: Buffers, rest: Capture) -> Snapshot:
    """Take a snapshot at a boundary. `rest`: the tree without its objects; its tensors are copies."""
    shot = Snapshot(tracked=tracked, rest=rest, parameters=rewind.list_versions(tracked))
    for name, (kind, thing) in tracked.objects.items():
        if not tracked.stays(name):
            tensors: state.Tensors = {}
            tree = tracked.capture_one(name, tensors)
            shot.objects[name] = Capture(tree=tree, tensors=tensors).cloned()
        elif kind == "optimizer":
            shot.settings[name] = [_copy_settings(group) for group in thing.param_groups]
    for owner, key, tensor in buffers.list_small():
        shot.buffers.setdefault(owner, {})[key] = with_local(
            tensor, local_of(tensor).detach().clone()
        )
    for name in filter(tracked.stays, tracked.objects):
        if tracked.has_sharded(name):
            shot.list_now(name)
        elif tracked.objects[name][0] == "module":
            shot.held[name] = dict(tracked.parameters_of(name))
    for owner, key, tensor in buffers.list_large():
        if owner in shot.held:
            shot.held[owner][key] = tensor
    shot.marked = device.mark()
    return shot


def _copy_settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
