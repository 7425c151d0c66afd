"""From a commit to verified files that workers can map. Workers never access the store."""

import asyncio
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from everstep_agent.checkpoint import digest
from everstep_agent.checkpoint.bounded import all_of
from everstep_agent.checkpoint.manifests import Broken, fetch_manifest
from everstep_agent.storage.errors import BadAddress, NotFound, TooLarge
from everstep_agent.storage.store import ObjectStore
from everstep_contract import codec
from everstep_contract.log import Commit
from everstep_contract.manifest import Chunk, Manifest

CONCURRENCY = 4
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    commit: Commit
    manifest: Manifest
    manifest_path: Path
    chunks: Path
    """Folder of the chunk files, each named by its digest."""


async def fetch_checkpoint(
    store: ObjectStore, commit: Commit, folder: Path, *, concurrency: int = CONCURRENCY
) -> Fetched:
    """Bring one checkpoint into `folder`; what is there already and right is kept, anything else
    removed.

    Raises:
        Broken: the manifest or a chunk is gone or not what was committed.
        StoreError: the store cannot say.
        OSError: `folder` has no room.
    """
    manifest = await fetch_manifest(store, commit)
    chunks = folder / "chunks"
    needed = choose_chunks(manifest)
    await asyncio.to_thread(_clear, chunks, {c.digest for c in needed})
    slots = asyncio.Semaphore(concurrency)
    await all_of(_fetch_chunk(store, chunk, chunks, slots) for chunk in needed)
    path = folder / MANIFEST_NAME
    await asyncio.to_thread(_replace, path, codec.dumps(manifest))
    return Fetched(commit=commit, manifest=manifest, manifest_path=path, chunks=chunks)


def choose_chunks(manifest: Manifest) -> list[Chunk]:
    """The chunks that hold tensors; the ledger is not downloaded."""
    named = {p.chunk for t in manifest.tensors for p in t.pieces}
    return [c for c in manifest.chunks if c.digest in named]


async def fetch_verified(store: ObjectStore, chunk: Chunk) -> bytes:
    """Raises `Broken` if the chunk is missing or does not match its digest."""
    try:
        body = await store.get(chunk.key)
    except NotFound:
        raise Broken(f"{chunk.key} is gone") from None
    except (BadAddress, TooLarge) as error:
        raise Broken(str(error)) from None
    if len(body) != chunk.bytes:
        raise Broken(f"{chunk.key} has {len(body)} bytes, not {chunk.bytes}")
    if differs := await asyncio.to_thread(digest.find_difference, body, chunk.digest):
        raise Broken(f"{chunk.key} is corrupt: {differs}")
    return body


async def _fetch_chunk(
    store: ObjectStore, chunk: Chunk, folder: Path, slots: asyncio.Semaphore
) -> None:
    path = folder / chunk.digest
    async with slots:
        if await asyncio.to_thread(_is_there, path, chunk):
            return
        body = await fetch_verified(store, chunk)
        await asyncio.to_thread(_replace, path, body)


def _is_there(path: Path, chunk: Chunk) -> bool:
    if not path.is_file() or path.stat().st_size != chunk.bytes:
        return False
    return digest.matches_file(path, chunk.digest)


def _replace(path: Path, body: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(body)
    os.replace(part, path)


def _clear(folder: Path, keep: Iterable[str]) -> None:
    """Frees memory at once: a worker that still maps a removed file keeps it until it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = set(keep)
    for path in folder.iterdir():
        if path.name not in kept:
            path.unlink(missing_ok=True)
