"""The keys of one epoch's process group, which `torch.distributed` calls its store. The
coordinator's agent keeps them.

No rank hosts the rendezvous, so it survives the death of any rank. Values are base64 text, as in
the wire format.
"""

from collections.abc import Callable, Sequence

from everstep_agent.waiting import Change
from everstep_contract import wire

HOLD_SECONDS = 10.0
"""How long a request waits for keys that no rank has set yet. Then the caller asks again, until its own limit."""
OVER = "the epoch is over"


class GroupStore:
    def __init__(self) -> None:
        self._epoch = 0
        self._values: dict[str, str] = {}
        self._changed = Change()

    def open_epoch(self, epoch: int) -> None:
        """From now on only this epoch's keys exist. Requests that wait for keys of an older epoch
        fail. 0: no epoch.
        """
        self._epoch, self._values = epoch, {}
        self._changed.fire()

    async def answer(self, frame: object, epoch: int) -> wire.StoreReply | None:
        """The reply; None: a key for which the request waits does not exist yet, and the request's
        own limit is not reached, so the caller must ask again.
        """
        if epoch != self._epoch:
            return wire.StoreReply(error=OVER)
        match frame:
            case wire.StoreGet():
                return await self._get(frame)
            case wire.StoreAllGather():
                return await self._all_gather(frame)
            case wire.StoreCheck():
                return wire.StoreReply(number=int(all(k in self._values for k in frame.keys)))
        reply = self._write(frame)
        self._changed.fire()
        return reply

    def _write(self, frame: object) -> wire.StoreReply:
        match frame:
            case wire.StoreSet():
                self._values[frame.key] = frame.value
                return wire.StoreReply()
            case wire.StoreAdd():
                return self._add(frame)
            case wire.StoreCompareSet():
                return self._compare_set(frame)
            case wire.StoreDelete():
                return wire.StoreReply(number=int(self._values.pop(frame.key, None) is not None))
        return wire.StoreReply(error=f"{type(frame).__name__} is not a store frame")

    def _add(self, frame: wire.StoreAdd) -> wire.StoreReply:
        number = int(wire.from_text(self._values.get(frame.key, "")) or b"0") + frame.amount
        self._values[frame.key] = wire.to_text(str(number).encode())
        return wire.StoreReply(number=number)

    def _compare_set(self, frame: wire.StoreCompareSet) -> wire.StoreReply:
        """As in torch: a missing key is set if `expected` is empty."""
        current = self._values.get(frame.key)
        if current == frame.expected or (current is None and not frame.expected):
            self._values[frame.key] = current = frame.desired
        return wire.StoreReply(value=current if current is not None else frame.expected)

    async def _get(self, frame: wire.StoreGet) -> wire.StoreReply | None:
        key = frame.key
        return await self._wait(frame, [key], lambda: wire.StoreReply(value=self._values[key]))

    async def _all_gather(self, frame: wire.StoreAllGather) -> wire.StoreReply | None:
        self._values[f"{frame.key}/{frame.rank}"] = frame.value
        self._changed.fire()
        keys = [f"{frame.key}/{rank}" for rank in range(frame.world)]
        return await self._wait(
            frame, keys, lambda: wire.StoreReply(values=tuple(self._values[key] for key in keys))
        )

    async def _wait(
        self,
        frame: wire.StoreGet | wire.StoreAllGather,
        keys: Sequence[str],
        reply: Callable[[], wire.StoreReply],
    ) -> wire.StoreReply | None:
        epoch, limit = frame.epoch, frame.timeout_ms / 1000
        found = await self._changed.until(
            lambda: self._epoch != epoch or all(key in self._values for key in keys),
            min(limit, HOLD_SECONDS),
        )
        if self._epoch != epoch:
            return wire.StoreReply(error=OVER)
        if found:
            return reply()
        return wire.StoreReply() if limit <= HOLD_SECONDS else None
