"""A worker's requests to the process group's store, relayed to a coordinator that may fail."""

import asyncio
import io
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from everstep_agent import logline
from everstep_agent.peers import http
from everstep_agent.peers.client import Pool
from everstep_agent.peers.group_store import OVER, GroupStore
from everstep_agent.peers.messages import StoreCall
from everstep_agent.pod import relay
from everstep_agent.pod.relay import Relay, answer_call
from everstep_contract import codec, wire

TOKEN = "token"
EPOCH = 3
SET = wire.StoreSet(epoch=EPOCH, key="rank 0", value=wire.to_text(b"here"))
GET = wire.StoreGet(epoch=EPOCH, key="rank 0", timeout_ms=60_000)
ADD = wire.StoreAdd(epoch=EPOCH, key="count", amount=1)


@dataclass
class Worker:
    """The part of a worker that the relay uses."""

    rank: int = 0
    epoch: int = EPOCH
    held: int = 0
    cut_at: float | None = None
    alive: bool = True
    store_errors: dict[int, str] = field(default_factory=dict)
    order: asyncio.Lock = field(default_factory=asyncio.Lock)
    replies: asyncio.Queue[wire.StoreReply] = field(default_factory=asyncio.Queue)

    def send(self, frame: Any, id: int = 0) -> None:
        self.replies.put_nowait(frame)

    async def reply(self) -> wire.StoreReply:
        async with asyncio.timeout(30):
            return await self.replies.get()


@dataclass
class Coordinator:
    """A real server and group store. The next `failures` calls fail: with `heard` after they took
    effect, otherwise before.
    """

    group: GroupStore = field(default_factory=GroupStore)
    failures: int = 0
    heard: bool = False
    held: bool = False
    calls: int = 0
    came: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, body: bytes) -> bytes:
        self.calls += 1
        self.came.set()
        if self.held:
            await asyncio.Event().wait()
        fails, self.failures = self.failures > 0, max(0, self.failures - 1)
        if fails and not self.heard:
            raise RuntimeError("lost")
        found = await answer_call(self.group, codec.loads(StoreCall, body))
        if fails:
            raise RuntimeError("the answer is lost")
        return codec.dumps(found)


@dataclass
class Scene:
    coordinator: Coordinator
    relay: Relay
    worker: Any

    def send(self, frame: Any, id: int = 0) -> None:
        self.relay.take(self.worker, wire.Envelope(frame=frame, id=id))


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    coordinator = Coordinator()
    coordinator.group.open_epoch(EPOCH)
    server = http.Server(TOKEN, {relay.PATH: coordinator.answer})
    await server.open("127.0.0.1", 0)
    pool = Pool(TOKEN)
    found = Relay(pool, logline.Log(io.StringIO()))
    found.target = server.address
    yield Scene(coordinator=coordinator, relay=found, worker=Worker())
    await found.close()
    await pool.close()
    await server.close()


@pytest.mark.parametrize("heard", [True, False])
async def test_a_key_whose_call_failed_is_set_again(scene: Scene, heard: bool) -> None:
    scene.coordinator.failures, scene.coordinator.heard = 2, heard
    scene.send(SET)
    scene.send(GET, 1)
    assert (await scene.worker.reply()).value == SET.value


async def test_a_key_that_cannot_be_set_fails_the_ranks_next_request_at_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "REACH_SECONDS", 0.5)
    scene.coordinator.failures = 1000
    scene.send(SET)
    scene.send(GET, 1)
    assert "cannot reach the coordinator" in (await scene.worker.reply()).error
    scene.coordinator.failures = 0
    calls = scene.coordinator.calls
    scene.send(GET, 2)
    assert "cannot reach the coordinator" in (await scene.worker.reply()).error
    assert scene.coordinator.calls == calls


async def test_a_late_key_of_a_former_epoch_fails_no_request_of_the_present_one(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a second loss, the interrupted formation may still run in another thread."""
    monkeypatch.setattr(relay, "REACH_SECONDS", 0.5)
    scene.coordinator.failures = 1000
    scene.send(replace(SET, epoch=SET.epoch - 1))
    while not scene.worker.store_errors:  # noqa: ASYNC110 no event tells
        await asyncio.sleep(0.01)
    scene.coordinator.failures = 0
    scene.send(SET)
    scene.send(GET, 1)
    assert (await scene.worker.reply()).value == SET.value


@pytest.mark.parametrize("left", [{"epoch": EPOCH + 1}, {"held": EPOCH}])
async def test_a_key_of_an_epoch_that_the_rank_has_left_holds_up_no_later_request(
    scene: Scene, left: dict[str, int]
) -> None:
    """Its coordinator may be gone, and the next group forms meanwhile."""
    scene.coordinator.held = True
    scene.send(SET)
    await scene.coordinator.came.wait()
    for name, value in left.items():
        setattr(scene.worker, name, value)
    scene.coordinator.held = False
    scene.coordinator.group.open_epoch(EPOCH + 1)
    scene.send(replace(SET, epoch=EPOCH + 1))
    scene.send(replace(GET, epoch=EPOCH + 1), 1)
    assert (await scene.worker.reply()).value == SET.value


async def test_what_must_not_be_done_twice_is_not_repeated(scene: Scene) -> None:
    scene.coordinator.failures, scene.coordinator.heard = 1, True
    scene.send(ADD, 1)
    assert "cannot reach the coordinator" in (await scene.worker.reply()).error
    assert scene.coordinator.calls == 1


async def test_once_its_epoch_is_over_a_rank_waits_for_no_coordinator(scene: Scene) -> None:
    """A frozen coordinator does not answer the call, and its successor has cut the epoch."""
    scene.coordinator.held = True
    scene.send(GET, 1)
    await asyncio.wait_for(scene.coordinator.came.wait(), 10)
    scene.worker.cut_at = 1.0
    assert (await scene.worker.reply()).error == OVER
