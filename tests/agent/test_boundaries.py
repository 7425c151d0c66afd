from agent.given import a_member, a_report, an_epoch, stepping, wanting
from everstep_agent.coordinator import boundaries
from everstep_agent.peers.agent_report import State
from everstep_agent.peers.epoch_level import Boundary
from everstep_contract import levels

MEMBERS = (a_member(0), a_member(1))


def why_stay(wanted, reports, eligible=0, coordinator=(0, 0, 1)):
    return boundaries.why_stay(wanted, MEMBERS, reports, eligible, coordinator=coordinator)


def acked(slot, step, passed=0):
    return a_report(slot, epoch=1, fresh=(), acked=step, passed=passed)


def test_a_boundary_is_armed_ahead_of_everybody():
    assert boundaries.arm([7, 9, 8], stay=True).step > 9


def test_it_counts_once_every_agent_has_acknowledged_it():
    armed = Boundary(step=10)
    half = boundaries.advance(armed, MEMBERS, [acked(0, 10), acked(1, 0)], raises=0)
    assert half == armed
    assert boundaries.advance(armed, MEMBERS, [acked(0, 10), acked(1, 10)], raises=0).confirmed


def test_an_acknowledgement_of_an_older_number_does_not_count():
    found = boundaries.advance(Boundary(step=12), MEMBERS, [acked(0, 12), acked(1, 10)], raises=0)
    assert not found.confirmed


def test_a_boundary_that_somebody_has_passed_is_raised_further_each_time():
    reports = [acked(0, 10), acked(1, 0, passed=11)]
    first = boundaries.advance(Boundary(step=10), MEMBERS, reports, raises=0)
    later = boundaries.advance(Boundary(step=10), MEMBERS, reports, raises=4)
    assert 11 < first.step < later.step
    assert not first.confirmed


def test_a_confirmed_boundary_stays_as_it_is():
    done = Boundary(step=10, confirmed=True)
    assert boundaries.advance(done, MEMBERS, [acked(0, 0, passed=11)], raises=0) == done


def test_a_member_that_never_reported_keeps_it_open():
    assert not boundaries.advance(Boundary(step=10), MEMBERS, [acked(0, 10)], raises=0).confirmed


def test_a_save_is_due_after_its_interval_unless_one_is_under_way():
    assert boundaries.is_save_due(60, since_last=61.0, busy=False)
    assert not boundaries.is_save_due(60, since_last=61.0, busy=True)
    assert not boundaries.is_save_due(60, since_last=59.0, busy=False)
    assert not boundaries.is_save_due(0, since_last=1e9, busy=False)


def test_why_an_epoch_ends_at_a_boundary_by_precedence():
    stop = wanting(2, stop=levels.Stop.SUSPEND, leave=(1,))
    steps = [stepping(0), stepping(1)]
    assert why_stay(stop, steps, eligible=1) == "Stop"
    assert why_stay(wanting(2, leave=(1,)), steps) == "Leave"
    leaving = [stepping(0), a_report(1, leaving=True)]
    assert why_stay(wanting(2), leaving) == "Leave"
    assert why_stay(wanting(3), steps, eligible=1) == "Grow"
    assert why_stay(wanting(2), steps, eligible=1) == ""


def test_a_member_is_surplus_by_the_size_that_remains_whatever_its_slot():
    steps = [stepping(0), stepping(1)]
    assert why_stay(wanting(1, leave=(1,)), steps) == "Shrink"
    assert why_stay(wanting(1, leave=(0,)), steps) == "Shrink", "slot 1 stays"
    assert why_stay(wanting(1, leave=(0, 1)), steps) == "Leave"


def test_a_slot_that_is_no_member_may_be_asked_to_leave_without_a_boundary():
    assert why_stay(wanting(2, leave=(7,)), []) == ""


def test_an_epoch_ends_at_a_boundary_when_the_coordinator_that_is_no_member_leaves():
    outside = {"coordinator": (7, 0, 1)}
    assert why_stay(wanting(9, leave=(7,)), [], **outside) == "Leave"
    assert why_stay(wanting(8), [a_report(7, leaving=True)], **outside) == "Leave"
    assert why_stay(wanting(2), [a_report(7, leaving=True)]) == "", (
        "slot 7 is neither a member nor the coordinator"
    )


def test_members_beyond_a_lower_size_are_no_loss_when_they_leave():
    epoch, wanted = an_epoch(4), wanting(2, leave=(2, 3))
    alive = [stepping(slot) for slot in range(4)]
    assert boundaries.is_resize(wanted, epoch, alive)
    gone = an_epoch(4, leaving=((2, 0, 1), (3, 0, 1)))
    over = [*alive[:2], stepping(2, state=State.DEAD), stepping(3, state=State.DEAD)]
    assert boundaries.is_resize(wanted, gone, over)
    assert boundaries.is_resize(wanting(2), gone, over), (
        "the request is over, but they left because of it"
    )


def test_it_is_a_loss_if_anything_else_is_lost_or_is_to_be_replaced():
    alive = [stepping(slot) for slot in range(4)]
    assert not boundaries.is_resize(wanting(2), an_epoch(4), alive), "nobody leaves"
    assert not boundaries.is_resize(wanting(3, leave=(1, 3)), an_epoch(4), alive)
    one_dead = [*alive[:3], stepping(3, state=State.DEAD)]
    assert not boundaries.is_resize(wanting(2, leave=(2, 3)), an_epoch(4), one_dead)
    assert not boundaries.is_resize(
        wanting(2, leave=(2, 3)), an_epoch(4), alive, lost=frozenset({(0, 0, 1)})
    )
