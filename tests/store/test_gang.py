"""Jobs of real agents with a faulty store keep stepping, lose nothing, and report the fix."""

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Protocol

import pytest

from agent.gang import assert_exact
from everstep_agent.coordinator import fence
from everstep_agent.storage.retrying import Patience
from everstep_contract import levels, report
from everstep_lab import objectstore
from store import proxy as bad
from store.given import S3Gang, make_impatient
from store.proxy import Act, S3Proxy

FAR = 120.0
"""A limit in seconds, long enough for a busy machine."""


async def ends_well(gang: S3Gang, steps: int) -> None:
    ends = await gang.reports(FAR)
    assert {r.cause for r in ends.values()} == {report.Cause.DONE}
    await assert_exact(gang, steps)


def said(gang: S3Gang, event: str, slot: int) -> list[str]:
    lines = gang.shown().splitlines()
    return [x for x in lines if f"event={event} " in x and f" slot={slot} " in x]


async def steps_on(gang: S3Gang, steps: int) -> None:
    at = gang.seen.step
    await gang.until(lambda s: s.step >= at + steps, FAR)


async def replace_all(gang: S3Gang) -> None:
    """Replace every pod and delete its memory, so that the next pods can read only from the store."""
    slots = sorted(gang.tasks)
    await asyncio.gather(*(gang.kill(slot) for slot in slots))
    for slot in slots:
        shutil.rmtree(gang.tmp / f"m-{gang.uid}-{slot}-0")
        await gang.start(slot, 1)


class MakeGang(Protocol):
    def __call__(self, *, until: int, every: int = 5) -> S3Gang: ...


