"""Records which checkpoints were read back, and retires old ones: first the `retire` entry, then
the deletion.

Only a checkpoint that was read back and found complete counts as good. The rules are in
`retention_rules`.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from everstep_agent.checkpoint.bounded import all_of
from everstep_agent.checkpoint.manifests import Broken, fetch_manifest
from everstep_agent.checkpoint.retention_rules import (
    build_retire,
    choose_garbage,
    choose_retired,
    step_of,
)
from everstep_agent.runlog.run_log import Lost, RunLog
from everstep_agent.storage.errors import Denied, StoreError
from everstep_agent.storage.probe import FOLDER as PROBE_FOLDER
from everstep_agent.storage.probe import is_probe
from everstep_agent.storage.store import ObjectStore
from everstep_contract.log import Claim, Commit, Retire
from everstep_contract.manifest import Chunk, Manifest

CONCURRENCY = 4
COLLECT_EVERY = 50
UNDELETED = 16
"""How many entries are remembered whose objects could not be deleted."""
REFUSED = 8
"""After so many objects that must not be deleted, the other objects of the entry are not tried either:
probably nothing may be deleted.
"""
Read = Callable[[Commit, Mapping[int, Chunk]], Awaitable[None]]
"""Reads chunks, by their place in the manifest's list, from the store. Raises `Broken`."""


@dataclass(slots=True)
class Checked:
    """What was read back for this coordinator."""

    good: dict[str, frozenset[str]] = field(default_factory=dict)
    """Manifest key → the keys of its chunks. The manifests themselves would take gigabytes if a large job
    has pinned many checkpoints.
    """
    broken: dict[str, str] = field(default_factory=dict)
    """Manifest key → why it is not complete."""
    chunks: set[str] = field(default_factory=set)
    pinned: dict[str, frozenset[str]] = field(default_factory=dict)
    """The same for pinned checkpoints, complete or not. These checkpoints stay for long, so each
    manifest is read only once.
    """


