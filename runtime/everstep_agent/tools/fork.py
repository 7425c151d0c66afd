"""Starts another run from an older checkpoint, and lists the checkpoints.

A run log is never rewritten and no commit becomes void, so "back to step N" is a second run. Its
log starts with the claims that led to the commit of step N, and with that commit. The objects that
the commit needs are copied. The next claim comes from a job with another UID, as after any former
job. The first run is only read.

The log is written last, and its first entry after all others: until then the new run does not exist,
and an interrupted fork can be resumed. A job that found the claims without the commit would begin at
step 0.
"""

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from everstep_agent.checkpoint.bounded import move_all
from everstep_agent.checkpoint.manifests import Broken, fetch_manifest
from everstep_agent.checkpoint.pin_rules import find_pinned
from everstep_agent.checkpoint.restore import fetch_verified
from everstep_agent.runlog.log_index import LogIndex
from everstep_agent.runlog.run_log import LogDamaged, RunLog
from everstep_agent.storage.errors import AlreadyExists, Denied, NotFound, StoreError
from everstep_agent.storage.store import ObjectStore
from everstep_contract import log
from everstep_contract.levels import Pinned
from everstep_contract.log import Claim, Commit, Entry
from everstep_contract.manifest import Chunk

CONCURRENCY = 4


