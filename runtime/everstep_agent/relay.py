"""A worker's requests to the group's store: answered here if this agent coordinates, else passed on
to who does.
"""

import asyncio
from typing import Any

from everstep_agent.groupstore import HOLD_SECONDS, OVER, GroupStore
from everstep_agent.messages import StoreAnswer, StoreCall
from everstep_agent.peers import PeerError, Pool
from everstep_agent.workers import Worker
from everstep_contract import wire

PATH = "/v1/store"
STORE_FRAMES = (
    wire.StoreSet,
    wire.StoreGet,
    wire.StoreAdd,
    wire.StoreCompareSet,
    wire.StoreCheck,
    wire.StoreDelete,
)


class Relay:
    """`target`: the group store if we coordinate, the coordinator's address, or None while nobody
    does.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._tasks: set[asyncio.Task[None]] = set()
        self.target: GroupStore | str | None = None

    def take(self, worker: Worker, envelope: wire.Envelope) -> None:
        task = asyncio.create_task(self._serve(worker, envelope))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, worker: Worker, envelope: wire.Envelope) -> None:
        frame = envelope.frame
        if envelope.id == 0:
            async with worker.order:
                await self._answer(frame)
            return
        async with worker.order:
            pass  # earlier one-way frames of this worker come first
        worker.send(await self._answer(frame), envelope.id)

    async def _answer(self, frame: Any) -> wire.StoreReply:
        try:
            while True:
                reply = await self._ask(frame)
                if reply is not None:
                    return reply
                frame = _less_time(frame)
        except PeerError as error:
            return wire.StoreReply(error=f"the coordinator cannot be reached: {error}")

    async def _ask(self, frame: Any) -> wire.StoreReply | None:
        target = self.target
        if target is None:
            return wire.StoreReply(error=OVER)
        if isinstance(target, GroupStore):
            return await target.answer(frame, frame.epoch)
        call = StoreCall(epoch=frame.epoch, frame=wire.to_text(wire.encode(frame)))
        answer = await self._pool.call(target, PATH, call, StoreAnswer, timeout=HOLD_SECONDS + 5.0)
        if answer.pending:
            return None
        return wire.StoreReply(value=answer.value, number=answer.number, error=answer.error)


async def answer_call(group: GroupStore, call: StoreCall) -> StoreAnswer:
    """The coordinator's half."""
    frame = wire.decode(wire.from_text(call.frame)[wire.LENGTH.size :]).frame
    if not isinstance(frame, STORE_FRAMES):
        return StoreAnswer(error=f"{type(frame).__name__} is no store frame")
    reply = await group.answer(frame, call.epoch)
    if reply is None:
        return StoreAnswer(pending=True)
    return StoreAnswer(value=reply.value, number=reply.number, error=reply.error)


def _less_time(frame: Any) -> Any:
    if not isinstance(frame, wire.StoreGet):
        return frame
    left = max(1, frame.timeout_ms - round(HOLD_SECONDS * 1000))
    return wire.StoreGet(epoch=frame.epoch, key=frame.key, timeout_ms=left)
