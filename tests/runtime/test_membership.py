"""The decisions of `Membership`, without a process group: what a rank is told, and what it reports."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from everstep import meeting
from everstep.errors import Misuse
from everstep.meeting import Endpoint
from everstep.membership import Listen, Membership, Parked
from everstep.shares import Pass
from everstep_contract import wire
from everstep_contract.units import Mesh

VECTOR = np.array([1.0, 2.0])


class Named:
    """A group of one epoch that does nothing."""

    rank, world, abandoned, complete_buckets = 0, 3, False, 0

    def __init__(self, epoch: int) -> None:
        self.epoch, self.was_cut = epoch, False

    def all_reduce(self, tensor: Any) -> Any:
        raise AssertionError

    def wait(self, works: Any) -> bool:
        raise AssertionError

    def cut(self) -> None:
        self.was_cut = True

    def wait_cut(self) -> None:
        assert self.was_cut

    def drop(self) -> None:
        assert self.was_cut


def listen(world: int) -> Endpoint:
    return meeting.listen(world, "127.0.0.1", "reinit")


class Rank:
    """Rank 1 of 3 in epoch 1, with 6 micro-batches in each loop: 2 and 3 are its own."""

    def __init__(self, listen: Listen | None = None, **changes: Any) -> None:
        self.sent: list[Any] = []
        self.problem = ""
        """Why no group can be formed."""
        self.groups = {1: Named(1)}
        given: dict[str, Any] = {
            "epoch": 1, "rank": 1, "world": 3, "local_rank": 0, "local_world": 1, "node_rank": 1, "job": "j",
            "run": "r", "staging": "", "applied": 5,
        }  # fmt: skip
        start = wire.Start(**(given | changes))
        self.formed_with: list[Endpoint | None] = []
        self.membership = Membership(
            start, self.groups[1], send=self.sent.append, form=self._form, listen=listen
        )
        self.membership.set_apart("")

    def _form(self, frame: wire.Regroup, endpoint: Endpoint | None) -> Named:
        self.formed_with.append(endpoint)
        if self.problem:
            raise RuntimeError(self.problem)
        return self.groups.setdefault(frame.epoch, Named(frame.epoch))

    def standings(self) -> list[wire.Standing]:
        return [f for f in self.sent if isinstance(f, wire.Standing)]

    def regroup(self, epoch: int = 2, **changes: Any) -> None:
        """Deliver the orders for the next epoch; the rank forms the group."""
        values: dict[str, Any] = {
            "epoch": epoch, "rank": 0, "world": 2, "local_world": 1, "node_rank": 0, "applied": 5,
            "reductions": 0,
        }  # fmt: skip
        self.membership.regroup(wire.Regroup(**(values | changes)))
        answered(self)

    def give(self) -> str:
        self.membership.give_vector(self.membership.epoch)
        return self.standings()[-1].vector


def answered(rank: Rank) -> None:
    epoch = rank.membership.epoch
    wait_for(lambda: any(isinstance(f, wire.Regrouped) and f.epoch == epoch for f in rank.sent))


def wait_for(condition: Any) -> None:
    until = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < until, "the condition did not become true in 20 s"
        time.sleep(0.001)


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.membership.park()


def indices(passes: list[Pass]) -> list[int]:
    assert not any(p.filler for p in passes), "a unit of one rank needs no fillers"
    return [p.index for p in passes]


def text(*numbers: float) -> str:
    return wire.to_text(np.array(numbers).tobytes())


def blocked(call: Any) -> "Call":
    """Start a call in its own thread; return it once it waits."""
    made = Call(call)
    wait_for(lambda: made.waits)
    return made


class Call:
    def __init__(self, call: Any) -> None:
        self._call, self.result, self.error = call, None, None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def waits(self) -> bool:
        self._thread.join(0.02)
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Parked as error:
            self.error = error

    def end(self) -> Any:
        self._thread.join(20.0)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


# --- what it reports -----------------------------------------------------------------------------


def test_held_before_a_loop_it_tells_that_nothing_is_begun(rank: Rank) -> None:
    rank.membership.hold(1)
    assert rank.sent == [wire.Standing(epoch=1, applied=5, reductions=0)]
    assert rank.groups[1].was_cut


def test_held_in_a_loop_it_tells_what_it_will_compute(rank: Rank) -> None:
    assert indices(rank.membership.begin(6)) == [2, 3]
    rank.membership.hold(1)
    assert rank.sent == [
        wire.Standing(epoch=1, applied=5, reductions=0, share=((2, 4),), micro_batches=6)
    ]


def test_a_rank_that_has_to_stay_in_its_epoch_says_why(rank: Rank) -> None:
    assert rank.membership.can_regroup
    rank.membership.stay_in_epoch("its script uses job.mesh")
    rank.membership.hold(1)
    assert rank.standings()[-1].problem == "its script uses job.mesh"
    assert not rank.membership.can_regroup


def test_a_rank_without_a_micro_batch_has_begun_all_the_same(rank: Rank) -> None:
    assert indices(rank.membership.begin(1)) == []
    rank.membership.hold(1)
    assert rank.standings()[0].share == ()


def test_held_twice_it_tells_once(rank: Rank) -> None:
    rank.membership.hold(1)
    rank.membership.hold(1)
    assert len(rank.sent) == 1


def test_a_failed_collective_tells_by_itself_and_a_hold_adds_nothing(rank: Rank) -> None:
    rank.membership.begin(6)
    rank.membership.fail(rank.groups[1])
    rank.membership.hold(1)
    assert len(rank.standings()) == 1


def test_an_epoch_that_is_not_its_own_holds_nobody(rank: Rank) -> None:
    rank.membership.hold(2)
    assert rank.sent == []
    assert rank.membership.group_now() is rank.groups[1]


def test_where_it_cannot_regroup_it_says_why(rank: Rank) -> None:
    rank.membership.set_apart("its script is in job.pause")
    rank.membership.hold(1)
    assert rank.standings()[0].problem == "its script is in job.pause"


def test_a_worker_that_forms_no_groups_says_so() -> None:
    sent: list[Any] = []
    start = wire.Start(
        epoch=1, rank=0, world=1, local_rank=0, local_world=1, node_rank=0, job="", run="", staging=""
    )  # fmt: skip
    membership = Membership(start, Named(1), send=sent.append)
    membership.hold(1)
    assert sent[0].problem == "in-place recovery is off"


# --- what counts ---------------------------------------------------------------------------------


def test_a_reduction_counts_once(rank: Rank) -> None:
    rank.membership.begin(6)
    assert rank.membership.complete(rank.groups[1], VECTOR)
    rank.membership.hold(1)
    assert rank.standings()[0].reductions == 1
    assert rank.standings()[0].share is None
    assert rank.give() == text(1.0, 2.0)


def test_a_reduction_that_completes_after_the_standing_was_told_does_not_count(rank: Rank) -> None:
    rank.membership.begin(6)
    rank.membership.hold(1)
    assert not rank.membership.complete(rank.groups[1], VECTOR)
    rank.regroup(share=((2, 4),), micro_batches=6)
    assert not rank.membership.complete(rank.groups[1], VECTOR), "the group is of the former epoch"
    assert rank.membership.complete(rank.groups[2], VECTOR)


def test_a_step_is_of_the_former_epoch_if_another_rank_had_applied_it_there(rank: Rank) -> None:
    rank.membership.hold(1)
    call = blocked(lambda: rank.membership.mark_applied(6))
    rank.regroup(applied=6)
    assert call.end() == 1
    assert rank.membership.mark_applied(7) == 2


def test_a_step_that_nobody_had_applied_is_of_the_new_epoch(rank: Rank) -> None:
    rank.membership.hold(1)
    call = blocked(lambda: rank.membership.mark_applied(6))
    rank.regroup(applied=5)
    assert call.end() == 2


def test_a_step_is_of_the_first_epoch_that_holds_it_two_regroups_later(rank: Rank) -> None:
    rank.membership.hold(1)
    rank.regroup(2, applied=6)
    rank.membership.hold(2)
    rank.regroup(3, applied=6)
    assert rank.membership.mark_applied(6) == 1
    assert rank.membership.mark_applied(7) == 3


def test_a_rank_that_cannot_regroup_says_so_instead_of_forming_a_group(rank: Rank) -> None:
    rank.membership.stay_in_epoch("its script uses job.mesh")
    rank.membership.hold_here(1)  # newcomers join
    rank.regroup()
    told = [f for f in rank.sent if isinstance(f, wire.Regrouped)]
    assert told == [wire.Regrouped(epoch=2, problem="its script uses job.mesh")]


# --- the next epoch ------------------------------------------------------------------------------


def test_what_a_lost_member_leaves_is_handed_over_once(rank: Rank) -> None:
    rank.membership.begin(6)
    rank.membership.hold(1)
    rank.regroup(share=((2, 6),), micro_batches=6)
    assert rank.membership.group_now() is None, "the rank has more micro-batches to compute first"
    assert indices(rank.membership.take_more()) == [4, 5]
    assert indices(rank.membership.take_more()) == []
    assert rank.membership.group_now() is rank.groups[2]


def test_what_was_left_and_not_handed_over_yet_is_told_at_the_next_hold(rank: Rank) -> None:
    rank.membership.begin(6)
    rank.membership.hold(1)
    rank.regroup(2, share=((2, 5),), micro_batches=6)
    rank.membership.hold(2)
    assert rank.standings()[1].share == ((2, 5),)
    rank.regroup(3, share=((0, 6),), micro_batches=6)
    assert indices(rank.membership.take_more()) == [4, 0, 1, 5]


def test_a_loop_that_another_rank_has_begun_begins_with_the_share_left_to_this_one(
    rank: Rank,
) -> None:
    rank.membership.hold(1)
    rank.regroup(share=((0, 1), (4, 6)), micro_batches=6)
    assert indices(rank.membership.begin(6)) == [0, 4, 5]
    assert rank.membership.complete(rank.groups[2], VECTOR)
    assert indices(rank.membership.begin(6)) == [0, 1, 2], "the next loop has the usual shares"


def test_another_number_of_micro_batches_than_the_others_have_is_misuse(rank: Rank) -> None:
    rank.membership.hold(1)
    rank.regroup(share=((0, 3),), micro_batches=6)
    with pytest.raises(Misuse, match="4 micro-batches, others into 6"):
        rank.membership.begin(4)


def test_a_share_that_was_left_and_not_begun_is_shared_out_anew(rank: Rank) -> None:
    rank.membership.hold(1)
    rank.regroup(2, share=((0, 3),), micro_batches=6)
    rank.membership.hold(2)
    assert rank.standings()[1].share is None
    rank.regroup(3, rank=0, world=1)
    assert indices(rank.membership.begin(6)) == [0, 1, 2, 3, 4, 5]


def test_orders_that_are_late_or_come_to_a_rank_that_is_not_held_change_nothing(rank: Rank) -> None:
    orders = wire.Regroup(
        epoch=2, rank=0, world=2, local_world=1, node_rank=0, applied=5, reductions=0
    )
    rank.membership.regroup(orders)
    assert rank.membership.epoch == 1
    rank.membership.hold(1)
    rank.regroup(3)
    rank.membership.hold(3)
    rank.membership.regroup(orders)
    assert rank.membership.epoch == 3


def test_a_group_that_cannot_be_formed_is_told(rank: Rank) -> None:
    rank.problem = "no route"
    rank.membership.hold(1)
    rank.regroup()
    assert rank.sent[-1] == wire.Regrouped(epoch=2, problem="no route")
    assert rank.membership.group_now() is None


# --- the vector that another rank sends ----------------------------------------------------------


def behind(rank: Rank) -> None:
    """The rank's sums are complete. Another rank also has the vector and has begun the next loop."""
    rank.membership.begin(6)
    rank.membership.hold(1)
    rank.regroup(reductions=1, vector=text(7.0), share=((4, 6),), micro_batches=6)


