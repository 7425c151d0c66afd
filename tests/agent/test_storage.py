"""One suite for every kind of store: memory, a folder, a real S3 server."""

import asyncio
import hashlib
import random
from collections import Counter
from pathlib import Path

import pytest

from everstep_agent.storage import ObjectStore, open_store
from everstep_agent.storage.errors import AlreadyExists, BadAddress, NotFound
from everstep_agent.storage.folder import PIECE_BYTES


async def test_what_was_put_is_read_back(store: ObjectStore) -> None:
    await store.put("chunks/a", b"one")
    await store.put("chunks/a", memoryview(b"two"))
    assert await store.get("chunks/a") == b"two"


async def test_an_empty_object_is_an_object(store: ObjectStore) -> None:
    await store.put("empty", b"")
    assert await store.get("empty") == b""


async def test_a_missing_key_is_not_found_and_named(store: ObjectStore) -> None:
    with pytest.raises(NotFound, match="log/7"):
        await store.get("log/7")
    with pytest.raises(NotFound, match="log/7"):
        await store.stream("log/7", hashlib.sha256)


@pytest.mark.parametrize("count", [0, 1, 3 * PIECE_BYTES + 7])
async def test_an_object_is_read_piece_by_piece(store: ObjectStore, count: int) -> None:
    body = random.Random(count).randbytes(count)
    await store.put("chunks/a", body)
    size, found = await store.stream("chunks/a", hashlib.sha256)
    assert (size, found.hexdigest()) == (count, hashlib.sha256(body).hexdigest())


async def test_create_takes_a_place_once(store: ObjectStore) -> None:
    await store.create("log/0", b"first")
    with pytest.raises(AlreadyExists):
        await store.create("log/0", b"second")
    assert await store.get("log/0") == b"first"


async def test_of_eight_racing_creators_exactly_one_wins(store: ObjectStore) -> None:
    for race in range(25):
        bodies = [f"{race}-{i}".encode() for i in range(8)]
        results = await asyncio.gather(
            *(store.create(f"race/{race}", b) for b in bodies), return_exceptions=True
        )
        assert Counter(type(r) for r in results) == {type(None): 1, AlreadyExists: 7}
        assert await store.get(f"race/{race}") == bodies[results.index(None)]


async def test_list_gives_the_keys_below_a_folder_sorted(store: ObjectStore) -> None:
    for key in ("log/2", "log/1", "logs/3", "a/b/c"):
        await store.put(key, b"x")
    assert await store.list("log") == ["log/1", "log/2"]
    assert await store.list() == ["a/b/c", "log/1", "log/2", "logs/3"]
    assert await store.list("nothing/here") == []
    assert await store.list("log", after="log/1") == ["log/2"]
    assert await store.list("log", after="log/2") == []


async def test_delete_is_done_when_there_is_nothing(store: ObjectStore) -> None:
    await store.put("a", b"x")
    await store.delete("a")
    await store.delete("a")
    with pytest.raises(NotFound):
        await store.get("a")


@pytest.mark.parametrize("key", ["../up", "a/../b", "/abs", "a//b", "", "a/.", "a b", "a?b", "é"])
async def test_a_key_that_could_mean_another_place_is_refused(store: ObjectStore, key: str) -> None:
    for call in (store.put(key, b"x"), store.create(key, b"x"), store.get(key), store.delete(key)):
        with pytest.raises(BadAddress):
            await call


async def test_a_large_object_survives_the_way(store: ObjectStore) -> None:
    body = bytes(range(256)) * 65536
    await store.put("chunks/large", body)
    assert await store.get("chunks/large") == body


async def test_writing_beside_a_delete_that_empties_the_folder_loses_nothing(
    store: ObjectStore,
) -> None:
    async def come_and_go(writer: int) -> None:
        for turn in range(20):
            await store.create(f"a/b/{writer}-{turn}", b"x")
            assert await store.get(f"a/b/{writer}-{turn}") == b"x"
            await store.delete(f"a/b/{writer}-{turn}")

    await asyncio.gather(*(come_and_go(w) for w in range(8)))
    assert await store.list() == []


async def test_a_folder_that_was_emptied_is_gone(tmp_path: Path) -> None:
    folder = open_store(f"file://{tmp_path}/store", "run", {})
    await folder.put("chunks/token/1/digest", b"x")
    await folder.put("log/0", b"x")
    await folder.delete("chunks/token/1/digest")
    assert sorted(p.name for p in (tmp_path / "store" / "run").iterdir()) == [".staging", "log"]
