"""What one GPU can test: the reducer, a group over NCCL with one rank, and staging."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist

from everstep import device, digests, forming, held_already, staging, transfer
from everstep.group import LocalGroup
from everstep.reducer import Reducer
from everstep.shares import Part, part_of
from everstep.slots import Slots
from everstep.snapshot import Capture
from everstep.store import AgentStore
from everstep_contract.units import ONE_RANK
from runtime.test_transfer import Keys

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_own", torch.device("cpu"))
    device.claim(0)


class OfTwo(LocalGroup):
    """Two ranks, of which the other adds nothing. A rank alone keeps its own gradients."""

    world = 2


def test_gradients_on_the_gpu_are_views_of_the_sum() -> None:
    layer = torch.nn.Linear(8, 4).to(GPU)
    reducer, named = Reducer(), dict(layer.named_parameters())
    reducer.begin(named, 1)
    reducer.backward(layer(torch.ones(2, 8, device=GPU)).sum(), overlap=None)
    reducer.flush(OfTwo())
    reducer.start_last(torch.zeros(1, device=GPU))
    assert reducer.end() is not None
    reducer.deliver([1.0, 1.0], 1.0)
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    shared = {g.untyped_storage().data_ptr() for g in (layer.weight.grad, layer.bias.grad)}
    assert len(shared) == 1
    assert reducer.measure(sampled=False) == pytest.approx((32 * 4 + 4 * 4) ** 0.5)
    assert layer.weight.grad.eq(2.0).all()


def test_a_group_over_nccl_sums_and_can_be_cut() -> None:
    formed = forming.reinit(AgentStore(Keys(), 1), forming.Place(1, 0, 1, None))
    try:
        slow, total = torch.ones(2**26, device=GPU), torch.ones(4, device=GPU)
        assert formed.wait([formed.all_reduce(slow), formed.all_reduce(total)])
        assert total.tolist() == [1.0] * 4
        began = time.monotonic()
        formed.cut()
        assert not formed.wait([formed.all_reduce(torch.ones(4, device=GPU))])
        formed.wait_cut()
        assert time.monotonic() - began < 20
    finally:
        dist.destroy_process_group()


def test_a_part_is_staged_from_the_gpu(folder: str) -> None:
    tensors = {name: t.to(GPU) for name, t in some_state().items()}
    path = f"{folder}/part"
    staged = staging.write_part(path, tensors, Part())
    raw = Path(path).read_bytes()
    for held in staged:
        assert raw[held.at :].startswith(to_bytes(tensors[held.name])), held.name


def to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def some_state() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    whole = torch.randn(64, 1000, generator=made)
    return {
        "model/w": whole,
        "model/narrow": whole.to(torch.bfloat16),
        "model/image": whole.view(4, 16, 10, 100).to(memory_format=torch.channels_last),
        "model/odd": torch.arange(13, dtype=torch.uint8),
        "model/n": torch.tensor(7),
    }


@pytest.fixture(params=["memory", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The device itself can copy only to a file in memory."""
    if request.param == "disk":
        yield str(tmp_path)
        return
    with TemporaryDirectory(dir="/dev/shm") as made:
        yield made


def test_a_slot_holds_what_lies_on_the_gpu(folder: str) -> None:
    here = some_state()
    there = {name: t.to(GPU) for name, t in here.items()}
    slots = Slots(folder, "slot-")
    slots.prepare(1000)
    assert all(slot.pinned for slot in slots._slots) or not folder.startswith("/dev/shm")
    with device.beside(device.mark()):
        staged, room = slots.write(f"{folder}/save", there, Part())
    assert torch.ones(4, device=GPU).sum() == 4, "an earlier call left an error on the device"
    for held in staged:
        raw = to_bytes(here[held.name])
        assert room[held.at : held.at + len(raw)].tobytes() == raw, held.name


def test_a_copy_beside_the_script_waits_for_nothing_that_its_stream_is_given_later(
    tmp_path: Path,
) -> None:
    state = {"w": torch.full((1 << 20,), 1.0, device=GPU)}
    with TemporaryDirectory(dir="/dev/shm") as folder:
        slots = Slots(folder, "slot-")
        slots.prepare(1 << 22)
        marked = device.mark()
        torch.cuda._sleep(4 * 10**9)  # cycles
        later = torch.cuda.current_stream().record_event()
        with ThreadPoolExecutor(1) as copier:
            room = copier.submit(_write, slots, f"{folder}/save", state, marked).result()
        assert not later.query(), "the script's stream is still busy"
        assert (room[: 1 << 22].view("f4") == 1.0).all()
        later.synchronize()


def _write(slots: Slots, path: str, state: dict[str, torch.Tensor], marked: Any) -> Any:
    with device.beside(marked):
        return slots.write(path, state, Part())[1]


def test_digests_are_the_same_wherever_the_state_lies() -> None:
    here = some_state()
    there = {name: t.to(GPU) for name, t in here.items()}
    for unit in range(3):
        part = part_of(ONE_RANK, unit, 3)
        assert digests.tell(here, part) == digests.tell(there, part)


def test_a_newcomer_takes_state_from_gpu_to_gpu_and_not_what_it_has_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", transfer.PACK_BYTES)
    frozen = torch.randn(3 * 2**18, device=GPU)  # 3 MiB
    large = torch.randn(transfer.PACK_BYTES, device=GPU)
    state = {**{n: t.to(GPU) for n, t in some_state().items()}, "large": large, "frozen": frozen}
    own = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    own["frozen"].copy_(frozen)
    del own["model/w"]
    keys, told = Keys(), [(0, 0)]
    has = held_already.tell(own, [own["large"]])
    assert list(has) == ["frozen"]
    with ThreadPoolExecutor(2) as both:
        giving = both.submit(transfer.give, keys, 1, "k", 7, Capture(tree={}, tensors=state))
        taking = both.submit(transfer.take, keys, 1, "k", own, has, lambda *n: told.append(n))
        giving.result(timeout=60)
        taken = taking.result(timeout=60).tensors
    assert all(torch.equal(taken[name].to(GPU), state[name]) for name in state)
    placed = {n for n, t in own.items() if taken[n].data_ptr() == t.data_ptr()}
    assert placed == own.keys() - {"model/image"}, "its memory is not contiguous"
    assert told[-1][0] == sum(t.nbytes for t in state.values()) - frozen.nbytes


def test_a_copy_on_the_host_has_the_values() -> None:
    for tensor in some_state().values():
        held = device.copy_to_host(tensor.to(GPU))
        assert held.device.type == "cpu"
        assert torch.equal(held, tensor)
