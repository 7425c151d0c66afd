"""State that belongs to each rank alone (`job.track_local`): each rank saves all of its
own, and nothing is compared.

A save holds it as tensors under the number of the rank. One of them is the
tree. Ranks follow slot order.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from everstep import state
from everstep.checkpoint_reader import Checkpoint
from everstep.device import copy_to_host
from everstep.errors import StateError
from everstep.sharded import Like, is_sharded
from everstep.tracked import Tracked
from everstep_contract.layout import LOCAL, name_ranks

_TREE = "$tree"


class LocalState:
    def __init__(self) -> None:
        self._tracked = Tracked()

    @property
    def names(self) -> str:
        """Names of the objects; empty: there are none."""
        return ", ".join(self._tracked.objects)

    def add(self, objects: Mapping[str, Any]) -> None:
        """Raises `Misuse`."""
        with self._tracked.all_or_none():
            for name, thing in objects.items():
                self._tracked.add(name, thing)

    def may_hold(self, parameters: Collection[torch.Tensor]) -> bool:
        """Whether one of these is of a module here, or may be of an object with a state_dict of its own."""
        own = set(map(id, self._tracked.named_parameters().values()))
        return any(self._tracked.of_kind("object")) or not own.isdisjoint(map(id, parameters))

    def capture(self, rank: int) -> state.Tensors:
        """Copy the state, because it may change at any time. Raises `StateError`."""
        if not self._tracked.objects:
            return {}
        tensors: state.Tensors = {}
        tree = self._tracked.capture(tensors)
        for name in filter(lambda n: is_sharded(tensors[n]), tensors):
            raise StateError(
                f"{name}: a DTensor belongs to several ranks, not to this one; track it with job.track"
            )
        raw = torch.from_numpy(np.frombuffer(json.dumps(tree).encode(), np.uint8).copy())
        own = {_TREE: raw, **{n: copy_to_host(t) for n, t in tensors.items()}}
        return {_prefix(rank) + name: tensor for name, tensor in own.items()}

    def load(
        self, new: list[str], checkpoint: Checkpoint, rank: int, world: int, device: torch.device
    ) -> list[str]:
        """Load the objects in `new`, if the checkpoint has them for this rank. Return why some
        begin as the script made them, in the same words on every rank that tells it.

        Raises:
            StateError: the state in the checkpoint does not fit.
        """
        made_by = checkpoint.manifest.world
        if made_by != world:
            before = f"{made_by} rank{'s' * (made_by != 1)}"
            return [_describe(new, f"it was saved by {before}, and the world size is {world} now")]
        notes: list[str] = []
        lacking = [r for r in range(world) if not checkpoint.has(_prefix(r) + _TREE)]
        if rank not in lacking:
            notes += self._load(new, checkpoint, rank, device)
        if lacking:
            notes.append(_describe(new, f"the checkpoint has none of {name_ranks(lacking)}"))
        return notes

    def describe_left_over(self, checkpoint: Checkpoint, rank: int) -> str:
        """Describe what the checkpoint has of this rank and the script does not track; empty: nothing."""
        if not checkpoint.has(_prefix(rank) + _TREE):
            return ""
        left = sorted(_read_trees(checkpoint, rank).keys() - self._tracked.objects.keys())
        if not left:
            return ""
        return (
            f"the checkpoint also has the local state {', '.join(left)}, which the script does not track: it is "
            "ignored, and later checkpoints will lack it"
        )

    def _load(
        self, new: list[str], checkpoint: Checkpoint, rank: int, device: torch.device
    ) -> list[str]:
        """Return a note on names that the checkpoint lacks."""
        trees = _read_trees(checkpoint, rank)
        missing = [name for name in new if name not in trees]

        def read(wanted: Mapping[str, torch.Tensor | Like | None]) -> dict[str, torch.Tensor]:
            found = checkpoint.read({_prefix(rank) + n: into for n, into in wanted.items()})
            return {n: found[_prefix(rank) + n] for n in wanted}

        self._tracked.load([name for name in new if name in trees], trees, read, device)
        had = f"the checkpoint has the local state {', '.join(sorted(trees))} only"
        return [_describe(missing, had)] if missing else []


def _read_trees(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """Name → tree of the rank's objects."""
    trees: dict[str, Any] = json.loads(checkpoint.tensor(_prefix(rank) + _TREE).numpy().tobytes())
    return trees


def _prefix(rank: int) -> str:
    return f"{LOCAL}{rank}/"


def _describe(names: list[str], why: str) -> str:
    return f"the local state {', '.join(names)} begins as the script made it: {why}"
