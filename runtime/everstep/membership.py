"""Which epoch this worker is in, with which rank and process group; and how it continues in the
same step when members are lost.

A regroup in place needs no answer from the main thread, which may be in the user's code. The thread
of the agent's socket reports what this rank holds *and will still compute* (its share), and
meanwhile another thread forms the new group. The main thread notices at its next micro-batch.

The invariant: once a rank has reported its standing, no further reduction of that epoch completes
on it, even if its sums arrive. So the members agree which reductions are complete. The buckets of
the next one that are complete on all of them are not summed again (`complete_buckets.py`).
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from everstep import shares
from everstep.complete_buckets import CompleteBuckets
from everstep.errors import Misuse
from everstep.group import Group
from everstep.meeting import Endpoint
from everstep.shares import Pass
from everstep.vector import Numbers
from everstep_contract import wire
from everstep_contract.ranges import list_ranges, to_ranges

Save = Callable[[wire.SaveHeld], None]
Form = Callable[[wire.Regroup, Endpoint | None], Group]
"""Forms the group of an epoch; blocks. Raises `RuntimeError` or `TimeoutError`. The endpoint is the
one that this rank has reported, if it has one.
"""
Listen = Callable[[int], Endpoint]
"""Opens this rank's endpoint for a group of at most so many ranks. Raises `RuntimeError`."""


class Parked(Exception):
    """There is no regroup to wait for: this rank has to leave the step, and park."""


