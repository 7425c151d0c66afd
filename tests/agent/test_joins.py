"""At which boundary newcomers join, with reports that the test makes up."""

from dataclasses import replace

import pytest

from agent.a_term import a_term
from agent.given import a_claim, a_report, a_worker, an_epoch, ended, stepping, wanting
from everstep_agent.coordinator import boundary_turn, invitations
from everstep_agent.coordinator.term import Term
from everstep_agent.coordinator.watch import Watch
from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.peers.epoch_level import Boundary
from everstep_contract.units import Mesh

EPOCH = an_epoch(2)
WORKERS = [a_worker(), a_worker()]
"""Both have applied step 5."""


@pytest.fixture
async def term() -> Term:
    made = a_term(wanting(4), in_place=1)
    members = tuple(i for m in EPOCH.members for i in m.ids())
    assert await made.run_log.append(a_claim(1, token=EPOCH.token, members=members))
    made.change(made.state.begin_epoch(EPOCH))
    return made


def newcomer(slot: int, **changes: object) -> AgentReport:
    return a_report(slot, **({"in_place": True, "fresh": (3,)} | changes))


def turn(term: Term, watch: Watch, after: float, *newcomers: AgentReport, until: int = 100) -> bool:
    """Take a turn so many seconds after the epoch began. Returns whether a boundary for newcomers is armed."""
    for slot in (0, 1):
        term.take(replace(stepping(slot), in_place=True, until=until))
    for report in newcomers:
        term.take(report)
    boundary_turn.settle(term, watch, WORKERS, watch.began + after)
    boundary = term.running.boundary
    return boundary is not None and boundary.hold


def invited(term: Term) -> list[int]:
    return [m.slot for m in term.running.joining]


@pytest.mark.parametrize("took", [1.0, 100.0])
async def test_newcomers_that_are_ready_do_not_wait_without_limit_for_slower_ones(
    term: Term, took: float
) -> None:
    watch = Watch.start(term.now())
    assert not turn(term, watch, 1, newcomer(2), newcomer(3))
    assert invited(term) == [2, 3]
    ready = 1 + took
    late = ready + max(took, invitations.LATE_SECONDS)
    assert not turn(term, watch, ready, newcomer(2, prepared=(3,)))
    assert not turn(term, watch, late - 0.5)
    assert invited(term) == [2, 3]
    assert turn(term, watch, late + 0.5)
    assert invited(term) == [2], "slot 3 joins at a later boundary"
    await term.close()


async def test_newcomers_that_are_all_ready_join_at_once(term: Term) -> None:
    watch = Watch.start(term.now())
    turn(term, watch, 1, newcomer(2), newcomer(3))
    assert turn(term, watch, 2, newcomer(2, prepared=(3,)), newcomer(3, prepared=(3,)))
    assert invited(term) == [2, 3]
    await term.close()


async def test_another_spare_gets_ready_beside_one_that_is_late_and_the_first_that_is_ready_joins(
    term: Term,
) -> None:
    """A script that hangs would otherwise keep the job small for `startupSeconds`."""
    term.change(term.state.want(wanting(3)))
    watch, late = Watch.start(term.now()), 1 + invitations.LATE_SECONDS
    turn(term, watch, 1, newcomer(2), newcomer(3), newcomer(4))
    turn(term, watch, late - 0.5)
    assert invited(term) == [2]
    turn(term, watch, late + 0.5)
    assert invited(term) == [2, 3]
    assert "slot 2" in term.state.notes[-1]
    assert not turn(term, watch, late + 5, newcomer(3, prepared=(3,)))
    assert turn(term, watch, late + 6)
    assert invited(term) == [3]
    await term.close()


async def test_a_newcomer_for_which_there_is_no_place_any_more_is_a_spare_again(term: Term) -> None:
    watch = Watch.start(term.now())
    term.change(term.state.want(wanting(3)))
    turn(term, watch, 1, newcomer(2))
    assert invited(term) == [2]
    turn(term, watch, 2)
    assert invited(term) == [2]
    term.change(term.state.want(wanting(2)))
    assert not turn(term, watch, 3, newcomer(2, prepared=(3,)))
    assert invited(term) == []
    turn(term, watch, 4, newcomer(2, fresh=(4,), ended=ended(3)))
    assert [spare.slot for spare in term.build_seen().spares] == [2]
    await term.close()