def test_a_rank_that_is_behind_takes_the_vector_and_then_its_share_of_the_next_loop(
    rank: Rank,
) -> None:
    behind(rank)
    assert rank.membership.wait_group() is None
    vector = rank.membership.take_rescue()
    assert vector is not None
    assert vector.tolist() == [7.0]
    assert rank.membership.take_rescue() is None
    assert indices(rank.membership.begin(6)) == [4, 5]
    assert rank.give() == text(7.0)


def test_it_counts_as_the_others_do_once_it_has_taken_the_vector(rank: Rank) -> None:
    behind(rank)
    rank.membership.take_rescue()
    rank.membership.hold(2)
    assert rank.standings()[1].reductions == 0


def test_held_again_before_it_took_the_vector_it_is_still_behind(rank: Rank) -> None:
    behind(rank)
    rank.membership.hold(2)
    assert rank.standings()[1].reductions == -1
    assert rank.standings()[1].share is None
    rank.regroup(3, reductions=0, vector=text(7.0))
    vector = rank.membership.take_rescue()
    assert vector is not None
    assert vector.tolist() == [7.0]


def test_told_without_the_vector_it_takes_it_only_in_the_next_epoch_and_once(rank: Rank) -> None:
    """Regression: a rank that took the vector during the hold got it again with the next epoch, and used
    it for the next reduction.
    """
    behind(rank)
    rank.membership.hold(2)
    call = blocked(rank.membership.take_rescue)
    rank.regroup(3, reductions=0, vector=text(7.0))
    assert call.end().tolist() == [7.0]
    assert rank.membership.take_rescue() is None


