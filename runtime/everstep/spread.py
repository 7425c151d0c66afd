"""Which ranks sum a parameter's gradient, and a rank's part of the gradient of a parameter that ranks divide."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from everstep.errors import Misuse
from everstep.sharded import is_sharded, local_of
from everstep.unit import Over

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Spread:
    """The dimensions of the unit that divide a parameter, and which ranks sum its gradients."""

    shard: bool = False
    tensor: bool = False
    over: Over = Over.SHARERS

    @property
    def place(self) -> str:
        """The field of `unit.Squares` for its gradient."""
        if self.shard:
            return "both" if self.tensor else "shard"
        return "tensor" if self.tensor else "whole"


PLAIN = Spread()


def find_spread(parameter: torch.Tensor) -> Spread:
    """Find how a parameter is divided. If the dimension "shard" divides it, FSDP has already summed
    its gradient over that dimension.
    """
    divided = _list_sizes(parameter)
    over = Over.REPLICAS if "shard" in divided else Over.SHARERS
    return Spread("shard" in divided, "tensor" in divided, over)


def count_planned(parameter: torch.Tensor) -> int:
    """Number of elements that the bucket plan assumes for each rank, the same for every place in
    the unit. Some places hold more or fewer.
    """
    return -(-parameter.numel() // math.prod(_list_sizes(parameter).values()))


def _list_sizes(parameter: Any) -> dict[str, int]:
    """The dimensions that divide the parameter, with their sizes; also those of one rank."""
    if not is_sharded(parameter):
        return {}
    mesh = parameter.device_mesh
    sized = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=False)
    return {name: size for name, size, placement in sized if not placement.is_replicate()}


def take_local(grad: Any, parameter: Any) -> torch.Tensor:
    """This rank's part of a gradient, divided like its parameter."""
    if type(grad) is torch.Tensor:
        return grad
    if is_sharded(grad) and grad.placements != parameter.placements:
        # Its sum over the dimension "tensor" may still be pending. All ranks of it come here.
        grad = grad.redistribute(placements=parameter.placements)
    part = local_of(grad)
    waits = getattr(part, "wait", None)  # of torch's functional collectives
    return waits() if callable(waits) else part


def require_known(
    named: Mapping[str, torch.Tensor], mesh: "DeviceMesh | None", *, exact: bool
) -> None:
    """Raise `Misuse` for a parameter whose gradients would not be summed as they should be.

    Args:
        mesh: `job.mesh`; None: the script has not asked for it.
        exact: gradients are to be added as fixed-point integers.
    """
    for name, parameter in named.items():
        if is_sharded(parameter):
            _require_known(name, parameter, mesh)
        if exact and _list_sizes(parameter).get("shard", 1) > 1:
            raise Misuse(
                f"exact_reduction: {name} is sharded, and FSDP itself sums its gradients over the shards, as "
                "floating-point numbers; use exact_reduction=False"
            )


def _require_known(name: str, parameter: Any, mesh: "DeviceMesh | None") -> None:
    own = parameter.device_mesh
    if mesh is None or not _is_part(own, mesh):
        raise Misuse(
            f"{name} is a DTensor on a mesh that is not job.mesh: {own}. Use job.mesh: "
            'fully_shard(layer, mesh=job.mesh["shard"]), parallelize_module(model, job.mesh["tensor"], plan). '
            "Everstep itself sums over the units"
        )
    for dimension, placement in zip(own.mesh_dim_names, parameter.placements, strict=True):
        if placement.is_partial() or (dimension == "shard" and placement.is_replicate()):
            raise Misuse(
                f"{name} is a DTensor that lies as {placement} over the dimension {dimension}, so nothing sums its "
                'gradients there; shard it with fully_shard(layer, mesh=job.mesh["shard"])'
            )


def _is_part(own: Any, mesh: "DeviceMesh") -> bool:
    """Whether the dimensions of `own` are dimensions of `mesh`, with the same groups."""
    known = {name: mesh.get_group(name).group_name for name in mesh.mesh_dim_names or ()}
    names = own.mesh_dim_names or ()
    return bool(names) and all(known.get(n) == own.get_group(n).group_name for n in names)


def prepare_fsdp(modules: Mapping[str, torch.nn.Module]) -> None:
    """Make FSDP's gradients plain sums, because the loss is already weighted. If the script has
    computed with a module, shard its parameters again.
    """
    for root in modules.values():
        for module in root.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                one: Any = module
                one.set_gradient_divide_factor(1.0)
                one.set_force_sum_reduction_for_comms(True)
                one.reshard()
