"""Commits complete parts: creates the manifest first, and then appends its entry to the run log."""

import asyncio
import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from everstep_agent.checkpoint import ledger
from everstep_agent.checkpoint.commit_rules import (
    BadSave,
    build_manifest,
    decide_append,
    list_given_up,
    use_kept,
)
from everstep_agent.checkpoint.manifests import Broken, fetch_manifest
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.checkpoint.merging import merge_ledger
from everstep_agent.checkpoint.parts import Part
from everstep_agent.checkpoint.restore import Fetcher
from everstep_agent.runlog.log_index import LogIndex
from everstep_agent.runlog.rules import Verdict
from everstep_agent.runlog.run_log import Appended, RunLog
from everstep_agent.storage.errors import AlreadyExists
from everstep_agent.storage.store import ObjectStore
from everstep_contract import codec
from everstep_contract.log import ChainLink, Commit
from everstep_contract.manifest import LIMIT_BYTES, AgentSeconds, Manifest

_NAMES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    commit: Commit
    place: int
    notes: tuple[str, ...] = ()
    """Problems of the checkpoint's ledger; its state is unaffected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotCommitted:
    reason: str
    """NewerClaim, OffLineage, NotNewer, ChunksRetired."""
    message: str
    newest: Commit | None = None
    """If NotNewer: another coordinator's commit of this step or a later one."""


