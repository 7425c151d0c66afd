"""One act: a fault on the node of one slot, and what was seen until the job stepped on."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from everstep_contract.log import Claim, Commit, Entry
from everstep_demo.board import Board, Object, Pod
from everstep_demo.runwatch import RunWatch
from everstep_demo.story import COMMITTED, CORDONED, FIRST_STEP, MOVED, Act, Incident
from everstep_demo.timeline import Timeline

POLL_SECONDS = 0.2
Noted = tuple[str, str]
"""Id and cause of an incident in the job's status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where acts are played."""

    job: str
    board: Board
    watch: RunWatch
    timeline: Timeline
    fault: Callable[[Pod, Act], Awaitable[str]]
    """Plays an act's fault on the GPU that the pod holds; says what was done."""


async def play(stage: Stage, act: Act, *, limit: float = 120.0) -> Incident:
    """Returns when the job has taken its first new step, or `limit` seconds after the fault."""
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
    """Looks until all milestones are reached; each is told once, as soon as it is seen."""

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
        job = await self._stage.board.job(self._stage.job)
        return Incident(
            act=self._act,
            node=self._pod.node,
            moved_to=self._moved_to,
            reached=self.reached,
            resumed_from=self._resumed,
            steps_lost=_steps_lost(job),
        )

    async def _look_at_node(self) -> None:
        node = (await self._stage.board.nodes()).get(self._pod.node)
        if node is not None and node.cordoned:
            self._reach(CORDONED, f"{node.name} takes no new pods")

    async def _look_at_incidents(self) -> None:
        """What the operator has noted in the job's status, once each."""
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
        """The last commit before the new claim is the one that counts."""
        if isinstance(entry, Commit) and not self._claimed:
            self._resumed = entry.step
            self._reach(COMMITTED, f"checkpoint of step {entry.step}")
        elif isinstance(entry, Claim) and entry.epoch > self._epoch:
            self._claimed = True
            members = f"{len(entry.members)} workers go on from step {self._resumed}"
            self._stage.timeline.say("claimed", f"epoch {entry.epoch}: {members}")

    async def _look_at_pod(self) -> None:
        pod = await self._stage.board.current_pod(self._stage.job, self._act.slot)
        if pod and pod.attempt > self._pod.attempt and pod.phase == "Running":
            self._moved_to = pod.node
            self._reach(MOVED, f"slot {pod.slot} runs on {pod.node} as {pod.name}")

    async def _look_for_step(self) -> None:
        step = await _step(self._stage)
        if step > self._resumed:
            self._reach(FIRST_STEP, f"now at step {step}")

    def _reach(self, milestone: str, detail: str) -> None:
        self.reached[milestone] = time.monotonic() - self.began
        self._stage.timeline.say(milestone, detail)


async def _incidents(stage: Stage) -> list[Object]:
    status = (await stage.board.job(stage.job)).get("status", {})
    return list(status.get("incidents") or [])


async def _step(stage: Stage) -> int:
    status = (await stage.board.job(stage.job)).get("status", {})
    return int(status.get("step") or 0)


def _steps_lost(job: Object) -> int:
    incidents = job.get("status", {}).get("incidents") or []
    return int(incidents[-1].get("stepsLost") or 0) if incidents else 0
