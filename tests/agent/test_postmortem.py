import itertools

import pytest

from agent.given import a_member, a_rank, a_report, a_worker, ended, stepping
from everstep_agent.coordinator import postmortem
from everstep_agent.peers.agent_report import State
from everstep_agent.peers.epoch_level import Saver
from everstep_contract.position import Phase
from everstep_contract.units import ONE_RANK, Mesh


def decide(*ranks, committed=0, waited=0.5, patience=8.0, failed=frozenset(), mesh=ONE_RANK):
    return postmortem.decide_post_mortem(
        ranks, committed=committed, waited=waited, patience=patience, failed=failed, mesh=mesh
    )


def test_the_lowest_rank_parked_at_the_furthest_step_saves():
    assert decide(a_rank(0, 5), a_rank(2, 6), a_rank(1, 6)) == Saver(rank=1, step=6)


@pytest.mark.parametrize("phase", [Phase.REDUCED, Phase.APPLYING])
def test_who_holds_the_vector_is_waited_for_and_counts_as_the_step_it_will_apply(phase):
    moving = a_rank(1, 5, parked=False, phase=phase)
    assert moving.reach == 6
    assert isinstance(decide(a_rank(0, 5), moving), postmortem.Wait)


def test_a_rank_that_still_computes_is_waited_for():
    assert isinstance(
        decide(a_rank(0), a_rank(1, parked=False, phase=Phase.COMPUTING)), postmortem.Wait
    )


def test_the_dead_neither_save_nor_are_waited_for():
    assert decide(a_rank(0, 9, alive=False, parked=False), a_rank(1, 5)) == Saver(rank=1, step=5)


def test_an_unreachable_member_is_waited_for_only_so_long_where_another_can_save():
    silent = a_rank(0, 0, reachable=False, parked=False)
    assert isinstance(decide(silent, a_rank(1, 5), waited=1.0), postmortem.Wait)
    assert decide(silent, a_rank(1, 5), waited=9.0) == Saver(rank=1, step=5)


@pytest.mark.parametrize("other", [a_rank(1, 5, alive=False), a_rank(1, 5, sound=False)])
def test_an_unreachable_member_is_waited_for_while_it_alone_may_hold_the_state(other):
    silent = a_rank(0, 0, reachable=False, parked=False)
    found = decide(silent, other, committed=2, waited=900.0)
    assert isinstance(found, postmortem.Wait)
    assert "rank 0 does not answer" in found.message
    given_up = a_rank(0, 0, alive=False, reachable=False)
    assert isinstance(decide(given_up, other, committed=2), postmortem.Nothing)


def test_an_unreachable_member_is_not_waited_for_when_all_others_stand_at_the_commit():
    silent = a_rank(0, 0, reachable=False, parked=False)
    assert isinstance(decide(silent, a_rank(1, 5), committed=5, waited=9.0), postmortem.Nothing)


def test_nothing_is_saved_twice():
    found = decide(a_rank(0, 5), committed=5)
    assert isinstance(found, postmortem.Nothing)
    assert found.target == 5


def test_an_unsound_state_is_not_saved_and_its_step_counts_as_lost():
    found = decide(a_rank(0, 5, sound=False), committed=3)
    assert isinstance(found, postmortem.Nothing)
    assert found.target == 5


def test_where_nobody_can_save_the_furthest_step_the_one_before_it_is_saved():
    ahead = a_rank(1, 6, sound=False)
    assert decide(a_rank(0, 5), ahead, committed=3) == Saver(rank=0, step=5)
    assert decide(a_rank(0, 5), a_rank(1, 6), failed=frozenset({1})) == Saver(rank=0, step=5)
    found = decide(a_rank(0, 5), ahead, committed=5)
    assert found == postmortem.Nothing(
        target=6, message="no living rank holds the full state of step 6"
    )


def test_with_nobody_alive_what_the_dead_had_applied_counts_as_lost():
    found = decide(a_rank(0, 5, alive=False), a_rank(1, 6, alive=False), committed=3)
    assert isinstance(found, postmortem.Nothing)
    assert found.target == 6


def test_of_the_dead_that_had_not_passed_the_newest_commit_nothing_is_lost():
    assert decide(a_rank(0, 2, alive=False), committed=3) == postmortem.Nothing(
        target=3, message="no member is alive"
    )


