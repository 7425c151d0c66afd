"""The places where a checkpoint's chunks may be found, and that the nearest one that is right is used."""

import contextlib
import io
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from agent.a_run import ARun
from agent.restored import fetch
from agent.unreliable import UnreliableStore
from everstep_agent import logline
from everstep_agent.agent import count_incarnation
from everstep_agent.checkpoint import digest
from everstep_agent.checkpoint.ledger import Book
from everstep_agent.checkpoint.manifests import Broken
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.checkpoint.restore import choose_chunks
from everstep_agent.checkpoint.tiers import StoreTier, Tier, find_problem
from everstep_agent.peers import http, peer_tier
from everstep_agent.peers.client import Pool
from everstep_agent.peers.messages import ChunkCall
from everstep_agent.peers.peer_tier import PeerTier, choose_order
from everstep_agent.pod.save_queue import Listener, Uploads
from everstep_agent.storage import ObjectStore, open_store
from everstep_contract import codec
from everstep_contract.manifest import Chunk
from everstep_contract.places import Place, Places
from everstep_contract.wire import Staged

TOKEN = "a-token"
BODY = bytes(range(256)) * 40


@pytest.fixture
def bad_day() -> UnreliableStore:
    return UnreliableStore(open_store("memory://", "", {}))


def a_chunk(body: bytes = BODY) -> Chunk:
    name = digest.compute(body)
    return Chunk(digest=name, key=f"chunks/token001/0000000001/{name}", bytes=len(body))


@contextlib.asynccontextmanager
async def serving(memory: MemoryTier) -> AsyncIterator[str]:
    """The address of an agent that serves what it holds."""

    async def answer(body: bytes) -> bytes:
        return await peer_tier.answer_call(memory, codec.loads(ChunkCall, body))

    server = http.Server(TOKEN, {peer_tier.PATH: answer})
    await server.open("127.0.0.1", 0)
    try:
        yield server.address
    finally:
        await server.close()


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    found = Pool(TOKEN)
    yield found
    await found.close()


def place_of(path: Path, body: bytes, start: int = 64) -> Place:
    sums = digest.sum_pieces(body, [(0, len(body))])
    return Place(path=str(path), start=start, bytes=len(body), sums=sums)


async def is_right(memory: MemoryTier, chunk: Chunk) -> bool:
    return not find_problem(chunk, await memory.get(chunk))


def hold_in_the_middle(memory: MemoryTier, folder: Path, body: bytes, step: int = 3) -> Path:
    """A staged file in which the chunk begins at byte 64, held by `memory`."""
    path = folder / f"{step}.part"
    path.write_bytes(b"\1" * 64 + body + b"\2" * 64)
    memory.hold(step, str(path), {digest.compute(body): place_of(path, body)})
    return path


@contextlib.asynccontextmanager
async def fetched_before(folder: Path, pool: Pool) -> AsyncIterator[Tier]:
    memory = MemoryTier(folder)
    await memory.keep({a_chunk().digest})
    await memory.put(a_chunk(), BODY)
    yield memory


@contextlib.asynccontextmanager
async def staged(folder: Path, pool: Pool) -> AsyncIterator[Tier]:
    memory = MemoryTier(folder)
    hold_in_the_middle(memory, folder, BODY)
    yield memory


@contextlib.asynccontextmanager
async def a_peer(folder: Path, pool: Pool) -> AsyncIterator[Tier]:
    memory = MemoryTier(folder)
    hold_in_the_middle(memory, folder, BODY)
    async with serving(MemoryTier(folder / "other")) as other, serving(memory) as address:
        yield PeerTier(pool, ["127.0.0.1:9", other, address])


@contextlib.asynccontextmanager
async def the_store(folder: Path, pool: Pool) -> AsyncIterator[Tier]:
    store = open_store("memory://", "", {})
    await store.put(a_chunk().key, BODY)
    yield StoreTier(store)


