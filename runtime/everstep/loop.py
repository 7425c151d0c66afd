"""The inner loop: this rank's micro-batches, the reduction during the last backward, and the end
once all sums are complete. If members are lost meanwhile, the loop also yields the micro-batches
that they leave to this rank, and reduces again; what this rank has computed stays.

Order at the end of a loop: all sums complete (phase REDUCED), loss finite, gradients and buffers
delivered, guards, then the user applies (phase APPLYING). A rank that cannot get that far undoes
what the step changed and parks at the boundary before the step. A rank that can get that far
continues as if nothing had happened, and parks at the boundary after the step.
"""

import math
from collections.abc import Iterable, Set
from typing import Any

import numpy as np
import torch

from everstep import device, order, randomness, rewind, step_checks, undo_step, validate, vector
from everstep.batches import Batches
from everstep.buffers import Held
from everstep.errors import Misuse
from everstep.group import Group
from everstep.membership import Parked
from everstep.shares import Pass
from everstep.step_state import StepState
from everstep_contract import wire
from everstep_contract.ledger import LedgerEntry
from everstep_contract.position import Phase
from everstep_contract.report import Cause

_UNANSWERED = (
    "step {step}: the loop asks for the next batch, but the batch before it had {count} "
    "step.backward or step.skip; it needs exactly one. The usual causes: list() or zip() around "
    "step.batches, a wrapper that prefetches, `continue` before step.backward, or an exception "
    "(out of memory?) that was swallowed. Call step.skip() to leave a batch out"
)

_NO_PARAMETERS = (
    "it is empty, so this loop would train nothing. A generator such as model.parameters() is empty after its first "
    "use: pass list(model.parameters())"
)
_ALL_FROZEN = (
    "none of its parameters requires a gradient, so this loop would train nothing. Pass parameters that the loop "
    "trains, or call requires_grad_(True) on these"
)


