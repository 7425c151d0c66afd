"""The transfer of small buffers changes no bit."""

import math
import struct

import numpy as np
import pytest
import torch

from everstep.buffers import SMALL_BYTES, Buffers
from everstep.errors import Misuse
from everstep.tracked import Tracked

ODD_NAN = struct.unpack("<f", struct.pack("<I", 0x7FC12345))[0]


def a_module(**buffers: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, value in buffers.items():
        module.register_buffer(f"a_{name}", value)
    return module


def track(module: torch.nn.Module) -> Buffers:
    tracked = Tracked()
    tracked.add("model", module)
    return Buffers(tracked)


def bits_of(module: torch.nn.Module) -> list[bytes]:
    return [
        b.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for b in module.buffers()
    ]


VALUES = {
    "int64": torch.tensor([2**60 + 1, -1]),
    "mask": torch.tensor([True, False, True]),
    "odd": torch.tensor([ODD_NAN, -0.0, math.inf, 1e-45]),
    "half": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    "complex": torch.tensor([1 - 2j, 0j]),
    "double": torch.tensor(0.1, dtype=torch.float64),
    "empty": torch.empty(0),
    "across": torch.arange(6.0).reshape(2, 3).t(),
}


@pytest.mark.parametrize("name", [*VALUES, "all"])
def test_every_dtype_arrives_with_its_bits(name: str) -> None:
    values = VALUES if name == "all" else {name: VALUES[name]}
    sender = a_module(**{n: v.clone() for n, v in values.items()})
    receiver = a_module(**{n: torch.zeros_like(v) for n, v in values.items()})
    buffers = track(sender)
    packed = buffers.pack(buffers.hold())
    assert packed.shape == (buffers.numbers,)
    summed = packed + np.zeros_like(packed)  # the other ranks add zeros
    track(receiver).take(summed)
    assert bits_of(receiver) == bits_of(sender)


def test_a_mask_costs_two_bytes_a_byte() -> None:
    buffers = track(a_module(mask=torch.zeros(SMALL_BYTES, dtype=torch.bool)))
    assert buffers.pack(buffers.hold()).nbytes == 2 * SMALL_BYTES


def test_a_buffer_that_forward_replaced_is_put_back_as_the_same_tensor() -> None:
    module = a_module(mean=torch.ones(2))
    buffers, before = track(module), module.a_mean
    held = buffers.hold()
    module.a_mean = module.a_mean * 3
    before.add_(1)
    buffers.put_back(held)
    assert module.a_mean is before
    assert module.a_mean.tolist() == [1, 1]


def test_a_buffer_that_grows_in_forward_is_refused_by_name() -> None:
    module = a_module(seen=torch.zeros(1))
    buffers = track(module)
    module.a_seen = torch.zeros(2)
    with pytest.raises(Misuse, match=r"size of the buffer model\.a_seen, now \(2,\)"):
        buffers.pack(buffers.hold())
