"""The inner loop: this rank's micro-batches, the reduction under the last backward, the end when
the sum is there.

Order at the end of a loop: all sums complete (phase REDUCED) → loss finite? → gradients and buffers
delivered → guards → the user applies (phase APPLYING). A rank that cannot get that far puts back
what the step changed and parks at the boundary before the step; a rank that can goes on as if
nothing had happened, and parks at the boundary after it.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from everstep import given, guards, randomness, shares, vector
from everstep.errors import Misuse
from everstep.feed import Batches
from everstep.session import Capture
from everstep_contract.ledger import LedgerEntry
from everstep_contract.position import Phase
from everstep_contract.report import Cause

if TYPE_CHECKING:
    from everstep.step import Step

_UNANSWERED = (
    "step {step}: the loop asks for the next batch, but the batch before it had {count} "
    "step.backward or step.skip; it needs exactly one. The usual causes: list() or zip() around "
    "step.batches, a wrapper that prefetches, `continue` before step.backward, or an exception "
    "(out of memory?) that was swallowed. Call step.skip() to leave a batch out"
)


class Loop:
    """What `step.batches` returns."""

    def __init__(
        self, step: "Step", feed: Batches, named: dict[str, torch.nn.Parameter], overlap: bool
    ) -> None:
        self._step, self._session, self._feed = step, step.session, feed
        self._named, self._overlap = named, overlap
        start = self._session.start
        self._share = shares.share(start.rank, start.world, feed.micro_batches)
        self._todo = list(self._share)
        self._layout = vector.Layout(
            micro_batches=feed.micro_batches,
            samples=feed.global_batch,
            parameters=len(named),
            buffers=self._session.buffers.elements,
        )
        self._numbers = np.zeros(self._layout.size)
        self._parts = self._layout.parts(self._numbers)
        self._losses: dict[int, torch.Tensor] = {}
        self._current: int | None = None
        self._answers = 0
        self._random: dict[str, Any] | None = None
        self._vector: torch.Tensor | None = None
        self.ended = False

    def __len__(self) -> int:
        """Micro-batches of this rank."""
        return len(self._share)

    def __iter__(self) -> "Loop":
        return self

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        if self._random is None:
            self._begin()
        self._require_answer()
        if self._session.broken and self._vector is None:
            self._leave("the epoch ended")
        if self._todo:
            return self._fetch(self._todo.pop(0))
        self._end()
        raise StopIteration

    def backward(self, loss: Any, weight: Any, scaler: Any) -> None:
        index = self._answer()
        value = _checked_loss(loss, self._step.number)
        amount = (
            len(self._feed.places(index))
            if weight is None
            else given.number("step.backward: weight", weight, "a weight")
        )
        scaled = value * (amount / self._feed.global_batch)
        if scaler is not None:
            scaled = scaler.scale(scaled)
        last = not self._todo
        self._session.reducer.backward(scaled, last=last, overlap=self._overlap)
        self._losses[index] = value.detach()
        self._parts.weights[index] = amount
        self._parts.scales[index] = float(scaler.get_scale()) if scaler is not None else 1.0
        if last:
            self._send()

    def skip(self) -> None:
        index = self._answer()
        self._parts.scales[index] = 1.0
        if not self._todo:
            self._send()

    def _begin(self) -> None:
        self._random = randomness.capture()
        self._session.reducer.begin(self._named)
        self._session.meter.update(phase=Phase.COMPUTING, reduction=self._step.reductions)

    def _require_answer(self) -> None:
        if self._current is not None and self._answers != 1:
            raise Misuse(_UNANSWERED.format(step=self._step.number, count=self._answers or "no"))

    def _answer(self) -> int:
        if self._current is None or self.ended:
            raise Misuse(
                f"step {self._step.number}: step.backward and step.skip belong inside the loop "
                "over step.batches"
            )
        if self._answers:
            raise Misuse(
                f"step {self._step.number}: a second step.backward or step.skip for one batch; "
                "add several losses: "
                "step.backward(loss_a + loss_b)"
            )
        self._answers = 1
        return self._current

    def _fetch(self, index: int) -> Any:
        """The random numbers of a micro-batch depend on (seed, step, index) and on nothing else."""
        self._current, self._answers = index, 0
        randomness.seed_all("micro-batch", self._feed.seed, self._step.number, index)
        ids = self._feed.ids(self._step.number, index)
        batch = self._feed.fetch(ids)
        places = self._feed.places(index)
        self._parts.counts[index] = 1
        self._parts.samples[places.start : places.stop] = [i + 1 for i in ids]
        return batch

    def _send(self) -> None:
        """Launch what is left of the buckets, then the vector behind them."""
        session = self._session
        session.reducer.flush()
        for index, loss in self._losses.items():
            self._parts.losses[index] = loss.item()
        self._parts.used[:] = session.reducer.used()
        if session.lead:
            self._parts.buffers[:] = session.buffers.numbers().numpy()
        parameter = next(iter(self._named.values()), None)
        device = parameter.device if parameter is not None else torch.device("cpu")
        self._vector = torch.from_numpy(self._numbers).to(device)
        session.reducer.launch_last(self._vector)

    def _end(self) -> None:
        session = self._session
        if self._vector is None:
            session.tracked.prepare_scalers(session.device)
            self._send()
        with session.meter.charging("wait", waiting=True):
            complete = session.reducer.wait()
        if not complete:
            self._leave("a collective failed")
        assert self._vector is not None
        parts = self._layout.parts(self._vector.cpu().numpy())
        summary = vector.read_summary(parts)
        self._reduced(summary, parts)
        self.ended = True

    def _reduced(self, summary: vector.Summary, parts: vector.Parts) -> None:
        step, session = self._step, self._session
        more = step.reductions + 1 < session.most_reductions
        if not more:
            session.meter.update(phase=Phase.REDUCED)
        self._require_finite(summary)
        step.start.check_large()
        if session.most_reductions > 1 and step.reductions == 0:
            self._keep_copy()
        factor = self._feed.global_batch / summary.total_weight if summary.total_weight else 1.0
        gradients = session.reducer.deliver(parts.used.tolist(), factor)
        session.buffers.take(torch.from_numpy(parts.buffers))
        assert self._random is not None
        randomness.restore(self._random)
        norm = _norm(gradients, summary.scale)
        self._guard(summary, norm)
        step.reduction_ended(self._entry(summary), norm)
        if not more:
            session.meter.update(phase=Phase.APPLYING)

    def _entry(self, summary: vector.Summary) -> LedgerEntry:
        return LedgerEntry(
            epoch=self._session.start.epoch,
            step=self._step.number,
            reduction=self._step.reductions,
            samples=summary.samples,
            counts=summary.counts,
            weights=summary.weights,
            losses=summary.losses,
            loss=summary.loss,
        )

    def _require_finite(self, summary: vector.Summary) -> None:
        index = vector.offender(summary)
        if index is None:
            return
        places = self._feed.places(index)
        samples = list(summary.samples[places.start : places.stop])
        bad = self._session.tracked.find_not_finite()
        if not bad:
            self._save_before()
        why = (
            f"; the parameter {bad} was not finite before it: that state is not saved"
            if bad
            else ""
        )
        self._session.fail(
            Cause.NOT_FINITE,
            f"step {self._step.number}: the loss of micro-batch {index} is "
            f"{summary.losses[index]}; its samples are "
            f"{samples}. Nothing of this step was applied{why}",
        )

    def _guard(self, summary: vector.Summary, norm: float | None) -> None:
        session, windows = self._session, self._session.windows
        observed = {"loss": summary.loss, "gradient norm": norm}
        for what, value in observed.items():
            if value is None or (what == "loss" and math.isnan(value)):
                continue
            key = f"{self._step.reductions}/{what}"
            before = windows.get(key, ())
            verdict = guards.judge(
                what, value, before, factor=session.start.guard_factor, step=self._step.number
            )
            if verdict is not None and session.start.guard_action == "SaveAndStop":
                self._save_and_stop(verdict)
            if verdict is not None:
                session.findings.notes.append(verdict.message)
            windows[key] = guards.extended(before, value) if math.isfinite(value) else before

    def _save_and_stop(self, verdict: guards.Verdict) -> NoReturn:
        self._save_before()
        self._session.fail(Cause.GUARD, f"{verdict.message}; stopped before it was applied")

    def _save_before(self) -> None:
        """The state of the boundary before this step, the same decision on every rank."""
        session, before = self._session, self._step.number - 1
        sound, capture = self._rewind()
        if sound and before > max(session.staged, session.start.applied):
            session.stage(before, capture)

    def _keep_copy(self) -> None:
        """Of the state before the step: a later reduction of it may fail when the first is applied
        already.
        """
        if self._step.start.untouched():
            self._step.start.put_back()
            self._step.copy = self._session.capture().cloned()

    def _leave(self, why: str) -> NoReturn:
        self._session.reducer.abandon()
        sound, capture = self._rewind()
        before = self._step.number - 1
        self._session.park(before, sound=sound, capture=capture, why=f"step {before + 1}: {why}")

    def _rewind(self) -> tuple[bool, Capture | None]:
        """Make the state that of the boundary before this step; False if it cannot be."""
        if self._step.copy is not None:
            return True, self._step.copy
        if self._step.reductions or not self._step.start.untouched():
            return False, None
        self._step.start.put_back()
        return True, None


def choose_parameters(
    trained: dict[str, torch.nn.Parameter],
    known: dict[str, torch.nn.Parameter],
    asked: Iterable[torch.nn.Parameter] | None,
) -> dict[str, torch.nn.Parameter]:
    """The parameters of one loop, in the order of the modules."""
    if asked is None:
        return trained
    wanted = {id(p) for p in asked}
    found = {n: p for n, p in known.items() if id(p) in wanted and p.requires_grad}
    if len({id(p) for p in known.values()} & wanted) != len(wanted):
        raise Misuse("step.batches(params=…): it names a parameter that no tracked module has")
    return found


def _checked_loss(loss: Any, step: int) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)[:80]
        raise Misuse(
            f"step {step}: step.backward needs a loss of one number, found {found}; use .mean()"
        )
    return loss.reshape(())


def _norm(gradients: list[torch.Tensor], scale: float) -> float | None:
    """Global 2-norm without the scaler's scale; None where an overflow is the scaler's business."""
    if not gradients:
        return None
    norm = float(torch.nn.utils.get_total_norm(gradients))
    if scale != 1.0:
        return norm / scale if math.isfinite(norm) else None
    return norm
