"""What an agent answers over HTTP. Bodies are documents of `messages` and `levels`."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

from everstep_agent import http
from everstep_agent.checkpoint.parts import Part
from everstep_agent.desk import Desk
from everstep_agent.messages import Accepted, After, AgentReport, Levels, StoreCall, Who
from everstep_agent.peers import PeerError, Pool
from everstep_agent.relay import answer_call
from everstep_agent.standing import Standing
from everstep_contract import codec, levels

RELAY_SECONDS = 1.5


class Api:
    """`following` gives the coordinator's address, empty if there is none or it is ourselves."""

    def __init__(
        self,
        *,
        run: str,
        standing: Standing,
        pool: Pool,
        who: Callable[[], Who],
        following: Callable[[], str],
        apply: Callable[[Levels], None],
    ) -> None:
        self._run = run
        self._standing = standing
        self._pool = pool
        self._who = who
        self._following = following
        self._apply = apply

    def routes(self) -> dict[str, http.Handler]:
        return {
            "/v1/wanted": self._wanted,
            "/v1/relayed-wanted": self._relayed_wanted,
            "/v1/who": self._post_who,
            "/v1/heard": self._heard,
            "/v1/report": self._report,
            "/v1/levels": self._levels,
            "/v1/part": self._part,
            "/v1/store": self._store,
        }

    async def _wanted(self, body: bytes) -> bytes:
        """From the operator, to any agent."""
        wanted = codec.loads(levels.Wanted, body)
        self._take(wanted)
        return codec.dumps(await self._seen(wanted))

    async def _relayed_wanted(self, body: bytes) -> bytes:
        """From an agent that was asked and follows us; never passed on again."""
        self._take(codec.loads(levels.Wanted, body))
        return codec.dumps(self._own_seen())

    def _take(self, wanted: levels.Wanted) -> None:
        standing = self._standing
        if not standing.take_wanted(wanted):
            return
        if standing.coordinator is not None:
            standing.coordinator.desk.want(wanted)
        elif standing.published is not None:
            self._apply(replace(standing.published, wanted=wanted))

    async def _seen(self, wanted: levels.Wanted) -> levels.Seen:
        target = self._following()
        if self._standing.coordinator is None and target:
            with contextlib.suppress(PeerError):
                return await self._pool.call(
                    target, "/v1/relayed-wanted", wanted, levels.Seen, timeout=RELAY_SECONDS
                )
        return self._own_seen()

    def _own_seen(self) -> levels.Seen:
        standing = self._standing
        if standing.coordinator is not None:
            return standing.coordinator.desk.serve_seen()
        if standing.published is not None:
            return standing.published.seen
        return levels.Seen(run=self._run)

    async def _post_who(self, body: bytes) -> bytes:
        return codec.dumps(self._who())

    async def _heard(self, body: bytes) -> bytes:
        """For a newcomer that is about to coordinate: where the job stood when its coordinator was lost."""
        if self._standing.published is None:
            raise codec.DecodeError("this agent has heard of no coordinator yet")
        return codec.dumps(self._standing.published)

    async def _report(self, body: bytes) -> bytes:
        found = codec.loads(AgentReport, body)
        coordinator = self._standing.coordinator
        if coordinator is not None:
            coordinator.desk.take(found)
        return codec.dumps(Accepted(acting=coordinator is not None))

    async def _levels(self, body: bytes) -> bytes:
        after = codec.loads(After, body)
        return codec.dumps(await self._desk().board.wait_newer(after.version, after.reader))

    async def _part(self, body: bytes) -> bytes:
        part = await asyncio.to_thread(codec.loads, Part, body)
        coordinator = self._standing.coordinator
        if coordinator is not None:
            coordinator.desk.add_part(part)
        return codec.dumps(Accepted(acting=coordinator is not None))

    async def _store(self, body: bytes) -> bytes:
        return codec.dumps(await answer_call(self._desk().group, codec.loads(StoreCall, body)))

    def _desk(self) -> Desk:
        if self._standing.coordinator is None:
            raise codec.DecodeError("this agent does not coordinate; ask /v1/who")
        return self._standing.coordinator.desk
