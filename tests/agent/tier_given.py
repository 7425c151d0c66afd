"""The tiers for the suite in `test_tiers.py`, each with a way to damage what it holds."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from everstep_agent.checkpoint import digest
from everstep_agent.checkpoint.folder_tier import FolderTier
from everstep_agent.checkpoint.keeping import Save
from everstep_agent.checkpoint.memory_tier import Held, MemoryTier
from everstep_agent.checkpoint.tiers import NearTier, StoreTier, Tier
from everstep_agent.peers import http, peer_tier
from everstep_agent.peers.client import Pool
from everstep_agent.peers.incoming import Incoming
from everstep_agent.peers.peer_tier import PeerTier
from everstep_agent.storage import open_store
from everstep_agent.storage.retrying import Patience
from everstep_contract.manifest import Chunk
from everstep_contract.places import Place

TOKEN = "a-token"
BODY = bytes(range(256)) * 40
OWNER = "slot-1"


def a_chunk(body: bytes = BODY) -> Chunk:
    name = digest.compute(body)
    return Chunk(digest=name, key=f"chunks/token001/0000000001/{name}", bytes=len(body))


def a_save(*bodies: bytes, epoch: int = 1, step: int = 3) -> Save:
    return Save(epoch=epoch, step=step, chunks=tuple(a_chunk(body) for body in bodies))


@contextlib.asynccontextmanager
async def serving(memory: MemoryTier, disk: FolderTier | None = None) -> AsyncIterator[str]:
    """Serve the chunks in these tiers as an agent does; yield the address."""
    server = http.Server(TOKEN, peer_tier.build_routes(Incoming(memory, disk)))
    await server.open("127.0.0.1", 0)
    try:
        yield server.address
    finally:
        await server.close()


def place_of(path: Path, body: bytes, start: int = 64) -> Place:
    sums = digest.sum_pieces(body, [(0, len(body))])
    return Place(path=str(path), start=start, bytes=len(body), sums=sums)


def hold_in_the_middle(
    memory: MemoryTier, folder: Path, body: bytes, step: int = 3, epoch: int = 1
) -> Path:
    """Stage a file in which the chunk begins at byte 64, and let `memory` hold it."""
    path = folder / f"{epoch}-{step}.part"
    path.write_bytes(b"\1" * 64 + body + b"\2" * 64)
    chunks = {digest.compute(body): place_of(path, body)}
    memory.hold(Held(epoch=epoch, step=step, chunks=chunks), str(path))
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    tier: Tier
    damage: Callable[[Chunk, bytes], None]
    """Replaces the stored bytes of a chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearCase(Case):
    tier: NearTier


def _damage_file(folder: Path) -> Callable[[Chunk, bytes], None]:
    def damage(chunk: Chunk, body: bytes) -> None:
        (folder / chunk.digest).write_bytes(body)

    return damage


@contextlib.asynccontextmanager
async def memory_case(folder: Path, pool: Pool) -> AsyncIterator[NearCase]:
    memory = MemoryTier(folder)
    yield NearCase(tier=memory, damage=_damage_file(memory.others.folder))


@contextlib.asynccontextmanager
async def disk_case(folder: Path, pool: Pool) -> AsyncIterator[NearCase]:
    disk = FolderTier(folder / "disk/run", "disk", run="a-run", sync=True)
    yield NearCase(tier=disk, damage=_damage_file(disk.folder))


@contextlib.asynccontextmanager
async def peer_case(folder: Path, pool: Pool) -> AsyncIterator[NearCase]:
    memory = MemoryTier(folder)
    async with serving(memory) as address:
        tier = PeerTier(pool, address, OWNER)
        yield NearCase(tier=tier, damage=_damage_file(memory.others.folder))


@contextlib.asynccontextmanager
async def store_case(folder: Path, pool: Pool) -> AsyncIterator[Case]:
    patience = Patience(deadline_s=0.5)
    store = open_store(f"file://{folder}/store", "run", {}, patience=patience)

    def damage(chunk: Chunk, body: bytes) -> None:
        (folder / "store/run" / chunk.key).write_bytes(body)

    yield Case(tier=StoreTier(store), damage=damage)


MakeCase = Callable[[Path, Pool], contextlib.AbstractAsyncContextManager[Case]]
MakeNear = Callable[[Path, Pool], contextlib.AbstractAsyncContextManager[NearCase]]
NEAR: list[MakeNear] = [memory_case, disk_case, peer_case]
ALL: list[MakeCase] = [*NEAR, store_case]
