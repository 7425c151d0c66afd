"""The run log as one writer sees it: `log/<n>.json`, each place written once by a create-only PUT,
never deleted.

An entry goes to the next place after everything that was read, so a writer always knows all entries
before its own. LIST is not used to find entries: its answer may be stale and hide an entry, which a
GET of the next place cannot.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from everstep_agent.runlog import rules as runlog_rules
from everstep_agent.runlog.log_index import LogIndex
from everstep_agent.storage.errors import AlreadyExists, Conflict, Denied, NotFound, StoreError
from everstep_agent.storage.store import DAMAGED_READS, ObjectStore
from everstep_contract import codec, log
from everstep_contract.log import Claim, Commit, Done, Entry

READ_AHEAD = 32


class LogDamaged(StoreError):
    """A place of the log holds something that is not an entry: nothing after it can be trusted."""

    kind = "LogDamaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    place: int
    answer_lost: bool = False
    """The entry was found at its place: an earlier try had succeeded, and its answer was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Nothing was written: `entries` were read instead; decide again."""

    entries: tuple[Entry, ...]
    reason: str
    message: str


class RunLog:
    """One per process; calls may overlap. Every method may raise a `StoreError`.

    After `Unreachable` from `append` the entry may or may not be in the log. Call `refresh` and
    look (entries are equal by value and carry their writer's random token), or append the same
    entry again: both are safe.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.index = LogIndex()
        """What was read so far."""
        self._lock = asyncio.Lock()

    @property
    def entries(self) -> Sequence[Entry]:
        """All entries read so far: entry n is at place n."""
        return self.index.entries

    @property
    def claims(self) -> Sequence[Claim]:
        return self.index.claims

    @property
    def commits(self) -> Sequence[Commit]:
        return self.index.commits

    @property
    def done(self) -> Done | None:
        return self.index.done

    @property
    def newest_claim(self) -> Claim | None:
        return self.index.newest_claim

    async def refresh(self) -> tuple[Entry, ...]:
        """Reads and returns the entries that were appended since the last call."""
        async with self._lock:
            return await self._read_on()

    async def append(self, entry: Entry, *, after: int | None = None) -> Appended | Lost:
        """Write `entry` at the next free place, if it is still allowed there.

        Args:
            after: how many entries were known when this one was decided on. If more have been read
                since, by whichever task of this process, nothing is tried: decide again. Give it
                with every claim.

        `Lost` when somebody else took the place, or when the newest claim is not the entry's own
        (then nothing was tried). A claim must have been judged by `runlog_rules.may_claim` on
        `claims` as they stand now.
        """
        async with self._lock:
            place = self.index.place_of(entry)
            if place is not None:
                return Appended(place=place, answer_lost=True)
            if after is not None and len(self.index) != after:
                newer = tuple(self.index.entries[after:])
                message = f"{len(newer)} entries were read since this one was decided on"
                return Lost(entries=newer, reason="ReadMore", message=message)
            verdict = runlog_rules.may_append(entry, self.newest_claim)
            if not verdict.ok:
                return Lost(entries=(), reason=verdict.reason, message=verdict.message)
            await self._check_kept()
            return await self._take(len(self.index), entry)

    async def _take(self, place: int, entry: Entry) -> Appended | Lost:
        try:
            await self._store.create(log.key(place), log.encode(entry))
        except AlreadyExists:
            read = await self._read_on()
            # Only an entry at the very place that was tried can be our own, with its answer lost.
            if read and read[0] == entry:
                return Appended(place=place, answer_lost=True)
            if not read:
                raise Conflict(
                    f"cannot write {self._store.uri}/{log.key(place)}: the store says that it exists, but does not"
                    " return it; if this persists, look what is there"
                ) from None
            message = f"place {place} of the log was taken by another writer"
            return Lost(entries=read, reason="PlaceTaken", message=message)
        self.index.add(entry)
        return Appended(place=place)

    async def check_whole(self) -> None:
        """Verify that the log ends where it was read to. A listing may be out of date, but every
        place that it shows was written. So a place beyond the end means that one between was
        deleted, and that one must not be written again.

        Raises:
            LogDamaged: names the place that is gone.
        """
        async with self._lock:
            with contextlib.suppress(Denied):  # the permission to list is not required
                last = log.key(len(self.index) - 1) if self.index.entries else ""
                listed = await self._store.list("log", after=last)
                await self._read_on()
                beyond = [n for n in map(_place, listed) if n >= len(self.index)]
                if beyond:
                    raise self._gone(len(self.index), f"place {max(beyond)} stands")

    async def check_kept(self) -> None:
        """Verifies that the entry read last still exists: a writer must not continue in a bucket
        that was emptied. Raises `LogDamaged` if it is missing.
        """
        async with self._lock:
            await self._check_kept()

    async def _check_kept(self) -> None:
        last = len(self.index) - 1
        if last >= 0 and await self._get(last) is None:
            raise self._gone(last, "it was read before")

    def _gone(self, place: int, why: str) -> LogDamaged:
        fork = (
            "" if self.index.entries else "; if an everstep fork to here was interrupted, repeat it"
        )
        return LogDamaged(
            f"{self._store.uri}/{log.key(place)} is gone, though {why}; nothing of a log may be"
            f" deleted: restore it, or start under another checkpoint.run{fork}"
        )

    async def _read_on(self) -> tuple[Entry, ...]:
        """GETs the next places until one is free, with more at once the longer the log goes on."""
        start, width = len(self.index), 1
        while True:
            first = len(self.index)
            found = await asyncio.gather(*(self._get(first + i) for i in range(width)))
            for entry in found:
                if entry is None:
                    return tuple(self.index.entries[start:])
                self.index.add(entry)
            width = min(READ_AHEAD, width * 2)

    async def _get(self, place: int) -> Entry | None:
        problem = ""
        for _ in range(DAMAGED_READS):
            try:
                return log.decode(await self._store.get(log.key(place)))
            except NotFound:
                return None
            except codec.DecodeError as error:
                problem = str(error)
        where = f"{self._store.uri}/{log.key(place)}"
        raise LogDamaged(f"{where}: {problem}; start under another checkpoint.run")


def _place(key: str) -> int:
    """The place in a listed key; -1 for a key that is no place of the log, such as a copy beside it."""
    try:
        place = log.place_of(key)
    except ValueError:
        return -1
    return place if log.key(place) == key else -1
