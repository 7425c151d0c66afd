"""What both sides train: model, data, and the script's clock. It uses neither side's library."""

import json
import os
import resource
import time
from pathlib import Path

import torch

WIDTH = 512
LAYERS = int(os.environ.get("EVERSTEP_STEADY_LAYERS", "16"))
BATCH = 32
"""Samples per rank and step: one micro-batch."""
SAMPLES = 4096
WARM_UP = 20
"""Steps that are not measured: they have first allocations, connections and bucket plans."""
LEARNING_RATE = 0.01
OUT = "EVERSTEP_STEADY_OUT"
"""Environment variable: the folder for one JSON file per rank."""
STEPS = "EVERSTEP_STEADY_STEPS"
EXACT = "EVERSTEP_STEADY_EXACT"
"""Not empty: Everstep adds gradients as fixed-point integers."""


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """[SAMPLES, WIDTH] fixed random numbers; on both sides, a batch is one row selection."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._rows = torch.randn(SAMPLES, WIDTH, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index]

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return list(self._rows[torch.tensor(indices)])


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))


def compute_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def steps() -> int:
    """The number of steps, including the warm-up."""
    return int(os.environ[STEPS])


TRACE = "EVERSTEP_STEADY_TRACE"
"""Not empty: the file for the trace of rank 0."""
TRACED_STEPS = 3


def start_trace(rank: int) -> torch.profiler.profile | None:
    """A profiler of the first steps after the warm-up, whose `step` has to be called after each."""
    path = os.environ.get(TRACE)
    if not path or rank != 0:
        return None
    found = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=WARM_UP - 1, warmup=1, active=TRACED_STEPS, repeat=1),
        on_trace_ready=lambda profile: profile.export_chrome_trace(path),
    )
    found.start()
    return found


def is_exact() -> bool:
    return bool(os.environ.get(EXACT))


class Clock:
    """Measures steps in seconds: wall time, and the CPU time of this process and of its parent.

    Call `tick` at the end of each step.

    Args:
        parent: whether the parent process works for the training (an agent does).
    """

    def __init__(self, *, parent: bool) -> None:
        self._parent = parent
        self._walls: list[float] = []
        self._cpu = (0.0, 0.0)
        self._count = 0

    def tick(self) -> None:
        self._count += 1
        if self._count == WARM_UP:
            self._cpu = self._read_cpu()
        if self._count >= WARM_UP:
            self._walls.append(time.perf_counter())

    def write(self, rank: int) -> None:
        """Write each measured step's seconds, CPU seconds per step, and the peak memory in MiB."""
        own, parent = (now - then for now, then in zip(self._read_cpu(), self._cpu, strict=True))
        count = len(self._walls) - 1
        found = {
            "rank": rank,
            "step_s": [b - a for a, b in zip(self._walls, self._walls[1:], strict=False)],
            "cpu_s": own / count,
            "parent_cpu_s": parent / count,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        Path(os.environ[OUT], f"{rank}.json").write_text(json.dumps(found))

    def _read_cpu(self) -> tuple[float, float]:
        return time.process_time(), _cpu_of(os.getppid()) if self._parent else 0.0


def _cpu_of(pid: int) -> float:
    """User and system CPU seconds of a running process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
