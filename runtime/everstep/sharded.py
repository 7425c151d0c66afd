"""Tensors of which each rank of a unit holds a box (DTensor). Nothing here issues a collective.

torch's module for DTensors takes long to import, so it is only looked up: before a script has
imported it, there are none.
"""

import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from everstep import device
from everstep_contract.units import DIMENSIONS, Mesh

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


@dataclass(frozen=True, slots=True)
class Box:
    """Where a rank's local tensor is in the logical tensor: it starts at `offsets`; one number per dimension."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Like:
    """Asks for a new tensor that is divided like this one, if the stored one has the same shape."""

    tensor: torch.Tensor


def is_sharded(value: Any) -> bool:
    """Whether the value is a DTensor, even one that is complete on each rank."""
    if type(value) in _PLAIN:
        return False
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def has_sharded(module: torch.nn.Module) -> bool:
    """Whether a parameter or buffer of the module is a DTensor."""
    return any(map(is_sharded, [*module.parameters(), *module.buffers()]))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor; a plain tensor is returned as it is."""
    if not is_sharded(tensor):
        return tensor
    found: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return found


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows when the tensor is changed in place, through the DTensor or through its local tensor."""
    return tensor._version + local_of(tensor)._version if is_sharded(tensor) else tensor._version


def with_local(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Make a tensor that is divided like `like` and whose local tensor is `local`. If
    `like` is plain: `local` itself.
    """
    if not is_sharded(like):
        return local
    given: Any = like
    spec = given._spec
    if spec.tensor_meta.dtype != local.dtype:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    # Not `from_local`, which would move it to the device of the mesh.
    made: torch.Tensor = type(given)(local, spec, requires_grad=False)
    return made


def box_of(tensor: torch.Tensor) -> Box:
    """The box that this rank holds; of a plain tensor, all of it."""
    if not is_sharded(tensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape))
    given: Any = tensor
    return _find_box(tuple(given.shape), given.device_mesh, tuple(given.placements))


@lru_cache(maxsize=16384)
def _find_box(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> Box:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    lengths, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Box(tuple(map(int, offsets)), tuple(map(int, lengths)))


def list_divided(tensor: torch.Tensor) -> frozenset[str]:
    """List the dimensions of the unit over which a tensor is divided. Ranks that differ only
    in others hold the same box.
    """
    if not is_sharded(tensor):
        return frozenset()
    given: Any = tensor
    return _list_divided(given.device_mesh, tuple(given.placements))


@lru_cache(maxsize=1024)
def _list_divided(mesh: Any, placements: tuple[Any, ...]) -> frozenset[str]:
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    sized = zip(names, mesh.shape, placements, strict=True)
    return frozenset(name for name, size, p in sized if size > 1 and not p.is_replicate())


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether this rank holds all of it."""
    return not list_divided(tensor)


def find_problem(tensor: torch.Tensor, unit: Mesh) -> str:
    """Why a DTensor cannot be saved, and what to do about it; empty: it can be saved."""
    given: Any = tensor
    if any(p.is_partial() for p in given.placements):
        return (
            f"it is a DTensor with the placements {_show(given.placements)}: each rank holds a term of a sum. "
            "Call .redistribute() to Shard or Replicate before it is tracked"
        )
    sizes = {"shard": unit.shard, "tensor": unit.tensor}
    names = given.device_mesh.mesh_dim_names or ("",) * given.device_mesh.ndim
    known = dict(zip(names, given.device_mesh.shape, strict=True))
    for name in sorted(list_divided(tensor)):
        if name not in DIMENSIONS:
            return (
                f"it is a DTensor divided over the mesh dimension {name!r} of {known[name]} ranks; "
                'divide it over job.mesh["shard"] or job.mesh["tensor"]'
            )
        if known[name] != sizes[name]:
            return (
                f"it is a DTensor divided over {known[name]} ranks of {name}, and the job's units have "
                f"{name}={sizes[name]}; use job.mesh, or start the job with {name}={known[name]}"
            )
    held = tuple(local_of(tensor).shape)
    if held != box_of(tensor).lengths or not _is_one_box(given):
        return (
            f"it is a DTensor of shape {tuple(given.shape)} with the placements {_show(given.placements)}, of "
            f"which this rank holds {held}, which is not one contiguous block of it. Choose sizes that the mesh "
            "divides evenly"
        )
    return ""


def _is_one_box(given: Any) -> bool:
    """Whether a rank's part is one box. A strided shard consists of pieces, unless a later
    dimension of the mesh divides it where the stride does.
    """
    for at, placement in enumerate(given.placements):
        if (stride := getattr(placement, "split_factor", 1)) == 1:
            continue
        later = zip(given.placements[at + 1 :], given.device_mesh.shape[at + 1 :], strict=True)
        if not any(p.is_shard(placement.dim) and size == stride for p, size in later):
            return False
    return True


def _show(placements: Any) -> str:
    return f"({', '.join(map(str, placements))})"


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    return with_local(tensor, device.copy_to_host(local_of(tensor)))


def lay_local(local: torch.Tensor, wanted: torch.Tensor | Like | None) -> torch.Tensor:
    """Make a tensor that is divided like the wanted one and whose local tensor is `local`.
    None wanted: `local` itself.
    """
    like = wanted.tensor if isinstance(wanted, Like) else wanted
    return local if like is None else with_local(like, local)


def divide(whole: torch.Tensor, wanted: torch.Tensor | Like | None) -> torch.Tensor:
    """Divide a plain tensor like the wanted one, and keep this rank's box. The tensor itself if
    none is wanted, or if the wanted one is plain or has another shape.
    """
    like = wanted.tensor if isinstance(wanted, Like) else wanted
    if like is None or not is_sharded(like) or is_sharded(whole) or like.shape != whole.shape:
        return whole
    box = box_of(like)
    where = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))
    return with_local(like, whole[where])
