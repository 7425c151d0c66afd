"""Copies this pod's own saves to one other tier: whenever there is a new one, chunk by chunk."""

import asyncio
import errno
from collections.abc import Awaitable, Callable

from everstep_agent import logline
from everstep_agent.checkpoint.keeping import Save
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.checkpoint.tiers import NearTier

RETRY_SECONDS = 5.0
Pause = Callable[[], Awaitable[object]]
FULL = (errno.ENOSPC, errno.EDQUOT)


class Copier:
    """
    Args:
        owner: the name under which the tier keeps the copies.
        pause: awaited each time that all saves have been copied.
        on_copied: called when `copied` has changed.
    """

    def __init__(
        self,
        memory: MemoryTier,
        tier: NearTier,
        *,
        owner: str,
        on_copied: Callable[[], None],
        line: logline.Log,
        pause: Pause | None = None,
    ) -> None:
        self._memory, self._tier, self._owner = memory, tier, owner
        self._on_copied, self._pause = on_copied, pause
        self._line, self._waits = line, logline.Once(line, "copy_waits")
        self.copied = 0
        """The newest step whose save the tier holds completely; 0: none."""
        self._forgotten = 0
        """How often `forget` was called."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        self._task.cancel()

    async def close(self) -> None:
        self.stop()
        await asyncio.gather(self._task, return_exceptions=True)

    def forget(self) -> None:
        """The tier may have deleted what was copied so far."""
        self._forgotten += 1
        if self.copied:
            self.copied = 0
            self._on_copied()

    async def _run(self) -> None:
        done: tuple[Save, ...] = ()
        while True:
            saves = self._memory.list_saves()
            if not saves or saves == done:
                await self._memory.changed.until(self._has_news(done), RETRY_SECONDS)
            elif await self._try(saves):
                done = saves
                if self._pause is not None:
                    await self._pause()
            else:
                await asyncio.sleep(RETRY_SECONDS)

    def _has_news(self, done: tuple[Save, ...]) -> Callable[[], bool]:
        return lambda: self._memory.list_saves() not in ((), done)

    async def _try(self, saves: tuple[Save, ...]) -> bool:
        try:
            await self._copy_or_replace(saves)
        except OSError as error:
            kind = errno.errorcode.get(error.errno or 0, type(error).__name__)
            self._waits.say(kind=kind, tier=self._tier.name, message=str(error))
            return False
        self._waits.passed()
        return True

    async def _copy_or_replace(self, saves: tuple[Save, ...]) -> None:
        try:
            await self._copy(saves)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self.forget()
            await self._tier.drop(self._owner)  # this pod's memory still holds the older save
            await self._copy(saves[-1:])

    async def _copy(self, saves: tuple[Save, ...]) -> None:
        """Raises OSError."""
        forgotten = self._forgotten
        await self._tier.keep(self._owner, saves, self._memory.since)
        there = set(await self._tier.list())
        for save in saves:
            for chunk in save.chunks:
                body = None if chunk.digest in there else await self._memory.get(chunk)
                if body is not None:
                    await self._tier.put(chunk, body)
                    there.add(chunk.digest)
            complete = all(chunk.digest in there for chunk in save.chunks)
            if complete and forgotten == self._forgotten:
                self._note(save.step)

    def _note(self, step: int) -> None:
        if step > self.copied:
            self.copied = step
            self._line.say("copied", tier=self._tier.name, step=step)
            self._on_copied()
