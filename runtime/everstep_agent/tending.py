"""After a commit, beside the training: read it back, then retire what is no longer needed."""

import asyncio
from collections.abc import Awaitable, Callable

from everstep_agent import logline
from everstep_agent.checkpoint.retention import Retention
from everstep_contract import levels, log

NOTES = 3


class Tending:
    """One commit after the other; retention counts only what was read back."""

    def __init__(
        self,
        retention: Retention,
        *,
        good: levels.CheckpointRef | None,
        persist: Callable[[Callable[[], Awaitable[str]]], Awaitable[str]],
        line: logline.Log,
    ) -> None:
        self.good = good
        """The newest that was read back and is whole."""
        self.notes: tuple[str, ...] = ()
        self._retention = retention
        self._persist = persist
        self._line = line
        self._turn = asyncio.Lock()

    async def look_after(self, commit: log.Commit) -> None:
        async with self._turn:
            # A store that lets nothing be read back is in trouble, though it takes what it is given.
            problem = await self._persist(lambda: self._retention.check(commit))
            if problem:
                self._say_broken(commit, problem)
                return
            self._note_good(commit)
            retired = await self._retention.retire(commit.token)
            if retired is not None:
                self._line.say(
                    "retired", manifests=len(retired.manifests), chunks=len(retired.chunks)
                )

    def _say_broken(self, commit: log.Commit, problem: str) -> None:
        note = f"checkpoint of step {commit.step} is broken: {problem}"
        self.notes = (*self.notes, note)[-NOTES:]
        self._line.say("checkpoint_broken", step=commit.step, message=problem)

    def _note_good(self, commit: log.Commit) -> None:
        if self.good is None or commit.step >= self.good.step or commit.epoch > self.good.epoch:
            self.good = levels.CheckpointRef(
                epoch=commit.epoch, step=commit.step, bytes=commit.bytes
            )
