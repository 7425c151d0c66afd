"""One suite for every tier: memory, disk, peer and store. All but the store delete chunks that nobody needs."""

import asyncio
import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent import tier_given
from agent.tier_given import (
    BODY,
    OWNER,
    TOKEN,
    Case,
    MakeCase,
    MakeNear,
    a_chunk,
    a_save,
    serving,
)
from everstep_agent.checkpoint.folder_tier import FolderTier
from everstep_agent.checkpoint.keeping import Resumed
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.checkpoint.tiers import NearTier, Tier, find_problem
from everstep_agent.peers import incoming, peer_tier
from everstep_agent.peers.client import Pool
from everstep_agent.peers.peer_tier import PeerTier
from everstep_agent.storage.errors import StoreError

OTHER = b"another" * 900

every_tier = pytest.mark.parametrize("make", tier_given.ALL, ids=lambda make: make.__name__)
every_near_tier = pytest.mark.parametrize("make", tier_given.NEAR, ids=lambda make: make.__name__)


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    found = Pool(TOKEN)
    yield found
    await found.close()


async def fill(tier: Tier, *bodies: bytes, step: int = 3) -> None:
    if hasattr(tier, "keep"):
        await tier.keep(OWNER, [a_save(*bodies, step=step)], 0)
    for body in bodies:
        await tier.put(a_chunk(body), body)


# --- every tier -----------------------------------------------------------------------------------


@every_tier
@pytest.mark.parametrize("piece", [1000, 4096, 10**6])
async def test_a_tier_gives_what_was_put_and_nothing_else(
    tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch, make: MakeCase, piece: int
) -> None:
    monkeypatch.setattr(incoming, "PIECE_BYTES", piece)
    monkeypatch.setattr(peer_tier, "SENT_BYTES", piece)
    async with make(tmp_path, pool) as case:
        await fill(case.tier, BODY)
        assert await case.tier.get(a_chunk()) == BODY
        assert await case.tier.get(a_chunk(OTHER)) is None
        assert case.tier.name


@every_tier
@pytest.mark.parametrize("body", [BODY[:-1], BODY[:100], b"", b"x" + BODY[1:], BODY + b"x"])
async def test_what_was_damaged_or_cut_off_is_found_out(
    tmp_path: Path, pool: Pool, make: MakeCase, body: bytes
) -> None:
    async with make(tmp_path, pool) as case:
        await fill(case.tier, BODY)
        case.damage(a_chunk(), body)
        found = await case.tier.get(a_chunk())
        assert find_problem(a_chunk(), found) or found == BODY
        assert find_problem(a_chunk(), found) or len(body) > len(BODY)
        await case.tier.put(a_chunk(), BODY)
        assert find_problem(a_chunk(), await case.tier.get(a_chunk())) == ""


@every_tier
async def test_several_may_put_the_same_chunk_at_once(
    tmp_path: Path, pool: Pool, make: MakeCase
) -> None:
    async with make(tmp_path, pool) as case:
        await fill(case.tier, OTHER, BODY)
        done = asyncio.Event()

        async def read() -> int:
            count = 0
            while not done.is_set():
                assert await case.tier.get(a_chunk()) == BODY
                assert await case.tier.get(a_chunk(OTHER)) == OTHER
                count += 1
            return count

        reading = asyncio.create_task(read())
        for _ in range(5):
            await asyncio.gather(*(put_again(case, body) for body in (BODY, OTHER, BODY)))
        done.set()
        assert await reading > 0


async def put_again(case: Case, body: bytes) -> None:
    """Put a chunk; a peer refuses it while another piece of the same owner arrives."""
    with contextlib.suppress(BlockingIOError):
        await case.tier.put(a_chunk(body), body)


@every_tier
async def test_a_tier_that_cannot_be_written_says_so(
    tmp_path: Path, pool: Pool, make: MakeCase
) -> None:
    async with make(tmp_path, pool) as case:
        for name in ("chunks", "disk", "store"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
            (tmp_path / name).write_bytes(b"a file in the folder's place")
        with pytest.raises((OSError, StoreError)):
            await fill(case.tier, BODY)
        assert await case.tier.get(a_chunk()) is None


@pytest.mark.parametrize("trouble", ["full", "read-only"])
@every_tier
def test_a_tier_without_room_refuses_and_keeps_what_it_has(
    tmp_path: Path, make: MakeCase, trouble: str
) -> None:
    """Uses a tmpfs of 1 MiB in a separate mount namespace."""
    script = f'mount -t tmpfs -o size=1m none "{tmp_path}" && exec "$@"'
    apart = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine lets nobody mount a tmpfs in a namespace of his own")
    command = [sys.executable, str(Path(__file__).with_name("tier_without_room.py"))]
    found = subprocess.run(
        [*apart, *command, make.__name__, trouble, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[1]), *sys.path)),
        },
    )
    assert found.returncode == 0, found.stderr
    assert "refused and kept" in found.stdout


