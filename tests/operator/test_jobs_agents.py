"""The dialogue with agents, against a real HTTP server that speaks the contract's authentication."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import web

from everstep_contract import auth, codec, levels
from everstep_operator.jobs import agents
from everstep_operator.jobs.agents import Agents
from job_builders import a_seen

TOKEN = auth.derive_token(b"k" * 32, "uid")
KEY = ("team", "lm")


@dataclass
class ToyAgent:
    """One agent: a nonce for each connection, refuses what is not signed with it."""

    seen: levels.Seen = field(default_factory=a_seen)
    told: list[levels.Wanted] = field(default_factory=list)
    refused: int = 0
    asked: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """One more for each request that was answered."""
    _verifiers: dict[Any, auth.Verifier] = field(default_factory=dict)
    _runner: web.AppRunner | None = None
    address: str = ""

    async def start(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/v1/nonce", self._nonce), web.post("/v1/wanted", self._wanted)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", int(self.address.rpartition(":")[2] or 0))
        await site.start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"

    async def answered(self, count: int) -> None:
        """Until so many requests in all have been answered."""
        async with asyncio.timeout(10):
            while len(self.told) + self.refused < count:
                await self.asked.acquire()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def _verifier(self, request: web.Request) -> auth.Verifier:
        key = request.transport
        return self._verifiers.setdefault(key, auth.Verifier(TOKEN, secrets.token_hex(8)))

    async def _nonce(self, request: web.Request) -> web.Response:
        return web.json_response({"nonce": self._verifier(request).nonce})

    async def _wanted(self, request: web.Request) -> web.Response:
        body, verifier = await request.read(), self._verifier(request)
        if not verifier.accepts(request.headers, "POST", "/v1/wanted", body):
            self.refused += 1
            self.asked.release()
            return web.Response(status=401, headers={auth.HEADER_NONCE: verifier.nonce})
        self.told.append(codec.loads(levels.Wanted, body))
        self.asked.release()
        return web.Response(body=codec.dumps(self.seen), content_type="application/json")


@pytest.fixture
async def agent() -> AsyncIterator[ToyAgent]:
    found = ToyAgent()
    await found.start()
    yield found
    await found.stop()


@dataclass
class Listener:
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, key: agents.Key) -> None:
        assert key == KEY
        self.heard.set()

    async def wait(self) -> None:
        async with asyncio.timeout(10):
            await self.heard.wait()
        self.heard.clear()


@pytest.fixture
async def listener() -> Listener:
    return Listener()


@pytest.fixture
async def dialogue(listener: Listener) -> AsyncIterator[Agents]:
    found = Agents(listener, interval=0.02)
    yield found
    await found.close()


async def test_what_is_wanted_is_told_and_what_is_seen_is_kept(
    agent: ToyAgent, dialogue: Agents, listener: Listener
) -> None:
    dialogue.tell(KEY, TOKEN, levels.Wanted(generation=3), {agent.address: "pod-uid"})
    await listener.wait()
    word = dialogue.word_of(KEY)
    assert word.seen == agent.seen
    assert word.callers == {"pod-uid"}
    assert agent.told[0].generation == 3
    assert agent.told[0].revision > 0


async def test_figures_wake_nobody_and_news_do(
    agent: ToyAgent, dialogue: Agents, listener: Listener
) -> None:
    dialogue.tell(KEY, TOKEN, levels.Wanted(), {agent.address: "u"})
    await listener.wait()
    agent.seen = replace(agent.seen, step=43, loss=1.0, seconds={"step": 9.0})
    await agent.answered(len(agent.told) + 3)
    assert not listener.heard.is_set()
    seen = dialogue.word_of(KEY).seen
    assert seen is not None
    assert seen.step == 43
    agent.seen = replace(agent.seen, running=False)
    await listener.wait()


async def test_a_change_is_told_at_once_under_a_higher_revision(
    agent: ToyAgent, listener: Listener
) -> None:
    dialogue = Agents(listener, interval=30.0)
    dialogue.tell(KEY, TOKEN, levels.Wanted(), {agent.address: "u"})
    await listener.wait()
    agent.seen = replace(agent.seen, running=False)
    dialogue.tell(KEY, TOKEN, levels.Wanted(leave=(1,)), {agent.address: "u"})
    await listener.wait()
    await dialogue.close()
    assert agent.told[-1].leave == (1,)
    assert agent.told[-1].revision > agent.told[0].revision


async def test_an_agent_that_was_started_anew_is_talked_to_again(
    agent: ToyAgent, dialogue: Agents, listener: Listener
) -> None:
    dialogue.tell(KEY, TOKEN, levels.Wanted(), {agent.address: "u"})
    await listener.wait()
    await agent.stop()
    agent.seen = replace(agent.seen, epoch=2)
    await agent.start()
    await listener.wait()
    seen = dialogue.word_of(KEY).seen
    assert seen is not None
    assert seen.epoch == 2


async def test_a_wrong_token_gets_no_word_and_makes_no_noise(
    agent: ToyAgent, dialogue: Agents
) -> None:
    dialogue.tell(KEY, "another token", levels.Wanted(), {agent.address: "u"})
    await agent.answered(2)
    assert agent.refused
    assert agent.told == []
    assert dialogue.word_of(KEY).callers == frozenset()


def test_the_end_outranks_the_highest_epoch_which_outranks_the_youngest_word() -> None:
    old, new = a_seen(epoch=1), a_seen(epoch=2)
    assert agents.choose_word([(old, 9.0), (new, 1.0)])[0] is new
    done = a_seen(epoch=1, done=True)
    assert agents.choose_word([(new, 9.0), (done, 1.0)])[0] is done


async def test_of_a_large_job_that_trains_the_coordinator_and_a_few_others_are_asked(
    listener: Listener,
) -> None:
    pods = [ToyAgent() for _ in range(8)]
    for pod in pods:
        await pod.start()
    peers = tuple(levels.Peer(slot=k, attempt=1, address=p.address) for k, p in enumerate(pods))
    place = levels.SlotAttempt(slot=5, attempt=1)
    for pod in pods:
        pod.seen = a_seen(coordinator=place, running=True)
    dialogue = Agents(listener, interval=0.02)
    addresses = {pod.address: f"uid-{k}" for k, pod in enumerate(pods)}
    dialogue.tell(KEY, TOKEN, levels.Wanted(peers=peers), addresses)
    for pod in pods:
        await pod.answered(2)
    assert len(dialogue.word_of(KEY).callers) == 8
    before = [len(pod.told) for pod in pods]
    await pods[5].answered(before[5] + 14)
    await dialogue.close()
    more = [len(pod.told) - old for pod, old in zip(pods, before, strict=True)]
    others = [n for k, n in enumerate(more) if k != 5]
    assert all(n >= 3 for n in others), more
    assert sum(others) <= 3 * more[5] + 3, more
    for pod in pods:
        await pod.stop()


def test_a_job_in_unrest_is_asked_whole_and_a_very_large_one_in_turn() -> None:
    few, many = [str(k) for k in range(8)], [str(k) for k in range(100)]
    assert agents.choose_addresses(few, 3, None) == few
    asked = [agents.choose_addresses(many, turn, None) for turn in range(4)]
    assert {len(a) for a in asked} == {agents.ASKED_AT_ONCE}
    assert {a for some in asked for a in some} == set(many)
    quiet = agents.choose_addresses(few, 0, "5")
    assert quiet == ["5", "0", "1", "2"]
