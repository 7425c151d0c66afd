"""The run log as one writer sees it: `log/<n>.json`, each place written once by a create-only PUT,
never deleted.

Appending takes the next place after everything that was read, so a writer always knows all that
stands before its entry. LIST is never asked: a stale answer could hide an entry, a GET of the next
place cannot.
"""

import asyncio
import contextlib
from dataclasses import dataclass

from everstep_agent import runlog_rules
from everstep_agent.storage.errors import AlreadyExists, Denied, NotFound, StoreError
from everstep_agent.storage.store import ObjectStore
from everstep_contract import codec, log
from everstep_contract.log import Claim, Commit, Done, Entry

READ_AHEAD = 32


class LogDamaged(StoreError):
    """A place of the log holds something that is not an entry: nothing after it can be believed."""

    kind = "LogDamaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    place: int
    answer_lost: bool = False
    """The entry was found in place: an earlier try had succeeded without our hearing of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Nothing was written: `entries` were read instead; decide anew."""

    entries: tuple[Entry, ...]
    reason: str
    message: str


class RunLog:
    """One per process; calls may overlap. Every method may raise a `StoreError`.

    After `Unreachable` from `append` the entry may or may not stand. Call `refresh` and look
    (entries are equal by value and carry their writer's random token), or append the same entry
    again: both are safe.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._entries: list[Entry] = []
        self._lock = asyncio.Lock()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries read so far, in order: entry n stands at place n."""
        return tuple(self._entries)

    @property
    def claims(self) -> list[Claim]:
        return [e for e in self._entries if isinstance(e, Claim)]

    @property
    def commits(self) -> list[Commit]:
        return [e for e in self._entries if isinstance(e, Commit)]

    @property
    def newest_claim(self) -> Claim | None:
        return runlog_rules.newest_claim(self._entries)

    @property
    def done(self) -> Done | None:
        """The run's end; None again once a later claim goes on from it (a raised `until`)."""
        claim = self.newest_claim
        token = claim.token if claim else None
        return next((e for e in self._entries if isinstance(e, Done) and e.token == token), None)

    async def refresh(self) -> tuple[Entry, ...]:
        """Read what was appended since; returns just that."""
        async with self._lock:
            return await self._read_on()

    async def append(self, entry: Entry, *, after: int | None = None) -> Appended | Lost:
        """Write `entry` at the next free place, if it is still allowed there.

        Args:
            after: how many entries were known when this one was decided on. If more have been read
                since, by whichever task of this process, nothing is tried: decide anew. Give it
                with every claim.

        `Lost` when somebody else took the place, or when the newest claim is not the entry's own
        (then nothing was tried). A claim must have been judged by `runlog_rules.may_claim` on
        `claims` as they stand now.
        """
        async with self._lock:
            if entry in self._entries:
                return Appended(place=self._entries.index(entry), answer_lost=True)
            if after is not None and len(self._entries) != after:
                newer = tuple(self._entries[after:])
                message = f"{len(newer)} entries were read since this one was decided on"
                return Lost(entries=newer, reason="ReadMore", message=message)
            verdict = runlog_rules.may_append(entry, self.newest_claim)
            if not verdict.ok:
                return Lost(entries=(), reason=verdict.reason, message=verdict.message)
            await self._check_kept()
            return await self._take(len(self._entries), entry)

    async def _take(self, place: int, entry: Entry) -> Appended | Lost:
        try:
            await self._store.create(log.key(place), log.encode(entry))
        except AlreadyExists:
            read = await self._read_on()
            # Only what stands at the very place that we tried can be our own lost answer.
            if read and read[0] == entry:
                return Appended(place=place, answer_lost=True)
            message = f"place {place} of the log was taken by another writer"
            return Lost(entries=read, reason="PlaceTaken", message=message)
        self._entries.append(entry)
        return Appended(place=place)

    async def check_whole(self) -> None:
        """Whether the log ends where it was read to. A listing may lag, but what it shows has stood:
        a place beyond the end means that one between was deleted, and is not to be written again.

        Raises:
            LogDamaged: names the place that is gone.
        """
        async with self._lock:
            with contextlib.suppress(Denied):  # the right to list is not needed
                listed = await self._store.list("log")
                await self._read_on()
                beyond = [n for n in map(_place, listed) if n >= len(self._entries)]
                if beyond:
                    raise self._gone(len(self._entries), f"place {max(beyond)} stands")

    async def check_kept(self) -> None:
        """Whether what was read last still stands: a writer must not go on in a bucket that was
        emptied. Raises `LogDamaged` if it is gone.
        """
        async with self._lock:
            await self._check_kept()

    async def _check_kept(self) -> None:
        last = len(self._entries) - 1
        if last >= 0 and await self._get(last) is None:
            raise self._gone(last, "it was read before")

    def _gone(self, place: int, why: str) -> LogDamaged:
        return LogDamaged(
            f"{self._store.uri}/{log.key(place)} is gone, though {why}; nothing of a log may be"
            " deleted: restore it, or start under another checkpoint.run"
        )

    async def _read_on(self) -> tuple[Entry, ...]:
        """GET the next places, more at once the longer the log goes on, until one is free."""
        start, width = len(self._entries), 1
        while True:
            first = len(self._entries)
            found = await asyncio.gather(*(self._get(first + i) for i in range(width)))
            for entry in found:
                if entry is None:
                    return tuple(self._entries[start:])
                self._entries.append(entry)
            width = min(READ_AHEAD, width * 2)

    async def _get(self, place: int) -> Entry | None:
        try:
            raw = await self._store.get(log.key(place))
        except NotFound:
            return None
        try:
            return log.decode(raw)
        except codec.DecodeError as error:
            where = f"{self._store.uri}/{log.key(place)}"
            raise LogDamaged(f"{where}: {error}; start under another checkpoint.run") from None


def _place(key: str) -> int:
    """Of a listed key; -1 for what is no place of the log."""
    try:
        return log.place_of(key)
    except ValueError:
        return -1