# --- tiers that forget ----------------------------------------------------------------------------


@every_near_tier
async def test_what_nobody_needs_is_deleted(tmp_path: Path, pool: Pool, make: MakeNear) -> None:
    async with make(tmp_path, pool) as case:
        tier = case.tier
        await fill(tier, BODY, OTHER)
        assert set(await tier.list()) == {a_chunk().digest, a_chunk(OTHER).digest}
        await tier.keep("slot-2", [a_save(OTHER, step=4)], 0)
        await tier.drop(OWNER)
        assert set(await tier.list()) == {a_chunk(OTHER).digest}
        await tier.drop("slot-2")
        assert set(await tier.list()) == set()
        assert await tier.get(a_chunk()) is None


@every_near_tier
async def test_what_is_older_than_the_newest_commit_is_needed_by_nobody(
    tmp_path: Path, pool: Pool, make: MakeNear
) -> None:
    async with make(tmp_path, pool) as case:
        tier = case.tier
        await fill(tier, BODY, step=3)
        await tier.keep("slot-2", [a_save(OTHER, step=6)], 3)
        await tier.put(a_chunk(OTHER), OTHER)
        assert len(await tier.list()) == 2, "step 3 is committed, 6 not yet"
        await tier.keep("slot-2", [], 6)
        assert set(await tier.list()) == {a_chunk(OTHER).digest}


@every_near_tier
async def test_a_chunk_that_two_saves_share_stays_as_long_as_one_needs_it(
    tmp_path: Path, pool: Pool, make: MakeNear
) -> None:
    async with make(tmp_path, pool) as case:
        await fill(case.tier, BODY, OTHER, step=3)
        await case.tier.keep(OWNER, [a_save(BODY, step=6)], 6)
        assert set(await case.tier.list()) == {a_chunk().digest}


@every_near_tier
async def test_a_tier_that_was_never_used_holds_nothing(
    tmp_path: Path, pool: Pool, make: MakeNear
) -> None:
    async with make(tmp_path, pool) as case:
        assert set(await case.tier.list()) == set()
        assert await case.tier.get(a_chunk()) is None


@every_near_tier
@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "", "a/b", ".lock"])
async def test_no_name_leads_out_of_a_tier(
    tmp_path: Path, pool: Pool, make: MakeNear, name: str
) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    async with make(tmp_path, pool) as case:
        await fill(case.tier, BODY)
        wrong = tier_given.Chunk(digest=name, key="chunks/x", bytes=6)
        assert await case.tier.get(wrong) is None
        with pytest.raises(OSError, match=r"is not the name of|is corrupt"):
            await case.tier.put(wrong, b"secret")
        with pytest.raises(OSError, match="is not the name of"):
            await case.tier.keep(name, [a_save(BODY)], 0)


async def test_chunks_of_another_epochs_chain_are_deleted(tmp_path: Path, pool: Pool) -> None:
    """Epoch 8 continues from step 3 of epoch 1. Later saves, and saves of other epochs at that step, are void."""
    new = b"of epoch 8 itself"
    void = b"of a gang that was cut off"
    for make in (tier_given.memory_case, tier_given.disk_case):
        async with make(tmp_path, pool) as case:
            await fill(case.tier, BODY, step=3)
            await case.tier.keep("slot-2", [a_save(OTHER, step=6)], 0)
            await case.tier.keep("slot-3", [a_save(void, epoch=7, step=3)], 0)
            await case.tier.keep("slot-4", [a_save(new, epoch=8, step=6)], 0)
            for body in (OTHER, void, new):
                await case.tier.put(a_chunk(body), body)
            assert hasattr(case.tier, "rewind")
            await case.tier.rewind(Resumed(epoch=1, step=3, by=8))
            assert set(await case.tier.list()) == {a_chunk().digest, a_chunk(new).digest}


# --- a peer's own troubles ------------------------------------------------------------------------


async def test_a_peer_refuses_a_chunk_that_was_damaged_on_its_way(
    tmp_path: Path, pool: Pool
) -> None:
    async with tier_given.peer_case(tmp_path, pool) as case:
        await case.tier.keep(OWNER, [a_save(BODY)], 0)
        with pytest.raises(OSError, match="is corrupt"):
            await case.tier.put(a_chunk(), b"x" + BODY[1:])
        assert set(await case.tier.list()) == set()


async def test_a_peer_keeps_room_for_itself(
    tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "RESERVE_BYTES", 2**60)
    async with tier_given.peer_case(tmp_path, pool) as case:
        with pytest.raises(OSError, match="No space left"):
            await fill(case.tier, BODY)