TIERS = [fetched_before, staged, a_peer, the_store]


@pytest.mark.parametrize("make", TIERS, ids=[make.__name__ for make in TIERS])
@pytest.mark.parametrize("piece", [1000, 4096, 10**6])
async def test_every_tier_gives_what_it_holds_and_nothing_else(
    tmp_path: Path,
    pool: Pool,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path, Pool], contextlib.AbstractAsyncContextManager[Tier]],
    piece: int,
) -> None:
    monkeypatch.setattr(peer_tier, "PIECE_BYTES", piece)
    async with make(tmp_path, pool) as tier:
        body = await tier.get(a_chunk())
        assert body == BODY
        assert find_problem(a_chunk(), body) == ""
        assert await tier.get(a_chunk(b"another")) is None
        assert tier.name


async def test_a_staged_file_is_held_until_another_save_is_staged(tmp_path: Path) -> None:
    memory = MemoryTier(tmp_path)
    path = hold_in_the_middle(memory, tmp_path, BODY, step=3)
    memory.release_others(3)
    assert await is_right(memory, a_chunk())
    memory.release_others(4)
    assert not path.exists()
    assert not await is_right(memory, a_chunk())
    assert memory.find(a_chunk().digest) is None
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240


async def test_a_copy_that_has_no_room_gets_that_of_the_last_save(tmp_path: Path) -> None:
    memory = MemoryTier(tmp_path / "restore")
    path = hold_in_the_middle(memory, tmp_path, BODY, step=3)
    uploads = Uploads(
        open_store("memory://", "", {}),
        "token001-rest",
        Book(),
        memory,
        Listener(on_part=lambda part: None, on_failed=lambda staged, rank: None),
        logline.Log(io.StringIO()),
    )
    try:
        uploads.give_up(Staged(epoch=1, step=6, path="", tensors=(), problem="full"), 0, "full")
    finally:
        await uploads.close()
    assert not path.exists()


async def test_the_next_agent_of_a_pod_adopts_what_was_held(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    path = hold_in_the_middle(MemoryTier(tmp_path / "restore"), staging, BODY)
    (staging / "waits-for-the-store.part").write_bytes(b"1")
    (staging / "slot-1-1").write_bytes(b"2")
    assert count_incarnation(str(tmp_path)) == 1
    assert set(staging.iterdir()) == {path, path.with_name(path.name + ".held")}
    adopted = MemoryTier(tmp_path / "restore", staging)
    assert adopted.find(a_chunk().digest) == place_of(path, BODY)
    assert await adopted.get(a_chunk()) == BODY


@pytest.mark.parametrize(
    "note",
    [b"", b"[]", b'{"step": 1}', b'{"step": "x", "chunks": {}}', b'{"step": 1, "chunks": 3}'],
)
async def test_a_note_that_cannot_be_read_is_passed_over(tmp_path: Path, note: bytes) -> None:
    path = hold_in_the_middle(MemoryTier(tmp_path), tmp_path, BODY)
    path.with_name(path.name + ".held").write_bytes(note)
    assert not await is_right(MemoryTier(tmp_path, tmp_path), a_chunk())


async def test_a_staged_file_that_was_damaged_is_not_adopted(tmp_path: Path) -> None:
    path = hold_in_the_middle(MemoryTier(tmp_path), tmp_path, BODY)
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"\0\0\0")
    assert not await is_right(MemoryTier(tmp_path, tmp_path), a_chunk())


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "", "a/b"])
async def test_a_peer_reads_nothing_but_chunks(tmp_path: Path, name: str) -> None:
    memory = MemoryTier(tmp_path / "memory")
    await memory.keep(set())
    (tmp_path / "memory/secret").write_bytes(b"secret")
    assert await peer_tier.answer_call(memory, ChunkCall(digest=name, start=0, count=10)) == b""


