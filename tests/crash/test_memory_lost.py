"""The operator keeps all its state in the API server. Here that state is wiped, restored from an
older copy, or read from old lists.
"""

import asyncio
import os
import random
from pathlib import Path

import pytest

from crash.lane import Lane
from crash.rig import Rig, a_rig
from crash.troubles import Stale
from everstep_contract import names
from everstep_demo.runwatch import RunWatch
from everstep_lab import Lab
from stub_image.given import build_stub_job

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(600)]
SEED = int(os.environ.get("EVERSTEP_CRASH_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
URI = "s3://everstep/tests"


def attempts_of(found: dict) -> dict[int, int]:
    return {s["slot"]: s["attempt"] for s in found.get("slots", [])}


async def lose_pod(lane: Lane, slot: int) -> None:
    """Delete the slot's pod and wait until its next attempt runs."""
    pod = await lane.board.current_pod(lane.job, slot)
    assert pod is not None
    await lane.board.delete_pod(pod.name)
    await lane.until_running(**{f"slot_{slot}": pod.attempt + 1})


async def until_quiet(rig: Rig, seconds: float = 4.0) -> None:
    """Wait until the operator has written nothing for `seconds`."""

    async def quiet() -> bool:
        loop = asyncio.get_running_loop()
        return not rig.proxy.writes_since(loop.time() - seconds)

    await rig.lanes[0].until(f"{seconds:.0f} s without a write", quiet)


@pytest.mark.parametrize("restarted", [False, True], ids=["under its eyes", "while it was down"])
async def test_a_status_that_was_wiped_by_hand_is_rebuilt_and_no_attempt_is_used_again(
    restarted: bool, lab: Lab, account: Path, tmp_path: Path
) -> None:
    async with a_rig(lab, tmp_path, account) as rig:
        lane = rig.lanes[0]
        await lane.create(build_stub_job(f"wiped-{restarted}".lower()))
        await lane.until_running()
        await lose_pod(lane, 1)
        lives, attempts = await lane.lives(), attempts_of(await lane.status())
        if restarted:
            await rig.operator.kill()
        await wipe(lane)
        if restarted:
            await rig.operator.start()
        await lane.until_running(slot_1=2)
        await until_quiet(rig)
        assert await lane.lives() == lives, "a pod was created or ended"
        assert attempts_of(await lane.status()) == attempts
        await lane.end()


async def wipe(lane: Lane) -> None:
    """Remove all status fields, like `kubectl replace --subresource=status` with a job without a
    status.
    """
    place = f"/apis/{names.GROUP}/{names.VERSION}/namespaces/default/{names.PLURAL}/{lane.job}"
    fields = (await lane.status()).keys()
    await lane.api.patch(f"{place}/status", {"status": dict.fromkeys(fields)})


async def test_etcd_restored_to_an_older_state_uses_no_attempt_again_and_takes_nothing_back(
    lab: Lab, account: Path, tmp_path: Path
) -> None:
    """The copy is from attempt 1 and restored after attempt 3. The deleted pods come back, and must not
    run.
    """
    name = "restored"
    async with a_rig(lab, tmp_path, account) as rig:
        lane = rig.lanes[0]
        watch = RunWatch(URI, f"default/{name}", lab.store_environment)
        await lane.create(build_stub_job(name, spec={"checkpoint": {"uri": URI, "everySteps": 50}}))
        await lane.until_running()
        await asyncio.to_thread(lab.etcd_keep)
        await lose_pod(lane, 1)
        await lose_pod(lane, 1)
        await watch.refresh()
        epoch, committed = watch.epoch, watch.committed
        await asyncio.to_thread(lab.etcd_restore)
        await lane.until_running(slot_1=2, limit=300)
        await until_quiet(rig)
        await watch.refresh()
        print(f"operator ended {rig.operator.ends} times; {await lane.status()}")
        events = await lane.api.list("/api/v1/namespaces/default/events")
        told = [e["message"] for e in events if e["reason"] == "StateRestored"]
        assert any("the job keeps what it has committed" in message for message in told)
        assert watch.epoch >= epoch
        assert watch.committed >= committed, "the run lost a commit"
        assert len(await lane.board.pods(name)) == 2
        await lane.end()


async def test_an_operator_that_starts_on_old_lists_ends_at_the_same_place(
    lab: Lab, account: Path, tmp_path: Path
) -> None:
    """For a while the operator sees the lists from before an attempt, and then the true ones."""
    stale = Stale(random.Random(SEED))
    async with a_rig(lab, tmp_path, account, "--resync-seconds=5") as rig:
        rig.proxy.faults.append(stale)
        lane = rig.lanes[0]
        await lane.create(build_stub_job("stale"))
        await lane.until_running()
        stale.kept.clear()

        async def listed() -> bool:
            return len(stale.kept) >= 4

        await lane.until("a list of each kind", listed)
        stale.frozen = True
        await lose_pod(lane, 1)
        await rig.operator.kill()
        stale.on = True
        await rig.operator.start()
        await asyncio.sleep(10)
        stale.on = False
        await lane.until_running(slot_1=2)
        await until_quiet(rig)
        shape = await lane.shape()
        assert stale.struck
        assert [slot[:2] for slot in shape.slots] == [(0, 1), (1, 2)]
        assert sum(n for _, n in shape.restarts) == 1
        await lane.end()
