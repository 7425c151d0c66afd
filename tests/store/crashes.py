"""A job of real agent processes. One of them is killed at one of its writes to the store."""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from agent.containers import Container, Containers
from everstep_agent.checkpoint.manifests import Broken, fetch_manifest
from everstep_agent.checkpoint.retention_rules import choose_garbage
from everstep_agent.runlog.run_log import RunLog
from everstep_agent.storage import ObjectStore, open_store
from everstep_agent.storage.errors import StoreError
from everstep_agent.tools import verify
from everstep_contract import levels, log
from everstep_lab import objectstore
from store.proxy import Answer, Forward, Request, S3Proxy, lose_answer

BEFORE, AFTER, LOST = "before", "after", "lost"
MOMENTS = (BEFORE, AFTER, LOST)
"""`before`: SIGKILL of the agent and all its processes before the store gets the write. `after`:
the same once the write is done, before the answer. `lost`: the write is done, but the agent stays
alive and gets a 500.
"""
UNTIL, EVERY, KILLED_AT = 30, 10, 13
RUN = "ns/job"
PLAYS = 2
_TARGET = re.compile(r"/(log|manifests|chunks|probe)/(.*)")
_STEP = re.compile(r"(?:\d+-)?(\d+)[-/]")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Case:
    scenario: str
    title: str
    occurrence: int
    moment: str

    @property
    def name(self) -> str:
        digest = hashlib.sha256(f"{self.title} {self.occurrence}".encode()).hexdigest()[:6]
        return f"{self.scenario}-{digest}-{self.moment}"


def title_of(slot: int, request: Request) -> str:
    """Describe who writes what, in words that are the same in every run. The coordinator's writes
    name no slot, because either slot may hold the role.
    """
    deleted = request.target.endswith("?delete")  # S3's DeleteObjects, with the keys in its body
    found = _TARGET.search(request.body.decode() if deleted else request.target.partition("?")[0])
    assert found is not None, request.target
    folder, rest = found.groups()
    verb = "DELETE" if deleted else request.method
    words = f"{f'slot {slot}' if folder == 'chunks' and verb == 'PUT' else 'coordinator'} {verb} {folder}"
    if folder == "log":
        return f"{words} {json.loads(request.body)['kind']}"
    step = _STEP.search(rest.partition("/")[2] if folder == "chunks" else rest)
    if folder == "probe" or step is None:
        return words
    # A save after a death has the step in which the death came.
    return f"{words} {'between' if int(step[1]) % EVERY else int(step[1])}"


@dataclass(slots=True)
class StorePoint:
    """Records the writes of all agents and injects the fault at one of them, once."""

    case: Case | None
    victims: Sequence[Container] = ()
    writes: list[str] = field(default_factory=list)
    met: str = ""

    def watch(self, slot: int, proxy: S3Proxy) -> None:
        async def act(request: Request, forward: Forward) -> Answer | web.StreamResponse:
            title = title_of(slot, request)
            self.writes.append(title)
            case = self.case
            due = case and (title, self.writes.count(title)) == (case.title, case.occurrence)
            if case is None or not due or self.met:
                return await forward(request)
            self.met = title
            return await self._strike(case.moment, slot, request, forward)

        proxy.arm(act, "PUT|DELETE|POST")

    async def _strike(
        self, moment: str, slot: int, request: Request, forward: Forward
    ) -> Answer | web.StreamResponse:
        if moment == LOST:
            return await lose_answer()(request, forward)
        if moment == AFTER:
            await forward(request)
        self.victims[slot].kill_all()
        assert request.wire.transport is not None
        request.wire.transport.abort()
        return web.Response(status=499)


Scenario = Callable[["Play"], Awaitable[None]]


@dataclass(slots=True)
class Play:
    """One play of a run, with its own folder in the store and on disk."""

    s3: objectstore.ObjectStore
    folder: Path
    point: StorePoint
    proxies: Sequence[S3Proxy]
    lost: int = 0
    told: str = ""

    @contextlib.asynccontextmanager
    async def gang(self, attempt: int = 0) -> AsyncIterator[Containers]:
        environ = [
            {"STUB_UNTIL": str(UNTIL), **self.s3.environment(), "AWS_ENDPOINT_URL": p.endpoint}
            for p in self.proxies
        ]
        folder = self.folder / str(attempt)
        gang = Containers(
            folder,
            len(self.proxies),
            environ,
            attempt,
            uri=self.uri,
            save_every_steps=EVERY,
            keep=1,
        )
        self.point.victims = gang.all
        async with gang:
            try:
                yield gang
                await gang.until_all_ended()
            except TimeoutError:
                raise AssertionError(
                    f"the job did not end in time: {gang.seen}\n{_said(gang)}"
                ) from None
        self.lost += sum(incident.steps_lost for incident in gang.seen.incidents)
        self.told += f"{gang.seen.incidents}\n{_said(gang)}\n"

    @property
    def uri(self) -> str:
        return f"s3://{self.s3.bucket}/{self.folder.name}"

    def store(self) -> ObjectStore:
        return open_store(self.uri, RUN, self.s3.environment())


