"""A script whose model is sharded within a unit, with the same gradients from one process and from torch's own HSDP."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d

from everstep import Job
from everstep.step import Step
from everstep.unit import Over

WIDTH = 6
BOTH = ("divided", "mixed")


def a_dataset(size: int = 60) -> torch.utils.data.TensorDataset:
    inputs = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())


class Layers(nn.Module):
    """The last layer is so small that some ranks of a unit of four hold nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(inputs + self.down(self.up(inputs).tanh()))


class Mixed(nn.Module):
    """`plain` is not sharded and has buffers; `narrow` has half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Sequential(nn.Linear(WIDTH, 5), nn.BatchNorm1d(5), nn.Linear(5, WIDTH))
        self.narrow = nn.Linear(WIDTH, 8, dtype=torch.bfloat16)
        self.divided = Layers()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        narrow = self.narrow(inputs.to(torch.bfloat16)).float().sum(1, keepdim=True)
        return self.divided(self.plain(inputs)) + narrow


def build() -> nn.ModuleDict:
    torch.manual_seed(3)
    return nn.ModuleDict({"divided": Layers(), "mixed": Mixed()})


def loss_of(model: Any, batch: Any, names: Sequence[str]) -> torch.Tensor:
    inputs, wanted = batch
    losses = [nn.functional.mse_loss(model[n](inputs), wanted) for n in names]
    return torch.stack(losses).sum()


def shard(layers: Any, mesh: Any) -> None:
    """Shard as FSDP2's users do: each layer, then the rest."""
    from torch.distributed.fsdp import fully_shard

    for part in (layers.up, layers.down, layers):
        fully_shard(part, mesh=mesh)


def shard_layers(model: nn.Sequential, mesh: Any) -> None:
    """Do the same for a model of any linear layers."""
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def divide(model: Any, mesh: Any) -> None:
    """Shard the model over the dimensions of `mesh` that are larger than one."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    layers = [model["divided"], model["mixed"].divided]
    if mesh["tensor"].size() > 1:
        for one in layers:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(one, mesh["tensor"], plan)
    if mesh["shard"].size() > 1:
        for one in layers:
            shard(one, mesh["shard"])
        fully_shard(model["mixed"].narrow, mesh=mesh["shard"])


def whole(tensor: Any) -> torch.Tensor:
    """Return the full tensor, if it is sharded within the unit."""
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


class Beside:
    """The result of a step in one process, from the same parameters."""

    def __init__(self, model: Any, batches: list[Any], names: Sequence[str]) -> None:
        self.model = build()
        self.model.load_state_dict({n: whole(t) for n, t in model.state_dict().items()})
        total = sum(len(inputs) for inputs, _ in batches)
        for index, batch in enumerate(batches):
            (loss_of(self.model, batch, names) * (len(batch[0]) / total)).backward()
            if index == 0:
                self.buffers = {n: b.clone() for n, b in self.model.named_buffers()}
        self.gradients = whole_gradients(self.model)

    @property
    def norm(self) -> float:
        return float(torch.nn.utils.get_total_norm([g.float() for g in self.gradients.values()]))


def list_batches(job: Job, data: Any, dataset: Any, first: int) -> list[Any]:
    return [dataset[torch.tensor(data.ids(first, i))] for i in range(data.micro_batches)]


def gradients_of_hsdp(mesh: Any, batches: list[Any], total: int) -> dict[str, torch.Tensor]:
    """This rank's shards of the gradients, from torch's own sums over both dimensions of `mesh`."""
    layers: Any = build()["divided"]
    shard(layers, mesh)
    for part in (layers.up, layers.down, layers):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    for index, batch in enumerate(batches):
        layers.set_requires_all_reduce(index == len(batches) - 1)
        loss = loss_of({"divided": layers}, batch, ["divided"])
        (loss * (len(batch[0]) / total)).backward()
    return {n: p.grad.to_local() for n, p in layers.named_parameters()}


def compute(step: Step, model: Any, data: Any, names: Sequence[str] = BOTH) -> list[Any]:
    """Run one loop; return this rank's batches."""
    seen = []
    for batch in step.batches(data):
        seen.append(batch)
        step.backward(loss_of(model, batch, names))
    return seen


