"""A worker's requests to the process group's store: answered here if this agent coordinates,
forwarded to the coordinator otherwise.

If a key is not set, every other rank waits for it, up to the limit for forming a group (300 s). So
a failed request is repeated. If that does not help, the rank's next request fails, the rank leaves
the group, and the coordinator starts another epoch.
"""

import asyncio
import time
from dataclasses import replace
from typing import Any

from everstep_agent import logline
from everstep_agent.peers.client import PeerError, Pool
from everstep_agent.peers.group_store import HOLD_SECONDS, OVER, GroupStore
from everstep_agent.peers.messages import StoreAnswer, StoreCall
from everstep_agent.pod.worker import Worker
from everstep_agent.waiting import result_unless
from everstep_contract import wire

PATH = "/v1/store"
STORE_SECONDS = HOLD_SECONDS + 5.0
"""Limit of one call to the coordinator, which holds it for at most `HOLD_SECONDS`. After it the
call is repeated.
"""
REACH_SECONDS = 10.0
"""Limit for reaching the coordinator again after a failed call. After it the request fails, and its
rank leaves the group.
"""
PAUSE_SECONDS = 0.2
"""Pause between two tries."""
CUT_POLL_SECONDS = 0.25
"""How soon a pending call is cancelled once its epoch is over."""
STORE_FRAMES = (
    wire.StoreSet,
    wire.StoreGet,
    wire.StoreAdd,
    wire.StoreCompareSet,
    wire.StoreCheck,
    wire.StoreDelete,
    wire.StoreAllGather,
)
REPEATABLE = (
    wire.StoreSet,
    wire.StoreGet,
    wire.StoreCompareSet,
    wire.StoreCheck,
    wire.StoreAllGather,
)
"""Idempotent requests: they can be repeated whether or not a failed call was received."""


class Relay:
    """`target`: the group store if this agent coordinates, else the coordinator's address, or None
    while there is none.
    """

    def __init__(self, pool: Pool, line: logline.Log) -> None:
        self.pool = pool
        self._line = line
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
                await self._serve_one_way(worker, frame)
            return
        async with worker.order:
            pass  # earlier one-way frames of this worker must be applied first
        if error := worker.store_errors.get(frame.epoch):
            worker.send(wire.StoreReply(error=error), envelope.id)
            return
        worker.send(await self._answer(worker, frame), envelope.id)

    async def _serve_one_way(self, worker: Worker, frame: Any) -> None:
        """No one waits for an answer, so an error is kept for the worker's next request."""
        reply = await self._answer(worker, frame)
        if not reply.error or frame.epoch in worker.store_errors:
            return
        worker.store_errors[frame.epoch] = reply.error
        if reply.error != OVER:
            self._line.say("store_request_failed", rank=worker.rank, message=reply.error)

    async def _answer(self, worker: Worker, frame: Any) -> wire.StoreReply:
        failing_since: float | None = None
        while True:
            try:
                reply = await self._ask(worker, frame)
            except PeerError as error:
                now = time.monotonic()
                failing_since = failing_since if failing_since is not None else now
                if not isinstance(frame, REPEATABLE) or now - failing_since > REACH_SECONDS:
                    return wire.StoreReply(error=f"cannot reach the coordinator: {error}")
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            failing_since = None
            if reply is not None:
                return reply
            frame = _less_time(frame)

    async def _ask(self, worker: Worker, frame: Any) -> wire.StoreReply | None:
        """None: the coordinator held it up to its limit. Raises `PeerError`."""
        target = self.target
        if target is None or _is_over(worker, frame.epoch):
            return wire.StoreReply(error=OVER)
        if isinstance(target, GroupStore):
            return await target.answer(frame, frame.epoch)
        call = StoreCall(epoch=frame.epoch, frame=wire.to_text(wire.encode(frame)))
        answer = await result_unless(
            self.pool.call(target, PATH, call, StoreAnswer, timeout=STORE_SECONDS),
            lambda: _is_over(worker, frame.epoch),
            CUT_POLL_SECONDS,
        )
        if answer is None:
            return wire.StoreReply(error=OVER)
        if answer.pending:
            return None
        return wire.StoreReply(
            value=answer.value, values=answer.values, number=answer.number, error=answer.error
        )


def _is_over(worker: Worker, epoch: int) -> bool:
    """Whether the worker no longer forms the group of this epoch."""
    left = epoch < worker.epoch or worker.held == epoch
    return left or worker.cut_at is not None or not worker.alive


async def answer_call(group: GroupStore, call: StoreCall) -> StoreAnswer:
    """The coordinator's answer."""
    frame = wire.decode(wire.from_text(call.frame)[wire.LENGTH.size :]).frame
    if not isinstance(frame, STORE_FRAMES):
        return StoreAnswer(error=f"{type(frame).__name__} is not a store frame")
    reply = await group.answer(frame, call.epoch)
    if reply is None:
        return StoreAnswer(pending=True)
    return StoreAnswer(
        value=reply.value, values=reply.values, number=reply.number, error=reply.error
    )


def _less_time(frame: Any) -> Any:
    if not isinstance(frame, wire.StoreGet | wire.StoreAllGather):
        return frame
    left = max(1, frame.timeout_ms - round(HOLD_SECONDS * 1000))
    return replace(frame, timeout_ms=left)
