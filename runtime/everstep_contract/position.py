"""A worker's position in shared memory: the agent can read it while the worker runs, and after its
death.

The position is in one page of a file that agent and worker map. The worker writes each `Position`
next to the previous one and then sets, in one word, which of the two is the newest: if a worker is
suspended or killed while it writes, the previous one is intact. A checksum detects a position that
was overwritten while it was read, even if the processor reorders stores.

Further words record when the worker last made progress, how long it may take until it makes
progress again, and how many sums of its reduction it has launched and completed. These words cost
the worker less than a position. The agent writes one word, the armed boundary. The worker also owns
a lock in the page, so that its end is known at once. All times are CLOCK_MONOTONIC of the host.
"""

import enum
import mmap
import os
import struct
import zlib
from dataclasses import dataclass, field

from everstep_contract import owner_lock
from everstep_contract.sums import Sums

SIZE = mmap.PAGESIZE
_BODY = struct.Struct("=7q10d")
_SUM = struct.Struct("=I")
_PLACES = (256, 512)
_LOCK = 1024
_COUNT, _MARK, _LIMIT, _JOINED, _COMPLETE, _LOOKED, _GROUP_LIMIT, _ARMED = 0, 1, 2, 3, 4, 5, 6, 8
"""Indices of 8-byte words, which are stored and loaded atomically."""
_MOST_SUMS = 0xFFFF
_ROUNDS = 0x7FFFFFFF
_TRIES = 100
SECONDS = ("step", "data", "wait", "stall", "startup", "evaluate", "pause", "restore", "idle")
_NONE = (0.0,) * len(SECONDS)


class Phase(enum.IntEnum):
    """The phase of the step that follows `applied`."""

    COMPUTING = 0
    REDUCED = 1
    """This rank holds the vector: every member holds the reduced gradient."""
    APPLYING = 2
    APPLIED = 3
    """The user's code after the inner loop has ended; `applied` already includes this step."""


class Where(enum.IntEnum):
    """What the worker is doing, as a number for the shared page; names as in `levels.Scope`."""

    STARTUP = 0
    STEP = 1
    EVALUATE = 2
    PAUSE = 3


class Stretch(enum.IntEnum):
    """What the worker does until its next mark."""

    OTHER = 0
    """Start-up, an evaluation, a pause, a save: no limit is learnt."""
    COMPUTE = 1
    FETCH = 2
    """It fetches the data of a micro-batch."""
    WAIT = 3
    """It waits for other ranks or for the agent."""
    SUM = 4
    """It waits for other ranks in a sum of a step, and checks now and then whether any data moves.
    """


@dataclass(frozen=True, slots=True)
class Mark:
    """The worker's last sign of progress."""

    at: float
    """time.monotonic(); 0: there was none."""
    kind: Stretch
    limit: float
    """The limit for this kind, in seconds, that the worker has learnt; 0: none. A wait has the
    limit of computing.
    """
    looked: float = 0.0
    """The last time at which a worker that waits for a sum checked, and nothing had moved since the
    mark.
    """
    group_limit: float = 0.0
    """How many seconds may pass without any data moving while all ranks wait for a sum; 0: the
    worker has learnt no limit.
    """


@dataclass(slots=True, kw_only=True)
class Position:
    epoch: int = 0
    applied: int = 0
    """Number of the last step applied; the worker is in step applied + 1 or at the boundary before it."""
    reduction: int = 0
    phase: Phase = Phase.APPLIED
    scope: Where = Where.STARTUP
    waiting: bool = False
    """Whether the worker is in a collective or waits for the agent. This is also true while another
    rank hangs.
    """
    limit_ms: int = 0
    """Time limit of the scope, 0: the default of the scope."""
    since: float = 0.0
    """When the scope or step started, time.monotonic()."""
    seconds: dict[str, float] = field(default_factory=dict)