def test_a_rank_whose_save_failed_is_passed_over():
    assert decide(a_rank(0), a_rank(1), failed=frozenset({0})) == Saver(rank=1, step=5)


def ranks(*reports, members=2, gone=frozenset(), age=0.1):
    return postmortem.list_ranks(
        [a_member(s) for s in range(members)],
        [(r, age) for r in reports],
        epoch=1,
        stale=5.0,
        gone=gone,
    )


def test_ranks_are_read_from_the_reports_of_their_own_epoch():
    parked = stepping(0, state=State.PARKED, applied=7, sound=True)
    dead = stepping(1, state=State.DEAD)
    first, second = ranks(parked, dead)
    assert (first.parked, first.sound, first.applied) == (True, True, 7)
    assert not second.alive


def test_a_pod_that_is_gone_or_was_started_again_holds_nothing():
    assert not ranks(stepping(0), stepping(1), gone=frozenset({(0, 0)}))[0].alive
    assert not ranks(stepping(0), a_report(0, incarnation=2), stepping(1))[0].alive


def test_an_agent_that_never_began_the_epoch_holds_nothing_of_it():
    never = a_report(0, epoch=0, workers=(), ended=ended(0), cut=1)
    assert not ranks(never, stepping(1))[0].alive
    said_before_the_cut = a_report(0, epoch=0, workers=(), ended=ended(0))
    assert ranks(said_before_the_cut, stepping(1))[0].alive


def test_an_agent_that_never_reported_is_unreachable_and_not_dead():
    assert ranks(stepping(0))[1] == postmortem.Rank(rank=1, slot=1, alive=True, reachable=False)


def test_a_process_that_outlives_sigkill_is_not_waited_for():
    stuck = stepping(1, applied=5, stuck="outlives SIGKILL for 30 s (pid 7)")
    parked = stepping(0, state=State.PARKED, applied=5, sound=True)
    found = ranks(parked, stuck)
    assert [r.alive for r in found] == [True, False]
    assert decide(*found) == Saver(rank=0, step=5)


def test_a_failed_worker_is_as_good_as_dead():
    assert not ranks(stepping(0, state=State.FAILED), stepping(1))[0].alive
    assert a_worker().state is State.TRACKED


# --- units ----------------------------------------------------------------------------------------


def of_units(*steps, committed=120, **changes):
    """Decide for two units of two ranks that are parked at these steps; None means that the rank is dead."""
    ranks = [
        a_rank(r, 0, alive=False, parked=False, sound=False) if at is None else a_rank(r, at)
        for r, at in enumerate(steps)
    ]
    known = [changes.pop(f"rank_{r.rank}", r) for r in ranks]
    return decide(*known, committed=committed, mesh=Mesh(shard=2), **changes)


def test_the_first_whole_unit_at_the_furthest_step_saves():
    assert of_units(126, 126, 126, 126) == Saver(rank=0, step=126)
    assert of_units(126, None, 126, 126) == Saver(rank=2, step=126)
    assert of_units(126, 126, None, 126) == Saver(rank=0, step=126)


def test_a_step_counts_only_if_all_ranks_of_the_unit_have_reached_it():
    """Rank 0 has applied a step whose vector rank 1 never got. The step is lost unless the other unit has it."""
    assert of_units(127, 126, 127, 127) == Saver(rank=2, step=127)
    assert of_units(127, 126, 126, 126) == Saver(rank=2, step=126)
    found = of_units(127, 126, None, 127)
    assert found == postmortem.Nothing(
        target=127,
        message="rank 1 of unit 0 did not apply step 127, unit 1 lost rank 2 (slot 2); no unit is whole",
    )


def test_no_rank_saves_whose_unit_is_not_whole():
    found = of_units(126, None, 126, None)
    assert isinstance(found, postmortem.Nothing)
    assert found.target == 126
    assert found.message == (
        "unit 0 lost rank 1 (slot 1), unit 1 lost rank 3 (slot 3); no unit is whole"
    )
    unsound = of_units(126, None, 126, 126, rank_3=a_rank(3, 126, sound=False))
    assert isinstance(unsound, postmortem.Nothing)
    assert "rank 3 of unit 1 cannot save" in unsound.message


