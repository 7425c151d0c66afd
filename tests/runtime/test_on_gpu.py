"""What one GPU can show: the reducer, a group over NCCL with one rank, and staging."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from everstep import forming, staging
from everstep.group import LocalGroup
from everstep.reducer import Reducer
from everstep.shares import Part
from everstep.store import AgentStore
from runtime.test_transfer import Keys

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
GPU = torch.device("cuda", 0)


def test_gradients_on_the_gpu_are_views_of_the_sum() -> None:
    layer = torch.nn.Linear(8, 4).to(GPU)
    reducer, named = Reducer(), dict(layer.named_parameters())
    reducer.begin(named, 1)
    reducer.backward(layer(torch.ones(2, 8, device=GPU)).sum(), overlap=None)
    reducer.flush(LocalGroup())
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
        assert time.monotonic() - began < 20
    finally:
        dist.destroy_process_group()


def test_a_part_is_staged_from_the_gpu(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(12.0, device=GPU).view(3, 4), "n": torch.tensor(7, device=GPU)}
    path = str(tmp_path / "part")
    staged = staging.write_part(path, tensors, Part())
    raw = Path(path).read_bytes()
    for held in staged:
        tensor = tensors[held.name].cpu().contiguous()
        size = tensor.numel() * tensor.element_size()
        assert raw[held.at : held.at + size] == tensor.numpy().tobytes()
