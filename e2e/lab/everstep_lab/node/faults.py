"""Applies the timed effects of `scenario` to one node: its GPUs, its exporter, its ranks."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Protocol

from everstep_lab.exporter.gpu import Gpu, build_gpu, reload_driver, with_incident, with_xid
from everstep_lab.node.holders import Candidate
from everstep_lab.scenario import (
    AddToGpu,
    Course,
    Effect,
    HangRank,
    KillRank,
    SetExporter,
    SetOnGpu,
    ShowIncident,
    ShowXid,
)

# Seconds from a program's start to its first CUDA call, which fails if the GPU is dead. Until then
# the program imports torch.
FIRST_CUDA_CALL = 3.0
_LOOK = 0.25
_ONCE = 2.0
"""Seconds. A `KillRank` that is not `lasting` is skipped if it is late by more than this."""


class Stage(Protocol):
    """What the effects change besides the GPUs. A node implements it."""

    def gpus_changed(self) -> None: ...
    async def set_exporter(self, mode: str) -> None: ...
    def find_holder(self, uuid: str) -> Candidate | None: ...


class Gpus:
    """The node's GPUs and the faults active on them."""

    def __init__(self, *, seed: int, node: str, count: int, stage: Stage) -> None:
        self.all = [build_gpu(seed, node, index) for index in range(count)]
        self._stage = stage
        self._tasks: set[asyncio.Task[None]] = set()
        self.titles: list[str] = []

    def play(self, index: int, code: int, course: Course, begun: float | None = None) -> None:
        """Apply the effects of a fault over time.

        `begun` is the fault's start on the monotonic clock. It is in the past if a restarted
        process continues a fault. Past effects are then applied again, except a `KillRank` that is
        not `lasting`.
        """
        self.titles.append(f"GPU {index}, XID {code}: {course.title}")
        self._spawn(self._play(index, course, time.monotonic() if begun is None else begun))

    async def stop(self) -> None:
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def reload(self) -> None:
        """Reboot: all faults end, and latched values are cleared as in `reload_driver`."""
        await self.stop()
        self.titles.clear()
        now = time.monotonic()
        self.all = [reload_driver(gpu, now) for gpu in self.all]
        self._stage.gpus_changed()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _play(self, index: int, course: Course, begun: float) -> None:
        for timed in course.effects:
            due = begun + timed.at
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if timed.effect != KillRank() or time.monotonic() < due + _ONCE:
                await self._apply(index, timed.effect, due)

    async def _apply(self, index: int, effect: Effect, due: float) -> None:
        gpu = self.all[index]
        match effect:
            case ShowXid(code=code):
                self._put(with_xid(gpu, code, due))
            case ShowIncident(watch=watch, level=level, code=name):
                self._put(with_incident(gpu, watch, level, name))
            case AddToGpu(counters=counters):
                now = {name: getattr(gpu, name) + by for name, by in counters.items()}
                self._put(replace(gpu, **now))
            case SetOnGpu(values=values):
                self._put(replace(gpu, **values))  # type: ignore[arg-type]
            case SetExporter(mode=mode):
                await self._stage.set_exporter(mode)
            case KillRank(lasting=lasting):
                self._strike(gpu.uuid, signal.SIGKILL, lasting)
            case HangRank():
                self._strike(gpu.uuid, signal.SIGSTOP, lasting=True)

    def _put(self, gpu: Gpu) -> None:
        self.all[gpu.index] = gpu
        self._stage.gpus_changed()

    def _strike(self, uuid: str, signum: int, lasting: bool) -> None:
        """Signal the GPU's process. If `lasting`, also signal processes that use the GPU later."""
        first = self._stage.find_holder(uuid)
        if first is not None:
            _signal(first.pid, signum)
        if lasting:
            self._spawn(self._strike_later(uuid, signum, {first.pid} if first else set()))

    async def _strike_later(self, uuid: str, signum: int, struck: set[int]) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            holder = self._stage.find_holder(uuid)
            if holder and holder.pid not in struck and holder.age > FIRST_CUDA_CALL:
                struck.add(holder.pid)
                _signal(holder.pid, signum)


def _signal(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
