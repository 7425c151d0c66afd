"""The operator's side of its dialogue with agents.

It talks to the agents' own HTTP server, and to strangers at their address.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest

from everstep_agent.peers import http
from everstep_contract import auth, codec, levels, names
from everstep_contract.http.channel import UNPROVEN_BYTES
from everstep_operator.jobs import agents, reports
from everstep_operator.jobs.agents import Agents
from everstep_operator.jobs.reports import Heard
from everstep_operator.jobs.unproven import NAMED, describe_unproven
from job_builders import a_pod, a_seen, an_observation
from strangers import Stranger

TOKEN = auth.derive_token(b"k" * 32, "uid")
KEY = ("team", "lm")


@dataclass
class ToyAgent:
    """An agent's HTTP server whose answers the test sets."""

    seen: levels.Seen = field(default_factory=a_seen)
    told: list[levels.Wanted] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    asked: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """Released once for each request that was answered or refused."""
    server: http.Server | None = None

    @property
    def address(self) -> str:
        assert self.server is not None
        return self.server.address

    async def start(self) -> None:
        port = self.server.port if self.server else 0
        self.server = http.Server(TOKEN, {names.WANTED_PATH: self._take}, self._refuse)
        await self.server.open("127.0.0.1", port)

    async def stop(self) -> None:
        assert self.server is not None
        await self.server.close()

    async def answered(self, count: int) -> None:
        """Wait until `count` requests have been answered in total."""
        async with asyncio.timeout(10):
            while len(self.told) + len(self.refused) < count:
                await self.asked.acquire()

    async def _take(self, body: bytes) -> bytes:
        self.told.append(codec.loads(levels.Wanted, body))
        self.asked.release()
        return codec.dumps(self.seen)

    def _refuse(self, message: str) -> None:
        self.refused.append(message)
        self.asked.release()


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
    told = dialogue.report_on(KEY)
    assert told.seen == agent.seen
    assert told.callers == {"pod-uid"}
    assert told.unproven == frozenset()
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
    seen = dialogue.report_on(KEY).seen
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


async def test_an_agent_that_does_not_answer_delays_the_word_of_no_other(
    agent: ToyAgent, dialogue: Agents, listener: Listener
) -> None:
    """A node without power neither accepts nor refuses connections."""
    asked: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: asked.append(writer), "127.0.0.1", 0)
    host, port = silent.sockets[0].getsockname()
    pods = {f"{host}:{port}": "silent", agent.address: "u"}
    dialogue.tell(KEY, TOKEN, levels.Wanted(), pods)
    await listener.wait()
    agent.seen = replace(agent.seen, running=False)
    dialogue.tell(KEY, TOKEN, levels.Wanted(leave=(1,)), pods)
    await listener.wait()
    assert agent.told[-1].leave == (1,)
    assert len(asked) == 1, "a second request was sent before the first had an answer"
    await dialogue.close()
    for writer in asked:
        writer.close()
    silent.close()


async def test_an_agent_that_was_started_anew_is_talked_to_again(
    agent: ToyAgent, dialogue: Agents, listener: Listener
) -> None:
    dialogue.tell(KEY, TOKEN, levels.Wanted(), {agent.address: "u"})
    await listener.wait()
    await agent.stop()
    agent.seen = replace(agent.seen, epoch=2)
    await agent.start()
    await listener.wait()
    seen = dialogue.report_on(KEY).seen
    assert seen is not None
    assert seen.epoch == 2


async def test_a_wrong_token_gets_no_word(
    agent: ToyAgent, dialogue: Agents, listener: Listener
) -> None:
    dialogue.tell(KEY, "another token", levels.Wanted(), {agent.address: "u"})
    await listener.wait()
    assert agent.told == []
    told = dialogue.report_on(KEY)
    assert told.seen is None
    assert told.callers == frozenset()
    assert told.unproven == {"u"}


@pytest.mark.parametrize("count", [160, 2000, 5000])
async def test_what_a_large_job_says_is_read_whole(
    agent: ToyAgent, dialogue: Agents, listener: Listener, count: int
) -> None:
    member = levels.Member(slot=1, attempt=1, incarnation=1, rank=1, life=1)
    agent.seen = replace(agent.seen, members=(member,) * count)
    dialogue.tell(KEY, TOKEN, levels.Wanted(), {agent.address: "u"})
    await listener.wait()
    assert dialogue.report_on(KEY).seen == agent.seen


