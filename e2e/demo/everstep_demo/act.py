"""One act of the demo: a fault on the node of one slot, observed until all workers step again."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from everstep_contract.log import Claim, Commit, Entry, MemberId
from everstep_demo import steplog
from everstep_demo.board import Board, Object, Pod
from everstep_demo.runwatch import RunWatch
from everstep_demo.steplog import StepLog
from everstep_demo.story import COMMITTED, CORDONED, FIRST_STEP, FULL_SIZE, MOVED, Act, Incident
from everstep_demo.timeline import Timeline
from everstep_demo.trial import first_step_of

POLL_SECONDS = 0.2
USUAL_STEPS = 20
"""How many steps before the fault are measured to find how long a step usually takes."""
Noted = tuple[str, str]
"""Id and cause of an incident in the job's status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The job, cluster and tools that an act uses."""

    job: str
    board: Board
    watch: RunWatch
    timeline: Timeline
    fault: Callable[[Pod, Act], Awaitable[str]]
    """Injects an act's fault on the GPU that the pod holds; returns a description."""
    log: StepLog | None = None
    """The training script's own log, if it writes one; else steps come from the job's status."""


async def play(stage: Stage, act: Act, *, limit: float = 120.0) -> Incident:
    """Run the act; return when all workers step again, or `limit` seconds after the fault."""
    pod = await stage.board.current_pod(stage.job, act.slot)
    assert pod is not None, f"slot {act.slot} of {stage.job} has no pod"
    await stage.watch.refresh()
    known = [(i["id"], i["cause"]) for i in await _incidents(stage)]
    assert stage.watch.newest_claim is not None, f"{stage.job} has not begun"
    run = _Playing(stage, act, pod, before=stage.watch.newest_claim, known=known)
    run.pods_before = {p.name for p in await stage.board.pods(stage.job)}
    if act.title:
        stage.timeline.heading(act.heading)
    step = await _step(stage)
    stage.timeline.fault(f"{pod.node}, which holds slot {pod.slot}, at step {step} or later")
    run.began = time.monotonic()
    await stage.fault(pod, act)
    while FULL_SIZE not in run.reached and time.monotonic() - run.began < limit:
        await run.look()
        await asyncio.sleep(POLL_SECONDS)
    return await run.end()


