"""A pass that fails says so where people look: on the job."""

from typing import Any, cast

import pytest

from everstep_operator import kube
from everstep_operator.jobs import passes
from everstep_operator.jobs.agents import Agents
from everstep_operator.kube import Kube
from everstep_operator.world import World
from job_builders import a_spec
from toy_jobs import ToyCluster, ToyJob

KEY = ("team", "lm")


def an_operator(cluster: ToyCluster) -> passes.Passes:
    metadata = {"name": "lm", "namespace": "team", "generation": 1}
    cluster.put(kube.JOBS, {"metadata": metadata, "spec": a_spec()})
    made = passes.Passes(
        port=cast(Kube, cluster), world=World(), agents=cast(Agents, ToyJob(cluster=cluster)),
        key=b"k" * 32, clock=lambda: cluster.now, figures_seconds=10.0,
    )  # fmt: skip
    cluster.feed(made.world)
    return made


def failing(error: Exception) -> Any:
    def plan(*_: object) -> None:
        raise error

    return plan


def told(cluster: ToyCluster) -> list[str]:
    return [e["message"] for (plural, _), e in cluster.objects.items() if plural == "events"]


@pytest.mark.parametrize(
    ("error", "words", "fix"),
    [
        (ZeroDivisionError("by nothing"), "ZeroDivisionError: by nothing", "please report it"),
        (kube.Denied(403, "Forbidden", "cannot patch"), "cannot patch", "rights back"),
    ],
)
async def test_it_says_so_once_on_the_job_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str, fix: str
) -> None:
    cluster = ToyCluster()
    operator = an_operator(cluster)
    monkeypatch.setattr(passes, "plan", failing(error))
    for _ in range(3):
        with pytest.raises(type(error)):
            await operator.run(KEY)
    (message,) = told(cluster)
    assert words in message
    assert fix in message


async def test_what_may_pass_by_itself_is_for_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ToyCluster()
    operator = an_operator(cluster)
    monkeypatch.setattr(passes, "plan", failing(kube.Transient(503, "", "away")))
    with pytest.raises(kube.Transient):
        await operator.run(KEY)
    assert told(cluster) == []
