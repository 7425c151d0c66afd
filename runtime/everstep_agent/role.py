"""The coordinator's role in this agent: taking it, serving this pod, giving it up."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from everstep_agent.agent_state import AgentState
from everstep_agent.context import Context
from everstep_agent.coordinator.coordinator import Coordinator
from everstep_agent.coordinator.term import Term
from everstep_agent.own_agent import OwnAgent
from everstep_agent.pace import Pace
from everstep_agent.peers.following import list_heirs
from everstep_agent.storage.errors import StoreError

REPORT_SECONDS = 0.1
"""Seconds between two reports of the coordinator's own pod without news."""
QUIET_REPORT_SECONDS = 0.5
"""The same once there has been no news for a while."""
YIELD_SECONDS = 1.0
RIVAL_SECONDS = 5.0
"""How often an acting coordinator looks for another one. This is less than the time after which a
silent member is given up.
"""
HEIR_SECONDS = 30.0
"""How often the agents that would coordinate next read on in the run log."""
LINGER_SECONDS = 5.0
"""How long the coordinator stays after the job's end, so that the operator and the agents can read
about it.
"""
LINGER_POLL_SECONDS = 0.05
ENDED_SECONDS = 3.0
HANDOVER_SECONDS = 1.0
"""Like `LINGER_SECONDS`, but when the role is given up before the job's end: other agents take
over.
"""


class Role:
    def __init__(self, context: Context, state: AgentState, own: OwnAgent) -> None:
        self._context = context
        self._state = state
        self._own = own
        self._line = context.line
        self._reading: asyncio.Task[object] | None = None
        """Reads on in the run log (`read_ahead`)."""

    async def read_ahead(self) -> None:
        """Keep the run log read while this agent is one of those that would coordinate next. A log of
        weeks takes the store many seconds, in which no loss could be handled.
        """
        while True:
            await asyncio.sleep(HEIR_SECONDS)
            heirs = list_heirs(self._state.published)
            if self._state.coordinator is not None or self._context.me.address not in heirs:
                continue
            self._reading = asyncio.create_task(self._context.run_log.refresh())
            try:
                await asyncio.wait([self._reading])
            finally:
                self._reading.cancel()
            error = None if self._reading.cancelled() else self._reading.exception()
            if error is not None and not isinstance(error, StoreError):
                raise error

    async def act(self, has_rival: Callable[[], Awaitable[bool]]) -> None:
        """Coordinate until another coordinator takes precedence, or this slot has left. Once the
        job has ended, keep the last levels published until this agent ends.
        """
        if self._reading is not None:
            self._reading.cancel()  # its request may hang, and the term's would wait for it
        context = replace(self._context, line=self._line.bind(role="coordinator"))
        coordinator = Coordinator(
            context,
            self._state.published,
            self._state.wanted,
            self._own.group,
            self._own.lost,
            self._state.phase_since,
        )
        coordinator.term.take(self._own.report())
        self._state.coordinator = coordinator
        self._line.say("coordinates", address=self._context.me.address)
        try:
            await self._until_over(coordinator, has_rival)
        finally:
            await coordinator.close()
            self._state.coordinator = None
            self._line.say("lays_role_down")

    async def _until_over(
        self, coordinator: Coordinator, has_rival: Callable[[], Awaitable[bool]]
    ) -> None:
        """Hold the role until one of these tasks ends. An error in any of them, except in the pod's
        own (`of_pod`), is a fault of the coordinator's code.
        """
        term = coordinator.term
        running = asyncio.create_task(coordinator.run())
        until = [
            asyncio.create_task(self._until_handed_over(term)),
            asyncio.create_task(self._until_yielded(coordinator, has_rival)),
        ]
        of_pod = [
            asyncio.create_task(self._hear(coordinator)),
            asyncio.create_task(self._tell(term)),
        ]
        try:
            done, _ = await asyncio.wait(
                [running, *until, *of_pod], return_when=asyncio.FIRST_COMPLETED
            )
            errors = [t.exception() for t in done if t not in of_pod]
            error = next((e for e in errors if isinstance(e, Exception)), None)
            if error is not None:
                await self._lay_down(term, error)
            elif until[0] in done:
                await self._hand_over(term, running)
            if term.ended:
                done, _ = await asyncio.wait(of_pod, return_when=asyncio.FIRST_COMPLETED)
            for task in done.intersection(of_pod):
                task.result()
        finally:
            for task in (running, *until, *of_pod):
                task.cancel()
            await asyncio.gather(running, *until, *of_pod, return_exceptions=True)

    async def _lay_down(self, term: Term, error: Exception) -> None:
        """Give the role up after a bug in the coordinator's code. The bug ends neither this pod nor
        the epoch (`coordinator/faults.py`).
        """
        fault = term.lay_down(error)
        self._line.say("coordinator_failed", message=fault.message, traceback=fault.traceback)
        if not term.ended:
            await self._until_read(term)

    async def _hear(self, coordinator: Coordinator) -> None:
        """Apply the levels in this pod each time they change, as the other pods do, but without
        HTTP.
        """
        version = -1
        while True:
            published = await coordinator.term.board.wait_newer(version)
            version = published.version
            self._own.hear(published)

    async def _tell(self, term: Term) -> None:
        pace = Pace(REPORT_SECONDS, QUIET_REPORT_SECONDS)
        while True:
            self._own.changed.clear()
            term.take(self._own.report())
            await pace.wait_for_news(self._own.changed)

    async def _until_handed_over(self, term: Term) -> None:
        """Wait until this pod has left."""
        version = -1
        while term.ended or not term.hands_over:
            version = (await term.board.wait_newer(version)).version

    async def _hand_over(self, term: Term, running: asyncio.Task[None]) -> None:
        """Hand the role over, and wait until all agents know that this pod has left."""
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        term.hand_over()
        await self._until_read(term)

    async def _until_yielded(
        self, coordinator: Coordinator, has_rival: Callable[[], Awaitable[bool]]
    ) -> None:
        asked = time.monotonic()
        while True:
            await asyncio.sleep(YIELD_SECONDS)
            term, now = coordinator.term, time.monotonic()
            if term.ended:
                continue
            if term.behind:
                return
            runs = term.epoch is not None and term.epoch.live
            if runs and now - asked < RIVAL_SECONDS:
                continue
            asked = now
            if await has_rival():
                return

    async def linger(self) -> None:
        """Wait until every agent that follows this coordinator, and the operator, have read its
        last levels.
        """
        coordinator = self._state.coordinator
        if coordinator is None:
            return
        await self._until_read(coordinator.term)

    async def _until_read(self, term: Term) -> None:
        began = term.now()  # reports have the times of the term's clock
        until = began + (LINGER_SECONDS if term.ended else HANDOVER_SECONDS)
        version = term.board.levels.version
        while term.now() < until:
            # An agent that has not reported for a while has ended: it has read this, or never will.
            recent = term.reports.recent(term.now(), ENDED_SECONDS)
            others = {r.address for r in recent} - {self._context.me.address}
            if term.board.is_read(others, version, began):
                return
            await asyncio.sleep(LINGER_POLL_SECONDS)