class CannotFork(Exception):
    """There is no such run or checkpoint, or the new run's address is not empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    step: int
    epoch: int
    bytes: int
    manifest: str
    cause: str
    """Why its epoch was started."""
    pins: tuple[str, ...] = ()
    """The names under which it is pinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    run: str
    checkpoints: tuple[Listed, ...]
    """Those that can be resumed from, newest first."""
    retired: int
    done: bool
    job: str
    """namespace/name of the job that claimed the run last."""
    pins: tuple[Pinned, ...] = ()
    """All pins that were not given up, ordered by name, including those of checkpoints that the run
    does not continue.
    """
    problem: str = ""
    """Why this list ends too early, and may contain deleted checkpoints: a place of the log is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    run: str
    step: int
    epoch: int
    bytes: int


async def list_checkpoints(store: ObjectStore) -> Catalog:
    """List the checkpoints from the run log alone. Raises `CannotFork`, `StoreError`."""
    run_log = await _open_run(store)
    pins = run_log.index.pins
    causes = {c.epoch: c.cause for c in run_log.claims}
    listed = tuple(
        Listed(
            step=c.step,
            epoch=c.epoch,
            bytes=c.bytes,
            manifest=c.manifest,
            cause=causes.get(c.epoch, ""),
            pins=tuple(sorted(n for n in c.pins if n in pins)),
        )
        for c in run_log.index.resumable()
    )
    newest = run_log.newest_claim
    return Catalog(
        run=store.uri,
        checkpoints=listed,
        retired=run_log.index.retired_count,
        done=run_log.done is not None,
        job=newest.job if newest else "",
        pins=tuple(filter(None, (find_pinned(n, run_log.index) for n in sorted(pins)))),
        problem=await _find_problem(run_log),
    )


async def _find_problem(run_log: RunLog) -> str:
    try:
        await run_log.check_whole()
    except LogDamaged as error:
        return str(error)
    return ""


async def _open_run(store: ObjectStore) -> RunLog:
    """Raises `CannotFork`: nothing was written at this address, perhaps because it is that of a store."""
    run_log = RunLog(store)
    await run_log.refresh()
    if not run_log.entries:
        await run_log.check_whole()
        raise CannotFork(
            f"{store.uri}: there is no run; give the address STORE/NAME of a run that a job has begun"
        )
    return run_log


async def fork_run(store: ObjectStore, target: ObjectStore, step: int) -> Forked:
    """Copy the checkpoint of `step` to `target` and begin a run log there.

    Raises:
        CannotFork: there is no such run or checkpoint, another run is at `target`, or the job retired
            the checkpoint meanwhile.
        Broken: the manifest or a chunk is missing or was changed.
        StoreError: a store failed to answer.
    """
    run_log = await _open_run(store)
    commit = await find_commit(run_log, step)
    entries = build_log(run_log.index, commit)
    await _require_free(target, entries)
    try:
        size = await _copy_all(store, target, commit)
    except (Broken, NotFound):
        await run_log.refresh()
        if run_log.index.is_retired(commit.manifest):
            raise CannotFork(
                f"{store.uri}: the job retired the checkpoint of step {step} while it was copied: pin one"
                " (job.save(pin=...)), or raise checkpoint.keep"
            ) from None
        raise
    await _require_free(target, entries)  # a job may have begun there while the chunks were copied
    for place in reversed(range(len(entries))):
        await _write(target, place, entries[place])
    return Forked(run=target.uri, step=commit.step, epoch=commit.epoch, bytes=size)


async def _require_free(target: ObjectStore, entries: Sequence[Entry]) -> None:
    """Raises `CannotFork`: `target` holds anything but this fork."""
    other = RunLog(target)
    await other.refresh()
    if list(other.entries) != entries[: len(other.entries)]:
        raise CannotFork(f"{target.uri} holds another run: choose another address")
    ours = {log.key(place): log.encode(entry) for place, entry in enumerate(entries)}
    read = len(other.entries)
    with contextlib.suppress(Denied):  # the permission to list is not required
        for key in await target.list("log", after=log.key(read - 1) if read else ""):
            if key not in ours or await target.get(key) != ours[key]:
                raise CannotFork(
                    f"{target.uri} holds what an interrupted fork of another step has left: repeat that fork,"
                    " or choose another address"
                )


async def require_checkpoint(store: ObjectStore, step: int) -> None:
    """Raises `CannotFork`: there is no such run or checkpoint."""
    await find_commit(await _open_run(store), step)


async def find_commit(run_log: RunLog, step: int) -> Commit:
    """Raises `CannotFork`, or `LogDamaged` if a place of the log is gone, so that later steps are not known."""
    try:
        return choose_commit(run_log.index, step)
    except CannotFork:
        await run_log.check_whole()
        return choose_commit(run_log.index, step)


def choose_commit(log: LogIndex, step: int) -> Commit:
    """Raises `CannotFork`, naming the existing steps."""
    resumable = list(log.resumable())
    for commit in resumable:
        if commit.step == step:
            return commit
    known = ", ".join(str(c.step) for c in resumable) or "none"
    raise CannotFork(f"there is no checkpoint of step {step}; there are: {known}")


def build_log(log: LogIndex, commit: Commit) -> list[Entry]:
    """The claims that precede `commit`, and `commit` itself without its pins, which stay with the
    old run.
    """
    claims = [e for e in log.entries[: log.place_of(commit)] if isinstance(e, Claim)]
    return [*claims, replace(commit, pins=())]


async def _copy_all(store: ObjectStore, target: ObjectStore, commit: Commit) -> int:
    """Copy a checkpoint. Returns its size in bytes."""
    manifest = await fetch_manifest(store, commit)
    copying = [partial(_copy, store, target, chunk) for chunk in manifest.chunks]
    await move_all(copying, CONCURRENCY)
    await _copy_manifest(store, target, commit)
    return manifest.bytes()


async def _copy(store: ObjectStore, target: ObjectStore, chunk: Chunk) -> None:
    await target.put(chunk.key, await fetch_verified(store, chunk))


async def _copy_manifest(store: ObjectStore, target: ObjectStore, commit: Commit) -> None:
    raw = await store.get(commit.manifest)
    if hashlib.sha256(raw).hexdigest() != commit.digest:
        raise Broken(f"{commit.manifest} was changed")
    await target.put(commit.manifest, raw)


async def _write(target: ObjectStore, place: int, entry: Entry) -> None:
    body = log.encode(entry)
    try:
        await target.create(log.key(place), body)
    except AlreadyExists:
        if await target.get(log.key(place)) != body:
            text = f"{target.uri}: place {place} of the log was taken by another writer"
            raise StoreError(text) from None


def build_table(catalog: Catalog) -> str:
    """For people."""
    state = "done" if catalog.done else "not finished"
    lines = [f"run     {catalog.run} ({state}, last written by {catalog.job or 'nobody'})"]
    lines += _list_rows(catalog) or ["there is no checkpoint"]
    problem = [f"PROBLEM {catalog.problem}"] if catalog.problem else []
    return "\n".join([*lines, *_list_apart(catalog), *problem])


def _list_rows(catalog: Catalog) -> list[str]:
    if not catalog.checkpoints:
        return []
    return [
        "",
        f"{'step':>9}  {'epoch':>5}  {'bytes':>14}  {'epoch began by':<16}  pinned as",
        *(
            f"{c.step:>9}  {c.epoch:>5}  {c.bytes:>14}  {c.cause or '-':<16}  {', '.join(c.pins) or '-'}"
            for c in catalog.checkpoints
        ),
    ]


def _list_apart(catalog: Catalog) -> list[str]:
    """Pins of checkpoints that are not in the table."""
    listed = {n for c in catalog.checkpoints for n in c.pins}
    return [
        f"pinned as {p.name}: step {p.step} of epoch {p.epoch}, which the run does not continue"
        for p in catalog.pins
        if p.name not in listed
    ]