@pytest.fixture
def make_gang(
    tmp_path: Path, s3: objectstore.ObjectStore, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> MakeGang:
    """Return a function that makes jobs of impatient agents, which save every `every` steps."""
    make_impatient(monkeypatch)
    monkeypatch.setattr(fence, "FENCE_SECONDS", 0.3)

    def make(*, until: int, every: int = 5) -> S3Gang:
        gang = S3Gang(tmp_path, s3, proxy, save_every_steps=every)
        gang.stub |= {"STUB_UNTIL": str(until), "STUB_STEP_MS": "30"}
        return gang

    return make


LONG = pytest.mark.long
REFUSED = "the identity needs to read, write, delete and list"


@pytest.mark.parametrize(
    ("act", "kind", "fix"),
    [
        pytest.param(
            bad.refuse(503, "SlowDown"), "Unreachable", "503 SlowDown", marks=LONG, id="slow-down"
        ),
        pytest.param(bad.refuse(403, "AccessDenied"), "AccessDenied", REFUSED, id="denied"),
        pytest.param(
            bad.refuse(400, "ExpiredToken"),
            "AccessDenied",
            "TOKEN has expired",
            marks=LONG,
            id="expired",
        ),
        pytest.param(
            bad.refuse(404, "NoSuchBucket"),
            "BucketMissing",
            "create it",
            marks=LONG,
            id="no-bucket",
        ),
        pytest.param(
            bad.refuse(507, "XMinioStorageFull"), "NoSpace", "make room", marks=LONG, id="full"
        ),
        pytest.param(
            bad.hang(after_head=False),
            "Unreachable",
            "did not complete a request",
            marks=LONG,
            id="slow",
        ),
    ],
)
async def test_while_the_store_refuses_the_job_steps_on_and_afterwards_nothing_is_lost(
    make_gang: MakeGang,
    proxy: S3Proxy,
    act: Act,
    kind: str,
    fix: str,
) -> None:
    async with make_gang(until=100000) as gang:
        await gang.until(lambda s: s.committed, FAR)
        proxy.arm(act)
        await gang.until(lambda s: s.storage_error and s.storage_error.kind == kind, FAR)
        assert gang.seen.storage_error is not None
        assert fix in gang.seen.storage_error.message
        held = gang.seen.committed
        await steps_on(gang, 40)
        assert gang.seen.committed is not None
        assert held is not None
        assert gang.seen.committed.step == held.step
        for slot in (0, 1):
            waits = said(gang, "upload_waits", slot)
            assert len(waits) == len({x.partition(" kind=")[2].split()[0] for x in waits})
        assert len(said(gang, "store_waits", 0)) <= 2
        proxy.mend()
        now = gang.seen.step
        await gang.until(lambda s: s.committed and s.committed.step >= now, FAR)
        await gang.until(lambda s: s.storage_error is None, FAR)
        gang.want(stop=levels.Stop.SUSPEND)
        ends = await gang.reports(FAR)
        assert {r.cause for r in ends.values()} == {report.Cause.STOPPED}
        found = await gang.verified()
        assert found.ok, found.problems
        assert not [x for x in gang.history if x.restarts]


async def test_a_rank_that_dies_while_the_store_refuses_costs_no_step(
    make_gang: MakeGang,
    proxy: S3Proxy,
) -> None:
    async with make_gang(until=60) as gang:
        await gang.until(lambda s: s.committed, FAR)
        proxy.arm(bad.refuse(403, "AccessDenied"))
        await gang.until(lambda s: s.storage_error, FAR)
        os.kill(gang.worker(1), signal.SIGKILL)
        await gang.until(lambda s: s.incidents, FAR)
        await asyncio.sleep(2.0)  # much longer than the agents retry a refused call
        assert not any(t.done() for t in gang.tasks.values())
        proxy.mend()
        await ends_well(gang, 60)
        assert gang.seen.incidents[-1].steps_lost == 0


@LONG
async def test_a_restart_whose_reads_are_refused_waits_and_does_not_go_back_in_time(
    make_gang: MakeGang,
    proxy: S3Proxy,
) -> None:
    async with make_gang(until=60) as gang:
        await gang.until(lambda s: s.committed and s.committed.step >= 10, FAR)
        refused = proxy.arm(bad.refuse(403, "AccessDenied"), "GET", target="/chunks/")
        await replace_all(gang)
        await gang.until(lambda s: refused.hits > 8 and s.storage_error, FAR)
        proxy.mend()
        await ends_well(gang, 60)
        start, restart = (await gang.run_log()).claims
        assert (start.epoch, restart.epoch) == (1, 2)
        assert restart.chain[-1].last_step >= 10
        assert sum(i.steps_lost for i in gang.seen.incidents) < 10  # those since the newest commit


async def test_a_bucket_that_was_emptied_is_said_and_never_written_over(
    make_gang: MakeGang,
    proxy: S3Proxy,
) -> None:
    async with make_gang(until=100000, every=10) as gang:
        await gang.until(lambda s: s.committed, FAR)
        behind = gang.store()
        kept = {key: await behind.get(key) for key in await behind.list("log")}
        for key in kept:
            await behind.delete(key)
        await gang.until(lambda s: s.storage_error and s.storage_error.kind == "LogDamaged", FAR)
        assert gang.seen.storage_error is not None
        assert "restore it" in gang.seen.storage_error.message
        await steps_on(gang, 30)
        assert await behind.list("log") == []
        for key, body in kept.items():
            await behind.create(key, body)
        now = gang.seen.step
        await gang.until(lambda s: s.committed and s.committed.step >= now, FAR)
        gang.want(stop=levels.Stop.SUSPEND)
        await gang.reports(FAR)
        found = await gang.verified()
        assert found.ok, found.problems


@pytest.mark.parametrize(
    ("act", "words"),
    [
        pytest.param(bad.refuse(403, "AccessDenied"), REFUSED, id="denied"),
        pytest.param(
            bad.refuse(301, "PermanentRedirect"), "set AWS_REGION", marks=LONG, id="region"
        ),
    ],
)
async def test_a_start_that_is_refused_ends_at_once_and_says_why(
    tmp_path: Path, s3: objectstore.ObjectStore, proxy: S3Proxy, act: Act, words: str
) -> None:
    proxy.arm(act)
    async with S3Gang(tmp_path, s3, proxy) as gang:
        ends = await gang.reports(FAR)
        assert report.Cause.STORE in {r.cause for r in ends.values()}
        assert all(words in r.message for r in ends.values() if r.cause is report.Cause.STORE)


@LONG
async def test_a_start_waits_for_a_store_that_is_away(
    tmp_path: Path, s3: objectstore.ObjectStore, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_impatient(monkeypatch)
    away = proxy.arm(bad.drop())
    async with S3Gang(tmp_path, s3, proxy) as gang:
        await gang.until(lambda s: away.hits > 10 and s.storage_error, FAR)
        proxy.mend()
        await ends_well(gang, 20)


@LONG
async def test_a_storm_with_lost_answers_is_trained_through(
    tmp_path: Path, s3: objectstore.ObjectStore, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_impatient(monkeypatch, Patience(deadline_s=60.0, first_s=0.01, longest_s=0.1))
    proxy.arm(bad.lose_answer(), "PUT", chance=0.3)
    proxy.arm(bad.refuse(409, "ConditionalRequestConflict"), "PUT", target="/log/", chance=0.3)
    proxy.arm(bad.refuse(503, "SlowDown"), chance=0.3)
    proxy.arm(bad.drop(0.5), "GET", chance=0.2)
    async with S3Gang(tmp_path, s3, proxy, save_every_steps=3) as gang:
        await ends_well(gang, 20)
        assert gang.seen.restarts == {}
