"""After a failure that names its device, the slot's next worker waits for the operator's verdict."""

from pathlib import Path

import pytest

from agent.gang import Gang, assert_exact
from everstep_agent.pod import device_waits
from everstep_agent.pod.device_waits import JUDGMENT_SECONDS, DeviceWait
from everstep_contract import levels, report

WAIT = DeviceWait(id="1.0.1.0.2", local=0, message="ECC", since=100.0)
WATCHED = levels.Wanted(watched=(1,))
JUDGED = levels.Wanted(watched=(1,), judged=("1.0.1.0.2",))


def test_where_the_gpus_are_not_watched_nothing_waits() -> None:
    assert device_waits.begin((), WAIT, levels.Wanted(watched=(0, 2)), slot=1) == ()


def test_a_death_that_is_told_twice_is_one_wait() -> None:
    once = device_waits.begin((), WAIT, WATCHED, slot=1)
    assert device_waits.begin(once, WAIT, WATCHED, slot=1) == once == (WAIT,)


@pytest.mark.parametrize(
    ("wanted", "after", "waits", "why"),
    [
        (WATCHED, 0.1, True, ""),
        (WATCHED, JUDGMENT_SECONDS - 0.1, True, ""),
        (WATCHED, JUDGMENT_SECONDS, False, "no judgment within 45 s"),
        (JUDGED, 0.1, False, "has judged a later scrape"),
        (levels.Wanted(watched=(1,), judged=("1.0.1.0.1",)), 0.1, True, ""),
        (levels.Wanted(), 0.1, False, "no longer watches"),
    ],
)
def test_a_wait_ends_with_the_judgment_or_at_its_limit(
    wanted: levels.Wanted, after: float, waits: bool, why: str
) -> None:
    left = device_waits.list_open((WAIT,), wanted, slot=1, now=100.0 + after)
    assert bool(left) is waits
    if why:
        assert why in device_waits.why_closed(WAIT, wanted, slot=1)


def test_the_age_of_a_death_is_told_to_the_operator() -> None:
    (told,) = device_waits.to_levels((WAIT,), slot=1, attempt=3, now=102.5)
    assert (told.id, told.slot, told.attempt, told.age_ms) == ("1.0.1.0.2", 1, 3, 2500)


def failing(tmp_path: Path) -> Gang:
    gang = Gang(tmp_path, 2)
    (tmp_path / "errors").mkdir()
    text = "CUDA error, uncorrectable ECC error encountered"
    gang.stub["STUB_MODE"] = f"says:6:{tmp_path}/errors:1:{text}"
    gang.want(watched=(0, 1))
    return gang


async def test_the_slot_starts_no_worker_until_the_operator_has_judged_its_device(
    tmp_path: Path,
) -> None:
    async with failing(tmp_path) as gang:
        seen = await gang.until(lambda s: s.device_deaths)
        (death,) = seen.device_deaths
        assert (death.slot, death.attempt) == (1, 0)
        assert "ECC" in death.message
        sound, broken = (gang.agents[s].pod.workers for s in (0, 1))
        await gang.until(lambda _: sound.ready_lives() and sound.group_over())
        later = await gang.until(lambda s: s.device_deaths and s.device_deaths[0].age_ms > 300)
        assert later.device_deaths[0].id == death.id
        assert broken.fresh == {}
        gang.want(judged=(death.id,))
        seen = await gang.until(lambda s: s.epoch == 2 and s.running)
        assert seen.device_deaths == ()
        assert [(i.cause, i.slot, i.steps_lost) for i in seen.incidents] == [("DeviceFailed", 1, 0)]
        ends = await gang.reports()
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
        await assert_exact(gang, 20)


async def test_without_a_judgment_the_slot_goes_on_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_waits, "JUDGMENT_SECONDS", 0.5)
    async with failing(tmp_path) as gang:
        await gang.until(lambda s: s.device_deaths)
        await gang.reports()
        assert "no judgment within" in gang.shown()
        await assert_exact(gang, 20)
