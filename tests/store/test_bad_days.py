"""Bad days: the store of a job fails at random, drawn from a seed, while ranks and agents die.

EVERSTEP_STORE_SEED is the seed of the first day. New days begin for EVERSTEP_STORE_SECONDS.
"""

import asyncio
import os
import random
import secrets
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from agent.gang import assert_exact
from everstep_agent.storage.retrying import Patience
from everstep_contract import report
from everstep_lab import objectstore
from store import proxy as bad
from store.given import S3Gang, make_impatient
from store.proxy import Act, S3Proxy

STEPS = 60
PATIENT = Patience(deadline_s=3.0, first_s=0.01, longest_s=0.2)
FAULTS: dict[str, tuple[Act, str, str, float]] = {
    "slow down": (bad.refuse(503, "SlowDown"), ".*", "", 0.6),
    "away": (bad.drop(), ".*", "", 1.0),
    "denied": (bad.refuse(403, "AccessDenied"), ".*", "", 1.0),
    "writes denied": (bad.refuse(403, "AccessDenied"), "PUT", "", 1.0),
    "reads denied": (bad.refuse(403, "AccessDenied"), "GET", "/chunks/", 1.0),
    "bucket lost": (bad.refuse(404, "NoSuchBucket"), ".*", "", 1.0),
    "full": (bad.refuse(507, "XMinioStorageFull"), "PUT", "", 1.0),
    "answers lost": (bad.lose_answer(), "PUT", "", 0.5),
    "log's answers lost": (bad.lose_answer(), "PUT", "/log/", 0.9),
    "conflicts": (bad.refuse(409, "ConditionalRequestConflict"), "PUT", "/log/", 0.7),
    "bodies cut": (bad.drop(0.5), "GET", "", 0.5),
    "bodies changed": (bad.store_other(lambda b: b + b"?"), "PUT", "/chunks/", 0.5),
}


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_no_day_costs_a_run_anything(
    tmp_path: Path, s3: objectstore.ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_impatient(monkeypatch, PATIENT)
    seed = int(os.environ.get("EVERSTEP_STORE_SEED") or secrets.randbelow(2**31))
    until = time.monotonic() + float(os.environ.get("EVERSTEP_STORE_SECONDS", "240"))
    met: Counter[str] = Counter()
    days = 0
    while days == 0 or time.monotonic() < until:
        print(f"bad day: EVERSTEP_STORE_SEED={seed + days}", flush=True)
        folder = tmp_path / str(days)
        folder.mkdir()
        async with S3Proxy(s3.endpoint, seed=seed + days).open() as proxy:
            met += await a_day(folder, s3, proxy, random.Random(seed + days))
        days += 1
    print(f"{days} bad days, first seed {seed}: {dict(met.most_common())}")


async def a_day(
    folder: Path, s3: objectstore.ObjectStore, proxy: S3Proxy, dice: random.Random
) -> Counter[str]:
    met: Counter[str] = Counter()
    gang = S3Gang(folder, s3, proxy, 3, save_every_steps=4)
    gang.stub |= {"STUB_UNTIL": str(STEPS), "STUB_STEP_MS": "25"}
    async with gang:
        await gang.until(lambda s: s.step >= 2, 120.0)
        for _ in range(dice.randint(1, 3)):
            name = dice.choice(sorted(FAULTS))
            act, method, target, chance = FAULTS[name]
            met[name] += 1
            fault = proxy.arm(act, method, target, chance=chance)
            await asyncio.sleep(dice.uniform(0.2, 1.5))
            met[await a_death(gang, dice)] += 1
            await asyncio.sleep(dice.uniform(0.2, 1.5))
            met["requests hit"] += fault.hits
            proxy.mend()
        ends = await gang.reports(240.0)
        causes = {r.cause for r in ends.values()}
        assert causes == {report.Cause.DONE}, (causes, gang.shown())
        await assert_exact(gang, STEPS)
    return met


async def a_death(gang: S3Gang, dice: random.Random) -> str:
    """Kill a rank, an agent with its pod, or nobody; return what was killed. After the job's end
    nobody dies.
    """
    slot, kind = dice.randrange(gang.count), dice.choice(["rank", "agent", "nobody"])
    workers = gang.agents[slot].pod.workers.current
    if kind == "nobody" or gang.tasks[slot].done() or gang.seen.done or not workers:
        return "nobody died"
    if kind == "rank":
        with_pid = [w.pid for w in workers.values() if w.alive]
        for pid in with_pid:
            os.kill(pid, signal.SIGKILL)
        return "rank killed" if with_pid else "nobody died"
    await gang.kill(slot)
    await gang.start(slot, gang.attempts[slot] + 1)
    return "agent killed"