def test_if_all_who_are_left_are_behind_each_keeps_its_vector(rank: Rank) -> None:
    behind(rank)
    rank.membership.hold(2)
    rank.regroup(3, reductions=-1)
    vector = rank.membership.take_rescue()
    assert vector is not None
    assert vector.tolist() == [7.0]


# --- an evaluation -------------------------------------------------------------------------------


def test_a_rank_goes_apart_only_once_the_ranks_and_their_group_are_known(rank: Rank) -> None:
    rank.membership.hold(1)
    call = blocked(lambda: rank.membership.go_apart("it evaluates"))
    assert rank.standings()[-1].problem == ""
    rank.regroup()
    call.end()
    assert (rank.membership.rank, rank.membership.world) == (0, 2)
    assert rank.membership.group is rank.groups[2]
    rank.membership.hold(2)
    assert rank.standings()[-1].problem == "it evaluates"


def test_a_rank_whose_epoch_ends_does_not_wait_to_go_apart(rank: Rank) -> None:
    rank.membership.hold(1)
    call = blocked(lambda: rank.membership.go_apart("it evaluates"))
    rank.membership.park()
    call.end()


# --- no regroup comes ----------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["begin", "wait_regrouped", "wait_group"])
def test_parked_after_a_hold_it_leaves_its_step(rank: Rank, call: str) -> None:
    rank.membership.hold(1)
    arguments = (6,) if call == "begin" else ()
    waits = blocked(lambda: getattr(rank.membership, call)(*arguments))
    rank.membership.park()
    with pytest.raises(Parked):
        waits.end()


