"""The operator dies at each of its writes, and everything ends where it would have ended."""

import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from crash.cases import Case, Clean, Runner, build_cases, describe
from crash.rig import a_rig
from crash.scenarios import SCENARIOS
from everstep_lab import Lab

pytestmark = [pytest.mark.lab]
SEED = int(os.environ.get("EVERSTEP_CRASH_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
SECONDS = float(os.environ.get("EVERSTEP_CRASH_SECONDS", "1200"))
SKIP = int(os.environ.get("EVERSTEP_CRASH_SKIP", "0"))
"""Cases at the beginning of the seed's order that an earlier run has tried."""
ONLY = os.environ.get("EVERSTEP_CRASH_ONLY", "")
"""As the output names a case: `pause-7-after`."""
SAMPLE = 4


@pytest.mark.timeout(300)
async def test_a_job_is_suspended_and_resumed_alike_wherever_the_operator_died(
    lab: Lab, account: Path, tmp_path: Path, cleans: dict[str, Clean]
) -> None:
    async with a_rig(lab, tmp_path, account) as rig:
        runner = Runner(rig.proxy, rig.operator, rig.lanes[:2], cleans)
        await runner.run_clean(["pause"])
        cases = build_cases({"pause": runner.clean["pause"]}, SEED)[:SAMPLE]
        await runner.run(cases, time.monotonic() + 120)
        conclude(runner, cases)


@pytest.mark.long
@pytest.mark.timeout(0)
async def test_the_operator_may_die_at_any_write(
    lab: Lab, account: Path, tmp_path: Path, cleans: dict[str, Clean]
) -> None:
    until = time.monotonic() + SECONDS
    async with a_rig(lab, tmp_path, account) as rig:
        runner = Runner(rig.proxy, rig.operator, rig.lanes, cleans)
        await runner.run_clean([ONLY.split("-")[0]] if ONLY else list(SCENARIOS))
        for name, clean in sorted(runner.clean.items()):
            print(f"{name}: {len(clean.writes)} writes, {clean.seconds:.1f} s: {clean.writes}")
        cases = build_cases(runner.clean, SEED)
        cases = [c for c in cases if c.name == ONLY] if ONLY else cases[SKIP:]
        await runner.run(cases, until)
        conclude(runner, cases)


def conclude(runner: Runner, cases: list[Case]) -> None:
    ran = Counter((r.case.scenario, r.case.moment) for r in runner.results)
    reached = sum(bool(r.met) for r in runner.results)
    print(f"seed {SEED} (EVERSTEP_CRASH_SEED): {len(runner.results)} of {len(cases)} cases ran")
    print(f"in {reached} of them the write came; {dict(sorted(ran.items()))}")
    assert runner.results
    failed = [describe(result) for result in runner.results if result.problem]
    assert not failed, "\n".join(failed)