def test_a_unit_of_which_a_rank_failed_to_save_is_passed_over():
    assert of_units(126, 126, 126, 126, failed=frozenset({1})) == Saver(rank=2, step=126)
    found = of_units(126, 126, 126, 126, failed=frozenset({1, 2}))
    assert isinstance(found, postmortem.Nothing)


def test_a_rank_that_still_moves_is_waited_for_though_its_unit_is_lost():
    moving = a_rank(1, 126, parked=False, phase=Phase.REDUCED)
    assert isinstance(of_units(None, 126, 127, 127, rank_1=moving), postmortem.Wait)


def silent(rank):
    return a_rank(rank, 0, reachable=False, parked=False, sound=False)


def test_an_unreachable_rank_is_waited_for_only_if_its_unit_may_be_whole():
    waits = of_units(126, 126, None, 126, rank_1=silent(1), waited=900.0)
    assert isinstance(waits, postmortem.Wait)
    assert "rank 1 does not answer" in waits.message
    found = of_units(126, 126, None, 126, rank_3=silent(3), waited=900.0)
    assert found == Saver(rank=0, step=126)
    over = of_units(None, 126, None, 126, rank_1=silent(1), waited=900.0)
    assert isinstance(over, postmortem.Nothing)
    behind = of_units(126, 120, None, 126, rank_0=silent(0), waited=900.0)
    assert isinstance(behind, postmortem.Nothing), "rank 1 of that unit is not ahead of the commit"


def test_tensor_and_shard_ranks_form_one_unit():
    ranks = [a_rank(r, 9, alive=r != 5) for r in range(8)]
    assert decide(*ranks, mesh=Mesh(shard=2, tensor=2)) == Saver(rank=0, step=9)
    ranks[0] = a_rank(0, 9, alive=False)
    assert isinstance(decide(*ranks, mesh=Mesh(shard=2, tensor=2)), postmortem.Nothing)


def known_as(kind, rank):
    """A rank in one of the possible states, always beyond the commit of step 5."""
    match kind:
        case "dead":
            return a_rank(rank, 6, alive=False, parked=False, sound=False)
        case "silent":
            return silent(rank)
        case "unsound":
            return a_rank(rank, 7, sound=False)
        case _:
            return a_rank(rank, 6 if kind == "behind" else 7)


KINDS = ("dead", "silent", "unsound", "failed", "behind", "ahead")


def expect(units):
    """The decision by its definition: the furthest whole unit saves; else wait for a unit that may be whole; else
    nothing.
    """
    whole = [(kinds[0], -n) for n, kinds in enumerate(units) if {*kinds} in ({"behind"}, {"ahead"})]
    if whole:
        kind, n = max(whole, key=lambda found: (found[0] == "ahead", found[1]))
        return Saver(rank=-2 * n, step=7 if kind == "ahead" else 6)
    able = [{*kinds} - {"silent"} for kinds in units if "silent" in kinds]
    if any(rest in (set(), {"behind"}, {"ahead"}) for rest in able):
        return postmortem.Wait
    return postmortem.Nothing


def test_in_every_state_of_two_units_only_a_whole_one_saves():
    for kinds in itertools.product(KINDS, repeat=4):
        found = decide(
            *(known_as(kind, rank) for rank, kind in enumerate(kinds)),
            committed=5,
            waited=900.0,
            failed=frozenset(rank for rank, kind in enumerate(kinds) if kind == "failed"),
            mesh=Mesh(shard=2),
        )
        wanted = expect([kinds[:2], kinds[2:]])
        assert found == wanted if isinstance(wanted, Saver) else isinstance(found, wanted), kinds


def test_a_rank_that_waits_for_a_lost_one_within_its_unit_is_ended():
    lost, waits = a_rank(1, 5, alive=False, parked=False), a_rank(0, 5, parked=False)
    others = [a_rank(2, 5, parked=False), a_rank(3, 5)]
    assert postmortem.list_hopeless([waits, lost, *others], Mesh(shard=2)) == (0,)
    assert postmortem.list_hopeless([waits, lost, *others], ONE_RANK) == ()
    parked = a_rank(0, 5)
    assert postmortem.list_hopeless([parked, lost, *others], Mesh(shard=2)) == ()
    silent = a_rank(1, 5, reachable=False, parked=False)
    assert postmortem.list_hopeless([waits, silent, *others], Mesh(shard=2)) == (), (
        "the silent rank may come back"
    )
