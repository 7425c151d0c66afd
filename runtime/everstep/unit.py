"""Several ranks that together hold one copy of the model: torch's groups of the unit, in which the
script's model communicates. They last as long as the process; the groups between units belong to an
epoch (`group.py`).
"""

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from everstep_contract import units

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MakeGroup = Callable[[Iterable[int]], Any]
"""Makes torch's group of these ranks; all of them call it."""


class Over(Enum):
    """Which ranks sum a gradient. Without units both mean all ranks."""

    SHARERS = "sharers"
    """The ranks with the same tensor index: one for each share of the micro-batches."""
    REPLICAS = "replicas"
    """The ranks of the same place, one in each unit: the sum over a unit's shards is already made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Squares:
    """Sums of the squares of the gradients that a rank holds, by the dimensions that divide the gradients."""

    whole: float = 0.0
    shard: float = 0.0
    tensor: float = 0.0
    both: float = 0.0

    @property
    def total(self) -> float:
        return self.whole + self.shard + self.tensor + self.both


class Unit:
    """This rank's unit. torch's default group is that of the unit: its ranks are the places in the unit.

    Args:
        dimensions: the unit's groups, by the name of the dimension.
        device: kind of the devices that hold the model.
        sockets: duplicates of all sockets of the unit's groups.
        keys: the rendezvous store, which torch uses again if the script makes groups of its own.
    """

    def __init__(
        self,
        mesh: units.Mesh,
        *,
        dimensions: Mapping[str, Any],
        device: str,
        sockets: Iterable[socket.socket],
        keys: Any,
    ) -> None:
        self.mesh = mesh
        self.dimensions, self.sockets = dict(dimensions), list(sockets)
        self._sizes = {"shard": mesh.shard, "tensor": mesh.tensor}
        self._keys = keys
        groups = list(self.dimensions.values())
        self.device_mesh = build_device_mesh(range(mesh.unit), mesh, groups, device)

    def add_squares(self, own: Squares) -> float | None:
        """Sum over the unit, with each part of the model once; the same result on all its ranks.
        None: a rank of the unit is lost.

        A rank that has the sum knows that all ranks of its unit have come this far.
        """
        try:
            shard, both = self._add("shard", [own.shard, own.both])
            tensor, both = self._add("tensor", [own.tensor, both])
        except RuntimeError:
            return None
        return Squares(whole=own.whole, shard=shard, tensor=tensor, both=both).total

    def _add(self, dimension: str, numbers: Sequence[float]) -> list[float]:
        if self._sizes[dimension] == 1:
            return list(numbers)
        summed = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self.dimensions[dimension].allreduce([summed]).wait()
        found: list[float] = summed.tolist()
        return found


def list_sums(mesh: units.Mesh, rank: int, world: int) -> dict[Over | None, range]:
    """The ranks that sum with this one. The key None means all ranks; so does a missing `Over`."""
    found: dict[Over | None, range] = {
        None: range(world),
        Over.REPLICAS: mesh.list_replicas(rank, world),
    }
    if mesh.tensor > 1:
        found[Over.SHARERS] = mesh.list_sharers(rank, world)
    return found


def form_dimensions(mesh: units.Mesh, place: int, make: MakeGroup) -> dict[str, Any]:
    """Form the groups within the unit, also those of one rank, because torch wants one for each dimension."""
    row = place - place % mesh.tensor
    return {
        "shard": make(range(place % mesh.tensor, mesh.unit, mesh.tensor)),
        "tensor": make(range(row, row + mesh.tensor)),
    }


def build_device_mesh(
    ranks: Sequence[int], mesh: units.Mesh, groups: Sequence[Any], device: str
) -> "DeviceMesh":
    """Build torch's mesh of one unit."""
    from torch.distributed.device_mesh import DeviceMesh

    shape = torch.tensor(ranks, device="cpu").view(mesh.shard, mesh.tensor)
    return DeviceMesh.from_group(list(groups), device, mesh=shape, mesh_dim_names=units.DIMENSIONS)


def make_group(limit: Any) -> MakeGroup:
    """Return a function that makes torch groups whose operations have this time limit."""

    def make(ranks: Iterable[int]) -> Any:
        return dist.new_group(list(ranks), timeout=limit, use_local_synchronization=True)

    return make
