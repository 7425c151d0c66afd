"""Before a run uses a store: does it exist, may the job use it, is its create-only PUT atomic?

A gateway whose PUT is not atomic first checks whether the key exists, then receives the body, and
then writes. So one writer sends a large body, and another sends a small one in the meantime.

Measured: MinIO had one winner in 500 of 500 races, a folder in 150 of 150, and versitygw 1.8, which
takes a lock, in 900 of 900. versitygw 1.7 had two winners in 40 to 70 % of such races, also on a
machine with three times as much work as cores. Two bodies of 256 KiB sent at once showed the fault
in only 13 % of the races. While six processes kept two cores busy, 31 to 33 of 40 probes refused
versitygw 1.7, otherwise 40 of 40.
"""

import asyncio
import contextlib
import re
import secrets
from collections.abc import Sequence

from everstep_agent.storage.errors import (
    AlreadyExists,
    NoAtomicCreate,
    NotFound,
    StoreError,
    Unsupported,
)
from everstep_agent.storage.store import ObjectStore

FOLDER = "probe"
"""The next coordinator that commits deletes what a killed probe has left there (`Retention`)."""
_KEY = re.compile(rf"{FOLDER}/[0-9a-f]{{16}}", re.ASCII)
BODY_BYTES = 1 << 20, 16
LATER_SECONDS = (0.0, 0.001, 0.002, 0.004, 0.008, 0.001, 0.002, 0.004) * 3
"""Delay of the small body in seconds, for each race."""
DOUBTED = LATER_SECONDS * 3
"""Further races, once one race has found two winners. One race is no proof: if another job of this
run deletes the object between the two writes, both writers create it.
"""

_NEEDED = (
    "the run log needs a store whose create-only PUT (If-None-Match: *) is atomic, as in AWS S3, GCS,"
    " Azure, MinIO and a local folder"
)


async def probe(store: ObjectStore) -> list[str]:
    """Test a store. Returns warnings as text (for example: keys cannot be deleted).

    Raises:
        NoAtomicCreate: two writers created the same object, or the store has no create-only PUT.
        StoreError: any other error that makes it unusable (`BucketMissing`, `Denied`, …), with the
            fix.
    """
    notes: list[str] = []
    if await _find_problem(store, LATER_SECONDS, notes):
        problem = await _find_problem(store, DOUBTED, notes)
        if problem:
            raise NoAtomicCreate(f"{store.uri}: {problem}; {_NEEDED}")
    return notes


def _make_key() -> str:
    return f"{FOLDER}/{secrets.token_hex(8)}"


def is_probe(key: str) -> bool:
    """Whether a probe has written this object. In the same folder may be another run, whose name begins with
    this run's name and `/probe/`.
    """
    return _KEY.fullmatch(key) is not None


async def check_writable(store: ObjectStore) -> str:
    """Create a small object, as an entry of the run log is created. Returns its key, for its
    deletion. Raises `StoreError`.
    """
    key = _make_key()
    with contextlib.suppress(AlreadyExists):  # an earlier try created it, and its answer was lost
        await store.create(key, b"writable")
    return key


async def _find_problem(store: ObjectStore, races: Sequence[float], notes: list[str]) -> str:
    """The first problem that a race proved; empty: no race proved one."""
    for later in races:
        key = _make_key()
        problem = await _race(store, key, later)
        try:
            await store.delete(key)
        except StoreError as error:
            if error.transient:
                raise
            notes[:] = [f"old checkpoints will not be deleted: {error}"]
        if problem:
            return problem
    return ""


async def _race(store: ObjectStore, key: str, later: float) -> str:
    """Run one race. Returns the problem that it proved; empty: none."""
    large, small = bodies = [secrets.token_bytes(size) for size in BODY_BYTES]
    writers = _create(store, key, large), _create(store, key, small, later)
    # Both end before an error of one is raised: the other must not write after the probe.
    answers = await asyncio.gather(*writers, return_exceptions=True)
    created = [_raise_if_error(answer) for answer in answers]
    try:
        stands = await store.get(key)
    except NotFound:
        return ""  # deleted by a coordinator that has just committed: the race proves nothing
    return judge_race(bodies, created, stands)


async def _create(store: ObjectStore, key: str, body: bytes, later: float = 0.0) -> bool:
    await asyncio.sleep(later)
    try:
        await store.create(key, body)
    except AlreadyExists:
        return False
    except Unsupported as error:
        raise NoAtomicCreate(f"{error}; {_NEEDED}") from None
    return True


def _raise_if_error(answer: bool | BaseException) -> bool:
    if isinstance(answer, BaseException):
        raise answer
    return answer


def judge_race(bodies: Sequence[bytes], created: Sequence[bool], stands: bytes) -> str:
    """The problem that a race proved; empty: none.

    If there is no winner at all, the winner's answer was lost.
    """
    winners = [body for body, won in zip(bodies, created, strict=True) if won]
    if len(winners) > 1:
        return f"{len(winners)} of {len(bodies)} racing writers all created the same object"
    if stands not in bodies or (winners and stands != winners[0]):
        return "an object was created once and then replaced by a create-only PUT"
    return ""
