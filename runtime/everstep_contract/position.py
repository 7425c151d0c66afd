"""A worker's position in shared memory: readable by the agent while the worker runs, and after its death.

One page in a file that agent and worker map. The worker writes `Position` (guarded by a sequence number, odd while it
writes); the agent writes one word, the armed boundary. All times are CLOCK_MONOTONIC of the host.
"""

import enum
import mmap
import os
import struct
from dataclasses import dataclass, field

SIZE = mmap.PAGESIZE
_BODY = struct.Struct("<qqqqqqqd8d")
_SEQ = struct.Struct("<Q")
_ARMED_AT = 2048
_ARMED = struct.Struct("<q")
SECONDS = ("step", "wait", "stall", "startup", "evaluate", "pause", "restore", "idle")


class Phase(enum.IntEnum):
    """Of the step that follows `applied`."""

    COMPUTING = 0
    REDUCED = 1
    """This rank holds the vector: every member holds the reduced gradient."""
    APPLYING = 2
    APPLIED = 3
    """The user's code after the inner loop has ended; `applied` already counts this step."""


class Where(enum.IntEnum):
    """What the worker is busy with, numbered for the shared page; names as `levels.Scope`."""

    STARTUP = 0
    STEP = 1
    EVALUATE = 2
    PAUSE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    epoch: int = 0
    applied: int = 0
    """Number of the last step applied; the worker is in step applied + 1 or at the boundary before it."""
    reduction: int = 0
    phase: Phase = Phase.APPLIED
    scope: Where = Where.STARTUP
    waiting: bool = False
    """In a collective or waiting for the agent: a hang of somebody else shows like this."""
    limit_ms: int = 0
    """Time limit of the scope, 0: the default of the scope."""
    since: float = 0.0
    """When the scope or step began, time.monotonic()."""
    seconds: dict[str, float] = field(default_factory=dict)


class PositionPage:
    """The mapped page; the worker's side creates nothing, the agent's side creates the file."""

    def __init__(self, path: str, *, create: bool = False) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:  # room is taken now: a full tmpfs would end whoever writes with SIGBUS
                os.posix_fallocate(fd, 0, SIZE)
            self._page = mmap.mmap(fd, SIZE)
        finally:
            os.close(fd)
        self._seq = 0

    def write(self, position: Position) -> None:
        self._seq += 1
        _SEQ.pack_into(self._page, 0, self._seq * 2 - 1)
        _BODY.pack_into(
            self._page, 8,
            position.epoch, position.applied, position.reduction, position.phase, position.scope,
            position.waiting, position.limit_ms, position.since,
            *(position.seconds.get(name, 0.0) for name in SECONDS),
        )  # fmt: skip
        _SEQ.pack_into(self._page, 0, self._seq * 2)

    def read(self) -> Position:
        """The newest whole position; of a worker that was killed while it wrote, what stands there."""
        for _ in range(100):
            (before,) = _SEQ.unpack_from(self._page, 0)
            body = _BODY.unpack_from(self._page, 8)
            (after,) = _SEQ.unpack_from(self._page, 0)
            if before == after and before % 2 == 0:
                break
        epoch, applied, reduction, phase, scope, waiting, limit_ms, since, *seconds = body
        return Position(
            epoch=epoch, applied=applied, reduction=reduction, phase=Phase(phase), scope=Where(scope),
            waiting=bool(waiting), limit_ms=limit_ms, since=since,
            seconds=dict(zip(SECONDS, seconds, strict=True)),
        )  # fmt: skip

    @property
    def armed(self) -> int:
        """Boundary (a step number) at which the worker must ask its agent; 0: none."""
        value: int = _ARMED.unpack_from(self._page, _ARMED_AT)[0]
        return value

    @armed.setter
    def armed(self, step: int) -> None:
        _ARMED.pack_into(self._page, _ARMED_AT, step)

    def close(self) -> None:
        self._page.close()
