import pytest

from everstep_kubectl import devices, incidents
from kubectl import recordings


def built() -> dict[str, incidents.Incident]:
    found = incidents.build_incidents(recordings.job(), recordings.quarantines())
    return {i.id: i for i in found}


def test_entries_of_two_slots_with_one_id_are_one_incident() -> None:
    moved = built()["inc-7b7c4a3c08"]
    assert moved.slots == (0, 1)
    assert moved.nodes == ("node-1",)
    assert moved.checkpoint_step == 1188
    names = [m.name for m in moved.moments]
    assert names == [
        "signal", "verdict", "leave", "cordon", "commit", "left", "deleted", "created", "running",
    ]  # fmt: skip
    created = next(m for m in moved.moments if m.name == "created")
    assert created.seconds == 1.238, "the slot that is created last counts"


def test_the_quarantine_of_the_incident_brings_verdict_and_evidence() -> None:
    moved = built()["inc-7b7c4a3c08"]
    assert moved.verdict == "Leaving"
    assert [(e.kind, e.code) for e in moved.evidence] == [("row-remap-failure", 0), ("xid", 64)]


def test_an_incident_that_took_the_jobs_id_finds_its_quarantine_by_reference() -> None:
    job = recordings.job()
    for entry in job["status"]["incidents"]:
        if entry["id"] == "inc-7b7c4a3c08":
            entry |= {"id": "tiny-abc", "quarantine": "inc-7b7c4a3c08"}
    found = incidents.build_incidents(job, recordings.quarantines())
    assert next(i for i in found if i.id == "tiny-abc").verdict == "Leaving"


def test_who_left_in_order_costs_from_left_to_running() -> None:
    cost = built()["inc-7b7c4a3c08"].cost
    assert cost.seconds == pytest.approx(10.047 - 0.731)
    assert cost.gpu_seconds == pytest.approx(2 * cost.seconds, abs=0.1)
    assert cost.steps_lost == 0
    assert cost.source == "seen by the operator"


def test_where_one_did_not_leave_in_order_steps_ended_at_the_beginning() -> None:
    assert built()["inc-22f445b229"].cost.seconds == pytest.approx(22.832)


def test_the_cost_counts_from_the_beginning_also_if_the_first_mark_is_later() -> None:
    """Nobody lived to measure the end. The first mark is 60 s after the steps had ended."""
    entry = {
        "id": "a", "open": False, "slot": 1, "startedAt": "2026-01-01T00:00:00.000Z",
        "phases": [{"name": "detect", "ms": 900}], "recoverySeconds": 75.0,
        "marks": [{"name": "deleted", "seconds": 60.1}, {"name": "running", "seconds": 75.0}],
    }  # fmt: skip
    (found,) = incidents.build_incidents(recordings.job(incidents=[entry]))
    assert found.cost.seconds == entry["recoverySeconds"]


def test_a_pod_that_waits_for_a_node_while_the_others_step_costs_no_steps() -> None:
    entry = {
        "id": "a", "open": False, "slot": 1, "startedAt": "2026-01-01T00:00:00.000Z", "phases": [],
        "marks": [{"name": "resumed", "seconds": 0.2}, {"name": "running", "seconds": 9000.0}],
    }  # fmt: skip
    (found,) = incidents.build_incidents(recordings.job(incidents=[entry]))
    assert found.cost.seconds == 0.2


def test_the_jobs_own_phases_count_if_it_saw_the_end_and_the_wait_for_the_boundary_does_not() -> (
    None
):
    phases = [
        {"name": n, "ms": ms} for n, ms in (("boundary", 300), ("regroup", 2000), ("restart", 500))
    ]
    entry = {"id": "a", "open": False, "phases": phases, "marks": [], "stepsLost": 3}
    (found,) = incidents.build_incidents(recordings.job(incidents=[entry]))
    assert found.cost.seconds == 2.5
    assert found.cost.source == "measured by the job"
    assert found.cost.steps_lost == 3