async def test_a_peer_that_is_gone_says_nothing_and_is_not_asked_twice(pool: Pool) -> None:
    gone = PeerTier(pool, "127.0.0.1:9", OWNER)
    assert await gone.get(a_chunk()) is None
    with pytest.raises(ConnectionError):
        await gone.put(a_chunk(), BODY)
    with pytest.raises(ConnectionError):
        await gone.list()


@pytest.mark.parametrize(
    ("seconds", "kept"), [(incoming.GIVEN_UP_SECONDS - 1, True), (incoming.GIVEN_UP_SECONDS, False)]
)
async def test_what_arrived_of_a_chunk_whose_sender_is_gone_takes_no_memory_for_ever(
    tmp_path: Path, seconds: float, kept: bool
) -> None:
    now, half = [0.0], len(BODY) // 2
    memory = MemoryTier(tmp_path)
    await memory.keep("slot-1", [a_save(BODY)], 0)
    held = incoming.Incoming(memory, clock=lambda: now[0])

    async def send(owner: str, body: bytes, start: int) -> int:
        call = incoming.PieceCall(owner=owner, chunk=a_chunk(), start=start)
        answer = await held.take(b"".join(incoming.pack(call, memoryview(body))))
        return incoming.codec.loads(incoming.TierAnswer, answer).error

    assert await send("slot-1", BODY[:half], 0) == 0
    now[0] += seconds
    assert await send("slot-2", BODY[:half], 0) == 0
    assert (await send("slot-1", BODY[half:], half) == 0) == kept


@pytest.mark.parametrize("hangs", [True, False], ids=["hangs", "fails"])
async def test_a_disk_that_does_not_answer_hides_nothing_that_is_in_memory(
    tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """Only the memory may have a save that a loss needs."""
    monkeypatch.setattr(incoming, "LIST_SECONDS", 0.1)
    monkeypatch.setattr("everstep_agent.checkpoint.folder_tier.ANSWER_SECONDS", 0.1)
    repaired = threading.Event()

    def answer(*_: object) -> None:
        if hangs:
            repaired.wait(30)
        raise OSError(errno.EIO, "Input/output error")

    disk = FolderTier(tmp_path / "disk", "disk", sync=True)
    monkeypatch.setattr(disk, "list_now", answer)
    monkeypatch.setattr(disk, "read", answer)
    memory = MemoryTier(tmp_path)
    tier_given.hold_in_the_middle(memory, tmp_path, BODY)
    try:
        async with serving(memory, disk) as address:
            tier = PeerTier(pool, address)
            assert set(await tier.list()) == {a_chunk().digest}
            assert await tier.get(a_chunk()) == BODY
            assert await tier.get(a_chunk(OTHER)) is None
            assert await tier.get(a_chunk()) == BODY, "it is asked again"
    finally:
        repaired.set()


@pytest.mark.parametrize(("start", "count"), [(-1, 5), (0, 0), (0, -4), (10**9, 5)])
async def test_a_span_outside_of_the_chunk_is_empty(tmp_path: Path, start: int, count: int) -> None:
    memory = MemoryTier(tmp_path)
    tier_given.hold_in_the_middle(memory, tmp_path, BODY)
    call = incoming.ChunkCall(digest=a_chunk().digest, start=start, count=count)
    assert await incoming.Incoming(memory).read(incoming.codec.dumps(call)) == b""


async def test_two_pods_of_a_node_share_a_folder_on_its_disk(tmp_path: Path, pool: Pool) -> None:
    async with (
        tier_given.disk_case(tmp_path, pool) as one,
        tier_given.disk_case(tmp_path, pool) as two,
    ):
        pair: list[NearTier] = [one.tier, two.tier]
        bodies = [b"a" * 900, b"b" * 900]

        async def save(at: int, step: int) -> None:
            body = bodies[at] + step.to_bytes(2, "little")
            await pair[at].keep(f"slot-{at}", [a_save(body, step=step)], step)
            await pair[at].put(a_chunk(body), body)
            assert await pair[at].get(a_chunk(body)) == body

        for step in range(1, 15):
            await asyncio.gather(save(0, step), save(1, step))
        await one.tier.keep("slot-0", [], 14)
        last = {a_chunk(body + (14).to_bytes(2, "little")).digest for body in bodies}
        assert set(await one.tier.list()) == last


async def test_a_peer_serves_what_it_staged_itself(tmp_path: Path, pool: Pool) -> None:
    memory = MemoryTier(tmp_path)
    tier_given.hold_in_the_middle(memory, tmp_path, BODY)
    async with serving(memory) as address:
        tier = PeerTier(pool, address)
        assert set(await tier.list()) == {a_chunk().digest}
        assert await tier.get(a_chunk()) == BODY
