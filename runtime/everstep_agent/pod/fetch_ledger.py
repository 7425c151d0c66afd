"""Copies the ledger from a member's agent to a pod that joins a running epoch.

The pod has missed steps, and any member's agent may have to write the ledger with the next save.
"""

import asyncio
import itertools
from collections.abc import Callable

from everstep_agent import logline
from everstep_agent.checkpoint.ledger import Book
from everstep_agent.peers.client import PeerError, Pool
from everstep_agent.peers.messages import LedgerAnswer, LedgerCall
from everstep_contract.ledger import LedgerEntry

PATH = "/v1/ledger"
ENTRIES = 500
"""The most entries in one answer."""
SAMPLES = 50_000
"""An answer ends before the entry with which it would have more samples. The agents that write and
read it do nothing else for 0.03 s.
"""
CALL_SECONDS = 5.0
"""Limit of one request. It is repeated until the members continue without this pod."""
PAUSE_SECONDS = 0.2


class LedgerFetcher:
    """`touch` is called when the book is complete."""

    def __init__(
        self, pool: Pool, book: Book, touch: Callable[[], None], line: logline.Log
    ) -> None:
        self._pool, self._book, self._touch, self._line = pool, book, touch, line
        self._task: asyncio.Task[None] | None = None
        self._key = ""
        self.done = False

    def ask(self, key: str, address: str) -> None:
        """Fetch the ledger from this address, once for each `key`, which is that of a transfer."""
        if key != self._key:
            self.forget()
            self._key = key
            self._task = asyncio.create_task(self._fetch(address))

    def forget(self) -> None:
        self._key, self.done = "", False
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        self.forget()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _fetch(self, address: str) -> None:
        entries: list[LedgerEntry] = []
        while True:
            last = entries[-1] if entries else None
            call = LedgerCall(step=last.step, reduction=last.reduction) if last else LedgerCall()
            try:
                answer = await self._pool.call(
                    address, PATH, call, LedgerAnswer, timeout=CALL_SECONDS
                )
            except PeerError as error:
                self._line.say("ledger_waits", address=address, message=str(error))
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            entries += answer.entries
            if not answer.more:
                break
        self._book.replace(entries)
        self.done = True
        self._touch()


def answer_call(book: Book, call: LedgerCall) -> LedgerAnswer:
    """The member's answer."""
    later = book.after(call.step, call.reduction, ENTRIES + 1)
    samples = itertools.accumulate(len(entry.samples) for entry in later[:ENTRIES])
    count = max(1, sum(total <= SAMPLES for total in samples))
    return LedgerAnswer(entries=tuple(later[:count]), more=len(later) > count)
