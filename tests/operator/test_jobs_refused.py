"""CheckpointHealthy reports a save that the job refuses to commit."""

from everstep_operator.jobs.conditions import find_condition
from everstep_operator.jobs.plan import plan
from job_builders import NOW, a_seen, an_observation


def test_a_state_that_is_not_finite_makes_checkpoints_unhealthy() -> None:
    seen = a_seen(refused="NaN or infinite values in model/weight")
    found = find_condition(plan(an_observation(seen=seen), NOW).status, "CheckpointHealthy")
    assert found is not None
    assert (found.status, found.reason) == ("False", "StateNotFinite")
    assert found.message == "the newest save was refused: NaN or infinite values in model/weight"


def test_the_next_commit_ends_it() -> None:
    found = find_condition(plan(an_observation(), NOW).status, "CheckpointHealthy")
    assert found is not None
    assert (found.status, found.reason) == ("True", "CheckpointCommitted")
