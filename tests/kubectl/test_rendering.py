"""What an engineer reads, rendered from the recordings."""

import pytest

import job_builders
from everstep_kubectl import checkpoints, incidents, jobs, nodes, text, timeline
from everstep_operator.jobs import statuspatch
from everstep_operator.jobs.plan import plan
from everstep_operator.jobs.stamps import to_stamp
from everstep_operator.model_status import JobStatus
from kubectl import recordings
from kubectl.recordings import NOW


def test_status_says_alive_how_far_how_safe() -> None:
    job = jobs.build_job(recordings.job(), NOW)
    lines = jobs.render_job(job, NOW).splitlines()
    assert lines[0] == "default/tiny: Running"
    assert "  ready        2/2 pods, epoch 3" in lines
    assert "  progress     step 2553 of 1000000, loss 0.7265" in lines
    (safe,) = [line for line in lines if line.startswith("  saved ")]
    assert safe.startswith("  saved        checkpoint of step 2550 (")
    assert safe.endswith("3 steps since then")
    assert "0      tiny-0-3   node-4   NodeGone, was on node-2" in lines
    assert lines[-1] == "more: kubectl everstep timeline -n default tiny last"


def test_status_says_how_ranks_form_units() -> None:
    raw = recordings.job()
    raw["spec"]["parallelism"] = {"shard": 2, "tensor": 1}
    lines = jobs.render_job(jobs.build_job(raw, NOW), NOW).splitlines()
    assert "  ready        2/2 pods, units of 2 ranks (shard=2), epoch 3" in lines


RECOVERIES = [
    {"rung": "regroup", "count": 12, "seconds": 3.72, "stepsLost": 0, "within": {"0.5": 12}},
    {"rung": "restart", "count": 1, "seconds": 14.2, "stepsLost": 3, "within": {"20.0": 1}},
]


def test_status_says_what_interruptions_cost() -> None:
    seconds = {"step": 984.0, "wait": 9.0, "data": 6.5, "idle": 0.5}
    raw = recordings.job(recoveries=RECOVERIES, seconds=seconds, goodput="98.4%", spareSeconds=9000)
    job = jobs.build_job(raw, NOW)
    lines = jobs.render_job(job, NOW).splitlines()
    assert (
        "  recovery     restart 1 × 14.2 s, regroup 12 × 0.31 s; goodput 98.4%; steps lost 3; spares held 2.5 h"
        in lines
    )
    assert "  time         step 98.4%, wait 0.9%, data 0.7%" in lines
    row = jobs.render_table([job], NOW, everywhere=False).splitlines()[1]
    assert row.split()[7:10] == ["4", "3", "98.4%"]
    assert max(map(len, lines[:10])) <= 120, "the lines must fit on one screen"


def test_steps_lost_of_an_incident_that_is_not_over_are_told_too() -> None:
    raw = recordings.job(recoveries=RECOVERIES)
    raw["status"]["incidents"][-1]["stepsLost"] = 5
    assert jobs.build_job(raw, NOW).steps_lost == 5


def test_a_status_of_an_older_operator_has_no_rungs() -> None:
    lines = jobs.render_job(jobs.build_job(recordings.job(), NOW), NOW).splitlines()
    assert "  recovery     goodput 80.3%; steps lost 0" in lines
    assert not [line for line in lines if line.startswith("  time")]


def test_one_line_for_each_job_has_the_risk_in_it() -> None:
    job = jobs.build_job(recordings.job(), NOW)
    head, row = jobs.render_table([job], NOW, everywhere=False).splitlines()
    assert head.split() == [
        "NAME", "STATE", "READY", "STEP", "SAVED", "AGE", "UNSAVED", "INTERRUPTED", "LOST",
        "GOODPUT", "WHY",
    ]  # fmt: skip
    assert row.split()[:8] == ["tiny", "Running", "2/2", "2553", "2550", "2s", "3", "4"]
    assert jobs.render_table([job], NOW, everywhere=True).startswith("NAMESPACE")
    assert "-A: everywhere" in jobs.render_table([], NOW, everywhere=False)


