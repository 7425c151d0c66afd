"""Asks members that have fallen silent whether they are alive.

This costs a request, and only while all others wait. So agents need not report more often than they
do, and an agent that is slow to report is not taken for dead.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence

from everstep_agent.coordinator.hung import Patience
from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.peers.client import PeerError, Pool
from everstep_agent.peers.epoch_level import EpochMember, Id
from everstep_agent.peers.messages import After, Who

ASK_SECONDS = 0.35
"""Limit for an answer: longer than a retransmission takes."""
ATTEMPTS = 2
"""This many unanswered requests in a row count as silence. The number is doubled for a while each
time a member that was left out turns out to be alive.
"""
AGAIN_SECONDS = 1.0
"""Pause before a member that has answered is asked again."""


class Silence:
    """`tell` is called when a member has not answered.

    Args:
        presumed: addresses at which nobody has answered for longer than asking takes.
    """

    def __init__(
        self, token: str, tell: Callable[[], None], presumed: Collection[str] = ()
    ) -> None:
        self._pool, self._tell = Pool(token), tell
        self._presumed = frozenset(presumed)
        self._asking: dict[Id, asyncio.Task[None]] = {}
        self._unanswered: set[Id] = set()
        self._left_out: set[Id] = set()
        self._patience = Patience()

    @property
    def unanswered(self) -> frozenset[Id]:
        """The members in doubt that have not answered."""
        return frozenset(self._unanswered)

    def doubt(self, members: Sequence[EpochMember], now: float) -> None:
        """Ask these members, and no others. A member that was in doubt before and has reported
        since is no longer in doubt.
        """
        ids = {m.id for m in members}
        for ident in [i for i in self._asking if i not in ids]:
            self._asking.pop(ident).cancel()
        self._unanswered &= ids
        for member in members:
            if member.id not in self._asking:
                self._asking[member.id] = asyncio.create_task(self._ask(member, self.attempts(now)))

    def attempts(self, now: float) -> int:
        """How many unanswered requests make a member silent."""
        return ATTEMPTS * self._patience.factor(now)

    def leave_out(self, ids: Iterable[Id]) -> None:
        """Note that the next epoch continues without these members."""
        self._left_out |= {*ids} & self._unanswered

    def hear(self, report: AgentReport, now: float) -> None:
        """Note that this agent is alive. If it was left out, that was wrong: from now on a member
        is asked more often before it counts as silent.
        """
        self._presumed -= {report.address}
        if report.id in self._left_out:
            self._left_out.discard(report.id)
            self._patience = self._patience.after_cut(now)

    async def _ask(self, member: EpochMember, attempts: int) -> None:
        missed = attempts if member.address in self._presumed else 0
        while missed < attempts:
            if await self._answers(member.address):
                missed = 0
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                missed += 1
        self._unanswered.add(member.id)
        self._tell()

    async def _answers(self, address: str) -> bool:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            await self._pool.call(address, "/v1/who", After(), Who, timeout=ASK_SECONDS)
            return True
        except PeerError as error:
            if error.refused:
                return True
        # While its container restarts, nothing listens there for a moment.
        await asyncio.sleep(max(0.0, began + ASK_SECONDS - clock()))
        return False

    async def close(self) -> None:
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        await self._pool.close()
