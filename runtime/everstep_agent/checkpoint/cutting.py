"""Divides a staged file into chunks and computes their digests, before a chunk is copied or
uploaded.
"""

import mmap
import os
from dataclasses import dataclass

from everstep_agent import aside
from everstep_agent.checkpoint.bounded import all_of
from everstep_agent.checkpoint.chunking import CHUNK_BYTES, ChunkPlan, plan_chunks
from everstep_agent.checkpoint.digest import compute, sum_pieces
from everstep_contract.places import Place
from everstep_contract.wire import Staged


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    plan: ChunkPlan
    digest: str
    place: Place


async def cut_file(staged: Staged, chunk_bytes: int = CHUNK_BYTES) -> list[Cut]:
    """The chunks of a staged file. Runs in parallel with the next step, so it lets the ranks go
    first on the cores.

    Raises:
        BadStaging: the file does not match its description in `staged`.
        OSError: it cannot be read.
    """
    size = os.stat(staged.path).st_size
    plans = await aside.run(plan_chunks, staged.tensors, size, chunk_bytes)
    if not plans:
        return []
    view = map_file(staged.path)
    return await all_of(aside.run(_cut, staged.path, view, plan) for plan in plans)


def map_file(path: str) -> memoryview:
    """Map a staged file. It is in memory, so nothing is copied.

    It stays mapped until its last user is done: a thread may still read it after the call that it
    works for was cancelled. Raises OSError.
    """
    with open(path, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _cut(path: str, view: memoryview, plan: ChunkPlan) -> Cut:
    spans = [(box.start - plan.start, box.end - box.start) for box in plan.boxes]
    with view[plan.start : plan.end] as body:
        place = Place(path=path, start=plan.start, bytes=len(body), sums=sum_pieces(body, spans))
        return Cut(plan=plan, digest=compute(body), place=place)
