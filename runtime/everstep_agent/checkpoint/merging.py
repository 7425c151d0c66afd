"""Merges many small ledger chunks into one, so that a manifest does not grow with every save.

The new chunk holds the same entries, under a key of the claim that writes it. Only older manifests
still name the old chunks, which are retired with these manifests.
"""

import asyncio
from dataclasses import replace

from everstep_agent.checkpoint import ledger as ledgers
from everstep_agent.checkpoint.bounded import all_of
from everstep_agent.checkpoint.chunk_upload import chunk_key
from everstep_agent.checkpoint.digest import compute
from everstep_agent.checkpoint.restore import fetch_verified
from everstep_agent.storage.store import ObjectStore
from everstep_contract import ledger
from everstep_contract.manifest import Chunk, Manifest

CONCURRENCY = 4


async def merge_ledger(store: ObjectStore, parent: Manifest, *, token: str, step: int) -> Manifest:
    """The parent for the manifest of `step`. If it has many small ledger chunks, the newest of them
    are merged into one.

    Raises:
        Broken: one of them is gone or changed.
        codec.DecodeError: one of them is not a ledger.
        StoreError: the store cannot be read or written.
    """
    chunks = {c.digest: c for c in parent.chunks}
    chosen = ledgers.choose_merge(parent.ledger, {d: c.bytes for d, c in chunks.items()})
    if not chosen:
        return parent
    slots = asyncio.Semaphore(CONCURRENCY)

    async def read(chunk: Chunk) -> list[ledger.LedgerEntry]:
        async with slots:
            raw = await fetch_verified(store, chunk)
        return await asyncio.to_thread(ledger.decode_lines, raw)

    lines = dict(zip(chosen, await all_of(read(chunks[d]) for d in chosen), strict=True))
    entries = ledgers.choose_entries([s for s in parent.ledger if s.chunk in lines], lines)
    body = await asyncio.to_thread(ledger.encode_lines, entries)
    digest = await asyncio.to_thread(compute, body)
    merged = Chunk(digest=digest, key=chunk_key(token, step, digest), bytes=len(body))
    await store.put(merged.key, body)
    segments = ledgers.build_segments(entries, digest)
    return replace(
        parent,
        ledger=ledgers.replace_segments(parent.ledger, lines, segments),
        chunks=(*(c for c in parent.chunks if c.digest not in lines), merged),
    )
