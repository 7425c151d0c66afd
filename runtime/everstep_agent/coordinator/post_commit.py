"""After a commit, in the background: read it back, then retire old checkpoints."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from everstep_agent import logline
from everstep_agent.checkpoint.retention import Retention
from everstep_agent.coordinator.read_back import ReadBacks
from everstep_agent.storage.errors import StoreError
from everstep_agent.waiting import Change
from everstep_contract import levels, log

NOTES = 3
CALM_SECONDS = 5.0
FORMER = 2
"""After each save, how many checkpoints of former coordinators are read back at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    commit: log.Commit
    uploaders: Mapping[str, int] = field(default_factory=dict)
    """Digest of a chunk → slot of the pod that uploaded it, as far as known."""


class PostCommit:
    """Retention counts only checkpoints that were read back.

    Args:
        is_calm: whether no interruption is open. A read-back begins after it, because the ranks that recover need
            the cores; `changed` fires when the answer may be another one.
    """

    def __init__(
        self,
        retention: Retention,
        read_backs: ReadBacks,
        *,
        good: levels.CheckpointRef | None,
        persist: Callable[[Callable[[], Awaitable[str]]], Awaitable[str]],
        is_calm: Callable[[], bool],
        line: logline.Log,
    ) -> None:
        self.good = good
        """The newest checkpoint that was read back and is complete."""
        self.blocked = ""
        """Why old checkpoints are not deleted; empty: nothing prevents it."""
        self.notes: tuple[str, ...] = ()
        self._retention, self._read_backs = retention, read_backs
        self.changed = Change()
        self._persist, self._is_calm = persist, is_calm
        self._line = line
        self._token = ""
        """Of the newest commit, under which old checkpoints are retired."""
        self._former = 0
        """How many checkpoints of former coordinators may still be read back before the next save."""
        self._busy = False
        self._waiting: list[Saved] = []
        self._skipped: list[int] = []

    async def look_after(self, saved: Saved) -> None:
        """Read this checkpoint back, then retire old ones.

        At most one read-back runs at a time. Meanwhile the newest checkpoint waits, and so does
        each pinned one. If saves come faster than they can be read back, the ones between are
        skipped: they do not count as good, and are retired once newer ones are good. If none waits,
        some checkpoints of former coordinators are read back, as far as `Retention` needs them.
        """
        self._token = saved.commit.token
        self._skipped += [s.commit.step for s in self._waiting if not s.commit.pins]
        self._waiting = [*(s for s in self._waiting if s.commit.pins), saved]
        if self._busy:
            return
        self._busy, self._former, refused = True, FORMER, None
        try:
            while (found := self._take_next()) is not None:
                self._log_skipped()
                try:
                    await self._read_back(found)
                except StoreError as error:  # the waiting ones are read nevertheless
                    self._former, refused = 0, error
        finally:
            self._busy = False
        if refused is not None:
            raise refused

    def _take_next(self) -> Saved | None:
        if self._waiting:
            return self._waiting.pop(0)
        commit = self._retention.find_unread() if self._former else None
        self._former = max(0, self._former - 1)
        return Saved(commit=commit) if commit is not None else None

    async def _read_back(self, saved: Saved) -> None:
        await self.changed.until(self._is_calm, CALM_SECONDS)
        commit = saved.commit
        read = partial(self._read_backs.read, uploaders=saved.uploaders)
        # A store from which nothing can be read counts as unavailable, even if it accepts writes.
        problem = await self._persist(lambda: self._retention.check(commit, read))
        if problem:
            self._log_broken(commit, problem)
            return
        self._note_good(commit)
        retired = await self._retention.retire(self._token)
        self.blocked = self._retention.blocked
        if retired is not None:
            self._line.say("retired", manifests=len(retired.manifests), chunks=len(retired.chunks))

    def _log_skipped(self) -> None:
        skipped, self._skipped = self._skipped, []
        if not skipped:
            return
        which = f"step {skipped[0]}" + (f" to {skipped[-1]}" if len(skipped) > 1 else "")
        note = (
            f"checkpoints of {which} are committed but not verified: saves come faster than they can be read back. "
            "Save less often, or raise checkpoint.readBackBandwidth"
        )
        self.notes = (*self.notes, note)[-NOTES:]
        self._line.say("read_backs_skipped", count=len(skipped), message=note)

    def _log_broken(self, commit: log.Commit, problem: str) -> None:
        note = (
            f"checkpoint of step {commit.step} is broken: {problem}. It does not count for checkpoint.keep, so older "
            "ones stay. Check the store"
        )
        self.notes = (*self.notes, note)[-NOTES:]
        self._line.say("checkpoint_broken", step=commit.step, message=problem)

    def is_good(self, commit: log.Commit) -> bool:
        return self.good is not None and (self.good.epoch, self.good.step) == (
            commit.epoch,
            commit.step,
        )

    def _note_good(self, commit: log.Commit) -> None:
        if self.good is None or commit.step >= self.good.step or commit.epoch > self.good.epoch:
            self.good = levels.CheckpointRef(
                epoch=commit.epoch, step=commit.step, bytes=commit.bytes
            )