class _Playing:
    """Looks for the act's milestones at each poll, and prints each once, as soon as it is seen."""

    def __init__(
        self, stage: Stage, act: Act, pod: Pod, *, before: Claim, known: Iterable[Noted]
    ) -> None:
        self._stage, self._act, self._pod = stage, act, pod
        self._epoch, self._before = before.epoch, before.members
        self._size = len(before.members)
        self.began = time.monotonic()
        self.reached: dict[str, float] = {}
        self.pods_before: set[str] = set()
        """Names of the job's pods before the fault."""
        self._resumed = 0
        self._moved_to = ""
        self._known = set(known)
        self._verdict = False
        self._whole_from = 0
        """First step of the epoch that all workers are in again; 0: there is none yet."""

    async def look(self) -> None:
        await self._look_at_incidents()
        if not self._verdict:
            await self._look_at_quarantine()
        if CORDONED not in self.reached:
            await self._look_at_node()
        for entry in await self._stage.watch.refresh():
            self._look_at_entry(entry)
        if MOVED not in self.reached:
            await self._look_at_pod()
        if self._resumed and FIRST_STEP not in self.reached:
            await self._look_for_step()
        if self._whole_from and FULL_SIZE not in self.reached:
            await self._look_for_full_size()

    async def end(self) -> Incident:
        lost, recomputed = await self._count_steps()
        usual, pause, shrunk = self._count_pauses()
        return Incident(
            act=self._act,
            node=self._pod.node,
            moved_to=self._moved_to,
            reached=self.reached,
            resumed_from=self._resumed,
            steps_lost=lost,
            steps_recomputed=recomputed,
            others_pause=pause,
            usual_pause=usual,
            shrunk_pause=shrunk,
        )

    def _count_pauses(self) -> tuple[float | None, float | None, float | None]:
        """Time between two steps of the other workers: the usual one before the fault, the longest
        one since, and the usual one while a worker was missing.
        """
        if self._stage.log is None:
            return None, None, None
        log = self._stage.log.read()
        hit = steplog.find_process(log, self._act.slot, self.began)
        pauses = steplog.list_pauses(log, without=hit)
        before = [seconds for end, seconds in pauses if end <= self.began][-USUAL_STEPS:]
        first = self.began + self.reached.get(FIRST_STEP, float("inf"))
        until = self.began + self.reached.get(FULL_SIZE, float("inf"))
        since = [(end, seconds) for end, seconds in pauses if self.began < end <= until]
        shrunk = [seconds for end, seconds in since if first < end < until]
        longest = max((seconds for _, seconds in since), default=None)
        return _median(before), longest, _median(shrunk)

    async def _count_steps(self) -> tuple[int | None, int | None]:
        if self._stage.log is None:
            return _steps_lost(await self._stage.board.job(self._stage.job)), None
        log = self._stage.log.read()
        hit = steplog.find_process(log, self._act.slot, self.began)
        lived = [a for a in log if a.pid != hit]
        lost = steplog.list_recomputed(lived, after=self.began)
        return len(lost), len(steplog.list_recomputed(log, after=self.began))

    async def _look_at_node(self) -> None:
        node = (await self._stage.board.nodes()).get(self._pod.node)
        if node is not None and node.cordoned:
            self._reach(CORDONED, f"{node.name} takes no new pods")

    async def _look_at_incidents(self) -> None:
        """Print each incident in the job's status once."""
        for incident in await _incidents(self._stage):
            seen = incident["id"], incident["cause"]
            if seen not in self._known:
                self._known.add(seen)
                self._stage.timeline.say("noticed", f"{incident['cause']} ({incident['id']})")

    async def _look_at_quarantine(self) -> None:
        found = await self._stage.board.quarantines()
        mine = (q["spec"] for q in found if q["spec"]["nodeName"] == self._pod.node)
        if spec := next(mine, None):
            self._verdict = True
            self._stage.timeline.say("verdict", f"{spec['verdict']}, {spec['reason']}")

    def _look_at_entry(self, entry: Entry) -> None:
        """The checkpoint of the act is the last commit before the first new claim."""
        if isinstance(entry, Commit) and not self._resumed:
            self._reach(COMMITTED, f"checkpoint of step {entry.step}")
        elif isinstance(entry, Claim) and entry.epoch > self._epoch:
            first = first_step_of(entry)
            self._resumed = self._resumed or first - 1
            whole = len(entry.members) >= self._size
            self._whole_from = 0 if not whole or any(map(self._is_hit, entry.members)) else first
            members = f"{len(entry.members)} workers continue from step {first - 1}"
            self._stage.timeline.say("claimed", f"epoch {entry.epoch}: {members}")

    def _is_hit(self, member: MemberId) -> bool:
        """Whether this is the worker that the fault hit or, if its pod does not stay, any worker in
        that pod.
        """
        if self._act.pod_stays:
            return member.slot == self._pod.slot and member in self._before
        return member.slot == self._pod.slot and member.attempt <= self._pod.attempt

    async def _look_at_pod(self) -> None:
        """The first new pod: the next attempt of the slot, or a spare that takes its place."""
        pods = await self._stage.board.pods(self._stage.job)
        new = (p for p in pods if p.name not in self.pods_before and p.phase == "Running")
        if pod := next(new, None):
            self._moved_to = pod.node
            self._reach(MOVED, f"{pod.name} runs on {pod.node}")

    async def _look_for_step(self) -> None:
        if self._stage.log is None:
            await self._look_at_status(FIRST_STEP, self._resumed + 1)
            return
        first = self._resumed + 1
        at = steplog.find_first(self._stage.log.read(), first, after=self.began)
        if at is not None:
            self._reach(FIRST_STEP, f"step {first}, in the training script's own log", at=at)

    async def _look_for_full_size(self) -> None:
        first = self._whole_from
        if self._stage.log is None:
            await self._look_at_status(FULL_SIZE, first)
            return
        at = steplog.find_whole(self._stage.log.read(), first, self._size, after=self.began)
        if at is not None:
            self._reach(FULL_SIZE, f"{self._size} workers have taken step {first}", at=at)

    async def _look_at_status(self, milestone: str, first: int) -> None:
        step = await _step(self._stage)
        if step >= first:
            self._reach(milestone, f"now at step {step}")

    def _reach(self, milestone: str, detail: str, *, at: float | None = None) -> None:
        """`at`: the exact time (monotonic clock), if known; else the time of this poll counts."""
        self.reached[milestone] = (time.monotonic() if at is None else at) - self.began
        self._stage.timeline.say(milestone, detail)


async def _incidents(stage: Stage) -> list[Object]:
    status = (await stage.board.job(stage.job)).get("status", {})
    return list(status.get("incidents") or [])


async def _step(stage: Stage) -> int:
    status = (await stage.board.job(stage.job)).get("status", {})
    return int(status.get("step") or 0)


def _steps_lost(job: Object) -> int | None:
    """`stepsLost` of the last incident in the job's status."""
    incidents = job.get("status", {}).get("incidents") or []
    lost = incidents[-1].get("stepsLost") if incidents else None
    return None if lost is None else int(lost)


def _median(seconds: list[float]) -> float | None:
    return statistics.median(seconds) if seconds else None