class Retention:
    """The coordinator's background work after a commit. Calls must not overlap."""

    def __init__(
        self, store: ObjectStore, log: RunLog, *, keep: int, concurrency: int = CONCURRENCY
    ) -> None:
        self._store = store
        self._log = log
        self.keep = keep
        """How many good checkpoints are kept."""
        self._slots = asyncio.Semaphore(concurrency)
        self._checked = Checked()
        self._undeleted: list[tuple[str, ...]] | None = None
        """For each entry the keys of its objects that are still to be deleted, at first those that a
        former coordinator may have left; None: nothing was deleted yet.
        """
        self._former: frozenset[str] | None = None
        """Keys of the manifests that former coordinators have committed; None: no checkpoint was read
        back yet.
        """
        self._calls = 0
        self.blocked = ""
        """Why nothing is deleted; empty: nothing is in the way."""

    @property
    def newest_good(self) -> Commit | None:
        resumable = self._log.index.resumable()
        return next((c for c in resumable if c.manifest in self._checked.good), None)

    @property
    def broken(self) -> dict[str, str]:
        """Manifest key → why it is not complete."""
        return dict(self._checked.broken)

    async def check(self, commit: Commit, read: Read) -> str:
        """Have a checkpoint read back, manifest and chunks. Returns why it is not complete; empty:
        it is.

        Chunks that an earlier check has read are not read again, because a key is written only
        once.
        """
        if self._former is None:
            resumable = self._log.index.resumable()
            self._former = frozenset(c.manifest for c in resumable if c != commit)
        try:
            manifest = await fetch_manifest(self._store, commit)
            chunks = enumerate(manifest.chunks)
            fresh = {place: c for place, c in chunks if c.key not in self._checked.chunks}
            await read(commit, fresh)
        except Broken as error:
            self._checked.broken[commit.manifest] = str(error)
            return str(error)
        self._checked.chunks |= {c.key for c in fresh.values()}
        self._checked.good[commit.manifest] = _list_chunks(manifest)
        return ""

    def find_unread(self) -> Commit | None:
        """The newest checkpoint of a former coordinator that is still to be read back, so that `keep` good
        ones are known. Otherwise nothing would be retired if each coordinator made fewer saves.

        None: enough good ones are known, or there is nothing to retire.
        """
        known = list(self._log.index.resumable())
        good = sum(c.manifest in self._checked.good for c in known)
        if good >= self.keep or len(self._log.index.standing) <= self.keep:
            return None
        unread = (self._former or frozenset()) - {*self._checked.good, *self._checked.broken}
        return next((c for c in known if c.manifest in unread), None)

    async def retire(self, token: str) -> Retire | None:
        """Retire what `choose_retired` names: append the entry, then delete. None: there is nothing
        to retire, or another claim is newer.

        Raises the error of an object that must not be deleted, after all others have been tried.
        """
        newest = self._log.newest_claim
        if newest is None or newest.token != token:
            return None
        if self._undeleted is None:
            self._undeleted = [_list_keys(entry) for entry in self._log.index.retires]
        entry = await self._retire_old(newest)
        refused: StoreError | None = None
        try:
            await self._delete_retired()
        except StoreError as error:
            if error.transient:
                raise
            refused = error
        if self._calls % COLLECT_EVERY == 0:
            await self._tidy(token)
        self._calls += 1
        if refused is not None:
            raise refused
        return entry

    async def _retire_old(self, claim: Claim) -> Retire | None:
        chosen = choose_retired(self._log.index, self._checked.good, self.keep)
        kept = await self._kept(chosen) if chosen else None
        if kept is None:
            return None
        given_up = [(c, await self._find_chunks(c) or frozenset()) for c in chosen]
        entry = build_retire(claim.token, claim.epoch, given_up, kept)
        if not await self._append(entry):
            return None
        self._undeleted = [*(self._undeleted or ()), _list_keys(entry)][-UNDELETED:]
        self._forget(entry)
        return entry

    def _forget(self, entry: Retire) -> None:
        for key in entry.manifests:
            self._checked.good.pop(key, None)
            self._checked.broken.pop(key, None)
            self._checked.pinned.pop(key, None)
        self._checked.chunks -= set(entry.chunks)

    async def _append(self, entry: Retire) -> bool:
        return not isinstance(await self._log.append(entry), Lost)

    async def _tidy(self, token: str) -> None:
        # Without the permission to list, only leftovers of failed saves and killed probes remain.
        with contextlib.suppress(Denied):
            await self.collect(token)
            await self._delete_all(filter(is_probe, await self._store.list(PROBE_FOLDER)))

    async def _delete_retired(self) -> None:
        """Delete what is still to be deleted. Raises the first error, after it has tried all entries."""
        refused: StoreError | None = None
        left: list[tuple[str, ...]] = []
        for keys in reversed(self._undeleted or ()):
            try:
                held = await self._delete_all(keys)
            except StoreError as error:
                held = dict.fromkeys(keys, error)
            if held:
                refused = refused or next(iter(held.values()))
                left.insert(0, tuple(held))
        self._undeleted = left
        if refused is not None:
            raise refused

    async def _kept(self, chosen: Collection[Commit]) -> set[str] | None:
        """The keys of the chunks that stay. None: a manifest that stays cannot be read, so the chunks
        that it needs are unknown, and nothing may be deleted.
        """
        found = [(c, await self._find_chunks(c)) for c in self._staying(chosen)]
        unknown = [c for c, chunks in found if chunks is None]
        self.blocked = next((_describe_blocked(c) for c in unknown if c.pins), "")
        return None if unknown else {key for _, chunks in found for key in chunks or ()}

    def _staying(self, chosen: Collection[Commit]) -> list[Commit]:
        return [c for c in self._log.index.standing if c not in chosen]

    async def _find_chunks(self, commit: Commit) -> frozenset[str] | None:
        """The keys of a checkpoint's chunks. None: its manifest cannot be read."""
        known = self._checked.good | self._checked.pinned
        if commit.manifest in known:
            return known[commit.manifest]
        try:
            found = _list_chunks(await fetch_manifest(self._store, commit))
        except Broken:
            return None
        if commit.pins:
            self._checked.pinned[commit.manifest] = found
        return found

    async def _delete_all(self, keys: Iterable[str]) -> dict[str, StoreError]:
        """Delete these objects, which any agent may do at any time. Returns those that must not be
        deleted (because of a legal hold, say), which do not keep the others. Raises an error that may pass.
        """
        refused: dict[str, StoreError] = {}

        async def delete(key: str) -> None:
            async with self._slots:
                try:
                    if len(refused) < REFUSED:
                        await self._store.delete(key)
                    else:
                        refused[key] = next(iter(refused.values()))
                except StoreError as error:
                    if error.transient:
                        raise
                    refused[key] = error

        await all_of(delete(key) for key in keys)
        return refused

    async def collect(self, token: str) -> Retire | None:
        """Retire leftovers of saves that were never committed, and delete what was retired and is
        still there.
        """
        newest = self._log.index.newest_resumable
        claim = self._log.newest_claim
        kept = await self._kept(())
        if newest is None or claim is None or claim.token != token or kept is None:
            return None
        keys = [*await self._store.list("manifests"), *await self._store.list("chunks")]
        gone = choose_garbage(keys, kept, self._log.index, newest.step)
        entry = Retire(
            epoch=claim.epoch,
            token=token,
            manifests=tuple(sorted(gone.manifests)),
            chunks=tuple(sorted(gone.chunks)),
        )
        appended = bool(entry.manifests or entry.chunks) and await self._append(entry)
        await self._delete_leftovers(keys, kept)
        return entry if appended else None

    async def _delete_leftovers(self, keys: Collection[str], named: Collection[str]) -> None:
        """Delete retired objects, also those whose deletion was refused, or that a former coordinator left."""
        log = self._log.index
        await self._delete_all(
            k for k in keys if log.is_retired(k) and k not in named and step_of(k) is not None
        )


def _list_chunks(manifest: Manifest) -> frozenset[str]:
    return frozenset(chunk.key for chunk in manifest.chunks)


def _list_keys(entry: Retire) -> tuple[str, ...]:
    """Entries of the log are never deleted, whatever the entry names."""
    return tuple(key for key in (*entry.manifests, *entry.chunks) if step_of(key) is not None)


def _describe_blocked(commit: Commit) -> str:
    return (
        f"no old checkpoint is deleted, because that of step {commit.step}, pinned as"
        f" {', '.join(commit.pins)}, cannot be read: unpin it"
    )