class Membership:
    """This worker's membership, which is shared by the main thread, the thread of the agent's
    socket, and the one that forms a group.

    Args:
        send: hands a frame to the agent; from any thread.
        form: None: this worker cannot regroup, so a lost member ends its process.
        listen: None: the ranks exchange their endpoints when they form the group.
        waiting: makes a context that the main thread enters while it waits for others.
    """

    def __init__(
        self,
        start: wire.Start,
        group: Group,
        *,
        send: Callable[[Any], None] = lambda frame: None,
        form: Form | None = None,
        listen: Listen | None = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.epoch, self.rank, self.world = start.epoch, start.rank, start.world
        self.script_world = start.script_world or start.world
        """As in `wire.Start`; from the first regroup on, the same as `world`."""
        self.mesh = start.mesh
        self._send, self._form, self._listen = send, form, listen
        self._waiting = waiting
        self._news = threading.Condition()
        self._group: Group | None = group
        """None: the group of this epoch is still being formed."""
        self._newest: Group = group
        """The group that was formed last, whatever its epoch."""
        self._applied = start.applied
        self._ended: list[tuple[int, int]] = []
        """(last step, epoch) of the epochs that this worker has left before it marked that step."""
        self._reductions = 0
        """Number of complete reductions of this epoch; -1: the last one of the
        former epoch waits for its vector.
        """
        self._vector: Numbers | None = None
        self._begun: list[Pass] | None = None
        """The passes of the current loop; None: no loop has begun."""
        self._micro_batches = 0
        self._more: list[Pass] = []
        """Those of `_begun` that a regroup added and that the loop has not taken yet."""
        self._complete = CompleteBuckets()
        self._assigned: list[Pass] | None = None
        """The passes of the next loop, if another member has begun it already."""
        self._rescue: Numbers | None = None
        self._held, self._parked = start.join, False
        self._holds_next = False
        """Newcomers join: this rank is held once its next loop has begun."""
        self._asked: wire.SaveHeld | None = None
        """The request to save what this rank holds; None: there is none."""
        self._orders: list[wire.GiveState | wire.TakeState] = []
        self._apart = "its script has not reached job.steps yet"
        """Why this rank cannot regroup now; empty: it can."""
        self._off = "in-place recovery is off"
        self._lost_unit = ""
        """Why this rank's unit is lost; empty: it is not."""
        self._endpoint: Endpoint | None = None
        """Open from a report of the standing until the next epoch's group is formed."""

    @property
    def can_regroup(self) -> bool:
        return self._form is not None

    @property
    def why_fixed(self) -> str:
        """Why this worker cannot enter another epoch; empty: it can."""
        return "" if self.can_regroup else self._off

    @property
    def group(self) -> Group:
        return self._newest

    def has_left(self, epoch: int) -> bool:
        """Whether this rank has left the epoch, or was told to: it does not need its group any more."""
        with self._news:
            return epoch != self.epoch or self._held or self._parked

    # --- the main thread -------------------------------------------------------------------------

    def stay_in_epoch(self, why: str) -> None:
        """From now on this worker cannot regroup."""
        with self._news:
            self._form, self._off = None, why

    def set_apart(self, why: str) -> None:
        """Set why this rank cannot regroup now; empty: it can, because it is in its steps."""
        with self._news:
            self._apart = why

    def go_apart(self, why: str) -> None:
        """Like `set_apart`, but if this rank has reported its standing, wait for the regroup and its
        group first. So from now on the ranks stay as they are, until `set_apart` or the epoch's end.
        """
        with self._news:
            self._wait(lambda: self._parked or not (self._held or self._group is None))
            self._apart = why

    def plan(self, micro_batches: int) -> range:
        """This rank's share of a loop that has not begun, with the current ranks."""
        return self._plan_of(self.rank, micro_batches)

    def plan_passes(self, micro_batches: int) -> list[Pass]:
        """The same share as passes, with fillers up to the number of passes of its unit."""
        first = self.mesh.list_unit_of(self.rank).start  # no other rank has more
        passes = len(self._plan_of(first, micro_batches))
        return shares.plan_passes(self.plan(micro_batches), passes)

    def plan_evaluation(self, micro_batches: int) -> tuple[range, bool]:
        """This rank's share of an evaluation, and whether all shares have the same size. All ranks
        of a unit have the same share, because they compute together.
        """
        unit, units = self.mesh.unit_of(self.rank), self.world // self.mesh.unit
        return shares.plan_share(unit, units, micro_batches), micro_batches % units == 0

    def _plan_of(self, rank: int, micro_batches: int) -> range:
        index, count = self.mesh.data_index(rank), self.mesh.count_shares(self.world)
        return shares.plan_share(index, count, micro_batches)

    def begin(self, micro_batches: int) -> list[Pass]:
        """Begin a loop. Return the passes that this rank computes.

        Raises:
            Parked: the epoch is over.
        """
        with self._news:
            joins = self._holds_next and not self._held and not self._parked
            if not joins:
                self._wait_regrouped()
            passes = self._choose_passes(micro_batches)
            self._begun, self._micro_batches, self._more = list(passes), micro_batches, []
            if not joins:
                return passes
            self._held, self._holds_next = True, False
            standing = self._describe("")
            self._news.notify_all()
        self._send(standing)
        return passes

    def take_more(self) -> list[Pass]:
        """Return the passes that lost members leave to this rank, each once."""
        with self._news:
            more, self._more = self._more, []
            return more

    def group_now(self) -> Group | None:
        """Return the group in which to reduce this rank's share, if the share is
        complete and the group is formed.
        """
        with self._news:
            return None if self._held or self._parked or self._more else self._hand_out()

    def _hand_out(self) -> Group | None:
        """Return the group, in which this rank launches its sums now."""
        self._complete.launch(self._group)
        return self._group

    def count_complete(self, group: Group, buckets: int) -> None:
        """Note that so many of the buckets that were launched in `group` are complete; from any thread."""
        with self._news:
            self._complete.count(group, buckets)

    def wait_regrouped(self, save: Save = lambda asked: None) -> None:
        """Wait until the next epoch is known; its group may still be forming.

        Args:
            save: called meanwhile if this rank is asked to save what it holds. The next epoch may
                begin while it runs.

        Raises:
            Parked: the epoch is over.
        """
        while (asked := self._wait_asked()) is not None:
            save(asked)

    def _wait_asked(self) -> wire.SaveHeld | None:
        with self._news:
            self._wait(lambda: not self._held or self._parked or self._asked is not None)
            asked, self._asked = self._asked, None
            if asked is not None and self._held and not self._parked:
                return asked
            self._wait_regrouped()
            return None

    def wait_group(self, save: Save = lambda asked: None) -> Group | None:
        """Like `wait_regrouped`, but wait for the group, too. None: there are more micro-batches to
        compute first, or the reduction is complete without this rank (`take_rescue`).

        Raises:
            Parked: the epoch is over.
        """
        while True:
            self.wait_regrouped(save)
            with self._news:
                if self._held or self._parked:
                    continue
                if self._more or self._rescue is not None:
                    return None
                if self._group is not None:
                    return self._hand_out()
                self._news.wait()

    def complete(self, group: Group, vector: Numbers) -> bool:
        """Complete the reduction, because every sum is complete in `group`. False: the reduction
        does not count, because the members continue without it.
        """
        with self._news:
            if self._held or group is not self._group:
                return False
            self._end_reduction(vector)
            return True

    def take_rescue(self) -> Numbers | None:
        """Return the vector of a reduction that was complete for other members, or None. This rank
        holds the sums of that reduction: a rank that has a vector knows that every member holds
        them.

        If this rank has meanwhile reported its standing without that reduction, wait for the next
        epoch, which brings the vector again.

        Raises:
            Parked: the epoch is over.
        """
        with self._news:
            if self._rescue is None:
                return None
            self._wait_regrouped()
            vector, self._rescue = self._rescue, None
            self._end_reduction(vector)
            return vector

    def fail(self, group: Group) -> None:
        """Report to the agent that a collective of `group` has failed."""
        with self._news:
            if group is not self._group or self._held or self._parked:
                return
            self._held = True
            standing = self._describe("")
        self._send(standing)

    def lose_unit(self, why: str) -> None:
        """Report to the agent that a collective within this rank's unit has failed. The agent ends this process."""
        with self._news:
            if self._lost_unit or self._parked:
                return
            self._lost_unit, self._held = why, True
            standing = self._describe("")
            self._news.notify_all()
        self._send(standing)

    def take_over(self, step: int) -> None:
        """Record that this rank, a newcomer, holds the state of a member as of `step`."""
        with self._news:
            self._applied = step

    def mark_applied(self, step: int) -> int:
        """Mark a step as applied. Return the epoch to which it belongs.

        If this rank has reported its standing, wait for the regroup: whether the step belongs to
        the old epoch or to the new one must be the same on every rank.
        """
        with self._news:
            self._wait(lambda: not self._held or self._parked)
            self._applied = step
            self._ended = [(last, epoch) for last, epoch in self._ended if step <= last]
            return self._ended[0][1] if self._ended else self.epoch

    def hold_here(self, epoch: int) -> None:
        """Hold this rank at a boundary of `epoch` at which newcomers join, and report its standing.

        If a loss has ended that epoch meanwhile, nobody joins: then do nothing.
        """
        with self._news:
            if epoch != self.epoch:
                return
            self._held = True
            standing = self._describe("")
        self._send(standing)

    def hold_next(self, epoch: int) -> None:
        """The same, but this rank continues: it reports its standing once the next loop has begun,
        and computes its share. No reduction completes before the next epoch, so its state stays as
        it is at this boundary.
        """
        with self._news:
            self._holds_next = epoch == self.epoch

    def next_order(self, epoch: int) -> wire.GiveState | wire.TakeState | None:
        """Wait for the next order to hand state over, while this rank is held in `epoch` or about to
        be. None: it is no longer.
        """

        def is_over() -> bool:
            return epoch != self.epoch or not self._is_held() or self._parked

        with self._news:
            self._news.wait_for(lambda: self._orders or is_over())
            if is_over():
                return None
            return self._orders.pop(0)

    # --- the thread of the agent's socket --------------------------------------------------------

    def hold(self, epoch: int) -> None:
        """`Cut` with `keep`: leave the group, keep the step, report the standing."""
        with self._news:
            if epoch != self.epoch or self._parked:
                return
            told, self._held = self._held, True
            standing = self._describe(self._apart)
            self._news.notify_all()
        self._newest.cut()
        if not told or standing.problem:
            self._send(standing)

    def park(self) -> None:
        """`Cut` without `keep`: there is no regroup to wait for."""
        with self._news:
            self._parked = True
            self._news.notify_all()
        self._newest.cut()

    def order(self, frame: wire.GiveState | wire.TakeState) -> None:
        with self._news:
            self._orders.append(frame)
            self._news.notify_all()

    def ask_save(self, frame: wire.SaveHeld) -> None:
        """Have the main thread save what it holds, while it waits for the next epoch. The request
        is ignored if this rank has moved on, because it then holds another step.
        """
        with self._news:
            if frame.epoch == self.epoch and frame.step == self._applied and self._held:
                self._asked = frame
                self._news.notify_all()

    def give_vector(self, epoch: int) -> None:
        """Report the standing again, with the vector of the last complete reduction."""
        with self._news:
            if epoch != self.epoch or self._vector is None:
                return
            vector = wire.to_text(self._vector.tobytes())
            standing = replace(self._describe(self._apart), vector=vector)
        self._send(standing)

    def regroup(self, frame: wire.Regroup) -> None:
        """Enter the next epoch: its share counts at once, and its group is formed
        while the main thread computes.
        """
        with self._news:
            if not self._held or self._parked or frame.epoch <= self.epoch:
                return
            self._enter(frame)
            endpoint, self._endpoint = self._endpoint, None
            self._held = bool(self._lost_unit)
            standing = self._describe("")
            self._news.notify_all()
        if standing.unit_lost:  # the epoch was planned before the loss was known
            self._send(standing)
        name = f"everstep-regroup-{frame.epoch}"
        threading.Thread(
            target=self._form_group, args=(frame, endpoint), name=name, daemon=True
        ).start()

    def _enter(self, frame: wire.Regroup) -> None:
        self._ended.append((frame.applied, self.epoch))
        self.epoch, self.rank, self.world = frame.epoch, frame.rank, frame.world
        self.script_world = frame.world
        self._held, self._holds_next, self._group = False, False, None
        self._orders.clear()
        self._asked = None
        behind = bool(frame.vector)
        self._reductions = -1 if behind else 0
        self._micro_batches = frame.micro_batches
        if behind:
            if self._rescue is None:  # else `_assigned` is for the loop after this vector
                self._begun, self._more, self._assigned = None, [], None
            self._rescue = np.frombuffer(wire.from_text(frame.vector), np.float64).copy()
        if self._begun is not None:
            more = shares.extend_passes(self._begun, list_ranges(frame.share or ()), frame.passes)
            self._begun, self._more = self._begun + more, self._more + more
        else:
            self._assigned = _assign(frame, self._assigned)

    def _form_group(self, frame: wire.Regroup, endpoint: Endpoint | None) -> None:
        former = self._newest
        former.cut()  # a rank that only held for newcomers has not left it yet
        try:
            former.wait_cut()
            if self._form is None:
                raise RuntimeError(self._off)
            group = self._form(frame, endpoint)
            group.complete_buckets = frame.complete_buckets
        except (RuntimeError, TimeoutError) as error:
            self._send(wire.Regrouped(epoch=frame.epoch, problem=str(error)[:500]))
            return
        finally:
            if endpoint is not None:
                endpoint.close()
        left = group
        with self._news:
            wanted = not self.has_left(frame.epoch)
            if wanted:
                left, self._group, self._newest = self._newest, group, group
            self._news.notify_all()
        if wanted:
            self._send(wire.Regrouped(epoch=frame.epoch))
        left.cut()
        left.drop()

    # --- under the lock --------------------------------------------------------------------------

    def _wait(self, over: Callable[[], bool]) -> None:
        """Wait until `over` returns true. If it does at once, as in most cases, the context is not entered."""
        if not over():
            with self._waiting():
                self._news.wait_for(over)

    def _wait_regrouped(self) -> None:
        self._wait(lambda: not self._held or self._parked)
        if self._parked:
            raise Parked

    def _is_held(self) -> bool:
        return self._held or self._holds_next

    def _choose_passes(self, micro_batches: int) -> list[Pass]:
        passes, self._assigned = self._assigned, None
        if passes is None:
            return self.plan_passes(micro_batches)
        if micro_batches != self._micro_batches:
            raise Misuse(
                f"this rank cuts the step into {micro_batches} micro-batches, others into "
                f"{self._micro_batches}; all ranks must use the same feed in the same step"
            )
        return passes

    def _end_reduction(self, vector: Numbers) -> None:
        self._reductions += 1
        self._vector = vector
        self._begun, self._more = None, []
        self._complete.end(self._group)

    def _describe(self, problem: str) -> wire.Standing:
        begun = self._begun
        held = None if begun is None else to_ranges([p.index for p in begun if not p.filler])
        return wire.Standing(
            epoch=self.epoch,
            applied=self._applied,
            reductions=self._reductions,
            share=held,
            micro_batches=self._micro_batches if begun is not None else 0,
            problem=self._lost_unit or (problem if self.can_regroup else self._off),
            passes=len(begun) if begun is not None and self.mesh.unit > 1 else 0,
            unit_lost=bool(self._lost_unit),
            endpoint="" if problem else self._open_endpoint(),
            complete_buckets=self._complete.buckets if self._counts_buckets else 0,
        )

    @property
    def _counts_buckets(self) -> bool:
        """Whether the complete buckets are of the next reduction: a rank that waits for a vector has those
        of the last one. Ranks of units complete their buckets in any order.
        """
        return self._begun is not None and self.mesh.unit == 1

    def _open_endpoint(self) -> str:
        """The endpoint for the next epoch's group; empty: the ranks exchange theirs when they form it."""
        if self._endpoint is None and self._listen is not None and self.can_regroup:
            with suppress(RuntimeError):  # it is raised again when the group is formed
                self._endpoint = self._listen(self.world)
        found = self._endpoint
        return found.text if found is not None and found.listener is not None else ""


def _assign(frame: wire.Regroup, assigned: list[Pass] | None) -> list[Pass] | None:
    """Return the passes of a loop that this rank has not begun; None: nobody has. Ranks that
    compute the same micro-batches do so in the same order, so new passes come last.

    Args:
        assigned: what an earlier epoch assigned, in the order of the ranks that have begun. `frame`
            does not hold the order.
    """
    if frame.share is None:
        return None
    first: list[Pass] = []
    if frame.begun is not None:
        first = assigned or shares.plan_passes(list_ranges(frame.begun), frame.begun_passes)
    return first + shares.extend_passes(first, list_ranges(frame.share), frame.passes)
