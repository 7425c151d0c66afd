"""What a rank has beside the group of all ranks where several ranks form a unit: torch's groups of the unit, in
which the script's model communicates, and the groups in which gradients are summed across units.
"""

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
"""torch's group of these ranks; all of them call it."""


class Over(Enum):
    """Which ranks sum a gradient. Without units both mean all ranks."""

    SHARERS = "sharers"
    """The ranks with the same tensor index: one for each share of the micro-batches."""
    REPLICAS = "replicas"
    """The ranks of the same place, one in each unit: the sum over a unit's shards is made already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Squares:
    """Sums of the squares of the gradients that a rank holds, by the dimensions that divide these."""

    whole: float = 0.0
    shard: float = 0.0
    tensor: float = 0.0
    both: float = 0.0

    @property
    def total(self) -> float:
        return self.whole + self.shard + self.tensor + self.both


class Unit:
    """The groups of a rank of a unit of several.

    Args:
        sums: the groups across units; those that are missing are all ranks.
        dimensions: the groups within the unit, by the name of its dimension.
        device: kind of the devices on which the model lies.
    """

    def __init__(
        self,
        mesh: units.Mesh,
        rank: int,
        *,
        sums: Mapping[Over, Any],
        dimensions: Mapping[str, Any],
        device: str,
    ) -> None:
        self.sums = dict(sums)
        self.dimensions = dict(dimensions)
        self._sizes = {"shard": mesh.shard, "tensor": mesh.tensor}
        ranks = list(mesh.list_unit(mesh.unit_of(rank)))
        self.device_mesh = build_device_mesh(ranks, mesh, list(dimensions.values()), device)

    def add_squares(self, own: Squares) -> float | None:
        """The sum over the unit, each part of the model once; alike on all ranks. None: a rank of the unit is lost.

        A rank that has it knows that all ranks of its unit are at this place.
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
        summed = torch.tensor(numbers, dtype=torch.float64)
        self.dimensions[dimension].allreduce([summed]).wait()
        found: list[float] = summed.tolist()
        return found


def form_sums(mesh: units.Mesh, rank: int, world: int, make: MakeGroup) -> dict[Over, Any]:
    """The groups across units. Every rank makes as many, in the same order."""
    groups = {Over.REPLICAS: make(mesh.list_replicas(rank, world))}
    if mesh.tensor > 1:
        groups[Over.SHARERS] = make(mesh.list_sharers(rank, world))
    return groups


def form_dimensions(mesh: units.Mesh, rank: int, make: MakeGroup) -> dict[str, Any]:
    """The groups within the unit, also those of one rank: torch wants one for each dimension."""
    row = rank - rank % mesh.tensor
    first = mesh.list_unit(mesh.unit_of(rank)).start + rank % mesh.tensor
    return {
        "shard": make(range(first, first + mesh.unit, mesh.tensor)),
        "tensor": make(range(row, row + mesh.tensor)),
    }


def build_device_mesh(
    ranks: Sequence[int], mesh: units.Mesh, groups: Sequence[Any], device: str
) -> "DeviceMesh":
    """torch's mesh of one unit."""
    from torch.distributed.device_mesh import DeviceMesh

    shape = torch.tensor(ranks).view(mesh.shard, mesh.tensor)
    return DeviceMesh.from_group(list(groups), device, mesh=shape, mesh_dim_names=units.DIMENSIONS)


def make_group(limit: Any) -> MakeGroup:
    """Makes groups of torch's whose operations have this time limit."""

    def make(ranks: Iterable[int]) -> Any:
        return dist.new_group(list(ranks), timeout=limit, use_local_synchronization=True)

    return make