class Loop:
    """What `step.batches` returns."""

    def __init__(
        self,
        step: StepState,
        feed: Batches,
        named: dict[str, torch.nn.Parameter],
        asked: Set[int] | None,
        overlap: bool,
    ) -> None:
        """`asked`: ids of the parameters that the script asks for; None: those that the tracked optimizers hold."""
        self._step, self._session, self._feed = step, step.session, feed
        self._session.at_track.require_same_groups()
        self._session.at_track.require_same_parameters()
        if step.reductions == 0:
            step.start.require_untouched(step.number)
        step.require_used(named)
        self._first = self._session.feeds.draw(feed, step.number)
        """Place of the step's first sample in the order of the feed."""
        self._draw = order.derive("draw", feed.name, self._first) % 2**32
        self._named, self._asked, self._overlap = named, asked, overlap
        membership = self._session.membership
        self._mesh = membership.mesh
        self._counts = self._mesh.counts(membership.rank)
        """Whether this rank enters its micro-batches in the vector. Of the ranks that compute the
        same micro-batches, only one does.
        """
        self._passes = membership.plan_passes(feed.micro_batches)
        self._todo: list[Pass] = []
        self._filling = False
        """The current pass is a filler: it has no weight, and all ranks of the unit make the
        same number of passes with it.
        """
        self._layout = vector.Layout(
            micro_batches=feed.micro_batches,
            samples=feed.global_batch,
            parameters=len(named),
            buffers=self._session.buffers.numbers,
        )
        self._numbers = np.zeros(self._layout.size)
        self._parts = self._layout.parts(self._numbers)
        self._losses: dict[int, torch.Tensor] = {}
        self._current: int | None = None
        self._answers = 0
        self._scaler: Any = None
        self._scale = 1.0
        """The scale of `_scaler`."""
        self._failed = False
        """`backward` raised for the current micro-batch: part of its gradient may be in the sum."""
        self._random: dict[str, Any] | None = None
        self._buffers_before: Held | None = None
        """The buffers as they were when the loop began."""
        self._buffers_after: Held | None = None
        """The buffers as micro-batch 0 left them; None: this rank does not compute it."""
        self._group: Group | None = None
        """The group in which the sums were launched; None: they have not been launched yet."""
        self.ended = False

    @property
    def begun(self) -> bool:
        """Whether the script has asked for the first batch."""
        return self._random is not None

    def __len__(self) -> int:
        """Number of this rank's batches; it grows if a member is lost."""
        return len(self._passes)

    def __iter__(self) -> "Loop":
        if self.ended:
            raise Misuse(
                f"step {self._step.number}: this loop over step.batches is over, so it would yield no batch. For "
                "another pass over the batches of the step, call step.batches again"
            )
        return self

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        if self._random is None:
            self._begin()
        self._require_answer()
        try:
            while True:
                if self._group is None:  # else its sums must complete or fail first
                    self._take_more()
                if self._todo:
                    self._leave_if_over()
                    return self._fetch(self._todo.pop(0))
                if self._try_to_end():
                    raise StopIteration
        except Parked:
            undo_step.leave(self._step, "the epoch ended")

    def backward(self, loss: Any, weight: Any, scaler: Any) -> None:
        index = self._answer()
        self._failed = True  # until it has returned
        value = _checked_loss(loss, self._step.number)
        amount = (
            len(self._feed.places(index))
            if weight is None
            else validate.number("step.backward: weight", weight, "a weight")
        )
        if self._filling:
            amount = 0
        scaled = value * (amount / self._feed.global_batch)
        if scaler is not None:
            _require_tracked(scaler, self._session.tracked.objects.values())
            scaled = scaler.scale(scaled)
        scale = self._read_scale(scaler)
        group = self._group_if_last()
        overlap = group if self._overlap else None
        if amount or self._mesh.unit > 1:  # 0 × NaN is NaN; the ranks of a unit compute together
            self._session.reducer.backward(scaled, overlap=overlap, scale=scale)
        if self._tells:
            self._losses[index] = value.detach().clone()  # the script may change its own in place
            self._parts.weights[index] = amount
            self._parts.scales[index] = scale
        if group is not None:
            self._send(group)
        self._failed = False

    def _read_scale(self, scaler: Any) -> float:
        """Read the scale once a loop, in which it does not change: each read waits for the device."""
        if scaler is None:
            return 1.0
        if scaler is not self._scaler:
            self._scaler, self._scale = scaler, float(scaler.get_scale())
        return self._scale

    def skip(self) -> None:
        if self._mesh.unit > 1:
            raise Misuse(
                f"step {self._step.number}: step.skip, but the ranks of a unit compute together, so all have to make "
                "this pass: call step.backward(loss, weight=0)"
            )
        self._answer()
        if (group := self._group_if_last()) is not None:
            self._send(group)

    @property
    def _tells(self) -> bool:
        """Whether this rank enters the current micro-batch in the vector."""
        return self._counts and not self._filling

    def _begin(self) -> None:
        self._random = randomness.capture()
        membership = self._session.membership
        try:
            membership.wait_regrouped(self._save_held)
            self._passes = membership.begin(self._feed.micro_batches)
        except Parked:
            undo_step.leave(self._step, "the epoch ended")
        self._todo = list(self._passes)
        self._counts_of_schedules = rewind.list_counts(self._session.tracked)
        self._feed.begin_loop(self._step.number)
        self._expect()
        if len(self) > 1 or membership.can_regroup:
            self._buffers_before = self._session.buffers.hold()
        reducer, first = self._session.reducer, self._step.reductions == 0
        known = list(self._session.tracked.named_parameters().values())
        reducer.watch(known)  # the script may have unfrozen some
        if first:
            step_checks.require_no_gradients(self._step, reducer.list_held())
        reducer.begin(self._named, self._feed.micro_batches, first=first)
        if not first:
            self._session.meter.update(phase=Phase.COMPUTING, reduction=self._step.reductions)

    def _take_more(self) -> None:
        more = self._session.membership.take_more()
        self._passes += more
        self._todo += more
        if more:
            self._expect()

    def _expect(self) -> None:
        if not self._feed.fetches_ahead:
            return
        session = self._session
        share = session.membership.plan(self._feed.micro_batches)
        todo = [one.index for one in self._todo if not one.filler]
        self._feed.expect(self._first, todo, share, session.until or self._step.number)

    def _leave_if_over(self) -> None:
        if self._session.broken and self._group is None:
            undo_step.leave(self._step, "the epoch ended")

    def _group_if_last(self) -> Group | None:
        """Return the group in which to reduce after the last micro-batch. None: it is too early."""
        return None if self._todo else self._session.membership.group_now()

    def _require_answer(self) -> None:
        self._require_whole()
        if self._current is not None and self._answers != 1:
            raise Misuse(_UNANSWERED.format(step=self._step.number, count=self._answers or "no"))

    def _require_whole(self) -> None:
        if self._failed:
            raise Misuse(
                f"step {self._step.number}: step.backward raised an exception that the script swallowed, and part of "
                "the gradient may be in the sum. Let the exception pass; to leave a batch out, call step.skip() "
                "instead of step.backward"
            )

    def _answer(self) -> int:
        if self._current is None or self.ended:
            raise Misuse(
                f"step {self._step.number}: step.backward and step.skip belong inside the loop "
                "over step.batches"
            )
        self._require_whole()
        if self._answers:
            raise Misuse(
                f"step {self._step.number}: a second step.backward or step.skip for one batch; "
                "add several losses: "
                "step.backward(loss_a + loss_b)"
            )
        self._answers = 1
        if self._current == 0 and not self._filling:
            self._buffers_after = self._session.buffers.hold()
        return self._current

    def _fetch(self, one: Pass) -> Any:
        """Fetch the batch of a pass. Its random numbers depend only on (seed, step, index), and its
        buffers only on earlier steps.
        """
        if self._current is not None and self._buffers_before is not None:
            self._session.buffers.put_back(self._buffers_before)
        index, self._filling = one.index, one.filler
        self._current, self._answers = index, 0
        request = self._feed.request(self._first, index)
        if self._tells:  # before the fetch, which may raise: the script may skip the batch then
            places = self._feed.places(index)
            self._parts.counts[index] = 1
            self._parts.samples[places.start : places.stop] = [i + 1 for i in request.ids]
        with self._session.meter.fetching(usual=self._feed.comes_as_usual(request)):
            batch = self._feed.take(request)
        randomness.seed_all(*request.seed)
        self._session.saves.begin_copy()
        return batch

    def _send(self, group: Group) -> None:
        """Launch the remaining buckets, and the vector."""
        self._group = group
        self._session.tracked.prepare_scalers(self._session.device)
        self._session.reducer.flush(group)
        self._session.reducer.start_last(self._fill_vector())

    def _fill_vector(self) -> torch.Tensor:
        session = self._session
        losses = device.read_numbers(list(self._losses.values()))
        for index, loss in zip(self._losses, losses, strict=True):
            self._parts.losses[index] = loss
        own = self._parts.counts.sum()
        self._parts.draw[:] = self._draw * own
        if session.told_epoch:  # else this process has not taken a step yet
            saved = session.saves.asked.step == self._step.number - 1
            self._parts.saves[:] = (own, 0) if saved else (0, own)
        if self._counts:
            self._parts.used[:] = session.reducer.used()
        if self._counts and self._buffers_after is not None:
            self._parts.buffers[:] = session.buffers.pack(self._buffers_after)
        return torch.from_numpy(self._numbers)

    def _try_to_end(self) -> bool:
        """Return whether the reduction is complete. False: members were lost, so there is more to do."""
        session = self._session
        if self._group is None:
            with session.meter.charging("wait", waiting=True):
                group = session.membership.wait_group(self._save_held)
            if group is None:
                return self._take_rescue()
            self._send(group)
        assert self._group is not None
        with session.meter.summing():
            vector = session.reducer.end(session.meter.look)
        numbers = vector.numpy() if vector is not None else None
        if numbers is None or not session.membership.complete(self._group, numbers):
            return self._recover(self._group)
        self._deliver(numbers)
        return True

    def _recover(self, group: Group) -> bool:
        """Recover because the sums of `group` do not count. Return whether the
        reduction is complete nevertheless.
        """
        session = self._session
        if not session.membership.can_regroup:
            undo_step.leave(self._step, "a collective failed")
        session.membership.fail(group)
        with session.meter.charging("wait", waiting=True):
            session.membership.wait_regrouped(self._save_held)
        if self._take_rescue():
            return True
        self._group = None
        session.reducer.repeat()
        return False

    def _save_held(self, asked: wire.SaveHeld) -> None:
        undo_step.save_held(self._step, asked)

    def _take_rescue(self) -> bool:
        """Return whether another member had completed this reduction. If so, deliver this rank's
        sums with that member's vector.
        """
        with self._session.meter.charging("wait", waiting=True):
            numbers = self._session.membership.take_rescue()
        if numbers is None:
            return False
        if not self._session.reducer.summed:
            undo_step.leave(self._step, "others hold the vector of sums that this rank lacks")
        self._deliver(numbers)
        return True

    def _deliver(self, numbers: vector.Numbers) -> None:
        """Check the sums, which are all complete, and hand them to the script."""
        step, session = self._step, self._session
        parts = self._layout.parts(numbers)
        summary = vector.read_summary(parts)
        self._require_each_once(summary)
        self._require_same_draw(parts)
        self._save_instead(parts)
        more = step.reductions + 1 < session.most_reductions
        if not more:
            session.meter.update(phase=Phase.REDUCED)
        step_checks.require_same_counts(step, self._counts_of_schedules)
        step_checks.require_still_frozen(step, self._asked, session.reducer.dropped)
        step_checks.require_finite(step, self._feed, summary)
        step.start.check_buffers()
        if session.most_reductions > 1 and step.reductions == 0:
            undo_step.keep_copy(step)
        factor = self._feed.global_batch / summary.total_weight if summary.total_weight else 1.0
        session.reducer.deliver(parts.used.tolist(), factor, scale=summary.scale)
        session.buffers.take(parts.buffers)
        assert self._random is not None
        randomness.restore(self._random)
        norm = self._norm(summary.scale)
        step_checks.watch_jumps(step, summary, norm)
        step.end_reduction(self._entry(summary), norm, scaled=summary.scale != 1.0)
        session.saves.end_copy()
        if not more:
            session.meter.update(phase=Phase.APPLYING)
        self.ended = True

    def _norm(self, scale: float) -> float | None:
        """Global 2-norm without the scaler's scale. None: nobody needs it, or it overflowed under a
        scaler, which handles that itself. It may be an estimate if the guard only notes.

        A unit of several ranks always measures it: a rank that has the norm knows that all
        ranks of its unit hold the sums.
        """
        start = self._session.start
        if self._mesh.unit == 1 and (not self._named or start.guard_factor <= 0):
            return None
        norm = self._session.reducer.measure(sampled=start.guard_action != "SaveAndStop")
        if norm is None:
            self._session.lose_unit("a rank of its unit is lost")
            undo_step.leave(self._step, "a rank of its unit is lost")
        return norm / scale if scale == 1.0 or math.isfinite(norm) else None

    def _require_each_once(self, summary: vector.Summary) -> None:
        wrong = [i for i, count in enumerate(summary.counts) if count != 1]
        if wrong:
            self._session.fail(
                Cause.AGENT,
                f"step {self._step.number}: the sum holds micro-batch {wrong[0]} "
                f"{summary.counts[wrong[0]]} times; nothing of this step was applied. This is a "
                "fault of Everstep: please report it",
            )

    def _require_same_draw(self, parts: vector.Parts) -> None:
        if parts.draw[0] != self._draw * self._feed.micro_batches:
            raise Misuse(
                f"step {self._step.number}: this rank drew from feed {self._feed.name} at sample {self._first}, and "
                "another rank from another feed, or at another place, so the sum has samples of both. All ranks must "
                "draw from the same feeds in each step: choose by step.number, or by random numbers of torch, numpy "
                "or random, which are the same on all ranks between two loops"
            )

    def _save_instead(self, parts: vector.Parts) -> None:
        """If only some ranks have asked to save the step before, which cannot be complete, have all of
        them save this one.
        """
        if parts.saves.all():
            number = self._step.number
            self._session.saves.asked.ask(number, None)
            self._session.note(
                f"step {number - 1}: job.save was called on some ranks only, and each rank saves its part: all ranks "
                f"save step {number} instead. Call it on every rank, outside of any condition that differs between "
                "ranks, such as job.is_first or the time"
            )

    def _entry(self, summary: vector.Summary) -> LedgerEntry:
        return LedgerEntry(
            epoch=self._session.epoch,
            step=self._step.number,
            reduction=self._step.reductions,
            feed=self._feed.name,
            samples=summary.samples,
            counts=summary.counts,
            weights=summary.weights,
            losses=summary.losses,
            loss=summary.loss,
        )


