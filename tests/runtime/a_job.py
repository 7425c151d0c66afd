"""A job of one worker in this process. `AgentRecord` replaces the connection to the agent: it
records the frames, and raises `Ended` instead of exiting.
"""

import os
import shutil
import threading
from pathlib import Path
from typing import Any, NoReturn

import torch

from everstep.group import LocalGroup
from everstep.job import Job
from everstep.membership import Membership
from everstep.meter import Meter
from everstep.session import Session
from everstep_contract import wire


class Ended(BaseException):
    """Raised instead of ending the process; a BaseException, so that no script catches it."""


def take_over(path: str) -> None:
    """Act as an agent that has uploaded the file: replace the link to the worker's slot by a copy."""
    if path:
        shutil.copy(path, f"{path}.copy")
        os.replace(f"{path}.copy", path)


class AgentRecord:
    def __init__(self) -> None:
        self.cut = threading.Event()
        self.frames: list[Any] = []
        self.saves: list[wire.Save] = []
        self.boundary = wire.BoundaryReply()
        self.uploads = True

    def send(self, frame: Any) -> None:
        if isinstance(frame, wire.Staged) and self.uploads:
            take_over(frame.path)
        self.frames.append(wire.decode(wire.encode(frame)[wire.LENGTH.size :]).frame)

    def send_soon(self, frame: Any) -> None:
        self.send(frame)

    def request(self, frame: Any) -> Any:
        self.send(frame)
        return self.boundary

    def wait_save(self) -> wire.Save:
        if not self.saves:
            raise Ended("parked")
        return self.saves.pop(0)

    def leave(self, status: int) -> NoReturn:
        raise Ended(f"status {status}")

    def of(self, kind: type[Any]) -> list[Any]:
        return [f for f in self.frames if isinstance(f, kind)]


class Trial:
    """A `job` with its session, a linear model and 12 samples."""

    def __init__(self, folder: Path, **start: Any) -> None:
        self.agent = AgentRecord()
        said = wire.Start(
            **{
                "epoch": 1, "rank": 0, "world": 1, "local_rank": 0, "local_world": 1, "node_rank": 0,
                "job": "ns/test", "run": "ns/test", "staging": str(folder), **start,
            }
        )  # fmt: skip
        meter = Meter(None, epoch=said.epoch, applied=said.applied)
        self.session = Session(
            agent=self.agent,
            membership=Membership(
                said, LocalGroup(), waiting=lambda: meter.charging("wait", waiting=True)
            ),
            meter=meter,
            start=said,
            seed=7,
        )
        self.job = Job(self.session)
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        inputs = torch.arange(36, dtype=torch.float32).reshape(12, 3) / 36
        self.dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        self.data = self.job.batches(self.dataset, global_batch=6, micro_batch=2)

    def track(self) -> "Trial":
        self.job.track(model=self.model, optimizer=self.optimizer)
        return self

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, wanted = batch
        return torch.nn.functional.mse_loss(self.model(inputs), wanted)

    def take(self, step: Any) -> None:
        """Take one complete step, as a script would."""
        for batch in step.batches(self.data):
            step.backward(self.loss(batch))
        self.optimizer.step()
