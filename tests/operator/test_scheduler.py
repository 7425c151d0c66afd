"""When each job gets a pass."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from everstep_operator import kube, scheduler
from everstep_operator.pacing import Bucket, Lane, Places
from everstep_operator.scheduler import Scheduler
from everstep_operator.settings import SettingsError, load_settings

Key = tuple[str, str]
A, B = ("ns", "a"), ("ns", "b")


@asynccontextmanager
async def running(run_pass: Callable[[Key], Awaitable[float | None]]) -> AsyncIterator[Scheduler]:
    found = Scheduler(run_pass)
    task = asyncio.create_task(found.run())
    yield found
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_wake_during_a_pass_gets_a_pass_of_its_own_and_never_two_at_once() -> None:
    began, go, passes, busy = asyncio.Event(), asyncio.Event(), [], 0

    async def run_pass(key: Key) -> None:
        nonlocal busy
        busy += 1
        assert busy == 1
        passes.append(key)
        began.set()
        await go.wait()
        busy -= 1

    async with running(run_pass) as found, asyncio.timeout(10):
        found.wake(A)
        await began.wait()
        began.clear()
        found.wake(A)
        found.wake(A)
        go.set()
        await began.wait()
    assert passes == [A, A]


async def test_a_pass_that_asks_to_be_woken_is() -> None:
    done, passes = asyncio.Event(), []

    async def run_pass(key: Key) -> float | None:
        passes.append(key)
        if len(passes) == 3:
            done.set()
            return None
        return 0.001

    async with running(run_pass) as found, asyncio.timeout(10):
        found.wake(A)
        await done.wait()
    assert passes == [A, A, A]


async def test_the_earlier_moment_counts() -> None:
    done = asyncio.Event()

    async def run_pass(key: Key) -> None:
        done.set()

    async with running(run_pass) as found, asyncio.timeout(10):
        found.wake(A, 3600)
        found.wake(A)
        found.wake(A, 3600)
        await done.wait()
        assert found.waiting == 0


async def test_one_bad_object_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "RETRY_SECONDS", (0.001,))
    good, tries = asyncio.Event(), []

    async def run_pass(key: Key) -> None:
        if key == A:
            tries.append(key)
            if len(tries) < 3:
                raise kube.Transient(503, "", "away") if len(tries) == 1 else ValueError("poison")
        if len(tries) >= 3:
            good.set()

    async with running(run_pass) as found, asyncio.timeout(10):
        found.wake(A)
        found.wake(B)
        await good.wait()


def test_a_setting_that_cannot_be_used_is_named_with_flag_and_variable() -> None:
    env = {"EVERSTEP_OPERATOR_KEY": "k" * 32}
    with pytest.raises(
        SettingsError,
        match=r"--cordon-budget \(EVERSTEP_OPERATOR_CORDON_BUDGET\) is 'ten': expected GPU nodes .* 10% or a number",
    ):
        load_settings(["--cordon-budget", "ten"], env)
    with pytest.raises(SettingsError, match="no key of at least 16"):
        load_settings([], {})
    command, settings = load_settings(["--http-port", "0"], env)
    assert (command, settings.http_port) == ("run", 0)


def test_a_key_file_of_random_bytes_is_named_with_the_fix(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"\xff" * 32)
    with pytest.raises(SettingsError, match=r"--key-file .*: the key is not text; write it"):
        load_settings(["--key-file", str(key)], {})


async def test_passes_that_wait_for_the_status_lane_hold_up_no_recovery() -> None:
    """More passes wait than there are places, because the status lane has no token for any of them."""
    bucket, waiting, recovered = Bucket(qps=0.001, burst=4), set(), asyncio.Event()
    all_wait = asyncio.Event()
    for _ in range(3):
        await bucket.take(Lane.RECOVERY)

    async def run_pass(key: Key) -> None:
        if key == A:
            await bucket.take(Lane.RECOVERY)
            recovered.set()
            return
        waiting.add(key)
        if len(waiting) == 20:
            all_wait.set()
        await bucket.take(Lane.STATUS)

    async with running(run_pass) as found, asyncio.timeout(10):
        for number in range(20):
            found.wake(("ns", f"figures-{number}"))
        await all_wait.wait()
        found.wake(A)
        await recovered.wait()


async def test_who_comes_back_from_the_status_lane_needs_a_place_again() -> None:
    places, order = Places(1), []

    async def work(name: str, bucket: Bucket) -> None:
        async with places.held():
            order.append(f"{name} begins")
            await bucket.take(Lane.STATUS)
            order.append(f"{name} ends")

    slow, fast = Bucket(qps=200.0, burst=2), Bucket(qps=1000.0, burst=8)
    for _ in range(2):
        await slow.take(Lane.RECOVERY)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(work("slow", slow))
        group.create_task(work("fast", fast))
    assert order == ["slow begins", "fast begins", "fast ends", "slow ends"]


async def test_a_pass_cancelled_in_the_status_lane_gives_its_place_once() -> None:
    places, bucket = Places(1), Bucket(qps=0.001, burst=2)
    for _ in range(2):
        await bucket.take(Lane.RECOVERY)

    async def wait() -> None:
        async with places.held():
            await bucket.take(Lane.STATUS)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    async with places.held():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        other = asyncio.create_task(wait())
        await asyncio.sleep(0)
        assert not other.done()
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
