"""Calls and watches fail again and again while jobs run. The jobs must end like undisturbed ones."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from crash import troubles
from crash.cases import Runner, describe
from crash.lane import Lane
from crash.plan import Case, Clean
from crash.rig import Rig, a_rig
from crash.troubles import (
    Away,
    Broken,
    Dropped,
    Failing,
    Garbled,
    Late,
    Refused,
    Repeated,
    Silent,
    Trouble,
)
from everstep_contract import names
from everstep_lab import Lab
from everstep_lab.api import Api
from stub_image.given import build_stub_job

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(600)]
SEED = int(os.environ.get("EVERSTEP_CRASH_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
ACTS = ("leave", "die")
WATCHED = {"pods", "nodes", names.PLURAL, names.QUARANTINE_PLURAL}
Make = Callable[[random.Random], Trouble]

TROUBLES: dict[str, Make] = {
    "events that never come": Dropped,
    "events that come twice, and old ones again": Repeated,
    "events that come late, kinds overtaking each other": Late,
    "410 in the stream": lambda c: Failing(c, code=410),
    "500 in the stream": lambda c: Failing(c, code=500),
    "events cut in their middle": lambda c: Failing(c, code=0),
    "watches that are closed again and again": lambda c: Failing(c, code=-1),
    "410 instead of a watch": lambda c: Refused(c, which=troubles.watches, status=410),
    "409 for a status": lambda c: Refused(
        c, 0.5, which=troubles.status_patches, status=409, reason="Conflict"
    ),
    "429 with Retry-After": lambda c: Refused(
        c, status=429, reason="TooManyRequests", headers={"Retry_After": "1"}
    ),
    "500 for what was not done": lambda c: Refused(c, which=troubles.writes),
    "500 for what was done": lambda c: Refused(c, which=troubles.writes, applied=True),
    "answers that are cut, or no JSON": lambda c: Garbled(c, 0.2),
    "answers that never come": lambda c: Broken(c, 0.2),
}

ENDS_THE_PROCESS = frozenset(
    {"500 in the stream", "410 instead of a watch", "answers that are cut, or no JSON"}
)
"""After these troubles kopf gives up a watch, and the operator's process ends. The next process lists
everything.
"""


@pytest.mark.parametrize("title", TROUBLES)
async def test_the_same_place_in_spite_of(
    title: str, lab: Lab, account: Path, tmp_path: Path, cleans: dict[str, Clean]
) -> None:
    """Full lists, here every 5 s, find lost events. Each trouble plays one of the two health acts."""
    played = ("pause", "finish", ACTS[_number(title) % 2])
    async with a_rig(lab, tmp_path, account, "--resync-seconds=5") as rig:
        runner = Runner(rig.proxy, rig.operator, rig.lanes, cleans)
        await runner.run_clean(played)
        trouble = TROUBLES[title](random.Random(f"{SEED} {title}"))
        await bring(rig, trouble)
        cases = [Case(scenario=name, write=None, moment=f"t{_number(title)}") for name in played]
        await runner.run(cases)
        print(f"seed {SEED}, {title}: struck {trouble.struck} times, {rig.operator.ends} ends")
        assert trouble.struck
        assert not rig.operator.ends or title in ENDS_THE_PROCESS, rig.operator.said()
        assert not [describe(result) for result in runner.results if result.problem]


async def test_when_everything_is_forbidden_for_a_while_every_watch_stands_again_afterwards(
    lab: Lab, account: Path, tmp_path: Path
) -> None:
    async with a_rig(lab, tmp_path, account) as rig:
        lane, away = rig.lanes[0], Away(random.Random(SEED), on=False)
        await bring(rig, away)
        await until_watching(rig)
        denied = Refused(random.Random(SEED), share=1.0, status=403, reason="Forbidden")
        rig.proxy.faults.append(denied)
        away.on = True
        await asyncio.sleep(1)
        away.on = False
        await asyncio.sleep(20)
        rig.proxy.faults.clear()
        await until_watching(rig)
        await lane.create(build_stub_job("forbidden"))
        await lane.until_running()
        assert denied.struck >= len(WATCHED), "not every kind was denied"
        assert rig.operator.ends == 0, rig.operator.said()
        await lane.end()


async def test_a_right_that_was_taken_away_is_told_on_the_job_and_missed_no_longer_than_it_is_gone(
    lab: Lab, account: Path, tmp_path: Path
) -> None:
    async with a_rig(lab, tmp_path, account) as rig:
        lane = rig.lanes[0]
        await lane.create(build_stub_job("rights"))
        await lane.until_running()
        before = await lane.lives()
        async with without_right(lane.api, names.PLURAL, f"{names.PLURAL}/status"):
            await lane.suspend(True)
            await lane.until("the job says what is missing", lambda: says_failed(lane))
            assert await lane.lives() == before
        await lane.until_condition("Suspended")
        await lane.suspend(False)
        await lane.until_running()
        await lane.end()


@asynccontextmanager
async def without_right(api: Api, *resources: str) -> AsyncIterator[None]:
    """In this context no role of Everstep may patch or update these resources."""
    path = "/apis/rbac.authorization.k8s.io/v1/clusterroles"
    roles = [r for r in await api.list(path) if r["metadata"]["name"].startswith("everstep")]
    for role in roles:
        kept = [_without(rule, resources) for rule in role["rules"]]
        change = {"rules": [rule for rule in kept if rule["verbs"]]}
        await api.patch(f"{path}/{role['metadata']['name']}", change)
    try:
        yield
    finally:
        for role in roles:
            await api.patch(f"{path}/{role['metadata']['name']}", {"rules": role["rules"]})


def _without(rule: dict[str, Any], resources: Sequence[str]) -> dict[str, Any]:
    concerned = set(rule.get("resources", ())) & set(resources)
    writing = ("patch", "update", "*")
    return {**rule, "verbs": [v for v in rule["verbs"] if not (concerned and v in writing)]}


async def says_failed(lane: Lane) -> bool:
    events = await lane.api.list("/api/v1/namespaces/default/events")
    told = [e["message"] for e in events if e["reason"] == "PassFailed"]
    return any("is forbidden" in m and "rights back" in m for m in told)


async def test_a_job_trains_on_while_the_api_server_is_away_for_a_minute(
    lab: Lab, account: Path, tmp_path: Path
) -> None:
    away = Away(random.Random(SEED), on=False)
    async with a_rig(lab, tmp_path, account, "--figures-seconds=1") as rig:
        await bring(rig, away)
        lane = rig.lanes[0]
        await lane.create(build_stub_job("away"))
        await lane.until_running()
        before, step = await lane.lives(), int((await lane.status()).get("step") or 0)
        away.on = True
        await asyncio.sleep(60)
        away.on = False

        async def caught_up() -> bool:
            return int((await lane.status()).get("step") or 0) > step + 200

        await lane.until("figures of the minute", caught_up)
        await lane.until_running()
        assert await lane.lives() == before, "a pod was replaced or restarted"
        assert not (await lane.shape()).restarts
        assert away.struck
        await lane.end()


async def test_a_watch_that_went_silent_is_noticed(lab: Lab, account: Path, tmp_path: Path) -> None:
    """The connection stays open, but delivers nothing, not even a bookmark."""
    silent = Silent(random.Random(SEED), share=1.0, on=False)
    async with a_rig(lab, tmp_path, account) as rig:
        await bring(rig, silent)
        await until_watching(rig)
        lane = rig.lanes[0]
        silent.hush()
        assert len(silent.hushed) >= len(WATCHED)
        opened = silent.made
        await lane.create(build_stub_job("silent"))
        await lane.until_running(limit=240)
        assert silent.made >= opened + len(WATCHED), "not every silent watch was opened again"
        assert rig.operator.ends == 0, rig.operator.said()
        await lane.end()


async def bring(rig: Rig, trouble: Trouble) -> None:
    """Add the trouble and restart the operator, because a trouble does not affect watches that are
    already open.
    """
    rig.proxy.faults.append(trouble)
    await rig.operator.crash()


async def until_watching(rig: Rig) -> None:
    async def all_four() -> bool:
        return rig.proxy.watching >= WATCHED

    await rig.lanes[0].until("a watch on each kind", all_four, limit=180)


def _number(title: str) -> int:
    return list(TROUBLES).index(title)