def choose_parameters(
    trained: dict[str, torch.nn.Parameter],
    known: dict[str, torch.nn.Parameter],
    asked: Set[int] | None,
) -> dict[str, torch.nn.Parameter]:
    """The parameters of one loop, in the order of the modules. Raises `Misuse`. `asked`: as for `Loop`."""
    if asked is None:
        return trained
    found = {n: p for n, p in known.items() if id(p) in asked and p.requires_grad}
    if len({id(p) for p in known.values()} & asked) != len(asked):
        raise Misuse(
            "step.batches(params=…): it names a parameter that no tracked module has. Leave the parameter out, or name "
            "its module in job.track"
        )
    if not found:
        raise Misuse(f"step.batches(params=…): {_ALL_FROZEN if asked else _NO_PARAMETERS}")
    return found


def _require_tracked(scaler: Any, tracked: Iterable[tuple[str, Any]]) -> None:
    """Each rank must scale by the same number, also one that joins later."""
    enabled = getattr(scaler, "is_enabled", lambda: True)()
    if enabled and not any(thing is scaler for _, thing in tracked):
        raise Misuse(
            "step.backward(…, scaler=…): this scaler is not tracked, so a rank that joins or restarts would begin "
            "with another scale; call job.track(scaler=scaler)"
        )


def _checked_loss(loss: Any, step: int) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise Misuse(
            f"step {step}: step.backward needs a loss of one number, found {_describe_loss(loss)}"
        )
    return loss.reshape(())


def _describe_loss(loss: Any) -> str:
    if isinstance(loss, torch.Tensor):
        return f"shape {tuple(loss.shape)}; use .mean()"
    return f"{loss!r:.80}; give the tensor from which backward can start (without .item())"
