"""What the engineer on call reads: log lines with the incident's id, each logged once, and metrics as
the documentation lists them.
"""

import asyncio
import logging
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import Metric

from everstep_operator import kube, logs, scheduler
from everstep_operator.health.metrics import HealthMetrics
from everstep_operator.jobs import action_log, plan, statuspatch
from everstep_operator.jobs.actions import CreatePod, DeletePod
from everstep_operator.jobs.observe import to_job
from everstep_operator.jobs.stamps import to_fine_stamp, to_stamp
from everstep_operator.metrics import Metrics
from everstep_operator.model_status import JobStatus
from everstep_operator.scheduler import Scheduler
from everstep_operator.values import NodeState
from everstep_operator.world import World
from job_builders import NOW, a_spec, a_verdict, an_observation

PAGE = Path(__file__).parents[2] / "operator" / "README.md"
UNITS = ("_seconds", "_bytes", "_ratio", "_info")


def line_of(level: int, message: str, **fields: str) -> str:
    record = logging.LogRecord("x", level, "x", 1, message, (), None)
    record.fields = fields
    return logs.Formatter().format(record)


def test_a_line_ends_with_fields_that_can_be_searched_for() -> None:
    line = line_of(logging.INFO, "it goes on", job="team/lm", reason="NodeLeaving", incident="")
    assert line.endswith("INFO x it goes on job=team/lm reason=NodeLeaving")
    assert line_of(logging.INFO, "x", why='a "b"').endswith(' why="a \\"b\\""')


def test_the_times_of_lines_are_those_of_statuses_and_events_in_any_time_zone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        record = logging.makeLogRecord({"msg": "x", "created": NOW + 0.25, "msecs": 250.0})
        line = logs.Formatter().format(record)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert line.startswith(to_fine_stamp(NOW + 0.25))


def test_a_message_of_many_lines_is_one_line_and_forges_none() -> None:
    line = line_of(logging.INFO, "boom\n2026-01-01 INFO x the node is fine\r\n")
    assert "\n" not in line
    assert "\r" not in line


def test_a_terminal_that_shows_the_log_obeys_no_message() -> None:
    line = line_of(logging.INFO, "away \x1b[2J\x9b\x0b\x85 still here, ß")
    assert line.endswith("away \\x1b[2J\\x9b\\x0b\\x85 still here, ß")


async def test_a_failure_that_repeats_is_said_once_and_its_end_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "RETRY_SECONDS", (0.001,))
    caplog.set_level(logging.INFO)
    errors = [kube.Transient(0, "", "away")] * 5 + [kube.Denied(403, "", "not allowed")] * 5
    over = asyncio.Event()

    async def run_pass(key: tuple[str, str]) -> None:
        if errors:
            raise errors.pop(0)

    def on_pass(outcome: str, seconds: float) -> None:
        if outcome == "Done":
            over.set()

    found = Scheduler(run_pass, on_pass=on_pass)
    task = asyncio.create_task(found.run())
    found.wake(("team", "lm"))
    async with asyncio.timeout(30):
        await over.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    said = [(r.levelname, r.message) for r in caplog.records]
    assert [level for level, _ in said] == ["ERROR", "ERROR", "INFO"]
    assert "away" in said[0][1]
    assert "not allowed" in said[1][1]
    assert "after 10 that failed" in said[2][1]


def test_decisions_and_deeds_of_an_incident_bear_its_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    observed = an_observation(verdicts={"node-1": a_verdict("node-1", NodeState.GONE)})
    planned = plan.plan(observed, NOW)
    incident = planned.status.incidents[-1].id
    assert planned.events
    for happening in planned.events:
        action_log.log_event(observed.job, happening)
    words = {"reason": "x", "message": "y", "slot": 1}
    for action in (CreatePod(attempt=2, body={}, **words), DeletePod(name="n", uid="u", **words)):
        action_log.log_done(observed.job, action, planned.status)
    told: list[dict[str, str]] = [r.__dict__["fields"] for r in caplog.records]
    moved = [f["incident"] for f in told if f["incident"]]
    assert set(moved) == {incident}
    assert len(moved) >= 3


QUIET = {
    "it trains": an_observation(),
    "a slot is asked to leave": an_observation(
        verdicts={"node-1": a_verdict("node-1", NodeState.LEAVING)}
    ),
    "no pod can be made": an_observation(seen=None, pods=(), nodes={}),
}


@pytest.mark.parametrize("case", QUIET)
def test_nothing_is_written_or_said_while_nothing_changes(case: str) -> None:
    """The first two passes count and report what has happened. Later ones are quiet."""
    observed, status = QUIET[case], JobStatus()
    for number in range(8):
        planned = plan.plan(observed, NOW + number)
        if number >= 2:
            assert [e.message for e in planned.events] == []
            stored = {**statuspatch.to_document(status), "observedAt": to_stamp(NOW + number)}
            assert statuspatch.decide_patch(stored, planned.status, NOW + number, 10.0) == {}
        status = planned.status
        job = a_job_with(observed.job, statuspatch.to_document(status))
        observed = replace(observed, job=job)


def a_job_with(job: Any, status: dict[str, Any]) -> Any:
    metadata = {
        "namespace": job.namespace, "name": job.name, "uid": job.uid, "generation": job.generation,
        "creationTimestamp": "2001-09-09T01:45:40Z",
    }  # fmt: skip
    return to_job({"metadata": metadata, "spec": a_spec(), "status": status})


def families() -> list[Metric]:
    world = World()
    status = JobStatus().model_dump(mode="json", by_alias=True, exclude_none=True)
    world.jobs.put({"metadata": {"namespace": "a", "name": "b", "uid": "u"}, "status": status})
    operator = Metrics([], world, lambda: True, observe_only=False)
    return [*operator.registry.collect(), *HealthMetrics().registry.collect()]


def listed() -> dict[str, str]:
    """Return each metric's type, from the page's table."""
    found: dict[str, str] = {}
    for names, kind in re.findall(
        r"^\| ((?:`everstep_\w+`(?:, )?)+) \| (\w+)", PAGE.read_text(), re.M
    ):
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), kind)
    return found


def test_the_page_lists_every_metric_with_its_type() -> None:
    real = {f.name + ("_total" if f.type == "counter" else ""): f.type for f in families()}
    assert listed() == real


def test_metrics_are_named_by_the_conventions() -> None:
    for family in families():
        assert re.fullmatch(r"everstep_[a-z0-9]+(_[a-z0-9]+)*", family.name), family.name
        assert family.documentation, family.name
        assert not re.search(r"_(ms|millis|mb|percent|count|sum)\b", family.name), family.name
        if family.type == "histogram":
            assert family.name.endswith(UNITS), family.name