def test_a_death_and_the_move_that_one_quarantine_explains_are_one_and_their_costs_add_up() -> None:
    died = {
        "id": "lm-1", "quarantine": "inc-1", "cause": "WorkerDied", "open": False, "slot": 1,
        "startedAt": "2026-01-01T00:00:00.000Z", "rung": "regroup", "stepsLost": 0,
        "phases": [{"name": "detect", "ms": 10}, {"name": "regroup", "ms": 90},
                   {"name": "first_step", "ms": 200}],
    }  # fmt: skip
    moved = {
        "id": "inc-1", "quarantine": "inc-1", "cause": "NodeLeaving", "open": False, "slot": 1,
        "startedAt": "2026-01-01T00:00:02.000Z", "rung": "move", "stepsLost": 0,
        "marks": [{"name": "verdict", "seconds": 0.5}, {"name": "running", "seconds": 6}],
        "phases": [{"name": "drain", "ms": 1500}, {"name": "regroup", "ms": 100},
                   {"name": "first_step", "ms": 300}],
    }  # fmt: skip
    (found,) = incidents.build_incidents(recordings.job(incidents=[died, moved]))
    assert (found.id, found.cause, found.rung) == ("lm-1", "WorkerDied", "regroup")
    assert found.cost.seconds == 0.7, "the steps continued while the leaving pod was drained"
    assert found.cost.steps_lost == 0
    assert found.cost.source == "measured by the job"
    assert [(m.name, m.seconds) for m in found.moments] == [("verdict", 2.5), ("running", 8)]
    assert [p.name for p in found.phases].count("first_step") == 2
    assert incidents.choose([found], "inc-1") == [found], (
        "the id of the move, which an Event names, must find it"
    )


def test_a_move_without_which_the_job_had_gone_on_costs_no_time_without_steps() -> None:
    died = {
        "id": "lm-1", "quarantine": "inc-1", "open": False, "startedAt": "2026-01-01T00:00:01.000Z",
        "rung": "regroup", "stepsLost": 0,
        "phases": [{"name": "regroup", "ms": 100}, {"name": "first_step", "ms": 50}],
    }  # fmt: skip
    moved = {
        "id": "inc-1", "quarantine": "inc-1", "open": False, "slot": 1, "phases": [],
        "startedAt": "2026-01-01T00:00:00.000Z", "rung": "move", "stepsLost": 0,
        "marks": [{"name": "verdict", "seconds": 2}, {"name": "running", "seconds": 11}],
    }  # fmt: skip
    (found,) = incidents.build_incidents(recordings.job(incidents=[died, moved]))
    assert (found.cost.seconds, found.cost.source) == (0.15, "measured by the job")


def test_a_move_that_was_withdrawn_costs_nothing() -> None:
    entry = {
        "id": "inc-1", "open": False, "slot": 1, "startedAt": "2026-01-01T00:00:00.000Z",
        "stepsLost": 0, "marks": [{"name": "leave", "seconds": 1}, {"name": "withdrawn", "seconds": 3}],
    }  # fmt: skip
    (found,) = incidents.build_incidents(recordings.job(incidents=[entry]))
    assert (found.open, found.cost.seconds, found.cost.steps_lost) == (False, 0, 0)
    assert found.moments[-1].meaning == "no slot has to leave any more"


def test_entries_that_began_at_different_moments_are_put_on_one_clock() -> None:
    entries = [
        {"id": "a", "slot": 0, "startedAt": "2026-01-01T00:00:00.000Z", "open": False,
         "marks": [{"name": "signal", "seconds": 0}, {"name": "running", "seconds": 9}]},
        {"id": "a", "slot": 1, "startedAt": "2026-01-01T00:00:02.000Z", "open": False,
         "marks": [{"name": "running", "seconds": 8}]},
    ]  # fmt: skip
    (found,) = incidents.build_incidents(recordings.job(incidents=entries))
    assert [(m.name, m.seconds) for m in found.moments] == [("signal", 0), ("running", 10)]


def test_one_incident_is_named_by_its_beginning_or_as_the_last() -> None:
    found = tuple(built().values())
    assert incidents.choose(found, None) == found
    assert incidents.choose(found, "last") == (found[-1],)
    assert [i.id for i in incidents.choose(found, "inc-2")] == ["inc-22f445b229"]
    with pytest.raises(LookupError, match="'inc' names 2 incidents"):
        incidents.choose(found, "inc")
    with pytest.raises(LookupError, match="status knows: none"):
        incidents.choose((), "last")


def test_gpus_are_counted_over_all_pods_and_a_job_without_any_by_its_pods() -> None:
    job = recordings.job()
    container = job["spec"]["workers"]["template"]["spec"]["containers"][0]
    container["resources"]["limits"]["nvidia.com/gpu"] = "8"
    assert incidents.count_gpus(job) == 16
    container["resources"]["limits"] = {"cpu": "4", "nvidia.com/mig-1g.10gb": "3"}
    assert incidents.count_gpus(job) == 6
    container["resources"] = {}
    assert incidents.count_gpus(job) == 2


@pytest.mark.parametrize(
    ("written", "gpus"),
    [(8, 8), ("8", 8), ("1k", 1000), ("one", 0), ("0.5", 0), ("-1", 0), ("", 0)],
)
def test_a_number_of_gpus_that_cannot_be_read_counts_as_none(written: object, gpus: int) -> None:
    """A template may hold any text: one job must not hide all others. The API server writes 1000 as 1k."""
    assert devices.count_gpus({"nvidia.com/gpu": written}) == gpus