def asked(epoch: int = 1, step: int = 5) -> wire.SaveHeld:
    return wire.SaveHeld(epoch=epoch, step=step)


@pytest.mark.parametrize("call", ["wait_regrouped", "wait_group"])
def test_a_rank_that_is_held_saves_if_asked_and_goes_on_waiting(rank: Rank, call: str) -> None:
    rank.membership.hold(1)
    saved: list[wire.SaveHeld] = []
    waits = blocked(lambda: getattr(rank.membership, call)(saved.append))
    for other in (asked(epoch=2), asked(step=4)):
        rank.membership.ask_save(other)
    rank.membership.ask_save(asked())
    wait_for(lambda: saved)
    rank.regroup()
    waits.end()
    assert saved == [asked()], "only the request for this step and epoch counts, once"


def test_a_save_that_nobody_got_to_before_the_next_epoch_is_not_taken(rank: Rank) -> None:
    rank.membership.ask_save(asked())
    rank.membership.hold(1)
    rank.membership.ask_save(asked())
    rank.regroup()
    saved: list[wire.SaveHeld] = []
    rank.membership.wait_regrouped(saved.append)
    assert saved == []


def test_parked_it_tells_nothing_and_follows_no_orders(rank: Rank) -> None:
    rank.membership.park()
    rank.membership.hold(1)
    rank.membership.fail(rank.groups[1])
    assert rank.sent == []
    assert rank.membership.group_now() is None


