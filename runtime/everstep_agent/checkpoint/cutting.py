"""A staged file as chunks, with their digests: before any of them is copied or uploaded."""

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
    """Beside the step that follows the save, so it leaves the cores to the ranks.

    Raises:
        BadStaging: the file does not hold what `staged` says.
        OSError: it cannot be read.
    """
    size = os.stat(staged.path).st_size
    plans = await aside.run(plan_chunks, staged.tensors, size, chunk_bytes)
    if not plans:
        return []
    with open(staged.path, "rb") as file:  # noqa: ASYNC230 a file in memory
        # Unmapped with its last user: a thread may be reading after this call was cancelled.
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return await all_of(aside.run(_cut, staged.path, view, plan) for plan in plans)


def _cut(path: str, view: memoryview, plan: ChunkPlan) -> Cut:
    spans = [(box.start - plan.start, box.end - box.start) for box in plan.boxes]
    with view[plan.start : plan.end] as body:
        place = Place(path=path, start=plan.start, bytes=len(body), sums=sum_pieces(body, spans))
        return Cut(plan=plan, digest=compute(body), place=place)
