"""What a rank will request next, and objects that travel between processes."""

import multiprocessing
import os
import socket
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep import parcel
from everstep.fetching import Rhythm, list_coming

Pair = namedtuple("Pair", "first second")


def a_rhythm(*draws: int) -> Rhythm:
    """A rhythm after these draws, by step."""
    rhythm = Rhythm()
    for step in draws:
        rhythm.begin_loop(step)
    return rhythm


def test_the_rest_of_the_step_comes_first_then_the_next_steps_up_to_the_last() -> None:
    coming = [*list_coming(a_rhythm(7), [1, 2, 9], [0, 1], until=9)]
    assert coming == [
        (0, 1, 1), (0, 1, 2), (0, 1, 9),
        (1, 1, 0), (1, 1, 1),
        (2, 1, 0), (2, 1, 1),
    ]  # fmt: skip


def test_a_step_has_as_many_loops_as_the_one_before() -> None:
    assert [*list_coming(a_rhythm(1, 1, 2), [4], [3], until=3)] == [
        (0, 1, 4), (0, 2, 3), (1, 1, 3), (1, 2, 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("draws", "until", "more"), [((3, 6), 12, 2), ((3, 6), 11, 1), ((8,), 8, 0)]
)
def test_the_next_draw_comes_after_as_many_steps_as_the_last(
    draws: tuple[int, ...], until: int, more: int
) -> None:
    coming = [*list_coming(a_rhythm(*draws), [], [0], until)]
    assert coming == [(draw, 1, 0) for draw in range(1, more + 1)]


def test_after_a_resume_the_next_step_draws() -> None:
    assert next(list_coming(a_rhythm(101), [], [0], 200)) == (1, 1, 0)


BIG = torch.arange(1000.0)
TENSORS = {
    "plain": torch.randn(2, 3),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "slice": BIG[10:20],
    "with gaps": torch.randn(4, 6)[1:3, ::2],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "bfloat16": torch.randn(5).bfloat16(),
    "bool": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "one number": torch.tensor(3),
    "empty": torch.empty(0, 3),
    "with gradient": torch.ones(2, requires_grad=True),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
}


def through(thing: Any) -> Any:
    return parcel.unpack(parcel.pack(thing))


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_arrives_with_its_bits_and_strides(case: str) -> None:
    sent = TENSORS[case]
    found = through({"tensor": sent})["tensor"]
    assert torch.equal(found, sent)
    assert found.dtype == sent.dtype
    assert found.stride() == sent.stride()
    assert found.requires_grad == sent.requires_grad


def test_a_default_device_does_not_move_what_a_worker_read() -> None:
    """As `torch.set_default_device("cuda")` does."""
    with torch.device("meta"):
        assert torch.equal(through(BIG[10:20]), BIG[10:20])


def test_a_slice_travels_without_the_rest_of_its_storage() -> None:
    assert through(BIG[10:20]).untyped_storage().nbytes() == 40


def test_other_objects_arrive_and_may_be_written_to() -> None:
    sent = {
        "arrays": (np.arange(5), np.zeros((0, 4)), np.asfortranarray(np.ones((2, 3)))),
        "pair": Pair("text", [1, None, 2.5, b"bytes"]),
        "tensor": torch.zeros(3),
    }
    found = through(sent)
    for array, same in zip(found["arrays"], sent["arrays"], strict=True):
        assert (array == same).all()
        assert array.dtype == same.dtype
    assert found["pair"] == sent["pair"]
    found["arrays"][0][0] = 9
    found["tensor"] += 1
    assert found["tensor"].tolist() == [1, 1, 1]


LARGE = torch.arange(float(parcel.COPIED_BYTES))


def count_mapped() -> int:
    """Number of parcels that this process maps."""
    return Path("/proc/self/maps").read_text().count("everstep-parcel")


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("large", [LARGE, LARGE.numpy()], ids=["tensor", "array"])
def test_a_batch_that_is_kept_holds_its_memory_and_no_descriptor(large: Any) -> None:
    before = count_descriptors()
    kept = [through({"inputs": large, "labels": BIG}) for _ in range(3)]
    assert count_descriptors() == before
    assert count_mapped() == 3
    assert all((batch["inputs"] == large).all() for batch in kept)
    del kept
    assert count_mapped() == 0


@pytest.mark.parametrize("small", [BIG, BIG.numpy()], ids=["tensor", "array"])
def test_labels_that_are_kept_do_not_hold_the_memory_of_their_batch(small: Any) -> None:
    labels = through((LARGE, small))[1]
    assert count_mapped() == 0
    assert (labels == small).all()
    labels += 1
    assert (labels == small + 1).all()


def test_tensors_lie_as_well_in_memory_as_those_of_torch() -> None:
    """Kernels may round otherwise if not."""
    found = through([BIG[:1], LARGE, BIG[:3]])
    assert [tensor.data_ptr() % 64 for tensor in found] == [0, 0, 0]


def test_what_several_processes_read_each_writes_to_for_itself() -> None:
    number = parcel.pack(LARGE)
    first = parcel.unpack(os.dup(number), only_reader=False)
    first += 1
    second = parcel.unpack(number, only_reader=False)
    assert torch.equal(second, LARGE)
    assert torch.equal(first, LARGE + 1)


def test_a_default_timeout_of_the_script_does_not_end_a_connection_that_a_descriptor_went_through() -> (
    None
):
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        socket.setdefaulttimeout(5.0)
        try:
            parcel.send(ours, parcel.pack([1, 2]), os.getpid())
            number = parcel.receive(theirs)
        finally:
            socket.setdefaulttimeout(None)
        assert parcel.unpack(number) == [1, 2]
        assert os.get_blocking(ours.fileno())
        assert os.get_blocking(theirs.fileno())