async def test_a_late_newcomer_that_is_ready_first_joins_after_all(term: Term) -> None:
    term.change(term.state.want(wanting(3)))
    watch, late = Watch.start(term.now()), 1 + invitations.LATE_SECONDS
    turn(term, watch, 1, newcomer(4))
    turn(term, watch, late + 0.5, newcomer(3))
    assert invited(term) == [3, 4]
    turn(term, watch, late + 1, newcomer(4, prepared=(3,)))
    assert turn(term, watch, late + 2)
    assert invited(term) == [4]
    await term.close()


async def test_a_newcomer_is_late_after_twice_as_long_as_the_last_one_took(term: Term) -> None:
    watch = Watch.start(term.now())
    turn(term, watch, 1, newcomer(2))
    turn(term, watch, 101, newcomer(2, prepared=(3,)))
    term.change(term.state.disarm().invite(()))
    watch = watch.renew(watch.began)
    term.change(term.state.want(wanting(3)))
    turn(term, watch, 200, newcomer(2), newcomer(3))
    turn(term, watch, 399)
    assert invited(term) == [2]
    turn(term, watch, 401)
    assert invited(term) == [2, 3]
    await term.close()


async def test_a_late_newcomer_goes_on_if_nobody_can_take_its_place(term: Term) -> None:
    watch = Watch.start(term.now())
    turn(term, watch, 1, newcomer(2))
    turn(term, watch, 500)
    assert invited(term) == [2]
    assert not term.state.notes
    await term.close()


@pytest.mark.parametrize(("until", "joins"), [(6, True), (5, False)])
async def test_newcomers_join_at_no_boundary_after_the_last_step(
    term: Term, until: int, joins: bool
) -> None:
    """Nobody would come to it, however long the rest of the script takes, and nobody could leave meanwhile."""
    watch, ready = Watch.start(term.now()), newcomer(2, prepared=(3,))
    term.change(term.state.want(wanting(3)))
    turn(term, watch, 1, ready, until=until)
    assert turn(term, watch, 2, until=until) is joins
    assert (term.running.boundary is not None) is joins
    await term.close()


async def test_a_boundary_that_was_raised_beyond_the_last_step_is_dropped(term: Term) -> None:
    watch = Watch.start(term.now())
    term.change(term.state.arm(Boundary(step=7, hold=True)))
    assert turn(term, watch, 1, until=7)
    assert not turn(term, watch, 2, until=6)
    assert term.running.boundary is None
    await term.close()


async def test_if_a_process_of_an_invited_unit_ends_the_others_get_ready_anew() -> None:
    """They would wait for it, because it may have ended before they could connect to it."""
    term = a_term(wanting(4), in_place=1)
    term.change(term.state.begin_epoch(an_epoch(2, mesh=Mesh(shard=2))))
    watch, prepares = Watch.start(term.now()), newcomer(3, fresh=())
    turn(term, watch, 1, newcomer(2), newcomer(3))
    assert invited(term) == [2, 3]
    turn(term, watch, 2, newcomer(2, fresh=(4,), ended=ended(3)), prepares)
    assert invited(term) == [], "the agent of slot 3 replaces a worker that is no longer invited"
    turn(term, watch, 3, newcomer(3, fresh=(4,), ended=ended(3)))
    assert [(m.slot, m.lives) for m in term.running.joining] == [(2, (4,)), (3, (4,))]
    await term.close()


async def test_pods_form_a_unit_without_a_neighbour_that_does_not_get_ready() -> None:
    term = a_term(wanting(4), in_place=1)
    term.change(term.state.begin_epoch(an_epoch(2, mesh=Mesh(shard=2))))
    watch, limit = Watch.start(term.now()), term.settings.gang_seconds
    turn(term, watch, 1, newcomer(2), newcomer(4), newcomer(3, fresh=()))
    turn(term, watch, limit)
    assert invited(term) == []
    watch = watch.renew(watch.began)
    turn(term, watch, limit + 2)
    assert invited(term) == [2, 4]
    await term.close()
