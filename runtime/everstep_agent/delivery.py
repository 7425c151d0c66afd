"""Sends uploaded parts to the coordinator, and again to each new coordinator, until they are
committed.
"""

import asyncio
from collections.abc import Callable, Mapping

from everstep_agent import logline
from everstep_agent.agent_state import AgentState
from everstep_agent.checkpoint.parts import Part, PartKey
from everstep_agent.peers.client import PeerError, Pool
from everstep_agent.peers.following import Holder
from everstep_agent.peers.messages import Accepted
from everstep_agent.waiting import happens, result_unless

AGAIN_SECONDS = 1.0
"""A part that was not accepted is sent again after this time, or as soon as another part is
uploaded.
"""
PART_SECONDS = 60.0
"""Limit for the coordinator to accept one part; then the part is sent again. The wait ends sooner
if another agent takes the role.
"""
Told = tuple[Holder, str]
"""The coordinator to which a part was sent, and the problem that the part then reported."""


class Delivery:
    """`parts`: those that are uploaded and not yet committed."""

    def __init__(
        self,
        *,
        state: AgentState,
        pool: Pool,
        parts: Callable[[], Mapping[PartKey, Part]],
        line: logline.Log,
    ) -> None:
        self._state = state
        self._pool = pool
        self._parts = parts
        self._line = line
        self._news = asyncio.Event()

    def wake(self, part: Part) -> None:
        self._news.set()

    async def run(self) -> None:
        sent: dict[PartKey, Told] = {}
        while True:
            if self._parts():
                await happens(self._news, AGAIN_SECONDS)
            else:
                await self._news.wait()
            self._news.clear()
            parts = dict(self._parts())
            sent = {key: told for key, told in sent.items() if key in parts}
            for key, part in parts.items():
                holder = self._state.holder
                if holder is None:
                    continue
                told = (holder, part.problem)
                if sent.get(key) != told and await self._send(part, holder):
                    sent[key] = told

    async def _send(self, part: Part, holder: Holder) -> bool:
        """Send the part. Return whether this term of the coordinator now holds it."""
        coordinator = self._state.coordinator
        if coordinator is not None:
            return coordinator.term.add_part(part)
        try:
            answer = await result_unless(
                self._pool.call(holder.address, "/v1/part", part, Accepted, timeout=PART_SECONDS),
                lambda: self._state.holder != holder,
                AGAIN_SECONDS,
            )
        except PeerError as error:
            self._line.say("part_waits", step=part.step, message=str(error))
            return False
        return answer == Accepted(acting=True, term=holder.term)
