"""The operator's connection to one agent: posts `Wanted`, receives `Seen`."""

import asyncio
import time
from dataclasses import dataclass

from everstep_contract import codec, names
from everstep_contract.http.asking import Answer, Connection
from everstep_contract.levels import Seen

ASK_SECONDS = 3.0
"""Limit of one request, connecting included. Then the agent counts as silent, and is asked again in
its next turn.
"""


class Unanswered(Exception):
    """The agent cannot be reached, or does not follow our protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    seen: Seen
    age: float
    """Seconds since its figures were fresh, according to the sender."""
    proven: bool
    """The sender has the job's token."""


class AgentConnection:
    """The connection to one agent, with what the next round needs to know about the agent."""

    def __init__(self, address: str, token: str) -> None:
        self._connection = Connection(address, token)
        self.answered = False
        """An answer came from this address; as far as is known, an agent of the job gave it."""
        self.unproven = False
        """The newest answer had no valid proof."""
        self.revision = 0
        """Revision of the newest document that it has accepted."""
        self.since = time.monotonic()
        self.failure = ""

    async def ask(self, body: bytes, limit: int) -> Said:
        """Raises `Unanswered` after `ASK_SECONDS` at the latest, also for an answer of more than `limit` bytes."""
        try:
            async with asyncio.timeout(ASK_SECONDS):
                found = await self._connection.ask("POST", names.WANTED_PATH, body, limit)
        except (OSError, ValueError) as error:
            self.unproven = False
            what = str(error) or f"no answer within {ASK_SECONDS:g} s"
            raise Unanswered(f"{type(error).__name__}: {what}") from error
        self.unproven = not found.proven
        try:
            return self._read(found)
        except codec.DecodeError as error:
            raise Unanswered(str(error)) from error

    def _read(self, found: Answer) -> Said:
        if found.status == 401 and not found.proven:
            raise Unanswered("it refuses the job's token: was the operator's key changed?")
        if found.status != 200:
            raise Unanswered(f"status {found.status}: {found.body[:300].decode(errors='replace')}")
        seen = codec.loads(Seen, found.body)
        return Said(seen=seen, age=_to_age(seen), proven=found.proven)

    def close(self) -> None:
        self._connection.close()


def _to_age(seen: Seen) -> float:
    try:
        return seen.age_ms / 1000
    except OverflowError:
        raise codec.DecodeError(f"Seen.age_ms: {seen.age_ms!r:.80} is too large") from None
