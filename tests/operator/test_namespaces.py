"""Namespaces of `watchNamespaces` that the operator may not list."""

import asyncio
from typing import cast

import pytest

from everstep_operator import kube, namespaces
from everstep_operator.kube import Kube
from everstep_operator.world import Scope, World


class Answers:
    """An API server that refuses the lists of some namespaces."""

    def __init__(self, *denied: str, busy: str = "") -> None:
        self.denied, self._busy = set(denied), busy

    async def list(self, kind: kube.Kind, namespace: str) -> tuple[list[kube.Object], str]:
        assert kind == kube.JOBS
        if namespace in self.denied:
            raise kube.Denied(403, "Forbidden", f"cannot list in the namespace {namespace}")
        if namespace == self._busy:
            raise kube.Transient(503, "ServiceUnavailable", "etcd leader changed")
        return [], "1"


async def leave_out(answers: Answers, *watched: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (the namespaces left out, those that stay)."""
    world = World(Scope(namespaces=watched, nodes=False))
    left_out = await namespaces.leave_out_denied(cast(Kube, answers), world)
    assert not world.scope.nodes
    return left_out, world.scope.namespaces


async def test_a_namespace_that_may_not_be_listed_is_left_out_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = await leave_out(Answers("team-b"), "team-a", "team-b")
    assert found == (("team-b",), ("team-a",))
    assert "namespace team-b" in caplog.text
    assert "remove it from watchNamespaces" in caplog.text


async def test_an_answer_that_refuses_nothing_leaves_nothing_out() -> None:
    assert await leave_out(Answers(busy="team-b"), "team-a", "team-b") == (
        (), ("team-a", "team-b"),
    )  # fmt: skip
    assert await leave_out(Answers()) == ((), ())


async def test_if_all_are_refused_the_full_list_says_so() -> None:
    found = await leave_out(Answers("team-a", "team-b"), "team-a", "team-b")
    assert found == ((), ("team-a", "team-b"))


async def test_a_namespace_that_may_be_listed_again_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(namespaces, "LEFT_OUT_SECONDS", 0.0)
    answers = Answers("team-a", "team-b")
    watching = namespaces.watch_left_out(cast(Kube, answers), ("team-a", "team-b"))
    task = asyncio.create_task(watching)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()
    answers.denied = {"team-a"}
    with pytest.raises(namespaces.NamespaceBack, match="namespace team-b"):
        async with asyncio.timeout(5):
            await task
