"""`everstep fetch RUN`: brings a checkpoint's files to this machine and verifies them, for a reader
that has no access to the store.

If the run is in a local folder, its chunks are not copied.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from everstep_agent.checkpoint.bounded import move_all
from everstep_agent.checkpoint.digest import Spans
from everstep_agent.checkpoint.files import NewFile, replace_file
from everstep_agent.checkpoint.landing import download
from everstep_agent.checkpoint.manifests import Broken, fetch_manifest
from everstep_agent.checkpoint.restore import PLACES_NAME, list_spans
from everstep_agent.checkpoint.tiers import StoreTier
from everstep_agent.runlog.run_log import LogDamaged, RunLog
from everstep_agent.storage.address import parse_uri
from everstep_agent.storage.folder import describe_obstacle
from everstep_agent.storage.store import ObjectStore
from everstep_agent.tools.fork import find_commit
from everstep_contract import codec
from everstep_contract.fetched import Fetched, Skipped
from everstep_contract.log import Commit
from everstep_contract.manifest import Chunk, Manifest
from everstep_contract.places import Place, Places

CONCURRENCY = 4
MANIFEST_NAME = "manifest.json"
TRIES = 3
"""How often it begins again because the job retired the checkpoint that was read."""


class NothingToFetch(Exception):
    """The run has no checkpoint that can be read, or lacks what was asked for."""


class _Retired(Exception):
    """The job retired the checkpoint while it was read."""


async def fetch_checkpoint(
    store: ObjectStore, folder: Path, *, step: int | None = None, only: tuple[str, ...] = ()
) -> Fetched:
    """Fetch a checkpoint into `folder`, which is created once there is something to fetch.

    Args:
        step: of the checkpoint; None: the newest one that can be read.
        only: names of the tracked objects to fetch; empty: all of them.

    Raises:
        NothingToFetch: no checkpoint can be read, or it lacks a name in `only`; the message says
            what there is.
        CannotFork: there is no checkpoint of this step.
        Broken: the manifest or a chunk of the checkpoint of `step` is missing or was changed.
        StoreError: the store failed to answer, or the log is damaged (`LogDamaged`).
        OSError: a file cannot be written, for example because there is no room.
    """
    for _ in range(TRIES if step is None else 1):
        with contextlib.suppress(_Retired):
            return await _fetch_newest(store, folder, step, only)
    what = f"the checkpoint of step {step}" if step is not None else "each checkpoint"
    raise NothingToFetch(
        f"{store.uri}: {what} was retired while it was read: pin one (job.save(pin=...)), or raise checkpoint.keep"
    )


async def _fetch_newest(
    store: ObjectStore, folder: Path, step: int | None, only: tuple[str, ...]
) -> Fetched:
    run_log = RunLog(store)
    await run_log.refresh()
    skipped: list[Skipped] = []
    for commit in await _choose(store, run_log, step):
        try:
            return await _fetch(store, commit, folder, only, tuple(skipped))
        except Broken as error:
            await run_log.refresh()
            if run_log.index.is_retired(commit.manifest):
                raise _Retired from None
            if step is not None:
                raise
            skipped.append(Skipped(step=commit.step, why=str(error)))
    why = "; ".join(f"step {s.step}: {s.why}" for s in skipped)
    raise NothingToFetch(f"{store.uri}: no checkpoint can be read: {why}")


async def _choose(store: ObjectStore, run_log: RunLog, step: int | None) -> list[Commit]:
    if step is None or not run_log.entries:
        await _require_whole(run_log)
    if not run_log.entries:
        raise NothingToFetch(
            f"{store.uri}: there is no run; give the address STORE/NAME of a run that a job has begun"
        )
    if step is not None:
        return [await find_commit(run_log, step)]
    found = list(run_log.index.resumable())
    if not found:
        raise NothingToFetch(f"{store.uri}: the run has no checkpoint yet")
    return found


async def _require_whole(run_log: RunLog) -> None:
    """Raises `LogDamaged` if a place of the log is gone: what seems to be the newest checkpoint may be an old one."""
    try:
        await run_log.check_whole()
    except LogDamaged as error:
        known = ", ".join(str(c.step) for c in run_log.index.resumable())
        hint = (
            f"; to read a checkpoint from before that place, name its step: {known}"
            if known
            else ""
        )
        raise LogDamaged(f"{error}{hint}") from None


async def _fetch(
    store: ObjectStore,
    commit: Commit,
    folder: Path,
    only: tuple[str, ...],
    skipped: tuple[Skipped, ...],
) -> Fetched:
    manifest = await fetch_manifest(store, commit)
    _require_objects(manifest, only)
    await asyncio.to_thread(_make, folder)
    wanted = list_spans(manifest, only)
    chunks = [c for c in manifest.chunks if c.digest in wanted]
    places = Places(chunks=await _bring_all(store, chunks, wanted, folder))
    for name, document in ((MANIFEST_NAME, manifest), (PLACES_NAME, places)):
        await asyncio.to_thread(replace_file, folder / name, codec.dumps(document))
    return Fetched(
        run=store.uri,
        epoch=commit.epoch,
        step=commit.step,
        manifest=str(folder / MANIFEST_NAME),
        places=str(folder / PLACES_NAME),
        skipped=skipped,
    )


def _make(folder: Path) -> None:
    """Raises OSError with a message for people."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = describe_obstacle(folder) or f"cannot create the folder: {error.strerror}"
        raise OSError(f"--to {folder}: {why}") from None


def _require_objects(manifest: Manifest, only: tuple[str, ...]) -> None:
    known = (manifest.state or {}).get("objects", {})
    if lacking := [name for name in only if name not in known]:
        raise NothingToFetch(
            f"the checkpoint of step {manifest.step} has no {', '.join(lacking)}; it has "
            f"{', '.join(sorted(known))}"
        )


async def _bring_all(
    store: ObjectStore, chunks: Sequence[Chunk], spans: Mapping[str, Spans], folder: Path
) -> dict[str, Place]:
    """Bring the chunks, by digest."""
    bringing = [partial(_bring, store, chunk, spans[chunk.digest], folder) for chunk in chunks]
    found = await move_all(bringing, CONCURRENCY)
    return {chunk.digest: place for chunk, place in zip(chunks, found, strict=True)}


async def _bring(store: ObjectStore, chunk: Chunk, spans: Spans, folder: Path) -> Place:
    here = _find_file(store.uri, chunk.key)
    path = here or folder / chunk.digest
    create = None if here else partial(NewFile, path)
    try:
        sums = await download(StoreTier(store), chunk, spans, create)
    except OSError as error:  # of a write, which names no file
        raise OSError(error.errno, error.strerror, str(folder)) from None
    return Place(path=str(path), start=0, bytes=chunk.bytes, sums=sums)


def _find_file(uri: str, key: str) -> Path | None:
    """The file of a key; None: the store is not a folder on this machine."""
    address = parse_uri(uri)
    path = Path(address.bucket, key)
    return path if address.scheme == "file" and path.is_file() else None


def describe(found: Fetched) -> str:
    """Describe the result for people."""
    lines = [f"step {s.step} is passed over: {s.why}" for s in found.skipped]
    where = f"{found.manifest} and {found.places} name its parts"
    return "\n".join([*lines, f"step {found.step} of epoch {found.epoch} of {found.run}: {where}"])