def test_parked_in_the_optimizers_step_it_counts_the_step_in_its_own_epoch(rank: Rank) -> None:
    rank.membership.hold(1)
    call = blocked(lambda: rank.membership.mark_applied(6))
    rank.membership.park()
    assert call.end() == 1


# --- newcomers join ------------------------------------------------------------------------------


def test_beside_newcomers_a_rank_begins_its_share_and_tells_it_and_reduces_nothing(
    rank: Rank,
) -> None:
    membership = rank.membership
    membership.hold_next(1)
    assert not rank.sent, "the rank has begun nothing yet"
    assert indices(membership.begin(6)) == [2, 3]
    (told,) = rank.standings()
    assert (told.applied, told.share, told.micro_batches) == (5, ((2, 4),), 6)
    assert membership.group_now() is None
    assert not membership.complete(rank.groups[1], VECTOR)
    ends = blocked(membership.wait_group)
    rank.regroup(share=((2, 4),), micro_batches=6, rank=2, world=4)
    assert ends.end() is rank.groups[2]
    assert indices(membership.take_more()) == []
    assert rank.groups[1].was_cut
    assert (membership.rank, membership.world) == (2, 4)


def test_a_loss_before_the_next_loop_has_begun_is_told_without_a_share(rank: Rank) -> None:
    membership = rank.membership
    membership.hold_next(1)
    membership.hold(1)
    assert [s.share for s in rank.standings()] == [None]
    begins = blocked(lambda: membership.begin(6))
    rank.regroup(share=((0, 3),), micro_batches=6)
    assert indices(begins.end()) == [0, 1, 2]
    assert len(rank.standings()) == 1, "the standing must not be sent again for the newcomers"


def test_orders_are_taken_from_the_boundary_on_until_the_next_epoch(rank: Rank) -> None:
    membership = rank.membership
    assert membership.next_order(1) is None
    membership.hold_next(1)
    waits = blocked(lambda: membership.next_order(1))
    order = wire.GiveState(epoch=1, key="k")
    membership.order(order)
    assert waits.end() == order
    membership.begin(6)
    waits = blocked(lambda: membership.next_order(1))
    rank.regroup()
    assert waits.end() is None


@pytest.mark.parametrize("how", ["hold_here", "hold_next"])
def test_a_loss_at_the_boundary_at_which_newcomers_join_holds_nobody_in_the_next_epoch(
    rank: Rank, how: str
) -> None:
    """The rank may be slow between the agent's answer and its hold."""
    membership = rank.membership
    membership.hold(1)
    rank.regroup()
    getattr(membership, how)(1)
    assert membership.next_order(1) is None
    assert indices(membership.begin(6)) == [0, 1, 2]
    assert membership.group_now() is rank.groups[2]
    assert [s.epoch for s in rank.standings()] == [1]


def test_a_newcomer_may_have_no_part_of_the_step_that_others_have_begun() -> None:
    rank = Rank(join=True)
    rank.regroup(share=(), micro_batches=6)
    assert indices(rank.membership.begin(6)) == []
    rank.membership.park()


def test_a_newcomer_tells_the_step_of_the_state_that_it_has_taken_over() -> None:
    """If all former members die before it applies a step, the run continues from that step."""
    newcomer = Rank(join=True, applied=0)
    newcomer.membership.take_over(7)
    newcomer.regroup(applied=7)
    newcomer.membership.hold(2)
    assert newcomer.standings()[-1].applied == 7
    newcomer.membership.park()


# --- ranks of a unit of several ------------------------------------------------------------------


@pytest.fixture
def second() -> Iterator[Rank]:
    """Rank 1 of two units of two. Of 6 micro-batches, ranks 0 and 1 have two each, ranks 2 and 3 one each."""
    made = Rank(world=4, mesh=Mesh(shard=2))
    yield made
    made.membership.park()