def test_the_longest_answer_of_a_job_is_within_the_limit() -> None:
    """Of the largest job, and of one that has much to tell."""
    long = 2**60
    for pods in (1, 300):
        members = tuple(
            levels.Member(
                slot=slot, attempt=10**6, incarnation=10**6, rank=10**6, life=10**6, step=long
            )
            for slot in range(pods)
            for _ in range(64)
        )
        left = tuple(levels.Left(slot=s, attempt=1, epoch=9, step=long) for s in range(pods))
        incident = levels.RuntimeIncident(
            id="x" * 128, cause="WorkerDied", message="m" * 4000, slots=tuple(range(pods))
        )
        seen = replace(a_seen(), members=members, left=left, incidents=(incident,) * 20)
        assert len(codec.dumps(seen)) <= reports.limit_answer(pods)


async def test_of_an_agent_no_more_is_read_than_its_job_can_have_to_say(
    agent: ToyAgent, dialogue: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent belongs to whoever wrote the job, and a few answers of 64 MiB take more memory than the operator has."""
    agent.seen = replace(agent.seen, notes=("x" * 2**21,))
    with caplog.at_level("INFO"):
        dialogue.tell(KEY, TOKEN, levels.Wanted(), {agent.address: "u"})
        await agent.answered(2)
    assert dialogue.report_on(KEY).seen is None
    assert "the limit is" in caplog.text


async def test_of_ever_so_many_incidents_the_newest_are_read(
    agent: ToyAgent, dialogue: Agents, listener: Listener
) -> None:
    """A pass over a few thousand of them would take longer than the operator's lease lasts."""
    told = tuple(
        levels.RuntimeIncident(id=str(number), cause="WorkerDied", message="")
        for number in range(5000)
    )
    agent.seen = replace(agent.seen, incidents=told)
    dialogue.tell(KEY, TOKEN, levels.Wanted(), {agent.address: "u"})
    await listener.wait()
    seen = dialogue.report_on(KEY).seen
    assert seen == replace(agent.seen, incidents=told[-reports.INCIDENTS :])


# --- answers without a proof ----------------------------------------------------------------------

LIE = replace(  # what a stranger claims
    a_seen(epoch=1 << 60, done=True),
    failure=levels.Failure(cause="UserError", message="forged"),
    fenced="forged",
    left=(levels.Left(slot=0, attempt=1, epoch=1, step=1),),
    stopped=levels.Stopped(epoch=1, step=1),
    restarts={"WorkerDied": 1000},
    incidents=(levels.RuntimeIncident(id="x", cause="WorkerDied", message="forged"),),
    storage_error=levels.StorageError(kind="AccessDenied", message="forged"),
)


async def test_a_stranger_can_neither_end_nor_move_a_job_that_has_told_nothing_yet(
    dialogue: Agents, listener: Listener
) -> None:
    async with Stranger(codec.dumps(LIE)) as stranger:
        dialogue.tell(KEY, TOKEN, levels.Wanted(), {stranger.address: "u"})
        await listener.wait()
    told = dialogue.report_on(KEY)
    assert told.unproven == {"u"}
    assert told.seen == levels.Seen(run=LIE.run, epoch=1, running=LIE.running, step=LIE.step, until=LIE.until,
                                    loss=LIE.loss, age_ms=LIE.age_ms)  # fmt: skip


@pytest.mark.parametrize("stranger_first", [True, False])
async def test_beside_an_agent_that_proves_its_answers_a_stranger_is_silence(
    agent: ToyAgent, dialogue: Agents, listener: Listener, stranger_first: bool
) -> None:
    async with Stranger(codec.dumps(LIE)) as stranger:
        both = {stranger.address: "dead", agent.address: "living"}
        first = stranger.address if stranger_first else agent.address
        dialogue.tell(KEY, TOKEN, levels.Wanted(), {first: both[first]})
        await listener.wait()
        dialogue.tell(KEY, TOKEN, levels.Wanted(generation=2), both)
        await agent.answered(len(agent.told) + 3)
        told = dialogue.report_on(KEY)
        assert told.seen == agent.seen
        assert told.callers == {"living"}
        assert told.unproven == {"dead"}


async def test_of_a_stranger_a_few_kilobytes_are_read(dialogue: Agents, listener: Listener) -> None:
    async with Stranger(b" " * (UNPROVEN_BYTES + 1) + codec.dumps(LIE)) as stranger:
        dialogue.tell(KEY, TOKEN, levels.Wanted(), {stranger.address: "u"})
        await listener.wait()
        told = dialogue.report_on(KEY)
        assert told.seen is None
        assert told.unproven == {"u"}


@pytest.mark.parametrize("field", ["loss", "age_ms"])
async def test_a_number_that_no_float_can_hold_ends_no_dialogue(
    agent: ToyAgent, dialogue: Agents, listener: Listener, field: str
) -> None:
    body = f'{{"{field}": {"9" * 400}}}'.encode()
    async with Stranger(body) as stranger:
        pods = {stranger.address: "dead", agent.address: "living"}
        dialogue.tell(KEY, TOKEN, levels.Wanted(), pods)
        await agent.answered(3)
    assert dialogue.report_on(KEY).callers == {"living"}


async def test_the_job_of_an_older_runtime_goes_on_through_an_upgrade_of_the_operator(
    dialogue: Agents, listener: Listener
) -> None:
    """Its agents check the older proof and prove none of their answers.

    The operator believes that the job steps, but not that it is done: the kubelet reports its end.
    """
    member = levels.Member(slot=0, attempt=1, incarnation=1, rank=0, life=1, step=7)
    stray = replace(member, slot=5, attempt=1 << 40)
    said = levels.Seen(run="r", epoch=3, running=True, members=(member, stray), step=7, done=True)
    async with Stranger(codec.dumps(said)) as older:
        peers = (levels.Peer(slot=0, attempt=1, address=older.address),)
        dialogue.tell(KEY, TOKEN, levels.Wanted(peers=peers), {older.address: "u"})
        await listener.wait()
        told = dialogue.report_on(KEY)
    assert told.callers == {"u"}
    assert told.seen is not None
    assert told.seen.running
    assert told.seen.step == 7
    assert told.seen.members == (member,)
    assert not told.seen.done


def test_that_answers_prove_nothing_is_said_once_of_each_pod() -> None:
    pods = tuple(
        a_pod(k, name=f"lm-{k}-1", uid=f"uid-{k}", ip=f"10.0.0.{k}") for k in range(NAMED + 2)
    )
    observed = an_observation(pods=pods, unproven=frozenset(p.uid for p in pods))
    said = describe_unproven(observed, frozenset())
    assert said is not None
    assert said.warning
    assert "lm-0-1 (10.0.0.0)" in said.message
    assert "and 2 more" in said.message
    told = {pod.uid for pod in observed.pods}
    assert describe_unproven(observed, told) is None
    last = describe_unproven(observed, told - {"uid-1"})
    assert last is not None
    assert "lm-1-1" in last.message
    assert "lm-0-1" not in last.message


# --- which report counts, and which agents are asked ----------------------------------------------


def test_the_end_outranks_the_highest_epoch_which_outranks_the_youngest_word() -> None:
    old, new = Heard(seen=a_seen(epoch=1), at=9.0), Heard(seen=a_seen(epoch=2), at=1.0)
    assert reports.choose_newest([old, new]) is new
    done = Heard(seen=a_seen(epoch=1, done=True), at=1.0)
    assert reports.choose_newest([replace(new, at=9.0), done]) is done
    unproven = Heard(seen=a_seen(epoch=9, done=True), at=9.0, proven=False)
    assert reports.choose_newest([unproven, old]) is old


def test_a_word_of_an_older_epoch_replaces_none_of_a_newer_one_and_what_is_proven_all_others() -> (
    None
):
    old, new = Heard(seen=a_seen(epoch=1), at=9.0), Heard(seen=a_seen(epoch=2), at=1.0)
    assert reports.replaces(new, old)
    assert reports.replaces(new, None)
    assert not reports.replaces(old, new)
    assert reports.replaces(replace(old, seen=a_seen(epoch=1, done=True)), new)
    deafening = Heard(seen=a_seen(epoch=1 << 60), at=9.0, proven=False)
    assert reports.replaces(old, deafening)
    assert not reports.replaces(deafening, old)


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
    assert len(dialogue.report_on(KEY).callers) == 8
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
    assert reports.choose_addresses(few, 3, None) == few
    asked = [reports.choose_addresses(many, turn, None) for turn in range(4)]
    assert {len(a) for a in asked} == {reports.ASKED_AT_ONCE}
    assert {a for some in asked for a in some} == set(many)
    quiet = reports.choose_addresses(few, 0, "5")
    assert quiet == ["5", "0", "1", "2"]