class Committer:
    """Used by the coordinator. Calls must not overlap. `memory`: of the coordinator's pod."""

    def __init__(
        self, store: ObjectStore, log: RunLog, run: str, memory: MemoryTier | None = None
    ) -> None:
        self._store = store
        self._log = log
        self._run = run
        self._memory = memory
        self._last: tuple[str, Manifest] | None = None
        self._tried: Manifest | None = None
        """The newest manifest that was to be committed."""

    @property
    def index(self) -> LogIndex:
        """The index of the log, as far as it was read."""
        return self._log.index

    async def commit(
        self,
        parts: Sequence[Part],
        *,
        token: str,
        world: int,
        seconds: Mapping[str, float] | None = None,
        agents: Sequence[AgentSeconds] = (),
        pins: Sequence[str] = (),
    ) -> Committed | NotCommitted:
        """Commit what `decide_commit` found ready.

        Args:
            token: the token of the claim under which it is committed, which must be the newest.
            seconds: the time ledger so far, to be shown with the checkpoint.
            agents: which of these seconds were reported by agents that may report again.
            pins: names under which it is pinned.

        Raises:
            BadSave: the parts do not form a complete state.
            StoreError: the outcome is unknown: call again with the same parts.
        """
        await self._log.refresh()
        head = next(p for p in parts if p.lead)
        epoch = self._choose_epoch(head, token)
        stands = self._standing(epoch, head.step)
        if stands:
            return stands
        parts = use_kept(parts, self._log.index)
        wanted = Commit(epoch=epoch, token=token, step=head.step, manifest="", digest="")
        if refused := self._why_not(wanted, parts):
            return refused
        parent_key, parent, notes = await self._parent()
        if parent is not None:
            parent = await self._merged(parent, token, head.step, notes)
        # In a thread: for hundreds of ranks it takes seconds, in which no other agent would be answered.
        built = await asyncio.to_thread(
            build_manifest,
            parts,
            run=self._run,
            writer=token,
            world=world,
            parent=parent,
            parent_key=parent_key,
            seconds=seconds,
            agents=agents,
        )
        manifest = self._repeat(replace(built, epoch=epoch))
        gap = ledger.find_gap(manifest.ledger, manifest.step)
        notes += [f"step {manifest.step}: {gap}"] if gap else []
        return await self._write(manifest, parts, token, notes, tuple(pins))

    def _choose_epoch(self, head: Part, token: str) -> int:
        """The epoch of the commit. A rank that was held after it had applied a step, and before it
        counted it, counts it in the epoch that continues its own. If that epoch was claimed and
        never began, the rank stops with the first step of that epoch.
        """
        newest = self._log.index.newest_claim
        if newest is None or newest.token != token or not newest.chain:
            return head.epoch
        before = ChainLink(epoch=head.epoch, last_step=head.step - 1)
        return newest.epoch if newest.chain[-1] == before else head.epoch

    def _why_not(self, commit: Commit, parts: Sequence[Part]) -> NotCommitted | None:
        """Why the log, as far as it was read, does not allow this commit; None: it does."""
        verdict = decide_append(commit, self._log.index)
        if not verdict.ok:
            return self._refused(verdict)
        given_up = list_given_up(parts, self._log.index)
        if given_up:
            text = f"its chunk {given_up[0]} was retired meanwhile"
            return NotCommitted(reason="ChunksRetired", message=text)
        return None

    def _refused(self, verdict: Verdict) -> NotCommitted:
        newest = self._log.index.newest_resumable if verdict.reason == "NotNewer" else None
        return NotCommitted(reason=verdict.reason, message=verdict.message, newest=newest)

    def _standing(self, epoch: int, step: int) -> Committed | None:
        """The commit, if it is in the log already: a call may be repeated after an error."""
        found = self._log.index.find_commit(epoch, step)
        return Committed(place=found[0], commit=found[1]) if found else None

    async def _parent(self) -> tuple[str | None, Manifest | None, list[str]]:
        last = self._log.index.newest_resumable
        if last is None:
            return None, None, []
        if self._last and self._last[0] == last.manifest:
            return last.manifest, self._last[1], []
        try:
            return last.manifest, await self._fetch(last), []
        except Broken as error:
            # Saving the state matters more than the proof of its history.
            return last.manifest, None, [f"the parent's ledger is lost: {error}"]

    async def _fetch(self, commit: Commit) -> Manifest:
        if self._memory is None:
            return await fetch_manifest(self._store, commit)
        return (await Fetcher(self._store, self._memory).find_manifest(commit))[0]

    async def _merged(self, parent: Manifest, token: str, step: int, notes: list[str]) -> Manifest:
        try:
            return await merge_ledger(self._store, parent, token=token, step=step)
        except (Broken, codec.DecodeError) as error:
            notes.append(f"the ledger can no longer be proved: {error}")
            return parent

    def _repeat(self, manifest: Manifest) -> Manifest:
        """The manifest of the try before, if only the seconds have grown since. Otherwise each try
        would write another object, as long as the log takes no entry.
        """
        last = self._tried
        if last and replace(manifest, seconds=last.seconds, agents=last.agents) == last:
            return last
        self._tried = manifest
        return manifest

    async def _write(
        self,
        manifest: Manifest,
        parts: Sequence[Part],
        token: str,
        notes: list[str],
        pins: tuple[str, ...],
    ) -> Committed | NotCommitted:
        raw = await asyncio.to_thread(codec.dumps, manifest)
        if len(raw) > LIMIT_BYTES:
            raise BadSave(
                f"its manifest takes {len(raw) / 2**20:.0f} MiB, and the limit is {LIMIT_BYTES >> 20} MiB: "
                "the state has too many tensors for so many ranks"
            )
        key = await self._put(manifest, raw)
        commit = Commit(
            epoch=manifest.epoch,
            token=token,
            step=manifest.step,
            manifest=key,
            digest=hashlib.sha256(raw).hexdigest(),
            bytes=manifest.bytes(),
            pins=pins,
        )
        while True:
            # A retirement of this coordinator may have been appended since the parts were checked.
            refused = self._why_not(commit, parts)
            if refused is not None and self._log.index.place_of(commit) is None:
                return refused
            outcome = await self._log.append(commit, after=len(self._log.index))
            if isinstance(outcome, Appended):
                self._last = (key, manifest)
                await self._hold(commit, raw)
                return Committed(commit=commit, place=outcome.place, notes=tuple(notes))

    async def _hold(self, commit: Commit, raw: bytes) -> None:
        """Keep the manifest in memory, so that a restore need not read it from the store."""
        if self._memory is not None:
            with contextlib.suppress(OSError):  # no room
                await self._memory.hold_manifest(commit, raw)

    async def _put(self, manifest: Manifest, raw: bytes) -> str:
        """Create the manifest and return its key. A manifest with the same name and other content
        (of a save that was dropped and taken again) is not overwritten.
        """
        stem = f"manifests/{manifest.epoch:08d}-{manifest.step:010d}-{manifest.writer[:8]}"
        for number in range(1, _NAMES):
            key = f"{stem}.json" if number == 1 else f"{stem}-{number}.json"
            try:
                await self._store.create(key, raw)
            except AlreadyExists:
                if await self._store.get(key) != raw:
                    continue
            return key
        text = f"{self._store.uri}/{stem}: {_NAMES} manifests of one step, none committed"
        raise AlreadyExists(text)