def test_a_job_whose_checkpoints_fail_is_called_not_safe() -> None:
    raw = recordings.with_condition(recordings.job(), "CheckpointHealthy", "False", "AccessDenied")
    shown = jobs.render_job(jobs.build_job(raw, NOW), NOW)
    assert "NOT SAFE: AccessDenied: AccessDenied it is" in shown


def test_a_step_that_is_kept_in_memory_is_told_beside_the_checkpoint() -> None:
    shown = jobs.render_job(jobs.build_job(recordings.job(keptStep=71), NOW), NOW)
    assert "; step 71 kept in memory" in shown
    fresh = recordings.job(keptStep=71, checkpoint=None)
    shown = jobs.render_job(jobs.build_job(fresh, NOW), NOW)
    assert "nothing is saved yet in the store; step 71 kept in memory" in shown


def test_old_figures_of_a_running_job_mean_a_long_step_or_an_absent_operator() -> None:
    """An operator that runs writes nothing while the figures do not change."""
    before, later = job_builders.NOW, job_builders.NOW + 600
    document = statuspatch.to_document(plan(job_builders.an_observation(), before).status)
    document["observedAt"] = to_stamp(before)
    held = job_builders.a_job(status=JobStatus.model_validate(document), raw_status=document)
    unchanged = plan(job_builders.an_observation(job=held), later).status
    assert statuspatch.decide_patch(document, unchanged, later, 10.0) == {}

    job = jobs.build_job(recordings.job(), NOW + 600)
    assert "these figures are 10m old: the step takes that long, or the operator" in job.warnings[0]
    assert "app.kubernetes.io/name=everstep-operator" in job.warnings[0], "in any namespace"
    assert jobs.build_job(recordings.job(), NOW).warnings == ()


def test_a_job_that_no_operator_has_seen_is_no_error() -> None:
    raw = recordings.job()
    del raw["status"]
    shown = jobs.render_job(jobs.build_job(raw, NOW), NOW)
    assert "default/tiny: New" in shown
    assert "no operator has looked at it yet" in shown
    assert "nothing is saved yet" not in jobs.render_table(
        [jobs.build_job(raw, NOW)], NOW, everywhere=False
    )


def test_a_job_that_is_being_deleted_is_not_said_to_run() -> None:
    raw = recordings.deleted(recordings.job())
    shown = jobs.render_job(jobs.build_job(raw, NOW), NOW)
    assert shown.startswith("default/tiny: Deleting\n  why          it is being deleted")
    assert jobs.describe_state(raw).startswith("Deleting: it is being deleted")
    assert jobs.find_end(raw) == "being deleted"


def test_a_slot_without_a_pod_names_none() -> None:
    """A job that is suspended, waits for a pod, or was made smaller from 200 pods to 1."""
    records = [{"slot": 0, "attempt": 1, "podUid": "u", "node": "node-0"}]
    records += [{"slot": 1, "attempt": 2, "cause": "Suspended", "formerNode": "node-1"}]
    records += [{"slot": 2, "attempt": 1}]
    records += [{"slot": s, "attempt": 2, "cause": "ScaledDown"} for s in range(3, 200)]
    records += [{"slot": 200, "attempt": 2, "cause": "ScaledDown", "podUid": "u", "node": "node-2"}]
    job = jobs.build_job(recordings.job(slots=records), NOW)
    lines = jobs.render_job(job, NOW).splitlines()
    head = next(k for k, line in enumerate(lines) if line.startswith("SLOT"))
    assert [line.split() for line in lines[head + 1 : head + 6]] == [
        ["0", "tiny-0-1", "node-0", "-"],
        ["1", "-", "-", "Suspended,", "was", "on", "node-1"],
        ["2", "-", "-", "-"],
        ["200", "tiny-200-2", "node-2", "ScaledDown"],
        [],
    ]


