"""Finding the coordinator, reporting to it, and hearing its levels; taking the role when it is ours
to take.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping

from everstep_agent import logline
from everstep_agent.desk import Identity
from everstep_agent.following import Answer, Choice, choose_coordinator, choose_witness
from everstep_agent.messages import Accepted, After, AgentReport, Levels, Who
from everstep_agent.peers import PeerClient, PeerError
from everstep_agent.signals import happens
from everstep_contract import levels

WHO_SECONDS = 1.5
REPORT_SECONDS = 3.0
LEVELS_SECONDS = 6.0
HEARTBEAT_SECONDS = 0.25
SEARCH_SECONDS = 0.2
RIVAL_SECONDS = 3.0


class Follower:
    """`act` runs the coordinator's role here and returns when it was laid down; `heard` gives the number
    of the newest epoch that was heard of.
    """

    def __init__(
        self,
        *,
        me: Identity,
        token: str,
        ready: Callable[[], bool],
        who: Callable[[], Who],
        peers: Callable[[], dict[str, levels.SlotAttempt]],
        report: Callable[[], AgentReport],
        changed: asyncio.Event,
        on_levels: Callable[[Levels], None],
        heard: Callable[[], int],
        act: Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]],
        line: logline.Log,
    ) -> None:
        self._me = me
        self._token = token
        self._ready = ready
        self._who = who
        self._peers = peers
        self._report = report
        self._changed = changed
        self._on_levels = on_levels
        self._heard = heard
        self._act = act
        self._line = line
        self._asking: dict[str, PeerClient] = {}
        self.following = ""
        """Address of the coordinator; empty: none known."""

    async def run(self) -> None:
        alone_since = time.monotonic()
        said = ""
        while True:
            if not self._ready():  # who does not know what is wanted proposes nothing
                alone_since = time.monotonic()
                await asyncio.sleep(SEARCH_SECONDS)
                continue
            answers = await self._ask_all()
            choice = self._choose(answers, time.monotonic() - alone_since)
            if choice.reason != said:
                said = choice.reason
                self._line.say("coordinator_choice", address=choice.address, reason=said)
            if choice.act:
                if await self._caught_up(answers):
                    await self._act(self._has_rival)
                    alone_since = time.monotonic()
            elif choice.address and await self._follow(choice.address):
                alone_since = time.monotonic()
            await asyncio.sleep(SEARCH_SECONDS)

    async def close(self) -> None:
        for client in self._asking.values():
            await client.close()

    def _choose(self, answers: Mapping[str, Answer], alone: float) -> Choice:
        return choose_coordinator(self._who(), self._me.address, answers, alone_for=alone)

    async def _has_rival(self) -> bool:
        """Another acting coordinator that precedes us: two took the role at once."""
        return not self._choose(await self._ask_all(), 0.0).act

    async def _caught_up(self, answers: Mapping[str, Answer]) -> bool:
        """Before the role is taken: hear of the newest epoch from who was in it, for what that one holds
        may stand nowhere else.
        """
        who = choose_witness(answers, known=self._heard())
        if who is None:
            return True
        try:
            self._on_levels(
                await self._asking[who].call("/v1/heard", After(), Levels, timeout=WHO_SECONDS)
            )
        except PeerError as error:
            self._line.say("not_caught_up", address=who, message=str(error))
            return False
        return True

    async def _ask_all(self) -> dict[str, Answer]:
        peers = {a: s for a, s in self._peers().items() if a != self._me.address}
        for gone in set(self._asking) - set(peers):
            await self._asking.pop(gone).close()
        found = await asyncio.gather(*(self._ask(a, s) for a, s in peers.items()))
        return {answer.address: answer for answer in found}

    async def _ask(self, address: str, place: levels.SlotAttempt) -> Answer:
        client = self._asking.setdefault(address, PeerClient(address, self._token))
        who = None
        with contextlib.suppress(PeerError):
            who = await client.call("/v1/who", After(), Who, timeout=WHO_SECONDS)
        return Answer(slot=place.slot, attempt=place.attempt, address=address, who=who)

    async def _follow(self, address: str) -> bool:
        """Until it is lost or lays the role down; whether it ever answered."""
        self.following, heard = address, False
        async with (
            PeerClient(address, self._token) as reporting,
            PeerClient(address, self._token) as hearing,
        ):
            try:
                first = await reporting.call(
                    "/v1/report", self._report(), Accepted, timeout=REPORT_SECONDS
                )
                heard = first.acting
                if heard:
                    await self._exchange(reporting, hearing)
            except PeerError as error:
                self._line.say("coordinator_lost", address=address, message=str(error))
            finally:
                self.following = ""
        return heard

    async def _exchange(self, reporting: PeerClient, hearing: PeerClient) -> None:
        """Both directions until one fails. Raises `PeerError`."""
        tasks = [
            asyncio.create_task(self._keep_reporting(reporting)),
            asyncio.create_task(self._keep_hearing(hearing)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_reporting(self, client: PeerClient) -> None:
        while True:
            self._changed.clear()
            answer = await client.call(
                "/v1/report", self._report(), Accepted, timeout=REPORT_SECONDS
            )
            if not answer.acting:
                raise PeerError(f"{client.address} no longer coordinates", refused=True)
            await happens(self._changed, HEARTBEAT_SECONDS)

    async def _keep_hearing(self, client: PeerClient) -> None:
        version = 0
        while True:
            published = await client.call(
                "/v1/levels",
                After(version=version, reader=self._me.address),
                Levels,
                timeout=LEVELS_SECONDS,
            )
            version = published.version
            self._on_levels(published)