def compare(job: Job, folder: Path) -> None:
    """Take steps whose micro-batches are even, few, and fewer than the ranks; save the results by rank."""
    model = build()
    divide(model, job.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)
    dataset = a_dataset()
    feeds = [job.batches(dataset, global_batch=n, micro_batch=2) for n in (24, 10, 2)]
    group: Any = job._session.membership.group
    sockets = len(group._sockets), len(group.unit.sockets)
    found: dict[str, Any] = {"steps": [], "sockets": sockets}
    for step in job.steps(until=3):
        data = feeds[step.number - 1]
        beside = Beside(model, list_batches(job, data, dataset, 0), BOTH)
        seen = compute(step, model, data)
        if step.number == 1 and job.mesh["tensor"].size() == 1:
            found["parts"], found["hsdp"] = _beside_hsdp(job, model, seen, data.global_batch)
        found["steps"].append(
            {
                "gradients": whole_gradients(model),
                "beside": beside.gradients,
                "norm": beside.norm,
                "buffers": {n: b.clone() for n, b in model.named_buffers()},
                "buffers beside": beside.buffers,
                "passes": len(seen),
            }
        )
        if step.number == 3:
            found["clipped"] = _clip(model, beside)
        optimizer.step()
    found["parameters"] = {n: whole(p) for n, p in model.named_parameters()}
    found["evaluated"] = _evaluate(job, model, feeds[0])
    torch.save(found, folder / f"{job.rank}.pt")


def _beside_hsdp(job: Job, model: Any, seen: list[Any], total: int) -> tuple[Any, Any]:
    from torch.distributed.device_mesh import DeviceMesh

    size = job.mesh["shard"].size()
    ranks = torch.arange(job.world_size).view(-1, size)
    group: Any = job._session.membership.group
    groups = [introduce(group._sums[Over.REPLICAS], ranks[:, 0]), job.mesh.get_group("shard")]
    both = DeviceMesh.from_group(groups, "cpu", ranks, mesh_dim_names=("replicate", "shard"))
    parts = {n: p.grad.to_local().clone() for n, p in model["divided"].named_parameters()}
    return parts, gradients_of_hsdp(both, seen, total)


def introduce(group: Any, ranks: torch.Tensor) -> Any:
    """Enter the group in torch's globals, as a `DeviceMesh` needs it."""
    group._set_group_name("between")
    distributed_c10d._register_pg_in_world(
        group,
        "gloo",
        store=None,  # type: ignore[arg-type]
        group_name=group.group_name,
        backend_config="cpu:gloo",
        rank_mapping={rank: number for number, rank in enumerate(ranks.tolist())},
    )
    return group


def _clip(model: Any, beside: Beside) -> tuple[float, float, Any, Any]:
    """Clip the parameters with the same layout, because torch cannot clip a mixture."""
    groups = [
        [p for n, p in m.named_parameters() if n.startswith(("divided.up", "divided.down.w"))]
        for m in (model, beside.model)
    ]
    norms = [whole(torch.nn.utils.clip_grad_norm_(own, 0.01)).item() for own in groups]
    mine, wanted = ([whole(p.grad) for p in own] for own in groups)
    return norms[0], norms[1], mine, wanted


def _evaluate(job: Job, model: Any, data: Any) -> tuple[float, ...]:
    total, count = 0.0, 0
    for batch in job.evaluate(data):
        total += loss_of(model, batch, ["divided"]).item() * len(batch[0])
        count += len(batch[0])
    return job.sum(total, count)


def list_results(folder: Path, world: int) -> Iterator[dict[str, Any]]:
    return (torch.load(folder / f"{rank}.pt") for rank in range(world))
