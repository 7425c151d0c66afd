"""Chunks that are downloaded piece by piece."""

import io
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from everstep_agent.checkpoint import digest
from everstep_agent.checkpoint.digest import PieceSums, sum_pieces
from everstep_agent.checkpoint.files import NewFile
from everstep_agent.checkpoint.landing import download
from everstep_agent.checkpoint.manifests import Broken
from everstep_agent.checkpoint.tiers import StoreTier
from everstep_agent.storage import ObjectStore, open_store
from everstep_agent.storage.errors import Unreachable
from everstep_agent.storage.folder import PIECE_BYTES
from everstep_agent.storage.retrying import Retrying
from everstep_agent.storage.store import S, Sink
from everstep_contract.manifest import Chunk

BODY = random.Random(1).randbytes(2 * PIECE_BYTES + 11)
SPANS = ((0, 5), (0, 40), (3, PIECE_BYTES), (PIECE_BYTES, PIECE_BYTES), (len(BODY) - 1, 1), (7, 0))
CHUNK = Chunk(digest=digest.compute(BODY), key="chunks/a", bytes=len(BODY))


@pytest.mark.parametrize("parts", [1, 7, 1000])
def test_pieces_are_summed_as_in_one_body(parts: int) -> None:
    chance = random.Random(parts)
    cuts = sorted(chance.randrange(len(BODY)) for _ in range(parts - 1))
    found = PieceSums(SPANS)
    for first, last in zip([0, *cuts], [*cuts, len(BODY)], strict=True):
        found.update(BODY[first:last])
    assert found.sums == sum_pieces(BODY, SPANS)


async def test_a_chunk_is_written_and_its_pieces_are_summed(
    store: ObjectStore, tmp_path: Path
) -> None:
    await store.put(CHUNK.key, BODY)
    path = tmp_path / "chunk"
    sums = await download(StoreTier(store), CHUNK, SPANS, partial(NewFile, path))
    assert path.read_bytes() == BODY
    assert sums == await download(StoreTier(store), CHUNK, SPANS, None) == sum_pieces(BODY, SPANS)


@pytest.mark.parametrize("stored", [None, BODY[:-1], BODY[:-1] + b"?"])
async def test_a_chunk_that_is_gone_or_damaged_leaves_no_file(
    tmp_path: Path, stored: bytes | None
) -> None:
    store = open_store("memory://", "", {})
    if stored is not None:
        await store.put(CHUNK.key, stored)
    with pytest.raises(Broken, match=r"chunks/a (is gone|has .* bytes, not|is corrupt)"):
        await download(StoreTier(store), CHUNK, SPANS, partial(NewFile, tmp_path / "chunk"))
    assert os.listdir(tmp_path) == []


async def test_a_full_memory_is_told_from_a_store_that_does_not_answer(tmp_path: Path) -> None:
    store = open_store("memory://", "", {})
    await store.put(CHUNK.key, BODY)
    with pytest.raises(OSError, match="No space left"):
        await download(StoreTier(store), CHUNK, SPANS, partial(_create_full, tmp_path))
    assert os.listdir(tmp_path) == []


def _create_full(folder: Path) -> NewFile:
    new = NewFile(folder / "chunk")
    new.file.close()
    new.file = io.BufferedWriter(io.FileIO("/dev/full", "w"))
    return new


class BreaksOff:
    """A store whose first answer breaks off. Its reader's thread writes once more, when the next try has begun."""

    uri = "memory://"
    _broken: Sink | None = None

    async def stream(
        self, key: str, begin: Callable[[], S], *, urgent: bool = False
    ) -> tuple[int, S]:
        if self._broken is None:
            self._broken = begin()
            self._broken.update(BODY[: PIECE_BYTES + 1])
            raise Unreachable("broken off")
        sink = begin()
        with pytest.raises(ValueError, match="closed"):
            self._broken.update(b"late")
        sink.update(BODY)
        return len(BODY), sink


async def test_a_chunk_that_is_read_again_is_written_anew(tmp_path: Path) -> None:
    store = StoreTier(Retrying(BreaksOff()))  # type: ignore[arg-type]
    await download(store, CHUNK, SPANS, partial(NewFile, tmp_path / "chunk"))
    assert (tmp_path / "chunk").read_bytes() == BODY
    assert os.listdir(tmp_path) == ["chunk"]
