"""Plays the kubelet and the operator for the storm's job: it restarts and replaces pods, and
exchanges `wanted` and `seen` with them.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

from everstep_agent.peers.client import PeerClient, PeerError
from everstep_contract import levels, report
from storm.ground import Ground
from storm.pods import TOKEN, Pod, Training
from storm.wish import Wish

LOOK_SECONDS = 0.1
AGAIN_SECONDS = 0.2
"""Delay before a container that ended is restarted."""
OF_THE_JOB = frozenset({report.Cause.DONE, report.Cause.STOPPED})
"""Causes of an end after which the slot's pod is not replaced."""


class Failed(Exception):
    """The job failed or missed a time limit."""


class Journal:
    """What was done and seen, for the witness. It uses the same clock as the workers' records."""

    def __init__(self, path: Path) -> None:
        self._out = path.open("a", buffering=1)

    def write(self, event: str, **fields: object) -> None:
        line = json.dumps({"event": event, **fields, "at": time.monotonic()})
        self._out.write(line + "\n")


class Cluster:
    def __init__(self, training: Training, count: int, ground: Ground, journal: Journal) -> None:
        self.training, self.count = training, count
        self.ground, self.journal = ground, journal
        self.wish = Wish(count=count)
        self.seen = levels.Seen()
        self.pods: dict[int, Pod] = {}
        """The current attempt of each slot."""
        self.handled: set[int] = set()
        """Slots whose pod is replaced by a fault, not by `Cluster`."""
        self.may_create = asyncio.Event()
        """Not set while the job is suspended."""
        self.may_create.set()
        self._failed = ""
        self._heard: set[tuple[int, bool]] = set()
        self._all: list[Pod] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Cluster":
        for slot in range(self.count):
            self.create(slot, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for pod in self._all:
            pod.removed = True
            pod.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- pods ------------------------------------------------------------------------------------

    def create(self, slot: int, attempt: int) -> Pod:
        pod = Pod(self.training, slot, attempt, self.ground.add_node())
        self.pods[slot] = pod
        self._all.append(pod)
        self.wish = self.wish.with_pod(slot, attempt, pod.address)
        self.journal.write("pod", slot=slot, attempt=attempt, ip=pod.ip)
        self._begin(self._keep(pod))
        self._begin(self._exchange(pod))
        return pod

    async def replace(self, slot: int) -> Pod:
        """Create the slot's next attempt once the job is not suspended. Declare the old attempt gone,
        whether it still runs or not.
        """
        old = self.pods[slot]
        self.wish = self.wish.with_gone(slot, old.attempt)
        await self.may_create.wait()
        if self.pods[slot] is not old:  # resuming has created all pods again
            return self.pods[slot]
        return self.create(slot, old.attempt + 1)

    async def remove(self, pod: Pod) -> None:
        """End the pod at once, without notice, as if it were deleted with its node."""
        pod.removed = True
        pod.kill()
        await pod.over.wait()

    async def _keep(self, pod: Pod) -> None:
        """Restart the container as with restartPolicy OnFailure. Report each end to the other pods, as
        the operator does.
        """
        try:
            while not pod.removed:
                pod.start()
                code = await pod.ended()
                found = pod.read_report()
                why = f"{found.cause.value}: {found.message}" if found else ""
                where = {"slot": pod.slot, "attempt": pod.attempt}
                self.journal.write("ended", **where, life=pod.lives, code=code, why=why)
                if code > 0 and found is None:
                    self._failed = f"agent {where} ended with {code} and no report: see its log"
                if code == report.EXIT_FOR_GOOD:
                    pod.report = found
                    return
                if pod is self.pods[pod.slot]:
                    self.wish = self.wish.with_dead(pod.slot, pod.attempt, pod.lives)
                await asyncio.sleep(AGAIN_SECONDS)
        finally:
            pod.over.set()
            self._begin(self._after(pod))

    async def _after(self, pod: Pod) -> None:
        """After a pod has ended for good by itself, create its slot's next attempt, unless the job has
        ended.
        """
        found = pod.report
        ours = pod is self.pods[pod.slot] and pod.slot not in self.handled
        if found is None or found.cause in OF_THE_JOB or not ours:
            return
        if found.cause not in report.OF_THE_POD:
            self._failed = f"slot {pod.slot} ended with {found.cause.value}: {found.message}"
            return
        await self.replace(pod.slot)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- wanted and seen -------------------------------------------------------------------------

    async def _exchange(self, pod: Pod) -> None:
        async with PeerClient(pod.address, TOKEN) as client:
            while not pod.over.is_set():
                if not pod.reachable:
                    await asyncio.sleep(LOOK_SECONDS)
                    continue
                with contextlib.suppress(PeerError):
                    wanted = self.wish.document()
                    seen = await client.call("/v1/wanted", wanted, levels.Seen, timeout=2.0)
                    self._hear(seen)
                await asyncio.sleep(LOOK_SECONDS)

    def _hear(self, seen: levels.Seen) -> None:
        """If the job is split in two halves, believe the one with the later epoch, because only that
        one can be claimed.
        """
        if seen.coordinator is None or seen.epoch < self.seen.epoch:
            return
        if (seen.epoch, seen.running) not in self._heard:
            self._heard.add((seen.epoch, seen.running))
            self.journal.write("seen", epoch=seen.epoch, running=seen.running, step=seen.step)
        self.seen = seen
        if seen.failure is not None:
            self._failed = f"the job has failed: {seen.failure}"

    async def until(self, what: Callable[[levels.Seen], object], seconds: float, why: str) -> None:
        """Wait until `what` holds. Raises Failed at the limit, or as soon as the job fails."""
        end = time.monotonic() + seconds
        while not what(self.seen):
            if self._failed:
                raise Failed(self._failed)
            if time.monotonic() > end:
                raise Failed(f"not in {seconds} s: {why}; last seen {self.seen}")
            await asyncio.sleep(0.02)

    def steps_on(self, seen: levels.Seen) -> bool:
        return seen.running and len(seen.members) == self.count

    @property
    def is_done(self) -> bool:
        return all(
            p.report is not None and p.report.cause is report.Cause.DONE for p in self.pods.values()
        )
