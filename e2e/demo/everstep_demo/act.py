"""One act of the demo: a fault on the node of one slot, observed until the job takes its first new step."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from everstep_contract.log import Claim, Commit, Entry
from everstep_demo import steplog
from everstep_demo.board import Board, Object, Pod
from everstep_demo.runwatch import RunWatch
from everstep_demo.steplog import StepLog
from everstep_demo.story import COMMITTED, CORDONED, FIRST_STEP, MOVED, Act, Incident
from everstep_demo.timeline import Timeline

POLL_SECONDS = 0.2
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
    """Run the act; return at the job's first new step, or `limit` seconds after the fault."""
    pod = await stage.board.current_pod(stage.job, act.slot)
    assert pod is not None, f"slot {act.slot} of {stage.job} has no pod"
    await stage.watch.refresh()
    known = [(i["id"], i["cause"]) for i in await _incidents(stage)]
    run = _Playing(stage, act, pod, epoch=stage.watch.epoch, step=await _step(stage), known=known)
    if act.title:
        stage.timeline.heading(act.heading)
    stage.timeline.fault(f"{pod.node}, which holds slot {pod.slot}, at step {run.step} or later")
    run.began = time.monotonic()
    await stage.fault(pod, act)
    while FIRST_STEP not in run.reached and time.monotonic() - run.began < limit:
        await run.look()
        await asyncio.sleep(POLL_SECONDS)
    return await run.end()


class _Playing:
    """Looks for the act's milestones at each poll, and prints each once, as soon as it is seen."""

    def __init__(
        self, stage: Stage, act: Act, pod: Pod, *, epoch: int, step: int, known: Iterable[Noted]
    ) -> None:
        self._stage, self._act, self._pod, self._epoch = stage, act, pod, epoch
        self.step = step
        self.began = time.monotonic()
        self.reached: dict[str, float] = {}
        self._resumed = 0
        self._moved_to = ""
        self._known = set(known)
        self._verdict = False
        self._claimed = False

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
        if self._claimed:
            await self._look_for_step()

    async def end(self) -> Incident:
        lost, recomputed = await self._count_steps()
        return Incident(
            act=self._act,
            node=self._pod.node,
            moved_to=self._moved_to,
            reached=self.reached,
            resumed_from=self._resumed,
            steps_lost=lost,
            steps_recomputed=recomputed,
        )

    async def _count_steps(self) -> tuple[int | None, int | None]:
        if self._stage.log is None:
            return _steps_lost(await self._stage.board.job(self._stage.job)), None
        log = self._stage.log.read()
        lived = [a for a in log if a.rank != self._act.slot]
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
        """The checkpoint of the act is the last commit before the new claim."""
        if isinstance(entry, Commit) and not self._claimed:
            self._resumed = entry.step
            self._reach(COMMITTED, f"checkpoint of step {entry.step}")
        elif isinstance(entry, Claim) and entry.epoch > self._epoch:
            self._claimed = True
            self._resumed = entry.chain[-1].last_step if entry.chain else 0
            members = f"{len(entry.members)} workers continue from step {self._resumed}"
            self._stage.timeline.say("claimed", f"epoch {entry.epoch}: {members}")

    async def _look_at_pod(self) -> None:
        pod = await self._stage.board.current_pod(self._stage.job, self._act.slot)
        if pod and pod.attempt > self._pod.attempt and pod.phase == "Running":
            self._moved_to = pod.node
            self._reach(MOVED, f"slot {pod.slot} runs on {pod.node} as {pod.name}")

    async def _look_for_step(self) -> None:
        if self._stage.log is None:
            step = await _step(self._stage)
            if step > self._resumed:
                self._reach(FIRST_STEP, f"now at step {step}")
            return
        first = self._resumed + 1
        at = steplog.find_first(self._stage.log.read(), first, after=self.began)
        if at is not None:
            self._reach(FIRST_STEP, f"step {first}, in the training script's own log", at=at)

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