def _said(gang: Containers) -> str:
    return "\n".join(
        f"--- slot {c.slot}, exits {c.codes}\n" + "\n".join(c.output.read_text().splitlines()[-25:])
        for c in gang.all
    )


async def finish(play: Play) -> None:
    """The job saves at intervals and trains to its end."""
    async with play.gang():
        pass


async def recover(play: Play) -> None:
    """A rank dies between two saves."""
    async with play.gang() as gang:
        await gang.until_step(KILLED_AT)
        victim = gang.all[1]
        while not (workers := victim.workers()):  # noqa: ASYNC110 the victim may just have been struck
            await asyncio.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.kill(workers[-1], signal.SIGKILL)


async def takeover(play: Play) -> None:
    """The coordinator's container dies between two saves."""
    async with play.gang() as gang:
        await gang.until_step(KILLED_AT)
        assert gang.seen.coordinator is not None
        gang.all[gang.seen.coordinator.slot].kill_all()


async def stop(play: Play) -> None:
    """The job is suspended between two saves and resumed with new pods."""
    async with play.gang() as gang:
        await gang.until_step(KILLED_AT)
        gang.want(stop=levels.Stop.SUSPEND)
    async with play.gang(attempt=1):
        pass


SCENARIOS: dict[str, Scenario] = {
    "finish": finish, "recover": recover, "takeover": takeover, "stop": stop,
}  # fmt: skip
TWO_DEATHS = frozenset({"recover", "takeover"})
"""In these scenarios both the scenario and the case kill a member, maybe at the same moment. Then
no survivor holds the steps since the newest commit, and these are lost. In the other scenarios at
most one member dies, and the survivor holds everything.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    case: Case
    met: str
    problem: str
    seconds: float
    plays: int = 1


async def play_one(
    s3: objectstore.ObjectStore, folder: Path, scenario: str, point: StorePoint
) -> None:
    """Play a scenario. Raises AssertionError if something is wrong with the run at its end."""
    case = point.case
    async with contextlib.AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(S3Proxy(s3.endpoint).open()) for _ in range(2)]
        for slot, proxy in enumerate(proxies):
            point.watch(slot, proxy)
        play = Play(s3=s3, folder=folder, point=point, proxies=proxies)
        await SCENARIOS[scenario](play)
    killed = case is not None and case.moment != LOST
    if not (killed and scenario in TWO_DEATHS):
        assert play.lost == 0, f"{play.lost} steps lost: {play.told}"
    await assert_whole(play.store())


def assert_continues_newest(entries: Sequence[log.Entry]) -> None:
    """Assert that each epoch continues from the newest commit before its claim. The steps since that
    commit may be lost, but no committed step.
    """
    newest: tuple[int, int] | None = None
    for entry in entries:
        if isinstance(entry, log.Commit):
            newest = entry.epoch, entry.step
        elif isinstance(entry, log.Claim):
            last = entry.chain[-1] if entry.chain else None
            assert (last and (last.epoch, last.last_step)) == newest, entry


async def assert_whole(store: ObjectStore) -> None:
    """Assert that every step was taken once, and that each object in the store belongs to the run, is
    retired, or will be garbage-collected.
    """
    found = await verify.verify_run(store, entries=True)
    assert found.ok, found.problems
    assert [e.step for e in found.entries] == list(range(1, UNTIL + 1))
    run_log = RunLog(store)
    await run_log.refresh()
    assert_continues_newest(run_log.entries)
    manifests = [await fetch_manifest(store, commit) for commit in run_log.index.standing]
    newest = run_log.index.newest_resumable
    assert newest is not None
    assert newest.step == UNTIL
    named = {c.key for m in manifests for c in m.chunks} | {
        c.manifest for c in run_log.index.standing
    }
    keys = [k for k in await store.list("") if not k.startswith("log/")]
    garbage = choose_garbage(keys, named, run_log.index, newest.step)
    collected = garbage.chunks | garbage.manifests
    left = [k for k in keys if k not in named | collected and not run_log.index.is_retired(k)]
    assert not left


async def run_case(s3: objectstore.ObjectStore, folder: Path, case: Case) -> Result:
    """Run one case. If its write does not come, play the case once more, because the agents race for
    a role. If the write does not come again, `met` is empty, and the play was exact without a death.
    """
    began, problem, play = time.monotonic(), "", 0
    point = StorePoint(case)
    while not point.met and not problem and play < PLAYS:
        play += 1
        point = StorePoint(case)
        try:
            await play_one(s3, folder / f"{case.name}-{play}", case.scenario, point)
        except (AssertionError, Broken, StoreError) as error:
            problem = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    return Result(case=case, met=point.met, problem=problem, seconds=seconds, plays=play)
