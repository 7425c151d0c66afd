"""A staged file as chunks, with their digests: before any of them is copied or uploaded."""

import asyncio
import mmap
import os
from dataclasses import dataclass

from everstep_agent.checkpoint.bounded import all_of
from everstep_agent.checkpoint.chunking import CHUNK_BYTES, ChunkPlan, plan_chunks
from everstep_agent.checkpoint.digest import compute, sum_pieces
from everstep_contract.places import Place
from everstep_contract.wire import Staged

CONCURRENCY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    plan: ChunkPlan
    digest: str
    place: Place


async def cut_file(staged: Staged, chunk_bytes: int = CHUNK_BYTES) -> list[Cut]:
    """At most `CONCURRENCY` chunks are in memory at once.

    Raises:
        BadStaging: the file does not hold what `staged` says.
        OSError: it cannot be read.
    """
    size = os.stat(staged.path).st_size
    plans = await asyncio.to_thread(plan_chunks, staged.tensors, size, chunk_bytes)
    if not plans:
        return []
    turns = asyncio.Semaphore(CONCURRENCY)
    with open(staged.path, "rb") as file:  # noqa: ASYNC230 a file in memory
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return await all_of(_cut(staged.path, view, plan, turns) for plan in plans)
    finally:
        view.close()


async def _cut(path: str, view: mmap.mmap, plan: ChunkPlan, turns: asyncio.Semaphore) -> Cut:
    spans = [(box.start - plan.start, box.end - box.start) for box in plan.boxes]
    async with turns:
        body = await asyncio.to_thread(view.__getitem__, slice(plan.start, plan.end))
        sums = await asyncio.to_thread(sum_pieces, body, spans)
        digest = await asyncio.to_thread(compute, body)
    place = Place(path=path, start=plan.start, bytes=len(body), sums=sums)
    return Cut(plan=plan, digest=digest, place=place)