def test_a_timeline_answers_what_happened_and_what_it_cost() -> None:
    found = incidents.build_incidents(recordings.job(), recordings.quarantines())
    shown = timeline.render("tiny", found[:1], whole=True, now=NOW)
    lines = shown.splitlines()
    assert lines[0] == "inc-7b7c4a3c08  NodeLeaving  2026-11-21 22:07:07 UTC (3m ago)"
    assert "  state       over, 10.0 s after it began" in lines
    assert "  verdict     Leaving" in lines
    assert "  rung        move (slot 0, 1 off node-1)" in lines
    assert "  checkpoint  continued from step 1188, nothing was lost" in lines
    assert (
        "  cost        9.3 s without steps (seen by the operator) x 2 GPUs = 19 GPU-seconds; "
        "0 steps lost"
    ) in lines
    assert "    0.087 s   verdict   decided: the node is not to be used" in lines
    assert lines[-1] == "  by the job's own clock: boundary 0.18 s, commit 0.07 s"


def test_an_incident_without_an_end_is_going_on_only_while_the_job_is_not_whole() -> None:
    found = [i for i in incidents.build_incidents(recordings.job()) if i.open]
    assert timeline.describe_state(found[0], whole=False) == "going on"
    assert "not recorded; the job runs" in timeline.describe_state(found[0], whole=True)


@pytest.mark.parametrize(
    ("ready", "running", "whole"), [(3, "True", True), (2, "True", False), (3, "False", False)]
)
def test_a_job_that_trains_without_a_lost_pod_is_not_whole(
    ready: int, running: str, whole: bool
) -> None:
    """Recovery in place: the job is Running while the incident of the lost pod goes on."""
    job = recordings.job(world={"ready": ready, "desired": 3})
    assert jobs.is_whole(recordings.with_condition(job, "Running", running)) is whole


def test_a_quiet_job_has_no_timeline() -> None:
    assert timeline.render("tiny", (), whole=True, now=NOW) == "tiny: no interruption so far"


def test_nodes_are_listed_with_verdict_and_why() -> None:
    found = nodes.choose_shown(nodes.build_nodes(recordings.nodes()))
    head, held, free = nodes.render_table(found, NOW).splitlines()
    assert head.split()[:4] == ["NODE", "STATE", "GPUS", "VERDICT"]
    assert held.split()[:5] == ["node-1", "Quarantined", "1/2", "Leaving", "3m"]
    assert "could not remap a faulty memory row" in held
    assert free.split()[:3] == ["node-3", "InUse", "2/2"]


def test_a_node_that_has_only_mig_slices_is_listed() -> None:
    raw = next(n for n in recordings.nodes() if n["metadata"]["name"] == "node-3")
    raw["status"]["capacity"] = {"nvidia.com/mig-1g.10gb": "7", "nvidia.com/gpu": "0"}
    raw["status"]["allocatable"] = {"nvidia.com/mig-1g.10gb": "6", "nvidia.com/gpu": "0"}
    (node,) = nodes.choose_shown(nodes.build_nodes([raw]))
    assert (node.allocatable, node.gpus) == (6, 7)


def test_why_has_the_evidence_and_the_way_back() -> None:
    node = nodes.build_nodes(recordings.nodes())[0]
    shown = nodes.render_why(node, [], NOW)
    assert shown.startswith("node-1: Quarantined")
    assert "xid 64 on GPU-8adb107b" in shown
    assert "release   kubectl everstep release node-1" in shown


def test_a_node_that_others_cordoned_is_not_ours() -> None:
    raw = next(n for n in recordings.nodes() if n["metadata"]["name"] == "node-3")
    raw["spec"]["unschedulable"] = True
    (node,) = nodes.build_nodes([raw])
    shown = nodes.render_why(node, [], NOW)
    assert "somebody else cordoned it: kubectl uncordon node-3" in shown
    assert not nodes.is_marked(raw)


