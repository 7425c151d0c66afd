"""Uploaded parts on their way to the coordinator: to a new one again, as long as they are not
committed.
"""

import asyncio
from collections.abc import Callable, Mapping

from everstep_agent import logline
from everstep_agent.checkpoint.parts import Part
from everstep_agent.messages import Accepted
from everstep_agent.peers import PeerError, Pool
from everstep_agent.signals import happens
from everstep_agent.standing import Standing

AGAIN_SECONDS = 1.0
CALL_SECONDS = 60.0
Key = tuple[int, int, int]


class Delivery:
    """`parts`: what is uploaded and not committed; `following`: the coordinator's address or ""."""

    def __init__(
        self,
        *,
        standing: Standing,
        pool: Pool,
        parts: Callable[[], Mapping[Key, Part]],
        following: Callable[[], str],
        line: logline.Log,
    ) -> None:
        self._standing = standing
        self._pool = pool
        self._parts = parts
        self._following = following
        self._line = line
        self._news = asyncio.Event()

    def wake(self, part: Part) -> None:
        self._news.set()

    async def run(self) -> None:
        sent: dict[Key, tuple[str, str, bool]] = {}
        while True:
            await happens(self._news, AGAIN_SECONDS)
            self._news.clear()
            for key, part in list(self._parts().items()):
                target = "ourselves" if self._standing.coordinator else self._following()
                told = (target, part.problem, part.whole)  # a whole save may follow a share
                if target and sent.get(key) != told and await self._send(part, target):
                    sent[key] = told

    async def _send(self, part: Part, target: str) -> bool:
        if self._standing.coordinator is not None:
            self._standing.coordinator.desk.add_part(part)
            return True
        try:
            answer = await self._pool.call(target, "/v1/part", part, Accepted, timeout=CALL_SECONDS)
        except PeerError as error:
            self._line.say("part_waits", step=part.step, message=str(error))
            return False
        return answer.acting
