"""From a commit to verified files that workers can map. Workers never access the store."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep_agent.checkpoint.bounded import all_of
from everstep_agent.checkpoint.manifests import Broken, fetch_manifest
from everstep_agent.checkpoint.memory_tier import MemoryTier, replace_file
from everstep_agent.checkpoint.tiers import StoreTier, Tier, find_problem
from everstep_agent.storage.store import ObjectStore
from everstep_contract import codec
from everstep_contract.log import Commit
from everstep_contract.manifest import Chunk, Manifest

CONCURRENCY = 4
MANIFEST_NAME = "manifest.json"
HELD_NAME = "held.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    commit: Commit
    manifest: Manifest
    manifest_path: Path
    chunks: Path
    """Folder of the chunk files, each named by its digest."""
    held_path: Path
    """Names the chunks that lie in other files (`wire.Start.held`)."""
    sources: Mapping[str, int]
    """Tier → how many chunks came from it."""


async def fetch_checkpoint(
    store: ObjectStore,
    commit: Commit,
    folder: Path,
    *,
    memory: MemoryTier | None = None,
    nearer: Sequence[Tier] = (),
    concurrency: int = CONCURRENCY,
) -> Fetched:
    """Bring one checkpoint into `folder`; what is there already and right is kept, anything else
    removed.

    Args:
        memory: this pod's, with that folder.
        nearer: tiers to ask before the store.

    Raises:
        Broken: the manifest or a chunk is gone or not what was committed.
        StoreError: the store cannot say.
        OSError: `folder` has no room.
    """
    memory = memory or MemoryTier(folder)
    manifest = await fetch_manifest(store, commit)
    needed = choose_chunks(manifest)
    await memory.keep({c.digest for c in needed})
    tiers, turns = (*nearer, StoreTier(store)), asyncio.Semaphore(concurrency)
    sources = Counter(await all_of(_bring(chunk, memory, tiers, turns) for chunk in needed))
    held = memory.locate(c.digest for c in needed)
    where = {name: [str(region.path), region.start] for name, region in held.items()}
    await asyncio.to_thread(replace_file, folder / MANIFEST_NAME, codec.dumps(manifest))
    await asyncio.to_thread(replace_file, folder / HELD_NAME, json.dumps(where).encode())
    return Fetched(
        commit=commit,
        manifest=manifest,
        manifest_path=folder / MANIFEST_NAME,
        chunks=memory.chunks,
        held_path=folder / HELD_NAME,
        sources=dict(sources),
    )


def choose_chunks(manifest: Manifest) -> list[Chunk]:
    """The chunks that hold tensors; the ledger is not downloaded."""
    named = {p.chunk for t in manifest.tensors for p in t.pieces}
    return [c for c in manifest.chunks if c.digest in named]


async def fetch_verified(store: ObjectStore, chunk: Chunk) -> bytes:
    """Raises `Broken` if the chunk is missing or does not match its digest."""
    body = await StoreTier(store).get(chunk)
    if problem := await asyncio.to_thread(find_problem, chunk, body):
        raise Broken(problem)
    assert body is not None
    return body


async def _bring(
    chunk: Chunk, memory: MemoryTier, tiers: Sequence[Tier], turns: asyncio.Semaphore
) -> str:
    """The name of the tier that it came from. Raises as `fetch_checkpoint`."""
    async with turns:
        if await memory.holds(chunk):
            return memory.name
        problem = ""
        for tier in tiers:
            body = await tier.get(chunk)
            problem = await asyncio.to_thread(find_problem, chunk, body)
            if body is not None and not problem:
                await memory.put(chunk, body)
                return tier.name
        raise Broken(problem)
