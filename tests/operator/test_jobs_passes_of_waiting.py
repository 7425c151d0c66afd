"""Jobs that wait for room get no passes until something that they wait for changes."""

from everstep_operator.jobs.waiting import REFUSED_SECONDS
from waiting_jobs import SPARED, Waiting, start

DAY = 86_400.0
JOBS = 20


async def test_jobs_for_which_there_is_no_room_have_no_passes() -> None:
    waiting = await start(JOBS)
    assert {waiting.state_of(n) for n in range(JOBS)} == {"Pending"}
    assert await waiting.run(DAY) == 0


async def test_a_pod_that_finds_a_node_wakes_its_own_job_alone() -> None:
    waiting = await start(JOBS)
    waiting.passes_of.clear()
    waiting.place("job-0007-0-1", "node-1")
    await waiting.run(1.0)
    assert set(waiting.passes_of) == {("team", "job-0007")}


async def test_a_node_that_is_released_wakes_the_jobs_whose_pods_shut_it_out() -> None:
    waiting = await start(JOBS)
    waiting.passes_of.clear()
    waiting.publish()
    await waiting.run(1.0)
    assert len(waiting.passes_of) == JOBS, (
        "each job's pod must be replaced, so that it can use the node"
    )
    waiting.delete_marked()
    await waiting.run(60.0)
    assert waiting.world.jobs_shutting_out([SPARED]) == set()
    assert await waiting.run(DAY) == 0


async def test_a_limit_that_is_over_wakes_its_job() -> None:
    waiting = await start(JOBS, spec={"activeDeadlineSeconds": 3600})
    assert await waiting.run(3500.0) == 0
    await waiting.run(75.0)
    assert {waiting.state_of(n) for n in range(JOBS)} == {"Failed"}


async def test_a_gang_that_waits_for_its_rest_is_looked_at_when_its_limits_are_over() -> None:
    """The younger job deletes its pods first; the older one keeps waiting."""
    waiting = await start(2)
    for number in range(2):
        waiting.place(f"job-{number:04}-0-1", f"node-{number}")
    await waiting.run(5.0)
    waiting.passes_of.clear()
    assert await waiting.run(200.0) <= 2
    await waiting.run(150.0)
    assert [waiting.has_given_back(n) for n in range(2)] == [False, True]


async def refused_passes(seconds: float) -> float:
    waiting = Waiting(JOBS)
    waiting.cluster.refuses = "exceeded quota: team"
    waiting.publish()
    await waiting.run(5.0)
    return await waiting.run(seconds) / JOBS


async def test_a_job_that_a_quota_keeps_out_is_looked_at_when_it_is_tried_again() -> None:
    tries = 600.0 / REFUSED_SECONDS
    assert await refused_passes(600.0) <= 3 * tries
