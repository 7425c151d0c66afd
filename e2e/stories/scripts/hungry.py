"""The script of the out-of-memory stories: in step HUNGRY_STEP each pod whose slot is in
HUNGRY_SLOTS takes more memory than its container may use. Each pod does so only once.
"""

import os
import platform
import time
from pathlib import Path

import torch

import everstep

STEPS = int(os.environ["HUNGRY_UNTIL"])
STEP = int(os.environ["HUNGRY_STEP"])
SLOTS = os.environ["HUNGRY_SLOTS"].split(",")
WHOLE = os.environ["HUNGRY_WHOLE"] == "1"
EATEN = Path("/scratch/eaten")
"""On an emptyDir, so that it outlives the container."""
STEP_SECONDS, ALONE_SECONDS, SAVE_SECONDS = 0.05, 0.4, 1.0
"""A pod that trains alone takes slow steps, so that the other one comes back before the end."""


def main(job: everstep.Job) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    job.track(model=model, optimizer=optimizer)
    inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(7))
    data = job.batches(torch.utils.data.TensorDataset(inputs), global_batch=8, micro_batch=2)
    for step in job.steps(until=STEPS):
        for (batch,) in step.batches(data):
            step.backward((model(batch) - batch.sum(1, keepdim=True)).square().mean())
            if step.number == STEP and slot() in SLOTS and not EATEN.exists():
                time.sleep(SAVE_SECONDS)  # the save of the step before is staged meanwhile
                eat()
        time.sleep(STEP_SECONDS if job.world_size > 1 else ALONE_SECONDS)
        optimizer.step()


def slot() -> str:
    """The slot of this pod, which is named <job>-<slot>-<attempt>."""
    return platform.node().rsplit("-", 2)[1]


def eat() -> None:
    """Take memory until the kernel kills this process.

    With cgroup v2 the kubelet makes the kernel kill all processes of the container. With cgroup v1
    the kernel kills only the one with the highest score, which is this one. If all are to end, the
    container's first process gets the highest score, because all others end with it.
    """
    EATEN.touch()
    if WHOLE:
        Path("/proc/1/oom_score_adj").write_text("1000")
    held = []
    while True:
        held.append(torch.ones(2**22))


everstep.run(main)
