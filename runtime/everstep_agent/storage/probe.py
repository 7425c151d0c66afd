"""Before a run uses a store: does it exist, may the job use it, is its create-only PUT atomic?

A gateway whose PUT is not atomic checks first, then receives the body, and then writes: so one
writer sends a large body, and another a small one in the meantime.

Measured: MinIO and a folder had one winner in 500 of 500 and 150 of 150 races, versitygw 1.8,
which takes a lock, in 900 of 900. versitygw 1.7 had two winners in 40 to 70 % of such races,
also on a machine with three times as much work as cores; two bodies of 256 KiB sent at once
showed it in only 13 % of the races. Beside six processes that keep two cores busy, 31 to 33 of 40 probes
refused it, otherwise 40 of 40.
"""

import asyncio
import secrets
from collections.abc import Sequence

from everstep_agent.storage.errors import AlreadyExists, NoAtomicCreate, NotFound, StoreError
from everstep_agent.storage.store import ObjectStore

FOLDER = "probe"
"""What a killed probe leaves there, the next coordinator to commit deletes (`Retention`)."""
BODY_BYTES = 1 << 20, 16
LATER_SECONDS = (0.0, 0.001, 0.002, 0.004, 0.008, 0.001, 0.002, 0.004) * 3
"""Delay of the small body in seconds, for each race."""
DOUBTED = LATER_SECONDS * 3
"""Further races, once one has found two writers. One is no proof: if another job of this run deletes the
object between the two writers, both create it.
"""


async def probe(store: ObjectStore) -> list[str]:
    """Returns warnings as text (for example: keys cannot be deleted).

    Raises:
        NoAtomicCreate: two writers created the same object.
        StoreError: any other error that makes it unusable (`BucketMissing`, `Denied`, …), with the
            fix.
    """
    notes: list[str] = []
    if await _find_problem(store, LATER_SECONDS, notes):
        problem = await _find_problem(store, DOUBTED, notes)
        if problem:
            raise NoAtomicCreate(
                f"{store.uri}: {problem}; the run log needs a store whose create-only PUT "
                "(If-None-Match: *) is atomic, as in AWS S3, GCS, Azure, MinIO and a local "
                "folder"
            )
    return notes


async def _find_problem(store: ObjectStore, races: Sequence[float], notes: list[str]) -> str:
    """What the first race proved that proved anything; empty: none did."""
    for later in races:
        key = f"{FOLDER}/{secrets.token_hex(8)}"
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
    """What it proved against the store, or empty."""
    large, small = bodies = [secrets.token_bytes(size) for size in BODY_BYTES]
    created = await asyncio.gather(_create(store, key, large), _create(store, key, small, later))
    try:
        stands = await store.get(key)
    except NotFound:
        return ""  # tidied away by a coordinator that committed just now: it proves nothing
    return judge_race(bodies, created, stands)


async def _create(store: ObjectStore, key: str, body: bytes, later: float = 0.0) -> bool:
    await asyncio.sleep(later)
    try:
        await store.create(key, body)
    except AlreadyExists:
        return False
    return True


def judge_race(bodies: Sequence[bytes], created: Sequence[bool], stands: bytes) -> str:
    """What a race proved against the store, or empty.

    No winner at all means that the winner's answer was lost.
    """
    winners = [body for body, won in zip(bodies, created, strict=True) if won]
    if len(winners) > 1:
        return f"{len(winners)} of {len(bodies)} racing writers all created the same object"
    if stands not in bodies or (winners and stands != winners[0]):
        return "an object was created once and then replaced by a create-only PUT"
    return ""
