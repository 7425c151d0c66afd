"""Holding the coordinator's role in this agent: taking it, serving our own pod, laying it down."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from everstep_agent import logline
from everstep_agent.coordinator import Coordinator
from everstep_agent.desk import Desk, Identity
from everstep_agent.messages import AgentReport, Levels
from everstep_agent.signals import happens
from everstep_agent.standing import Standing
from everstep_agent.storage.retrying import Retrying
from everstep_contract import env

REPORT_SECONDS = 0.1
YIELD_SECONDS = 1.0
RIVAL_SECONDS = 5.0
"""How often a coordinator whose epoch runs looks for another: sooner than a silent member is given up."""
LINGER_SECONDS = 5.0
"""How long the coordinator stays after the end, so that operator and agents can hear of it."""
LINGER_POLL_SECONDS = 0.05
ENDED_SECONDS = 3.0
HANDOVER_SECONDS = 1.0
"""The same when only its own pod leaves: others take over."""


class Role:
    def __init__(
        self,
        *,
        settings: env.AgentEnv,
        me: Identity,
        store: Retrying,
        standing: Standing,
        report: Callable[[], AgentReport],
        changed: asyncio.Event,
        on_levels: Callable[[Levels], None],
        line: logline.Log,
    ) -> None:
        self._settings = settings
        self._me = me
        self._store = store
        self._standing = standing
        self._report = report
        self._changed = changed
        self._on_levels = on_levels
        self._line = line

    async def act(self, has_rival: Callable[[], Awaitable[bool]]) -> None:
        """Coordinate until another coordinator precedes us, or our own slot has left. Once the job
        has ended, its last levels stay published until this agent ends.
        """
        coordinator = Coordinator(
            settings=self._settings,
            me=self._me,
            store=self._store,
            line=self._line.bind(role="coordinator"),
            inherited=self._standing.published,
            wanted=self._standing.wanted,
        )
        coordinator.desk.take(self._report())
        self._standing.coordinator = coordinator
        self._line.say("coordinates", address=self._me.address)
        try:
            await self._until_over(coordinator, has_rival)
        finally:
            await coordinator.close()
            self._standing.coordinator = None
            self._line.say("lays_role_down")

    async def _until_over(
        self, coordinator: Coordinator, has_rival: Callable[[], Awaitable[bool]]
    ) -> None:
        running = asyncio.create_task(coordinator.run())
        serving = [
            asyncio.create_task(self._hear(coordinator)),
            asyncio.create_task(self._tell(coordinator)),
            asyncio.create_task(self._until_handed_over(coordinator.desk)),
            asyncio.create_task(self._until_yielded(coordinator, has_rival)),
        ]
        try:
            done, _ = await asyncio.wait([running, *serving], return_when=asyncio.FIRST_COMPLETED)
            if running in done:
                running.result()
                done, _ = await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (running, *serving):
                task.cancel()
            await asyncio.gather(running, *serving, return_exceptions=True)

    async def _hear(self, coordinator: Coordinator) -> None:
        """Our own pod takes no other way than the others, only a shorter one."""
        version = -1
        while True:
            published = await coordinator.desk.board.wait_newer(version)
            version = published.version
            self._on_levels(published)

    async def _tell(self, coordinator: Coordinator) -> None:
        while True:
            self._changed.clear()
            coordinator.desk.take(self._report())
            await happens(self._changed, REPORT_SECONDS)

    async def _until_handed_over(self, desk: Desk) -> None:
        """Our own pod has left, and all have heard that its epoch is over."""
        version = -1
        while desk.ended or not desk.hands_over:
            version = (await desk.board.wait_newer(version)).version
        await self._until_heard(desk)

    async def _until_yielded(
        self, coordinator: Coordinator, has_rival: Callable[[], Awaitable[bool]]
    ) -> None:
        asked = time.monotonic()
        while True:
            await asyncio.sleep(YIELD_SECONDS)
            desk, now = coordinator.desk, time.monotonic()
            if desk.ended:
                continue
            if desk.behind:
                return
            runs = desk.epoch is not None and desk.epoch.live
            if runs and now - asked < RIVAL_SECONDS:
                continue
            asked = now
            if await has_rival():
                return

    async def linger(self) -> None:
        """A coordinator's word must be heard: by every agent that follows it, and by the operator."""
        coordinator = self._standing.coordinator
        if coordinator is None:
            return
        await self._until_heard(coordinator.desk)

    async def _until_heard(self, desk: Desk) -> None:
        began = time.monotonic()
        until = began + (LINGER_SECONDS if desk.ended else HANDOVER_SECONDS)
        version = desk.end_version if desk.ended else desk.board.levels.version
        while time.monotonic() < until:
            if self._is_heard(desk, version, began):
                return
            await asyncio.sleep(LINGER_POLL_SECONDS)

    def _is_heard(self, desk: Desk, version: int, since: float) -> bool:
        """Who has not reported for a while has ended: it has read this, or will never."""
        recent = desk.reports.recent(time.monotonic(), ENDED_SECONDS)
        others = {r.address for r in recent} - {self._me.address}
        read = desk.board.read
        told = desk.end_served if desk.ended else desk.served_at > since
        return told and all(read.get(a, 0) >= version for a in others)
