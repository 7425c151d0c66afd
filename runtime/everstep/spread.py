"""How a parameter lies on the ranks of a unit: plain, or as a DTensor of which this rank holds a part."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from everstep.errors import Misuse
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
        """Its field of `unit.Squares`."""
        names = {(True, True): "both", (True, False): "shard", (False, True): "tensor"}
        return names.get((self.shard, self.tensor), "whole")


PLAIN = Spread()


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Without the import of torch's DTensor, which takes seconds: a script that has none needs none."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it: the same memory."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        found: torch.Tensor = tensor.to_local()  # type: ignore[operator]
    return found


def find_spread(parameter: torch.Tensor) -> Spread:
    """FSDP has summed the gradient of a parameter that the shard dimension divides over that dimension."""
    if not is_dtensor(parameter):
        return PLAIN
    divided = _divided(parameter)
    over = Over.REPLICAS if divided.get("shard") else Over.SHARERS
    return Spread(bool(divided.get("shard")), bool(divided.get("tensor")), over)


def count_planned(parameter: torch.Tensor) -> int:
    """Elements that a rank holds, alike for every place in the unit: some hold fewer."""
    if not is_dtensor(parameter):
        return parameter.numel()
    sizes = dict(zip(_names(parameter), parameter.device_mesh.shape, strict=True))  # type: ignore[attr-defined]
    parts = 1
    for name, divides in _divided(parameter).items():
        parts *= sizes[name] if divides else 1
    return -(-parameter.numel() // parts)


def local_gradient(grad: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient, as its parameter lies."""
    if is_dtensor(grad):
        if grad.placements != parameter.placements:  # type: ignore[attr-defined]
            # A sum over the tensor dimension may be left to be made; all its ranks come here.
            grad = grad.redistribute(placements=parameter.placements)  # type: ignore[operator,attr-defined]
        grad = local(grad)
    waits = getattr(grad, "wait", None)  # of torch's functional collectives
    return waits() if callable(waits) else grad


def as_gradient(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`part` as the gradient of a parameter: the same memory."""
    if not is_dtensor(parameter):
        return part
    like: Any = parameter
    with torch.no_grad():
        found: torch.Tensor = type(like).from_local(
            part,
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
    return found


def require_known(
    named: Mapping[str, torch.Tensor], mesh: "DeviceMesh | None", *, exact: bool
) -> None:
    """Raises `Misuse` for a parameter that the reducer cannot sum.

    Args:
        mesh: `job.mesh`; None: the script has not asked for it.
        exact: gradients are to be added as fixed-point integers.
    """
    for name, parameter in named.items():
        if is_dtensor(parameter):
            _require_known(name, parameter, mesh)
            if exact and find_spread(parameter).shard and mesh is not None and mesh.size(0) > 1:
                raise Misuse(
                    f"exact_reduction: {name} is sharded, and FSDP itself sums its gradients over the shards as "
                    "floating-point numbers; use exact_reduction=False"
                )


def _require_known(name: str, parameter: Any, mesh: "DeviceMesh | None") -> None:
    names = parameter.device_mesh.mesh_dim_names or ()
    if mesh is None or not _is_part(parameter.device_mesh, mesh):
        raise Misuse(
            f"{name} is a DTensor on a mesh that is not job.mesh: {parameter.device_mesh}. Use "
            'job.mesh: fully_shard(layer, mesh=job.mesh["shard"]), '
            'parallelize_module(model, job.mesh["tensor"], plan). Everstep itself sums over units'
        )
    for dimension, placement in zip(names, parameter.placements, strict=True):
        if placement.is_partial() or (dimension == "shard" and placement.is_replicate()):
            raise Misuse(
                f"{name} is a DTensor that lies as {placement} over the dimension {dimension}, so nothing sums its "
                'gradients there; shard it with fully_shard(layer, mesh=job.mesh["shard"])'
            )


def _is_part(own: Any, mesh: "DeviceMesh") -> bool:
    """Its dimensions are those of `mesh`, with the same groups."""
    known = {name: mesh.get_group(name).group_name for name in mesh.mesh_dim_names or ()}
    names = own.mesh_dim_names or ()
    return bool(names) and all(
        known.get(name) == own.get_group(name).group_name for name in names
    )


def _divided(parameter: Any) -> dict[str, bool]:
    return {
        name: not placement.is_replicate()
        for name, placement in zip(_names(parameter), parameter.placements, strict=True)
    }


def _names(parameter: Any) -> tuple[str, ...]:
    return parameter.device_mesh.mesh_dim_names or ()


def prepare_fsdp(modules: Mapping[str, torch.nn.Module]) -> None:
    """FSDP's gradients become plain sums: the loss is weighted already. Its parameters are sharded again, if the
    script has computed with them.
    """
    for root in modules.values():
        for module in root.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                one: Any = module
                one.set_gradient_divide_factor(1.0)
                one.set_force_sum_reduction_for_comms(True)
                one.reshard()