@pytest.mark.parametrize(("start", "count"), [(-1, 5), (0, 0), (0, -4), (10**9, 5)])
async def test_a_span_outside_of_the_chunk_is_empty(tmp_path: Path, start: int, count: int) -> None:
    memory = MemoryTier(tmp_path)
    hold_in_the_middle(memory, tmp_path, BODY)
    call = ChunkCall(digest=a_chunk().digest, start=start, count=count)
    assert await peer_tier.answer_call(memory, call) == b""


def test_the_pods_behind_this_one_are_asked_first() -> None:
    assert choose_order(["a", "b", "c", "d"], "c") == ["d", "a", "b"]
    assert choose_order(["a", "b"], "z") == ["a", "b"]


# --- a whole checkpoint ---------------------------------------------------------------------------


async def a_checkpoint(folder: Path, store: ObjectStore) -> tuple[ARun, list[Chunk]]:
    run = ARun(store, folder / "staged")
    await run.claim(1)
    await run.save(2)
    fetched = await fetch(store, run.log.commits[-1], folder / "first")
    return run, choose_chunks(fetched.manifest)


async def test_what_a_peer_holds_is_not_read_from_the_store(
    bad_day: UnreliableStore, tmp_path: Path, pool: Pool
) -> None:
    run, chunks = await a_checkpoint(tmp_path, bad_day)
    async with serving(MemoryTier(tmp_path / "first")) as address:
        bad_day.calls.clear()
        found = await fetch(
            bad_day, run.log.commits[-1], tmp_path / "second", nearer=[PeerTier(pool, [address])]
        )
    assert found.sources == {"peer": len(chunks)}
    assert bad_day.calls == [("get", run.log.commits[-1].manifest)]


async def test_a_chunk_that_is_damaged_at_a_peer_is_read_from_the_store(
    bad_day: UnreliableStore, tmp_path: Path, pool: Pool
) -> None:
    run, chunks = await a_checkpoint(tmp_path, bad_day)
    (tmp_path / "first/chunks" / chunks[0].digest).write_bytes(b"\0" * chunks[0].bytes)
    async with serving(MemoryTier(tmp_path / "first")) as address:
        found = await fetch(
            bad_day, run.log.commits[-1], tmp_path / "second", nearer=[PeerTier(pool, [address])]
        )
    assert found.sources == {"peer": len(chunks) - 1, "store": 1}
    body = (tmp_path / "second/chunks" / chunks[0].digest).read_bytes()
    assert find_problem(chunks[0], body) == ""


async def test_a_chunk_that_the_store_has_lost_comes_from_a_peer(
    bad_day: UnreliableStore, tmp_path: Path, pool: Pool
) -> None:
    run, chunks = await a_checkpoint(tmp_path, bad_day)
    await bad_day.delete(chunks[0].key)
    with pytest.raises(Broken, match="is gone"):
        await fetch(bad_day, run.log.commits[-1], tmp_path / "alone")
    async with serving(MemoryTier(tmp_path / "first")) as address:
        found = await fetch(
            bad_day, run.log.commits[-1], tmp_path / "second", nearer=[PeerTier(pool, [address])]
        )
    assert found.sources == {"peer": len(chunks)}


async def test_what_is_staged_here_is_used_where_it_lies(
    bad_day: UnreliableStore, tmp_path: Path
) -> None:
    run, chunks = await a_checkpoint(tmp_path, bad_day)
    memory = MemoryTier(tmp_path / "second")
    body = (tmp_path / "first/chunks" / chunks[0].digest).read_bytes()
    path = hold_in_the_middle(memory, tmp_path, body)
    found = await fetch(bad_day, run.log.commits[-1], tmp_path / "second", memory=memory)
    assert found.sources["memory"] == 1
    assert not (tmp_path / "second/chunks" / chunks[0].digest).exists()
    assert found.places[chunks[0].digest].path == str(path)
    assert codec.loads(Places, found.places_path.read_bytes()).chunks == found.places
