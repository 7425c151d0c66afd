"""Which tensors of the state a newcomer already holds: weights that are not trained, and that its
script made or loaded in the same way as the members' scripts. Only tensors that differ are sent.

The newcomer reports a digest of the bytes of each. So nothing depends on whether a tensor was
changed through `.data`, which its version does not show.
"""

from collections.abc import Collection, Mapping

import torch
import xxhash

from everstep import device, state

LEAST_BYTES = 2**20
"""Smaller tensors are not reported, because sending them costs no more."""
MOST = 4096
"""How many digests are reported at most: those of the largest tensors."""
_BLOCK = 2**24
"""The interpreter's lock is free while a block is digested."""


def tell(tensors: Mapping[str, torch.Tensor], trained: Collection[torch.Tensor]) -> dict[str, str]:
    """Digest the large tensors, by name. Tensors that are `trained` are left out, because they differ.

    Args:
        tensors: the tensors of modules.
    """
    differ = {t.data_ptr() for t in trained}
    found = [
        (t.nbytes, name)
        for name, t in tensors.items()
        if t.nbytes >= LEAST_BYTES and t.data_ptr() not in differ and t.is_contiguous()
    ]
    return {name: digest(tensors[name]) for _, name in sorted(found, reverse=True)[:MOST]}


def find(tensors: Mapping[str, torch.Tensor], told: Mapping[str, str]) -> set[str]:
    """Return the names of those tensors that a newcomer has reported and that are the same here."""
    return {name for name, text in told.items() if _is_same(tensors.get(name), text)}


def _is_same(tensor: torch.Tensor | None, text: str) -> bool:
    return tensor is not None and tensor.is_contiguous() and digest(tensor) == text


def digest(tensor: torch.Tensor) -> str:
    """Digest a tensor's dtype, shape and bytes."""
    hasher = xxhash.xxh3_128(f"{state.dtype_name(tensor.dtype)}{list(tensor.shape)}".encode())
    for block in device.read(tensor, _BLOCK):
        hasher.update(block.numpy().data)
    return hasher.hexdigest()