class PositionPage:
    """The mapped page; the agent creates the file, the worker only opens it."""

    def __init__(self, path: str, *, create: bool = False) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:  # allocate now: with a full tmpfs a later write would end with SIGBUS
                os.posix_fallocate(fd, 0, SIZE)
            self._page = mmap.mmap(fd, SIZE)
        finally:
            os.close(fd)
        if create:
            owner_lock.create(self._page, _LOCK)
        self._words = memoryview(self._page).cast("q")

    def own(self) -> None:
        """Make the calling thread the owner of the page until it ends (`wait_owner_ended`). Call
        this once.
        """
        owner_lock.own(self._page, _LOCK)

    def detach(self) -> None:
        """From now on, write to memory that nobody reads: the worker's script has forked this process, which has
        inherited the page.
        """
        self._page = mmap.mmap(-1, SIZE)
        self._words = memoryview(self._page).cast("q")

    def write(self, position: Position) -> None:
        count = self._words[_COUNT] + 1
        body = _BODY.pack(
            position.epoch, position.applied, position.reduction, position.phase, position.scope,
            position.waiting, position.limit_ms, position.since,
            *map(position.seconds.get, SECONDS, _NONE),
        )  # fmt: skip
        at = _PLACES[count % 2]
        self._page[at : at + _BODY.size + _SUM.size] = body + _SUM.pack(zlib.crc32(body))
        self._words[_COUNT] = count

    def mark(self, at: float, kind: Stretch, limit: float) -> None:
        """Record progress: a stretch of this kind begins. Each word is written separately, the
        limit first.
        """
        self._words[_LIMIT] = int(limit * 1000)
        self._words[_MARK] = int(at * 1e6) << 3 | kind

    def note_look(self, at: float) -> None:
        """Record that nothing has moved since the mark."""
        self._words[_LOOKED] = int(at * 1e6)

    def read_mark(self) -> Mark:
        """The worker's newest mark. On a damaged page, what is no stretch is `OTHER`."""
        word, limit, looked = self._words[_MARK], self._words[_LIMIT], self._words[_LOOKED]
        known = word & 7 in Stretch.__members__.values()
        stretch = Stretch(word & 7) if known else Stretch.OTHER
        return Mark((word >> 3) / 1e6, stretch, limit / 1000, looked / 1e6, self.group_limit)

    @property
    def group_limit(self) -> float:
        return self._words[_GROUP_LIMIT] / 1000

    @group_limit.setter
    def group_limit(self, seconds: float) -> None:
        self._words[_GROUP_LIMIT] = int(seconds * 1000)

    def join_sums(self, round: int, buckets: int, joined: int) -> None:
        """Record how many of the buckets and the vector are launched. `round`: as in `SumMarks`."""
        first, last = min(buckets, _MOST_SUMS), min(joined, _MOST_SUMS)
        self._words[_JOINED] = (round & _ROUNDS) << 32 | first << 16 | last

    def complete_sums(self, round: int, complete: int) -> None:
        """Record how many of the buckets are complete. Another thread may call this, because only
        this method writes the word.
        """
        self._words[_COMPLETE] = (round & _ROUNDS) << 32 | min(complete, _MOST_SUMS)

    def read_sums(self, position: Position) -> Sums | None:
        """The sums of the reduction under way; None: there is none. `position`: as read from this
        page.
        """
        launched, over = self._words[_JOINED], self._words[_COMPLETE]
        buckets, joined = launched >> 16 & _MOST_SUMS, launched & _MOST_SUMS
        if not launched:
            return None
        complete = over & _MOST_SUMS if over >> 32 == launched >> 32 else 0
        return Sums(
            step=position.applied + 1, reduction=position.reduction,
            buckets=buckets, joined=joined, complete=complete,
        )  # fmt: skip

    def leave_sums(self) -> None:
        """Record that no reduction is under way."""
        self._words[_JOINED] = 0

    def read(self) -> Position:
        """The newest position, consistent; all zero if the worker has written none.

        Raises:
            ValueError: the page is damaged.
        """
        for _ in range(_TRIES):
            count = self._words[_COUNT]
            at = _PLACES[count % 2]
            body = self._page[at : at + _BODY.size]
            (checksum,) = _SUM.unpack_from(self._page, at + _BODY.size)
            if count == 0 or zlib.crc32(body) == checksum:
                return _parse(body)
        raise ValueError(f"position {count} of the shared page does not match its checksum")

    @property
    def armed(self) -> int:
        """Boundary (a step number) at which the worker must ask its agent; 0: none."""
        return self._words[_ARMED]

    @armed.setter
    def armed(self, step: int) -> None:
        self._words[_ARMED] = step

    def close(self) -> None:
        self._words.release()
        self._page.close()


def wait_owner_ended(path: str) -> bool:
    """Block until the thread that owns the page has ended. False: no thread owns it.

    Raises:
        OSError: there is no such page.
    """
    return owner_lock.wait_owner_ended(path, _LOCK)


def _parse(body: bytes) -> Position:
    epoch, applied, reduction, phase, scope, waiting, limit_ms, since, *seconds = _BODY.unpack(body)
    return Position(
        epoch=epoch, applied=applied, reduction=reduction, phase=Phase(phase), scope=Where(scope),
        waiting=bool(waiting), limit_ms=limit_ms, since=since,
        seconds=dict(zip(SECONDS, seconds, strict=True)),
    )  # fmt: skip
