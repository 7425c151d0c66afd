"""A job under a random sequence of faults, and an operator that answers each as ours would.

What is checked does not trust what the job says of itself: the furthest step of every member is read
from its position page, and a new epoch may not resume behind what a member held that nobody hurt.
"""

import asyncio
import contextlib
import itertools
import os
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from agent.gang import Gang
from everstep_agent.agent import Agent
from everstep_contract import levels, report
from everstep_contract.log import Claim

LOOK_SECONDS = 0.01
Fault = Callable[[int], Awaitable[None]]


class Storm:
    def __init__(self, tmp_path: Path, seed: int, *, count: int = 3, faults: int = 6) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.gang = Gang(tmp_path, count, save_every_steps=25)
        self.gang.stub["STUB_UNTIL"] = "250"
        self.gang.stub["STUB_STEP_MS"] = "8"
        self.told: list[str] = []
        self.busy: set[int] = set()
        self.hurt: set[tuple[int, int]] = set()
        """(slot, epoch): what this member held may be lost."""
        self.held: dict[tuple[int, int], int] = {}
        """Furthest step that the member of (slot, epoch) was seen to have applied."""
        self.zombies: list[Agent] = []
        self.kinds: dict[str, Fault] = {
            "worker": self._kill_worker,
            "agent": self._kill_agent,
            "container": self._restart_container,
            "node": self._lose_node,
            "leave": self._leave,
            "sigterm": self._sigterm,
            "gone": self._declare_gone,
        }

    async def play(self) -> dict[int, report.ExitReport]:
        """Until the job is done. Raises AssertionError with the story if it is not."""
        async with self.gang as gang, asyncio.TaskGroup() as tasks:
            watching = [tasks.create_task(self._look()), tasks.create_task(self._mend())]
            try:
                for _ in range(self.faults):
                    await gang.until(lambda s: s.running or s.done, 120)
                    await asyncio.sleep(self.random.uniform(0.0, 1.2))
                    await self._strike(tasks)
                async with asyncio.timeout(300):
                    while not self._is_over():  # noqa: ASYNC110 tasks come and go meanwhile
                        await asyncio.sleep(0.05)
            except (TimeoutError, AssertionError) as error:
                raise AssertionError(
                    f"{self.story()}\n{error}\n{gang.seen}\n{gang.shown()}"
                ) from None
            finally:
                for task in watching:
                    task.cancel()
            return {s: t.result() for s, t in gang.tasks.items() if t.done()}

    def story(self) -> str:
        return "what happened:\n  " + "\n  ".join(self.told)

    def lost(self, claims: list[Claim]) -> list[str]:
        """Epochs that resumed behind what an unhurt member of the one before held."""
        found = []
        for before, after in itertools.pairwise(claims):
            resumed = after.chain[-1].last_step if after.chain else 0
            for (slot, epoch), step in self.held.items():
                if epoch == before.epoch and (slot, epoch) not in self.hurt and step > resumed:
                    found.append(
                        f"epoch {after.epoch} resumes at {resumed}, slot {slot} held {step}"
                    )
        return found

    # --- watching ------------------------------------------------------------------------------------

    async def _look(self) -> None:
        while True:
            for slot, agent in [*self.gang.agents.items()]:
                if slot in self.gang.tasks and not self.gang.tasks[slot].done():
                    self._note(slot, agent)
            await asyncio.sleep(LOOK_SECONDS)

    def _note(self, slot: int, agent: Agent) -> None:
        workers = agent.pod.workers.current if hasattr(agent, "pod") else {}
        for worker in workers.values():
            if worker.alive and worker.epoch:
                key = (slot, worker.epoch)
                self.held[key] = max(self.held.get(key, 0), worker.position().applied)

    def _is_over(self) -> bool:
        tasks = self.gang.tasks
        return bool(tasks) and all(
            t.done() and not t.cancelled() and t.result().done for t in tasks.values()
        )

    async def _mend(self) -> None:
        """The kubelet's and the operator's part: what ends is started again, here or as the next attempt."""
        while True:
            for slot, task in list(self.gang.tasks.items()):
                if not task.done() or slot in self.busy or task.result().done:
                    continue
                found = task.result()
                self._tell(f"slot {slot} ended: {found.cause.value} {found.message}")
                await self.gang.kill(slot, say=False)
                if found.exit_code() == report.EXIT_FOR_GOOD:
                    await self._next(slot)
                else:
                    await self._again(slot)
            await asyncio.sleep(0.1)

    # --- faults --------------------------------------------------------------------------------------

    async def _strike(self, tasks: asyncio.TaskGroup) -> None:
        """One or two faults at once; one slot at least stays unhurt until the job runs again."""
        free = [s for s in range(self.gang.count) if s not in self.busy and s in self.gang.tasks]
        often = 2 if self.random.random() < 0.4 else 1
        chosen = self.random.sample(
            free, min(often, len(free), self.gang.count - 1 - len(self.busy))
        )
        for slot in chosen:
            kind = self.random.choice(list(self.kinds))
            self._tell(f"{kind} {slot}")
            self.busy.add(slot)
            tasks.create_task(self._one(kind, slot))

    async def _one(self, kind: str, slot: int) -> None:
        try:
            await self.kinds[kind](slot)
        finally:
            self.busy.discard(slot)

    async def _kill_worker(self, slot: int) -> None:
        self._hurts(slot)
        worker = self.gang.agents[slot].pod.workers.current.get(0)
        if worker is not None and worker.alive:
            os.kill(worker.pid, signal.SIGKILL)

    async def _kill_agent(self, slot: int) -> None:
        self._hurts(slot)
        await self.gang.kill(slot, say=False)
        await self._pause()
        self._say_dead(slot)
        await self._pause()
        await self._next(slot)

    async def _restart_container(self, slot: int) -> None:
        self._hurts(slot)
        await self.gang.kill(slot, say=False)
        await self._pause()
        await self._again(slot)

    async def _lose_node(self, slot: int) -> None:
        self._hurts(slot)
        await self.gang.kill(slot, say=False)
        await self._pause()
        await self._next(slot)

    async def _leave(self, slot: int) -> None:
        gang = self.gang
        attempt = gang.attempts[slot]
        gang.want(leave=tuple(sorted({*gang.wanted.leave, slot})))
        while not gang.tasks[slot].done():
            if any((x.slot, x.attempt) == (slot, attempt) for x in gang.seen.left):
                break
            if gang.seen.done:
                break
            await asyncio.sleep(0.02)
        gang.want(leave=tuple(s for s in gang.wanted.leave if s != slot))
        if not gang.seen.done:
            await gang.kill(slot, say=False)
            await self._next(slot)

    async def _sigterm(self, slot: int) -> None:
        self.gang.agents[slot].leave()
        await asyncio.wait([self.gang.tasks[slot]], timeout=20)

    async def _declare_gone(self, slot: int) -> None:
        """Too early: it lives on, and is told so by nobody but its peers and the log."""
        self._hurts(slot)
        zombie = self.gang.tasks.pop(slot)
        await self._next(slot)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(zombie), 30)
        if not zombie.done():
            self._tell(f"the zombie of slot {slot} still runs")
            zombie.cancel()
        await asyncio.gather(zombie, return_exceptions=True)

    # --- the operator's part -------------------------------------------------------------------------

    async def _next(self, slot: int) -> None:
        old = levels.SlotAttempt(slot=slot, attempt=self.gang.attempts[slot])
        others = tuple(g for g in self.gang.wanted.gone if g.slot != slot)
        self.gang.want(gone=(*others, old))
        self.gang.tell_peers()
        await self._pause()
        await self.gang.start(slot, old.attempt + 1)
        self._tell(f"slot {slot} is attempt {old.attempt + 1}")

    async def _again(self, slot: int) -> None:
        self._say_dead(slot)
        await self.gang.start(slot, self.gang.attempts[slot])
        self._tell(f"slot {slot} is started again")

    def _say_dead(self, slot: int) -> None:
        agent = self.gang.agents[slot]
        dead = levels.DeadAgent(
            slot=slot, attempt=self.gang.attempts[slot], incarnation=agent.me.incarnation
        )
        others = tuple(d for d in self.gang.wanted.dead if d.slot != slot)
        self.gang.want(dead=(*others, dead))

    def _hurts(self, slot: int) -> None:
        self.hurt.add((slot, self.gang.agents[slot].pod.epoch))

    async def _pause(self) -> None:
        await asyncio.sleep(self.random.choice((0.0, 0.1, 0.5, 1.0)))

    def _tell(self, text: str) -> None:
        seen = self.gang.seen
        self.told.append(f"{text} (epoch {seen.epoch}, step {seen.step}, running {seen.running})")