def test_a_node_that_an_observing_operator_warned_of_is_not_called_sound() -> None:
    raw = next(n for n in recordings.nodes() if n["metadata"]["name"] == "node-3")
    raw["spec"]["unschedulable"] = True
    (node,) = nodes.build_nodes([raw])
    event = {
        "type": "Warning", "reason": "GpuFatalXid", "message": "node node-3: GPU 0 reports XID 79",
        "source": {"component": "everstep-operator"}, "lastTimestamp": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    shown = nodes.render_why(node, [event], NOW)
    assert "Everstep has warned of it" in shown
    assert "uncordon" not in shown


def test_a_quarantine_whose_node_is_gone_is_still_shown() -> None:
    (node,) = nodes.build_nodes(recordings.quarantines())
    assert node.verdict == "Absent"


def test_what_a_reader_found_is_told_in_one_sentence() -> None:
    found = {
        "run": "s3://b/r", "ok": True, "problems": [], "steps": 9, "commits": 2, "bytes": 2048,
        "epochs": [{"epoch": 1, "first": 1, "last": 9, "samples": 36, "cause": "Start"}],
    }  # fmt: skip
    assert "whole: steps 1 to 9 once each, 36 samples" in checkpoints.render_verified(found)
    gap = found | {"ok": False, "problems": ["step 5 is missing from the ledger"]}
    assert "PROBLEM: step 5 is missing" in checkpoints.render_verified(gap)
    assert "whole" not in checkpoints.render_verified(gap)


def test_the_list_of_checkpoints_says_where_the_next_start_goes_on_from() -> None:
    found = {"step": 9, "epoch": 2, "bytes": 60_085, "manifest": "m", "cause": "Start"}
    catalog = {
        "run": "s3://b/r",
        "done": False,
        "job": "ns/j",
        "retired": 3,
        "checkpoints": [found],
    }
    shown = checkpoints.render_catalog(catalog)
    assert (
        "9      2       60.1 kB   Start            -           the next start resumes from it"
        in shown
    )
    assert shown.endswith("3 older checkpoints retired")
    assert "no checkpoint yet" in checkpoints.render_catalog(catalog | {"checkpoints": []})


def test_the_list_of_checkpoints_names_a_damaged_log_and_pins_that_the_table_lacks() -> None:
    pin = {"name": "good", "epoch": 1, "step": 4, "manifest": "m", "kept": True}
    catalog = {
        "run": "s3://b/r",
        "done": False,
        "job": "ns/j",
        "retired": 0,
        "checkpoints": [],
        "pins": [pin],
        "problem": "log/000000000002.json is gone",
    }
    shown = checkpoints.render_catalog(catalog).splitlines()
    assert shown[-2:] == [
        "pinned as good: step 4 of epoch 1, which the run does not continue",
        "PROBLEM: log/000000000002.json is gone",
    ]


def test_ages_and_sizes_read_as_kubectl_writes_them() -> None:
    assert [text.span(s) for s in (5, 119, 600, 7200, 200_000)] == ["5s", "119s", "10m", "2h", "2d"]
    assert [text.size(n) for n in (5, 60_085, 3e9)] == ["5 B", "60.1 kB", "3.0 GB"]
    assert text.age("2026-11-21T22:10:00Z", NOW) == "29s"
    assert text.age(None, NOW) == ""
    assert text.seconds_of("nonsense") is None


def test_a_message_of_several_lines_is_one_line_of_the_table() -> None:
    shown = text.table(["NAME", "WHY"], [["a", "Error(s) in GPT:\n\tMissing key(s)"], ["b", ""]])
    assert [line.split(maxsplit=1) for line in shown.splitlines()] == [
        ["NAME", "WHY"], ["a", "Error(s) in GPT: Missing key(s)"], ["b", "-"],
    ]  # fmt: skip