@pytest.fixture
def sibling() -> Iterator[Rank]:
    """Rank 1 of two units of two. Both ranks of its unit compute the first three of 6 micro-batches."""
    made = Rank(world=4, mesh=Mesh(tensor=2))
    yield made
    made.membership.park()


def show(passes: list[Pass]) -> str:
    return " ".join(f"({p.index})" if p.filler else str(p.index) for p in passes)


def test_a_unit_fills_up_what_a_lost_unit_leaves(second: Rank) -> None:
    assert show(second.membership.begin(6)) == "2 3"
    second.membership.hold(1)
    assert second.standings()[0].passes == 2
    second.regroup(rank=1, share=((2, 4), (5, 6)), micro_batches=6, passes=4)
    assert show(second.membership.take_more()) == "5 (5)"
    second.membership.hold(2)
    told = second.standings()[1]
    assert (told.share, told.passes) == (((2, 4), (5, 6)), 4)
    second.regroup(3, rank=1, share=((2, 4), (5, 6)), micro_batches=6, passes=5)
    assert show(second.membership.take_more()) == "(5)"


def test_a_rank_that_has_nothing_to_compute_fills_up_with_the_first(second: Rank) -> None:
    second.membership.hold(1)
    second.regroup(rank=1, share=(), micro_batches=6, passes=2)
    assert show(second.membership.begin(6)) == "(0) (0)"


def test_a_rank_that_has_not_begun_follows_the_order_of_its_sibling(sibling: Rank) -> None:
    sibling.membership.hold(1)
    sibling.regroup(2, share=((0, 4),), micro_batches=6, passes=5, begun=((1, 4),), begun_passes=4)
    sibling.membership.hold(2)
    told = sibling.standings()[1]
    assert (told.share, told.passes) == (None, 0)
    # The sibling reports what it holds in ascending order, but holds it in the order of arrival.
    sibling.regroup(3, share=((0, 6),), micro_batches=6, passes=8, begun=((0, 4),), begun_passes=5)
    assert show(sibling.membership.begin(6)) == "1 2 3 (3) 0 4 5 (5)"


def test_so_it_does_if_it_has_yet_to_take_the_vector_of_the_loop_before(sibling: Rank) -> None:
    sibling.membership.begin(6)
    sibling.membership.hold(1)
    late: dict[str, Any] = {"vector": text(7.0), "micro_batches": 6}
    sibling.regroup(2, share=((0, 4),), passes=4, begun=((1, 4),), begun_passes=3, **late)
    sibling.membership.hold(2)
    sibling.regroup(3, share=((0, 6),), passes=6, begun=((0, 4),), begun_passes=4, **late)
    assert sibling.membership.take_rescue() is not None
    assert show(sibling.membership.begin(6)) == "1 2 3 0 4 5"


def test_a_share_that_no_sibling_has_begun_is_replaced(sibling: Rank) -> None:
    sibling.membership.hold(1)
    sibling.regroup(2, share=((0, 3),), micro_batches=6, passes=3)
    sibling.membership.hold(2)
    sibling.regroup(3, share=((3, 5),), micro_batches=6, passes=3)
    assert show(sibling.membership.begin(6)) == "3 4 (4)"


def test_a_rank_whose_unit_is_lost_says_so_and_is_in_no_further_epoch(second: Rank) -> None:
    second.membership.begin(6)
    second.membership.lose_unit("an all-gather failed")
    second.membership.lose_unit("another one")
    (told,) = second.standings()
    assert (told.problem, told.unit_lost, told.epoch) == ("an all-gather failed", True, 1)
    second.membership.hold(1)
    second.membership.regroup(
        wire.Regroup(
            epoch=2, rank=1, world=2, local_world=1, node_rank=0, applied=5, reductions=0,
            share=((2, 4),), micro_batches=6, passes=2,
        )
    )  # fmt: skip
    told = second.standings()[-1]
    assert (told.unit_lost, told.epoch) == (True, 2)
    assert second.membership.group_now() is None


