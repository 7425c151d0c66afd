"""Digests by which the replicas of the state are compared.

Each part of a save has three witnesses: the rank that stores it, and those of the same place in the two units
before its own (a unit may be one rank). So all state is compared by majority, for three parts' work on each rank,
whatever the world size. Within a unit nothing is compared.
"""

import base64

import numpy as np
import torch

from everstep import shares, staging, state
from everstep_contract import wire
from everstep_contract.layout import OWN

WITNESSES = 3
_WORD = 8
"""Bytes."""


def tell(tensors: state.Tensors, part: shares.Part) -> tuple[wire.PartDigests, ...]:
    """What this rank holds of its own part and of the same place's in the next two units; nothing if its unit is
    alone.
    """
    if part.units == 1:
        return ()
    told = range(min(WITNESSES, part.units))
    return tuple(_of_part(tensors, part.of_unit(part.unit + i)) for i in told)


def _of_part(tensors: state.Tensors, part: shares.Part) -> wire.PartDigests:
    laid, _ = staging.lay_out(tensors, part)
    values = [
        sum_words(staging.select(tensors[held.rows.name], held.rows))
        for held in laid
        if held.bytes and not held.rows.name.startswith(OWN)
    ]
    return wire.PartDigests(
        part=part.number, values=base64.b64encode(np.array(values, "<u8").tobytes()).decode()
    )


def sum_words(tensor: torch.Tensor) -> int:
    """The sum of a tensor's bits as words of 64 bits, modulo 2**64, computed where the tensor lies.

    Tensors that differ in one word have different sums. Others that differ have the same sum by chance, in one of 2**64
    cases.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = raw.numel() // _WORD * _WORD
    tail = int.from_bytes(raw[whole:].cpu().numpy().tobytes(), "little")
    return (_sum(raw[:whole]) + tail) % 2**64


def _sum(raw: torch.Tensor) -> int:
    if raw.device.type == "cpu":  # numpy works in the calling thread alone
        return int(raw.numpy().view(np.uint64).sum(dtype=np.uint64))
    words = raw.clone() if raw.storage_offset() % _WORD else raw
    return int(words.view(torch.int64).sum())
