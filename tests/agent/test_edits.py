"""Settings edited while the job runs: some apply at once, some must be equal on all members."""

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest

from agent.gang import Gang, assert_exact
from everstep_agent.coordinator import boundaries, seen_document
from everstep_agent.live_settings import apply_wanted
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Stage
from everstep_agent.pod.worker_start import build_start
from everstep_contract import env, levels
from everstep_contract.units import ONE_RANK, Mesh

MEMBER = EpochMember(
    slot=0, attempt=1, incarnation=1, node_rank=0, first=0, lives=(1,), address="a"
)
MADE = env.AgentEnv(
    job="team/lm", job_uid="u", slot=0, attempt=1, token="t", pod_ip="", uri="file:///x", run="r",
    memory="/m", save_every_steps=25, save_every_seconds=60,
)  # fmt: skip
EDITS = {
    "hang_seconds": 7.0, "startup_seconds": 8.0, "drain_seconds": 9.0, "gang_seconds": 10.0, "keep": 11,
    "guard_factor": 12.0, "guard_action": "SaveAndStop", "in_place": False, "on_loss": "Wait",
    "below_min_seconds": 60.0, "max_redo_seconds": 5.0,
}  # fmt: skip


def an_epoch(**changes: object) -> EpochLevel:
    level = EpochLevel(
        number=2, token="t", stage=Stage.RUNNING, members=(MEMBER,), save_every_steps=25,
        guard_factor=10.0, guard_action="Note", generation=3,
    )  # fmt: skip
    return replace(level, **changes)


def wanted(**changes: object) -> levels.Wanted:
    settings = levels.JobSettings(guard_factor=10.0, guard_action="Note", hang_seconds=300.0)
    return replace(levels.Wanted(generation=3, save_every_steps=25, settings=settings), **changes)


def edited(**changes: object) -> levels.Wanted:
    return wanted(generation=4, settings=replace(wanted().settings, **changes))


def test_every_setting_of_the_operator_takes_the_place_of_the_pod_s_own() -> None:
    assert set(EDITS) == {f.name for f in dataclasses.fields(levels.JobSettings)}
    live = apply_wanted(MADE, levels.Wanted(settings=levels.JobSettings(**EDITS)))
    assert {name: getattr(live, name) for name in EDITS} == EDITS
    spaced = apply_wanted(MADE, levels.Wanted(save_every_steps=0, save_every_seconds=5))
    assert (spaced.save_every_steps, spaced.save_every_seconds) == (0, 5)


def test_what_an_older_operator_says_nothing_of_stays_as_the_pod_was_made() -> None:
    assert apply_wanted(MADE, levels.Wanted()) == MADE


@pytest.mark.parametrize(
    ("news", "purpose"),
    [
        (wanted(), ""),
        (edited(hang_seconds=5.0), ""),
        (edited(keep=9), ""),
        (edited(guard_factor=5.0), "Edit"),
        (edited(guard_action="SaveAndStop"), "Edit"),
        (wanted(save_every_steps=40), "Edit"),
        (levels.Wanted(), ""),
    ],
)
def test_an_epoch_ends_for_what_all_its_members_must_have_alike(
    news: levels.Wanted, purpose: str
) -> None:
    assert boundaries.why_renew(news, an_epoch()) == purpose


def test_an_edit_is_acted_on_once_the_epoch_has_it() -> None:
    at_once, later = edited(hang_seconds=5.0), edited(guard_factor=5.0)
    assert seen_document.find_generation(at_once, an_epoch()) == 4
    assert seen_document.find_generation(later, an_epoch()) == 3
    assert seen_document.find_generation(later, an_epoch(guard_factor=5.0, generation=4)) == 4
    assert seen_document.find_generation(later, an_epoch(stage=Stage.OVER)) == 4
    assert seen_document.find_generation(later, None) == 4


def test_members_of_one_epoch_begin_alike_whenever_their_pods_were_made() -> None:
    start = build_start(MADE, 0, an_epoch(guard_factor=5.0, save_every_steps=40), MEMBER, None)
    assert (start.guard_factor, start.guard_action, start.save_every_steps) == (5.0, "Note", 40)
    older = an_epoch(guard_factor=None, guard_action=None, save_every_steps=None)
    start = build_start(MADE, 0, older, MEMBER, None)
    assert (start.guard_factor, start.save_every_steps) == (10.0, 25)


def test_all_members_of_an_epoch_are_told_the_same_units() -> None:
    mesh = Mesh(shard=2, tensor=2)
    member = replace(MEMBER, lives=(1, 1))
    made = replace(MADE, mesh=mesh, workers=2)
    level = an_epoch(members=(member, replace(member, slot=1, first=2)), mesh=mesh)
    start = build_start(made, 1, level, level.members[1], None)
    assert (start.rank, start.world, start.mesh) == (3, 4, mesh)
    assert build_start(MADE, 0, an_epoch(), MEMBER, None).mesh == ONE_RANK


async def test_a_shorter_hang_limit_reaches_the_ranks_that_train(tmp_path: Path) -> None:
    """The pods started with a limit of five minutes, longer than this test waits."""
    gang = Gang(tmp_path, 2, hang_seconds=300.0)
    gang.stub["STUB_MODE"] = f"hang:6:{tmp_path}/flag"
    async with gang:
        await gang.until(lambda s: s.step >= 4)
        gang.want(generation=2, settings=levels.JobSettings(hang_seconds=1.0))
        seen = await gang.until(lambda s: s.incidents and not s.incidents[-1].open, 60.0)
        assert seen.incidents[-1].cause == "WorkerHung"
        assert seen.generation == 2
        await gang.reports()
        await assert_exact(gang, 20)


async def test_an_edited_guard_and_interval_begin_a_new_epoch_that_loses_nothing(
    tmp_path: Path,
) -> None:
    gang = Gang(tmp_path, 2)
    gang.stub["STUB_UNTIL"] = "60"
    async with gang:
        await gang.until(lambda s: s.running and s.step >= 3)
        settings = levels.JobSettings(guard_factor=3.0, guard_action="Note")
        gang.want(generation=2, settings=settings, save_every_steps=7)
        await gang.until(lambda s: s.epoch == 2 and s.running)
        assert gang.seen.generation == 2
        incident = gang.seen.incidents[-1]
        assert (incident.cause, incident.steps_lost, incident.slots) == ("Edit", 0, ())
        assert [s.generation for s in gang.history if s.epoch == 1 and s.running][-1] == 0
        await gang.reports()
        await assert_exact(gang, 60)
        log = await gang.run_log()
        assert [c.cause for c in log.claims] == ["Start", "Edit"]