def test_each_standing_of_an_epoch_has_the_endpoint_with_which_the_next_group_is_formed() -> None:
    rank = Rank(listen)
    rank.membership.fail(rank.groups[1])
    rank.membership.hold(1)
    rank.membership.hold_here(1)
    texts = {s.endpoint for s in rank.standings()}
    assert len(texts) == 1 < len(rank.standings())
    rank.regroup(2)
    (first,) = rank.formed_with
    assert first is not None
    assert texts == {first.text}
    rank.membership.hold(2)
    assert rank.standings()[-1].endpoint not in {"", first.text}
    rank.regroup(3)
    rank.membership.park()


def test_a_rank_that_cannot_listen_regroups_all_the_same() -> None:
    def refuse(world: int) -> Endpoint:
        raise RuntimeError("this rank cannot listen")

    rank = Rank(refuse)
    rank.membership.hold(1)
    assert rank.standings()[-1].endpoint == ""
    rank.regroup(2)
    assert rank.formed_with == [None]
    rank.membership.park()


# --- buckets that are complete ---------------------------------------------------------------------


def complete_buckets(rank: Rank, epoch: int) -> int:
    """What it reports when it is held in this epoch."""
    rank.membership.hold(epoch)
    return rank.standings()[-1].complete_buckets


def test_a_standing_has_the_number_of_buckets_that_are_complete(rank: Rank) -> None:
    rank.membership.begin(6)
    group = rank.membership.group_now()
    assert group is not None
    rank.membership.count_complete(group, 2)
    assert complete_buckets(rank, 1) == 2


def test_a_bucket_that_is_complete_after_the_standing_does_not_count(rank: Rank) -> None:
    """The rank keeps it, but the others do not know that."""
    rank.membership.begin(6)
    group = rank.membership.group_now()
    assert group is not None
    assert complete_buckets(rank, 1) == 0
    rank.membership.count_complete(group, 2)
    rank.regroup(2, share=((0, 6),), micro_batches=6)
    assert rank.groups[2].complete_buckets == 0


def test_once_the_next_group_is_handed_out_only_what_is_complete_on_all_ranks_counts(
    rank: Rank,
) -> None:
    rank.membership.begin(6)
    first = rank.membership.group_now()
    assert first is not None
    rank.membership.count_complete(first, 3)
    rank.membership.hold(1)
    rank.regroup(2, share=((2, 4),), micro_batches=6, complete_buckets=1)
    assert complete_buckets(rank, 2) == 3, "its buffers are not filled anew yet"
    rank.regroup(3, share=((2, 4),), micro_batches=6, complete_buckets=2)
    second = rank.membership.wait_group()
    assert second is rank.groups[3]
    rank.membership.count_complete(first, 4)
    rank.membership.count_complete(second, 1)
    assert complete_buckets(rank, 3) == 2 + 1


def test_complete_buckets_count_for_their_own_reduction_only(rank: Rank) -> None:
    rank.membership.begin(6)
    rank.membership.hold(1)
    rank.regroup(2, share=((0, 6),), micro_batches=6, complete_buckets=2)
    rank.membership.take_more()
    group = rank.membership.group_now()
    assert group is not None
    assert rank.membership.complete(group, VECTOR)
    assert group.complete_buckets == 0
    rank.membership.begin(6)
    assert rank.membership.group_now() is group
    assert complete_buckets(rank, 2) == 0


def test_a_rank_of_a_unit_reports_no_complete_buckets() -> None:
    """Its groups complete their sums in any order."""
    rank = Rank(mesh=Mesh(shard=2), world=4)
    rank.membership.begin(6)
    group = rank.membership.group_now()
    assert group is not None
    rank.membership.count_complete(group, 2)
    assert complete_buckets(rank, 1) == 0


def test_a_rank_that_waits_for_a_vector_reports_no_buckets_of_that_reduction(rank: Rank) -> None:
    """The next reduction would otherwise begin with sums of this one."""
    rank.membership.begin(6)
    group = rank.membership.group_now()
    assert group is not None
    rank.membership.count_complete(group, 2)
    rank.membership.hold(1)
    rank.regroup(2, reductions=1, vector=wire.to_text(VECTOR.tobytes()))
    assert complete_buckets(rank, 2) == 0
