"""A store that wraps another one and fails as real stores sometimes do. The test arms the faults,
one at a time.
"""

import asyncio
from collections.abc import Callable

from everstep_agent.storage.errors import Denied, Unreachable
from everstep_agent.storage.store import ObjectStore, S


class UnreliableStore:
    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.uri = inner.uri
        self.away = False
        self.lost_answers = 0
        """How many of the next writes reach the store, but lose their answers."""
        self.lost_requests = 0
        self.refusals = 0
        self.refusal: type[Denied] = Denied
        self.corrupt: set[str] = set()
        self.corrupt_once: set[str] = set()
        """Keys whose next read is damaged on its way."""
        self.stale: list[str] | None = None
        """If set, LIST returns this, whatever the store holds."""
        self.calls: list[tuple[str, str]] = []

    async def put(self, key: str, body: bytes | memoryview) -> None:
        await self._write("put", key, body)

    async def create(self, key: str, body: bytes | memoryview) -> None:
        await self._write("create", key, body)

    async def _write(self, verb: str, key: str, body: bytes | memoryview) -> None:
        self._reach(verb, key)
        if self.refusals:
            self.refusals -= 1
            raise self.refusal(f"{key}: refused")
        if self.lost_requests:
            self.lost_requests -= 1
            raise Unreachable(f"{key}: the request was lost")
        await getattr(self.inner, verb)(key, body)
        if self.lost_answers:
            self.lost_answers -= 1
            raise Unreachable(f"{key}: the answer was lost")

    async def get(self, key: str) -> bytes:
        self._reach("get", key)
        body = await self.inner.get(key)
        damaged = key in self.corrupt or key in self.corrupt_once
        self.corrupt_once.discard(key)
        return body[:-1] + bytes([body[-1] ^ 1]) if damaged else body

    async def stream(
        self, key: str, begin: Callable[[], S], *, urgent: bool = False
    ) -> tuple[int, S]:
        sink, body = begin(), await self.get(key)
        sink.update(body)
        return len(body), sink

    async def list(self, prefix: str = "", *, after: str = "") -> list[str]:
        self._reach("list", prefix)
        return (
            await self.inner.list(prefix, after=after) if self.stale is None else list(self.stale)
        )

    async def delete(self, key: str) -> None:
        self._reach("delete", key)
        await self.inner.delete(key)

    def _reach(self, verb: str, key: str) -> None:
        self.calls.append((verb, key))
        if self.away:
            raise Unreachable(f"{key}: the store does not answer")


class NarrowStore(UnreliableStore):
    """Its connection is too slow for two chunks at the same time."""

    under_way = 0

    async def get(self, key: str) -> bytes:
        if not key.startswith("chunks/"):
            return await super().get(key)
        self.under_way += 1
        try:
            await asyncio.sleep(0.01)
            if self.under_way > 1:
                raise Unreachable(f"cannot read {key}: it did not arrive in time")
            return await super().get(key)
        finally:
            self.under_way -= 1
