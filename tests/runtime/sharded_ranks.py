"""Ranks that are real processes with real gloo. Each has a session and a model that FSDP2 and tensor parallelism
shard. They have no agent; what they stage is returned.
"""

import contextlib
import ctypes
import importlib
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from everstep import spread, state
from everstep.membership import Membership
from everstep.meter import Meter
from everstep.session import Session
from everstep.worker import PR_SET_PDEATHSIG
from everstep_contract import wire
from everstep_contract.units import Mesh
from runtime.a_job import AgentRecord

LIMIT = 90.0
"""Seconds."""


class Net(nn.Module):
    """Sizes that no number of ranks divides, and parameters with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 13), nn.LayerNorm(13)
        self.last = nn.Linear(13, 1)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        return self.last(self.norm(hidden.relu()))  # type: ignore[no-any-return]


class Rank:
    """One rank: its session, model and optimizer. `device_mesh` None: a plain model."""

    def __init__(
        self, folder: Path, mesh: Mesh, rank: int, world: int, device_mesh: Any, **start: Any
    ) -> None:
        self.agent = AgentRecord()
        said = wire.Start(
            epoch=1, rank=rank, world=world, mesh=mesh, local_rank=rank, local_world=world, node_rank=0,
            job="ns/test", run="ns/test", staging=str(folder), **start,
        )  # fmt: skip
        self.session = Session(
            agent=self.agent,
            membership=Membership(said, None),  # type: ignore[arg-type]
            meter=Meter(None, epoch=1, applied=said.applied),
            start=said,
            seed=7,
        )
        torch.manual_seed(rank if start else 0)
        self.model = Net()
        if device_mesh is not None:
            divide(self.model, device_mesh)
            self.session._device_mesh = device_mesh
            spread.prepare_fsdp({"model": self.model})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.session.track({"model": self.model, "optimizer": self.optimizer})

    def compute(self) -> None:
        inputs = torch.linspace(-1, 1, 24).reshape(4, 6)
        self.optimizer.zero_grad()
        loss = self.model(inputs).square().sum()
        (loss / self.session.membership.mesh.shard).backward()

    def train(self, steps: int) -> "Rank":
        for _ in range(steps):
            self.compute()
            self.optimizer.step()
        return self

    def gather(self) -> dict[str, torch.Tensor]:
        """Return all state as full tensors. Every rank must call this."""
        tensors: state.Tensors = {}
        self.session.tracked.capture(tensors)
        whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in tensors.items()}
        return {n: t.detach().clone() for n, t in whole.items()}

    def staged(self) -> list[wire.Staged]:
        return self.agent.of(wire.Staged)


def divide(model: Net, device_mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.distributed.tensor.placement_types import Replicate

    if device_mesh["tensor"].size() > 1:
        plan = {
            "first": ColwiseParallel(output_layouts=Replicate()),
            "last": RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(model, device_mesh["tensor"], plan)
    fully_shard(model.first, mesh=device_mesh["shard"])
    fully_shard(model, mesh=device_mesh["shard"])


@dataclass(frozen=True)
class Wish:
    folder: Path
    mesh: Mesh
    world: int
    act: Callable[[Rank], Any]
    start: dict[str, Any]


class Launcher:
    """A process that has imported what ranks need, including torch's compiler, and forks them. Other tests must not run
    with the compiler loaded.
    """

    def __init__(self) -> None:
        self._asking, answering = Pipe()
        self._pid = os.fork() or _serve(answering)
        answering.close()

    def run(
        self, folder: Path, mesh: Mesh, world: int, act: Callable[[Rank], Any], **start: Any
    ) -> list[Any]:
        """Return the result of `act`, a function of a module, from each rank."""
        folder.mkdir(parents=True)
        self._asking.send(Wish(folder, mesh, world, act, start))
        assert self._asking.poll(2 * LIMIT)
        statuses = self._asking.recv()
        said = (folder / "output").read_text() if (folder / "output").exists() else ""
        assert statuses == [0] * world, said
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _serve(line: Any) -> NoReturn:
    """Runs in the launcher's process."""
    die_with_parent()
    importlib.import_module("torch.distributed.fsdp")
    importlib.import_module("torch._dynamo")
    with contextlib.suppress(EOFError):
        while True:
            line.send(_launch(line.recv()))
    os._exit(0)


def _launch(wish: Wish) -> list[int]:
    """Return the exit statuses of the ranks."""
    pids = [os.fork() or _run(wish, rank) for rank in range(wish.world)]
    try:
        return _wait(pids)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(pids: list[int]) -> list[int]:
    """Return their exit statuses; -1 means still running. They stay unreaped, so no other process gets their ids."""
    until = time.monotonic() + LIMIT
    ended: dict[int, int] = {}
    while len(ended) < len(pids) and time.monotonic() < until and not any(ended.values()):
        for pid in set(pids) - set(ended):
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if found is not None:
                ended[pid] = found.si_status
        time.sleep(0.01)
    return [ended.get(pid, -1) for pid in pids]


def _run(wish: Wish, rank: int) -> NoReturn:
    """Runs in a rank's process."""
    status = 1
    try:
        die_with_parent()
        torch.set_num_threads(1)
        store = dist.FileStore(str(wish.folder / "keys"), wish.world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=wish.world)
        mesh = form_mesh(wish.mesh, wish.world)
        found = wish.act(Rank(wish.folder, wish.mesh, rank, wish.world, mesh, **wish.start))
        torch.save(found, wish.folder / f"{rank}.pt")
        dist.barrier()
        status = 0
    except BaseException:
        with open(wish.folder / "output", "a") as out:
            out.write(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        os._exit(status)


def form_mesh(mesh: Mesh, world: int) -> Any:
    """Return the mesh of this rank's unit, like `job.mesh`."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = (world // mesh.unit, mesh.shard, mesh.tensor)
    return init_device_mesh("cpu", shape, mesh_dim_names=("unit", "shard", "tensor"))[
        "shard", "tensor"
    ]
