"""A worker that got ready to join and is no longer needed ends with a line that says why. Starts no process."""

import io
from typing import Any

import pytest

from agent.a_term import SETTINGS
from agent.given import a_member, an_epoch
from everstep_agent import logline
from everstep_agent.identity import Identity
from everstep_agent.peers.agent_report import State
from everstep_agent.peers.epoch_level import EpochLevel
from everstep_agent.pod.in_place_join import InPlaceJoin
from everstep_agent.pod.worker import Worker
from everstep_contract import wire

ME = Identity(slot=2, attempt=0, incarnation=1, address="host-2:7070")


class Workers:
    """As `WorkerSet`: one worker is ready to join epoch 1."""

    def __init__(self) -> None:
        page: Any = None
        ready = Worker(local=0, life=3, pid=77, page=page, page_path="", spawned_at=0.0)
        ready.state, ready.joins, ready.unit = State.TRACKED, 1, "unit-2"
        self.fresh = {0: ready}

    def recycle(self, epoch: int) -> None:
        self.fresh = {n: w for n, w in self.fresh.items() if w.joins in (0, epoch)}

    def are_fresh(self, lives: tuple[int, ...]) -> bool:
        return all(self.fresh[n].life == life for n, life in enumerate(lives))

    def ready_lives(self) -> tuple[int, ...]:
        return ()


def invited(number: int = 1, life: int = 3) -> EpochLevel:
    return an_epoch(2, number=number, joining=(a_member(2, lives=(life,)),))


@pytest.mark.parametrize(
    ("level", "reason"),
    [
        pytest.param(None, "no longer invited", id="no epoch"),
        pytest.param(an_epoch(2), "no longer invited", id="not invited"),
        pytest.param(invited(life=4), "another worker", id="other workers"),
        pytest.param(invited(number=2), "invited to epoch 2 now", id="another epoch"),
        pytest.param(invited(), "other processes", id="another unit"),
    ],
)
def test_a_newcomer_that_is_no_longer_needed_ends_with_a_reason(
    level: EpochLevel | None, reason: str
) -> None:
    said, workers, no_ledger = io.StringIO(), Workers(), None
    given: tuple[Any, Any] = workers, no_ledger
    InPlaceJoin(SETTINGS, ME, *given, logline.Log(said)).follow(level)
    assert workers.fresh == {}
    told = logline.parse_line(said.getvalue())
    assert told is not None
    event, line = told
    assert event == "newcomer_replaced"
    assert reason in line["reason"]
    assert (line["local"], line["life"], line["pid"], line["epoch"]) == ("0", "3", "77", "1")


def test_the_same_if_another_worker_of_its_pod_does_not_take_the_state() -> None:
    said, workers, no_ledger = io.StringIO(), Workers(), None
    given: tuple[Any, Any] = workers, no_ledger
    failed = wire.StateTaken(epoch=1, applied=0, problem="Connection closed by peer")
    InPlaceJoin(SETTINGS, ME, *given, logline.Log(said)).taken(workers.fresh[0], failed)
    assert workers.fresh == {}
    events = [told[0] for told in map(logline.parse_line, said.getvalue().splitlines()) if told]
    assert events == ["state_not_taken", "newcomer_replaced"]
