"""Digests by which the replicas of the state are compared.

Each part of a save has three witnesses: the rank that stores it, and the ranks of the same place in
the two units before its own (a unit may be one rank). So all state is compared by majority, and
each rank digests three parts, whatever the world size. Within a unit nothing is compared.
"""

import base64
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from everstep import device, shares, staging, state
from everstep_contract import wire
from everstep_contract.layout import OWN

WITNESSES = 3
_WORD = 8
"""Bytes in a word."""


def tell(tensors: state.Tensors, part: shares.Part) -> tuple[wire.PartDigests, ...]:
    """Digest what this rank holds of its own part and of the parts of the same place in the next
    two units. Empty if there is only one unit.
    """
    if part.units == 1:
        return ()
    told = range(min(WITNESSES, part.units))
    return tuple(_of_part(tensors, part.of_unit(part.unit + i)) for i in told)


def _of_part(tensors: state.Tensors, part: shares.Part) -> wire.PartDigests:
    laid, _ = staging.lay_out(tensors, part)
    values = sum_all(
        staging.select(tensors[held.rows.name], held.rows)
        for held in laid
        if held.bytes and not held.rows.name.startswith(OWN)
    )
    return wire.PartDigests(
        part=part.number, values=base64.b64encode(np.array(values, "<u8").tobytes()).decode()
    )


def sum_all(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Sum the bits of each tensor as words of 64 bits, modulo 2**64, on the tensor's own device.

    Tensors that differ in one word have different sums. Tensors that differ in more words have the
    same sum by chance in one of 2**64 cases.
    """
    sums = [_sum(device.bytes_of(tensor)) for tensor in tensors]
    there = [one for one in sums if isinstance(one, torch.Tensor)]
    read = iter(torch.stack(there).tolist() if there else ())  # one transfer
    return [(next(read) if isinstance(one, torch.Tensor) else one) % 2**64 for one in sums]


def _sum(raw: torch.Tensor) -> int | torch.Tensor:
    """Sum the words of a tensor's bytes. On a device the result is an int64 tensor, which is not waited for."""
    if raw.device.type != "cpu":
        words = functional.pad(raw, (0, -raw.numel() % _WORD))
        words = words.clone() if words.storage_offset() % _WORD else words
        return words.view(torch.int64).sum()
    found: npt.NDArray[np.uint8] = raw.numpy()  # numpy works in the calling thread alone
    whole = len(found) // _WORD * _WORD
    tail = int.from_bytes(found[whole:].tobytes(), "little")
    return int(found[:whole].view(np.uint64).sum(dtype=np.uint64)) + tail
