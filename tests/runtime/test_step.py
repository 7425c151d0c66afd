"""What a step computes: the gradient of the global batch, with its counts and guards."""

# ruff: noqa: PT012 - the loop as a whole is what raises

import gc
import math
import threading
import time
import tracemalloc
import warnings
import weakref
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep.errors import Misuse, StateError
from everstep.group import LocalGroup
from everstep.reducer import Reducer
from everstep.tracked import SMALL_BYTES
from everstep.transfer import Taken
from everstep_contract import wire
from everstep_contract.position import Phase, Where
from everstep_contract.report import Cause
from runtime.a_commit import commit
from runtime.a_job import Ended, Trial


def gradient_of(trial: Trial, samples: Any, weights: list[float] | None = None) -> torch.Tensor:
    """Compute the gradient by hand, in one backward pass."""
    inputs, wanted = trial.dataset[list(samples)]
    each = (trial.model(inputs) - wanted).square().flatten()
    share = torch.tensor(weights or [1.0] * len(each))
    loss = (each * share).sum() / share.sum()
    (found,) = torch.autograd.grad(loss, [trial.model.weight])
    return found


def first_step(trial: Trial) -> Any:
    return next(iter(trial.job.steps(until=3)))


def evaluation(trial: Trial) -> Generator[Any, None, None]:
    """An evaluation that the test may close, as a script's `break` does."""
    found = trial.job.evaluate(trial.data)
    assert isinstance(found, Generator)
    return found


def test_the_gradient_is_that_of_the_global_batch(trial: Trial) -> None:
    step = first_step(trial)
    for batch in step.batches(trial.data):
        assert trial.model.weight.grad is None
        step.backward(trial.loss(batch))
    (entry,) = trial.session.findings.entries
    expected = gradient_of(trial, entry.samples)
    assert torch.allclose(trial.model.weight.grad, expected, atol=1e-7)
    assert entry.counts == (1, 1, 1)
    assert step.loss == sum(2 * loss for loss in entry.losses) / 6


def test_weights_count_instead_of_samples(trial: Trial) -> None:
    step = first_step(trial)
    for number, batch in enumerate(step.batches(trial.data)):
        step.backward(trial.loss(batch), weight=torch.tensor(float(number + 1)))
    (entry,) = trial.session.findings.entries
    expected = gradient_of(trial, entry.samples, [1, 1, 2, 2, 3, 3])
    assert torch.allclose(trial.model.weight.grad, expected, atol=1e-7)
    assert entry.weights == (1, 2, 3)


def test_a_skipped_batch_is_in_the_ledger_and_not_in_the_gradient(trial: Trial) -> None:
    step = first_step(trial)
    for number, batch in enumerate(step.batches(trial.data)):
        step.skip() if number == 1 else step.backward(trial.loss(batch))
    (entry,) = trial.session.findings.entries
    expected = gradient_of(trial, [*entry.samples[:2], *entry.samples[4:]])
    assert torch.allclose(trial.model.weight.grad, expected, atol=1e-7)
    assert (entry.counts, entry.weights) == ((1, 1, 1), (2, 0, 2))


def test_a_step_of_skips_alone_changes_nothing(trial: Trial) -> None:
    step = first_step(trial)
    for _ in step.batches(trial.data):
        step.skip()
    assert trial.model.weight.grad is None
    assert math.isnan(step.loss)


def test_a_parameter_unused_by_all_has_no_gradient(trial: Trial) -> None:
    idle = torch.nn.Linear(2, 2)
    trial.job.track(idle=idle, idler=torch.optim.SGD(idle.parameters(), lr=0.01))
    trial.take(first_step(trial))
    assert idle.weight.grad is None
    assert trial.model.weight.grad is not None


def test_two_loops_reduce_their_own_parameters(trial: Trial) -> None:
    other = torch.nn.Linear(3, 1)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    trial.job.track(other=other, second=second)
    step = first_step(trial)
    for inputs, wanted in step.batches(trial.data, params=trial.model.parameters()):
        step.backward((trial.model(inputs) + other(inputs) - wanted).square().mean())
    assert other.weight.grad is None
    for inputs, wanted in step.batches(trial.data, params=other.parameters()):
        step.backward((trial.model(inputs) + other(inputs) - wanted).square().mean())
    assert other.weight.grad is not None
    entries = trial.session.findings.entries
    assert [e.reduction for e in entries] == [0, 1]
    assert entries[0].samples == entries[1].samples


@pytest.mark.parametrize("skips", [False, True])
def test_a_loop_keeps_the_gradients_that_another_has_delivered(trial: Trial, skips: bool) -> None:
    """Also on a rank that has nothing to compute in the second loop."""
    other = torch.nn.Linear(3, 1)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    trial.job.track(other=other, second=second)
    step = first_step(trial)
    for inputs, wanted in step.batches(trial.data, params=trial.model.parameters()):
        step.backward((trial.model(inputs) - wanted).square().mean())
    assert trial.model.weight.grad is not None
    delivered = trial.model.weight.grad.clone()
    for inputs, wanted in step.batches(trial.data, params=other.parameters()):
        if skips:
            step.skip()
        else:
            step.backward((trial.model(inputs) + other(inputs) - wanted).square().mean())
    assert torch.equal(trial.model.weight.grad, delivered)


@pytest.mark.parametrize("how", ["frozen", "left out"])
def test_a_gradient_of_a_former_step_is_not_applied_again(trial: Trial, how: str) -> None:
    other = torch.nn.Linear(3, 1)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    trial.job.track(other=other, second=second)
    for number, step in enumerate(trial.job.steps(until=2), 1):
        before = other.weight.detach().clone()
        if number == 2 and how == "frozen":
            other.requires_grad_(False)
        chosen = trial.model.parameters() if number == 2 and how == "left out" else None
        for inputs, wanted in step.batches(trial.data, params=chosen):
            step.backward((trial.model(inputs) + other(inputs) - wanted).square().mean())
        assert (other.weight.grad is None) is (number == 2)
        trial.optimizer.step()
        second.step()
        assert torch.equal(other.weight, before) is (number == 2)


class Torn(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Twelve samples, one of which cannot be read."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 3:
            raise OSError("cannot read sample 3")
        return torch.ones(3), torch.zeros(1)


def test_a_batch_that_cannot_be_read_may_be_skipped(trial: Trial) -> None:
    data = trial.job.batches(Torn(), global_batch=6, micro_batch=2, shuffle=False, name="torn")
    step = first_step(trial)
    loop = step.batches(data)
    while True:
        try:
            batch = next(loop)
        except StopIteration:
            break
        except OSError:
            step.skip()
            continue
        step.backward(trial.loss(batch))
    (entry,) = trial.session.findings.entries
    assert entry.counts == (1, 1, 1)
    assert [bool(weight) for weight in entry.weights] == [True, False, True]


class RunsOut(Torn):
    """Reads its samples from an iterator, which has fewer than its length says."""

    def __init__(self) -> None:
        self._samples = iter([(torch.ones(3), torch.zeros(1))] * 3)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return next(self._samples)


def test_a_dataset_that_raises_stop_iteration_does_not_end_the_loop(trial: Trial) -> None:
    data = trial.job.batches(RunsOut(), global_batch=6, micro_batch=2, name="runs out")
    with pytest.raises(RuntimeError, match="RunsOut or collate raised StopIteration"):
        for step in trial.job.steps(until=3):
            for batch in step.batches(data):
                step.backward(trial.loss(batch))


def test_a_script_may_change_its_loss_after_step_backward(trial: Trial) -> None:
    losses = []
    step = first_step(trial)
    for batch in step.batches(trial.data):
        loss = trial.loss(batch)
        step.backward(loss)
        losses.append(float(loss))
        loss.detach().mul_(0)
    assert step.loss == pytest.approx(sum(losses) / len(losses))
    assert trial.session.findings.entries[0].losses == pytest.approx(losses)


def test_from_an_evaluation_to_the_end_of_its_step_a_loss_restarts_all_ranks(trial: Trial) -> None:
    """Until `job.sum` each rank holds a part of the result, whatever the script does with it first."""
    steps = iter(trial.job.steps(until=3))
    trial.take(next(steps))
    apart = []
    for act in (lambda: list(trial.job.evaluate(trial.data)), lambda: trial.job.sum(1.0)):
        act()
        apart.append(trial.session.membership._apart)
    assert apart == ["its script is in job.evaluate"] * 2
    next(steps)
    assert trial.session.membership._apart == ""


def begin_evaluation(trial: Trial) -> Any:
    evaluation = trial.job.evaluate(trial.data)
    next(evaluation)
    return evaluation


def test_an_evaluation_that_the_script_does_not_end_keeps_the_rank_apart_until_its_step_ends(
    trial: Trial,
) -> None:
    steps, membership = iter(trial.job.steps(until=4)), trial.session.membership
    trial.take(next(steps))
    suspended = begin_evaluation(trial)
    assert membership._apart == "its script is in job.evaluate"
    trial.take(next(steps))
    assert membership._apart == ""
    suspended.close()
    assert membership._apart == ""
    trial.job.sum(1.0)
    assert membership._apart == "", "nothing was evaluated in this step"


def test_an_evaluation_of_a_former_step_that_is_closed_later_ends_no_other(trial: Trial) -> None:
    steps, membership = iter(trial.job.steps(until=4)), trial.session.membership
    trial.take(next(steps))
    suspended = begin_evaluation(trial)
    trial.take(next(steps))
    evaluation = begin_evaluation(trial)
    suspended.close()
    assert membership._apart == "its script is in job.evaluate"
    assert trial.session.meter.position.scope is Where.EVALUATE
    evaluation.close()
    assert membership._apart, "until the step is over"
    next(steps)
    assert membership._apart == ""


def test_half_precision_is_summed_in_float32(a_trial: Callable[..., Trial]) -> None:
    trial = a_trial()
    trial.model.to(torch.bfloat16)
    trial.track()
    step = first_step(trial)
    sums = torch.zeros(1, 3)
    for inputs, wanted in step.batches(trial.data):
        loss = (trial.model(inputs.to(torch.bfloat16)).float() - wanted).square().mean()
        (own,) = torch.autograd.grad(loss / 3, [trial.model.weight], retain_graph=True)
        sums += own.float()
        step.backward(loss)
    assert trial.model.weight.grad.dtype == torch.bfloat16
    assert torch.allclose(trial.model.weight.grad.float(), sums, rtol=1e-2)


def test_a_scaled_gradient_unscales_to_the_same(a_trial: Callable[..., Trial]) -> None:
    plain, scaled = a_trial().track(), a_trial()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    scaled.track().job.track(scaler=scaler)
    plain.take(first_step(plain))
    step = first_step(scaled)
    for batch in step.batches(scaled.data):
        step.backward(scaled.loss(batch), scaler=scaler)
    norm = scaled.session.findings.grad_norm
    scaler.unscale_(scaled.optimizer)
    assert torch.allclose(scaled.model.weight.grad, plain.model.weight.grad)
    assert norm == pytest.approx(plain.session.findings.grad_norm)


def test_a_scale_is_read_once_a_loop(trial: Trial) -> None:
    """On a GPU each read waits until the device has computed everything before it."""

    class Read(torch.amp.GradScaler):
        reads = 0

        def get_scale(self) -> float:
            self.reads += 1
            return super().get_scale()

    scaler = Read("cpu")
    trial.job.track(scaler=scaler)
    for step in trial.job.steps(until=2):
        loop = step.batches(trial.data)
        before = scaler.reads
        for batch in loop:
            step.backward(trial.loss(batch), scaler=scaler)
        assert scaler.reads == before + 1
        scaler.step(trial.optimizer)
        scaler.update()


@pytest.mark.parametrize("exact", [False, True])
def test_a_skipped_batch_changes_no_scale(a_trial: Callable[..., Trial], exact: bool) -> None:
    found = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**12)):
        trial = a_trial().track()
        trial.session.reducer = Reducer(exact=exact)
        if scaler is not None:
            trial.job.track(scaler=scaler)
        step = first_step(trial)
        for number, batch in enumerate(step.batches(trial.data)):
            if number == 1:
                step.skip()
            else:
                step.backward(trial.loss(batch), scaler=scaler)
        if scaler is not None:
            scaler.unscale_(trial.optimizer)
        found.append((trial.model.weight.grad, trial.session.findings.grad_norm))
    (plain, norm), (scaled, scaled_norm) = found
    assert torch.allclose(scaled, plain)
    assert scaled_norm == pytest.approx(norm)


def test_a_rank_that_skips_all_its_batches_can_unscale(a_trial: Callable[..., Trial]) -> None:
    trial, scaler = a_trial(), torch.amp.GradScaler("cpu")
    trial.track().job.track(scaler=scaler)
    step = first_step(trial)
    for _ in step.batches(trial.data):
        step.skip()
    scaler.unscale_(trial.optimizer)


def test_random_numbers_belong_to_the_micro_batch(a_trial: Callable[..., Trial]) -> None:
    def drawn(consume: int) -> tuple[list[float], float]:
        torch.manual_seed(1)
        trial, found = a_trial().track(), []
        torch.manual_seed(1)
        step = first_step(trial)
        for batch in step.batches(trial.data):
            torch.rand(consume)
            found.append(torch.rand(1).item() if not consume else 0.0)
            step.backward(trial.loss(batch))
        return found, torch.rand(1).item()

    (some, after), (_, after_more) = drawn(0), drawn(5)
    assert len(set(some)) == 3
    assert after == after_more
    assert drawn(0)[0] == some


def test_a_loss_that_is_no_number_stops_before_it_is_applied(trial: Trial) -> None:
    step = first_step(trial)
    with pytest.raises(Ended):
        for number, batch in enumerate(step.batches(trial.data)):
            step.backward(trial.loss(batch) * (math.nan if number == 1 else 1))
    (failed,) = trial.agent.of(wire.Failed)
    samples = trial.data.ids(0, 1)
    assert failed.cause == Cause.NOT_FINITE.value
    assert failed.step == 0
    assert failed.message == (
        f"step 1: the loss of micro-batch 1 is nan; its samples are {samples}. "
        "Nothing of this step was applied"
    )


def test_a_batch_of_weight_0_has_no_gradient_even_if_its_loss_is_no_number(
    a_trial: Callable[..., Trial],
) -> None:
    """Such as the mean over the tokens of a batch in which all are masked."""
    found = []
    for leave_out in (True, False):
        trial = a_trial().track()
        step = first_step(trial)
        for number, batch in enumerate(step.batches(trial.data)):
            if number != 1:
                step.backward(trial.loss(batch))
            elif leave_out:
                step.skip()
            else:
                step.backward(trial.loss(batch) / 0.0 * 0.0, weight=0)
        trial.optimizer.step()
        found.append((trial.model.weight.detach(), step.loss))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def run_until_bad(trial: Trial, factor: float, *, spoil: bool = False) -> None:
    """Take three good steps; in the fourth, multiply the loss by `factor`."""
    for step in trial.job.steps(until=9):
        for batch in step.batches(trial.data):
            step.backward(trial.loss(batch) * (factor if step.number == 4 else 1))
        trial.optimizer.step()
        if spoil and step.number == 3:
            with torch.no_grad():
                trial.model.bias.fill_(math.nan)


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_saves_what_was_trained_before_it(
    trial: Trial, factor: float
) -> None:
    with pytest.raises(Ended):
        run_until_bad(trial, factor)
    (staged,), (failed,) = trial.agent.of(wire.Staged), trial.agent.of(wire.Failed)
    assert (staged.step, failed.step, failed.cause) == (3, 3, Cause.NOT_FINITE.value)
    assert f"is {factor};" in failed.message


def test_a_state_that_is_not_finite_itself_is_not_saved(trial: Trial) -> None:
    with pytest.raises(Ended):
        run_until_bad(trial, 1.0, spoil=True)
    (failed,) = trial.agent.of(wire.Failed)
    assert trial.agent.of(wire.Staged) == []
    assert "the parameter model.bias was not finite before it" in failed.message


def test_the_norm_of_the_gradient_alone_trips_the_guard(a_trial: Callable[..., Trial]) -> None:
    trial = a_trial(guard_action="SaveAndStop").track()
    with pytest.raises(Ended):
        for step in trial.job.steps(until=15):
            for batch in step.batches(trial.data):
                loss = trial.loss(batch)
                more = 1e4 * (loss - loss.detach()) if step.number == 13 else 0.0
                step.backward(loss + more)
    (staged,), (failed,) = trial.agent.of(wire.Staged), trial.agent.of(wire.Failed)
    assert (staged.step, failed.cause) == (12, Cause.GUARD.value)
    assert "step 13: gradient norm" in failed.message
    assert "loss" not in failed.message


def run_with_a_spike(trial: Trial) -> None:
    for step in trial.job.steps(until=15):
        for batch in step.batches(trial.data):
            step.backward(trial.loss(batch) * (1e4 if step.number == 13 else 1))
        if step.number != 13:
            trial.optimizer.step()


def test_a_spike_is_noted(trial: Trial) -> None:
    run_with_a_spike(trial)
    notes = {a.step: a.notes for a in trial.agent.of(wire.Applied) if a.notes}
    assert list(notes) == [13]
    assert "step 13: loss" in notes[13][0]
    assert "gradient norm" in notes[13][1]


def test_what_was_noted_becomes_the_new_measure(trial: Trial) -> None:
    for step in trial.job.steps(until=30):
        for batch in step.batches(trial.data):
            step.backward(trial.loss(batch) * (100 if step.number > 12 else 1))
        trial.optimizer.zero_grad()
    noted = [a.step for a in trial.agent.of(wire.Applied) if a.notes]
    assert noted
    assert set(noted) <= {13, 14, 15}


def test_a_spike_stops_the_job_with_the_state_before_it(a_trial: Callable[..., Trial]) -> None:
    trial = a_trial(guard_action="SaveAndStop").track()
    with pytest.raises(Ended):
        run_with_a_spike(trial)
    (staged,), (failed,) = trial.agent.of(wire.Staged), trial.agent.of(wire.Failed)
    assert (staged.step, staged.whole) == (12, False)
    assert failed.cause == Cause.GUARD.value
    assert failed.message.endswith("stopped before it was applied")


def test_saves_fall_on_their_interval_and_on_the_end(a_trial: Callable[..., Trial]) -> None:
    trial = a_trial(save_every_steps=2).track()
    for step in trial.job.steps(until=5):
        trial.take(step)
    assert [s.step for s in trial.agent.of(wire.Staged)] == [2, 4, 5]
    assert [a.step for a in trial.agent.of(wire.Applied)] == [1, 2, 3, 4, 5]
    assert trial.session.finished


class Armed:
    """Replaces the position page, and names `step` as the armed boundary."""

    def __init__(self, trial: Trial, step: int) -> None:
        trial.session.meter._page = self  # type: ignore[assignment]
        self.armed = step

    def write(self, position: Any) -> None:
        pass

    def mark(self, *of: Any) -> None:
        pass


def test_a_state_that_is_too_large_for_the_agent_is_told_and_the_steps_go_on(
    a_trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = a_trial(save_every_steps=2).track()
    send = trial.agent.send

    def refuse(frame: Any) -> None:
        if isinstance(frame, wire.Staged) and frame.state is not None and frame.step == 2:
            raise StateError("too large")
        send(frame)

    monkeypatch.setattr(trial.agent, "send", refuse)
    for step in trial.job.steps(until=4):
        trial.take(step)
    told = [(s.step, s.problem, s.path != "") for s in trial.agent.of(wire.Staged)]
    assert told == [(2, "too large", False), (4, "", True)]


def test_an_armed_boundary_asks_saves_once_and_stays(a_trial: Callable[..., Trial]) -> None:
    trial = a_trial(save_every_steps=2).track()
    Armed(trial, 2)
    trial.agent.boundary = wire.BoundaryReply(save=True, stay=True)
    with pytest.raises(Ended, match="parked"):
        for step in trial.job.steps(until=5):
            trial.take(step)
    kinds = [type(f).__name__ for f in trial.agent.frames]
    assert kinds == ["Tracked", "Applied", "Applied", "AtBoundary", "Staged", "Parked"]


def test_a_raised_boundary_goes_on(trial: Trial) -> None:
    Armed(trial, 2)
    trial.agent.boundary = wire.BoundaryReply(raised=True)
    for step in trial.job.steps(until=3):
        trial.take(step)
    assert [s.step for s in trial.agent.of(wire.Staged)] == [3]


def test_the_position_follows_the_step(trial: Trial) -> None:
    seen = []
    for step in trial.job.steps(until=2):
        for batch in step.batches(trial.data):
            seen.append(replace(trial.session.meter.position))
            step.backward(trial.loss(batch))
        seen.append(replace(trial.session.meter.position))
        with trial.job.pause("export", limit=1.5):
            seen.append(replace(trial.session.meter.position))
    phases = [(p.applied, p.phase, p.scope, p.limit_ms) for p in seen]
    assert phases == [
        *[(0, Phase.COMPUTING, Where.STARTUP, 0)] * 3,
        (0, Phase.APPLYING, Where.STARTUP, 0),
        (1, Phase.APPLIED, Where.PAUSE, 1500),
        *[(1, Phase.COMPUTING, Where.STEP, 0)] * 3,
        (1, Phase.APPLYING, Where.STEP, 0),
        (2, Phase.APPLIED, Where.PAUSE, 1500),
    ]


def test_a_scope_within_another_ends_in_that_one(trial: Trial) -> None:
    """A pause keeps its limit after an evaluation within it, and an evaluation stays one after a
    sum within it.
    """
    session = trial.session

    def now() -> tuple[Where, int, bool]:
        at = session.meter.position
        return at.scope, at.limit_ms, bool(session.membership._apart)

    step = first_step(trial)
    trial.take(step)
    with trial.job.pause("export", limit=600):
        seen = []
        for _ in trial.job.evaluate(trial.data):
            trial.job.sum(1.0)
            seen.append(now())
        assert seen == [(Where.EVALUATE, 0, True)] * 6
        assert now() == (Where.PAUSE, 600_000, True)
    assert now() == (Where.STEP, 0, True)


def test_scopes_that_end_in_another_order_leave_the_step(trial: Trial) -> None:
    step = first_step(trial)
    trial.take(step)
    first, second = evaluation(trial), evaluation(trial)
    with torch.enable_grad():
        next(first), next(second)
        first.close()
        assert trial.session.meter.position.scope is Where.EVALUATE
        second.close()
    assert trial.session.meter.position.scope is Where.STEP
    assert trial.session.membership._apart, "until the step is over"


def test_evaluate_is_one_pass_in_order_without_gradients(trial: Trial) -> None:
    seen = [inputs for inputs, _ in trial.job.evaluate(trial.data)]
    assert torch.equal(torch.cat(seen), trial.dataset.tensors[0])
    for inputs, _ in trial.job.evaluate(trial.data):
        assert not trial.model(inputs).requires_grad
    assert torch.is_grad_enabled()
    trial.take(first_step(trial))
    assert trial.job.sum(1.5, 2) == (1.5, 2.0)


def test_an_evaluation_of_a_long_dataset_begins_at_once(trial: Trial) -> None:
    data = trial.job.batches(range(10**5), global_batch=1, micro_batch=1, name="long")
    tracemalloc.start()
    try:
        assert next(trial.job.evaluate(data)) == 0
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_each_batch_of_an_evaluation_has_the_whole_time_limit(trial: Trial) -> None:
    begun = [trial.session.meter.position.since for _ in trial.job.evaluate(trial.data)]
    assert len(begun) > 1
    assert begun == sorted(set(begun))


def test_evaluations_that_overlap_leave_gradients_and_random_numbers_as_they_were(
    trial: Trial,
) -> None:
    """`zip` ends the first before the second."""
    before = torch.get_rng_state()
    for (inputs, _), _ in zip(
        trial.job.evaluate(trial.data), trial.job.evaluate(trial.data), strict=False
    ):
        assert not trial.model(inputs).requires_grad
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)


def test_an_evaluation_in_train_mode_leaves_the_buffers_as_they_were(trial: Trial) -> None:
    norm = torch.nn.BatchNorm1d(3)
    trial.job.track(norm=norm)
    for step in trial.job.steps(until=2):
        trial.take(step)
        for inputs, _ in trial.job.evaluate(trial.data):
            norm(inputs)
    assert norm.running_mean is not None
    assert not norm.running_mean.any()
    (note,) = [n for a in trial.agent.of(wire.Applied) for n in a.notes]
    assert "forward changes the buffer norm.running_mean" in note
    assert "model.eval()" in note


def test_so_does_an_evaluation_before_the_steps(trial: Trial) -> None:
    norm, later = torch.nn.BatchNorm1d(3), torch.nn.LazyBatchNorm1d()
    trial.job.track(norm=norm, later=later)
    for inputs, _ in trial.job.evaluate(trial.data):
        later(norm(inputs))
    assert norm.running_mean is not None
    assert not norm.running_mean.any()


def test_an_evaluation_that_began_before_the_steps_ends_where_they_begin(trial: Trial) -> None:
    before = torch.get_rng_state()
    abandoned = evaluation(trial)
    next(abandoned)
    for step in trial.job.steps(until=1):
        assert torch.is_grad_enabled()
        assert torch.equal(torch.get_rng_state(), before)
        trial.take(step)
    abandoned.close()
    assert torch.is_grad_enabled()


def test_an_evaluation_that_the_script_does_not_end_ends_with_its_step(trial: Trial) -> None:
    for step in trial.job.steps(until=2):
        assert torch.is_grad_enabled()
        trial.take(step)
        before = torch.get_rng_state()
        abandoned = evaluation(trial)
        next(abandoned)
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)
    abandoned.close()
    assert torch.is_grad_enabled()


def test_an_evaluation_that_began_without_gradients_leaves_the_script_its_own_mode(
    trial: Trial,
) -> None:
    for step in trial.job.steps(until=2):
        trial.take(step)
        evaluation = trial.job.evaluate(trial.data)
        with torch.no_grad():
            next(evaluation)
    assert torch.is_grad_enabled()


def test_an_evaluation_is_divided_among_the_ranks_that_there_are_after_a_loss(trial: Trial) -> None:
    membership, step = trial.session.membership, first_step(trial)
    membership._form = lambda frame, endpoint: LocalGroup()
    trial.take(step)
    membership.hold(1)
    found: list[Any] = []
    evaluation = threading.Thread(
        target=lambda: found.extend(trial.job.evaluate(trial.data)), daemon=True
    )
    evaluation.start()
    evaluation.join(0.05)
    assert not found, "it is not known yet who evaluates"
    frame = wire.Regroup(
        epoch=2, rank=1, world=3, local_world=1, node_rank=0, applied=1, reductions=1
    )
    membership.regroup(frame)
    evaluation.join(20)
    assert torch.equal(torch.cat([inputs for inputs, _ in found]), trial.dataset.tensors[0][4:8])


def test_a_sum_within_an_evaluation_of_which_some_ranks_have_more_batches(trial: Trial) -> None:
    """They would call it more often."""
    membership, step = trial.session.membership, first_step(trial)
    membership._form = lambda frame, endpoint: LocalGroup()
    trial.take(step)
    membership.hold(1)
    frame = wire.Regroup(
        epoch=2, rank=1, world=4, local_world=1, node_rank=0, applied=1, reductions=1
    )
    membership.regroup(frame)
    with pytest.raises(Misuse, match=r"some ranks have more batches.*call job\.sum once after it"):
        for _ in trial.job.evaluate(trial.data):
            trial.job.sum(1.0)
    for _ in trial.job.evaluate(trial.data):
        break
    assert trial.job.sum(1.0) == (1.0,)


def a_cut(trial: Trial) -> None:
    trial.agent.cut.set()
    trial.session.membership.group.cut()


def test_a_cut_in_the_body_parks_before_the_step_with_the_state_of_then(trial: Trial) -> None:
    norm = torch.nn.BatchNorm1d(3)
    trial.job.track(norm=norm)
    trial.agent.saves = [wire.Save(epoch=1, step=1)]
    with pytest.raises(Ended, match="parked"):
        for step in trial.job.steps(until=5):
            before = norm.running_mean.clone()
            torch.rand(step.number)
            for inputs, wanted in step.batches(trial.data):
                step.backward(trial.loss((norm(inputs), wanted)))
                if step.number == 2:
                    a_cut(trial)
            trial.optimizer.step()
    (parked,), (staged,) = trial.agent.of(wire.Parked), trial.agent.of(wire.Staged)
    assert (parked.step, parked.sound) == (1, True)
    assert (staged.step, staged.whole, staged.lead) == (1, True, True)
    assert torch.equal(norm.running_mean, before)


def test_forward_may_change_buffers_before_the_loop_of_the_first_step(trial: Trial) -> None:
    norm = torch.nn.BatchNorm1d(3)
    trial.job.track(norm=norm)
    step = first_step(trial)
    norm(torch.ones(2, 3))
    trial.take(step)
    assert norm.running_mean is not None
    assert norm.running_mean.all()


class Gate(torch.nn.Module):
    """Multiplies by a buffer that the script sets at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_a_held_rank_that_saves_computes_on_with_what_the_script_has_set(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saves the state before the step; buffers and random numbers that the script has set since stay."""
    membership, gate, seen = trial.session.membership, Gate(), []
    membership._form = lambda frame, endpoint: LocalGroup()
    trial.job.track(gate=gate)
    send = trial.agent.send

    def send_and_regroup(frame: Any) -> None:
        send(frame)
        if isinstance(frame, wire.Staged) and frame.whole:
            membership.regroup(
                wire.Regroup(
                    epoch=2, rank=0, world=1, local_world=1, node_rank=0, applied=1, reductions=0
                )
            )

    monkeypatch.setattr(trial.agent, "send", send_and_regroup)
    for step in trial.job.steps(until=2):
        gate.factor.fill_(step.number)
        torch.rand(step.number)
        before = torch.get_rng_state()
        if step.number == 2:
            membership.hold(1)
            membership.ask_save(wire.SaveHeld(epoch=1, step=1))
        for inputs, wanted in step.batches(trial.data):
            seen.append(gate.factor.item())
            step.backward(trial.loss((gate(inputs), wanted)))
        trial.optimizer.step()
        assert torch.equal(torch.get_rng_state(), before)
    assert [s.step for s in trial.agent.of(wire.Staged) if s.whole] == [1]
    assert seen == [1.0] * 3 + [2.0] * 3


def test_a_cut_after_the_sum_parks_after_the_step(trial: Trial) -> None:
    with pytest.raises(Ended, match="parked"):
        for step in trial.job.steps(until=5):
            trial.take(step)
            a_cut(trial)
    (parked,) = trial.agent.of(wire.Parked)
    assert (parked.step, parked.sound) == (1, True)
    assert [a.step for a in trial.agent.of(wire.Applied)] == [1]


@pytest.mark.parametrize("where", ["before the loop", "after it"])
def test_a_rank_that_is_held_waits_for_others_and_does_not_hang(trial: Trial, where: str) -> None:
    membership, position, seen = trial.session.membership, trial.session.meter.position, []

    def end() -> None:
        limit = time.monotonic() + 2.0
        while not position.waiting and time.monotonic() < limit:
            time.sleep(0.001)
        seen.append((position.applied, position.waiting))
        trial.agent.cut.set()
        membership.park()

    def hold(now: str) -> None:
        if now == where and trial.session.applied == 1:
            membership.hold(1)
            threading.Thread(target=end, daemon=True).start()

    with pytest.raises(Ended, match="parked"):
        for step in trial.job.steps(until=5):
            hold("before the loop")
            trial.take(step)
            hold("after it")
    assert seen == [(1, True)]


def test_a_step_leaves_nothing_to_the_garbage_collector(trial: Trial) -> None:
    gc.disable()
    try:
        ended = []
        for step in trial.job.steps(until=3):
            trial.take(step)
            ended.append(weakref.ref(step._state.loop))
    finally:
        gc.enable()
    assert [one() for one in ended] == [None, None, None]


def test_a_parameter_that_is_unfrozen_and_that_no_optimizer_holds_gets_no_gradient(
    trial: Trial,
) -> None:
    """Its gradient would be this rank's own, and change the norm that clipping uses."""
    other = torch.nn.Linear(1, 1).requires_grad_(False)
    trial.job.track(other=other)
    step = first_step(trial)
    other.requires_grad_(True)
    for batch in step.batches(trial.data):
        step.backward(other(trial.loss(batch).view(1, 1)).sum())
    assert other.weight.grad is None
    assert trial.model.weight.grad is not None


class Lazy:
    """Makes its state in the first step, as optimizers do."""

    def __init__(self) -> None:
        self.moments: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments}

    def load_state_dict(self, given: dict[str, Any]) -> None:
        self.moments = given["moments"]


@pytest.mark.parametrize(
    "grown",
    [
        [torch.zeros(SMALL_BYTES)],
        [np.zeros(SMALL_BYTES)],
        [0.5] * SMALL_BYTES,  # the losses of all steps
        [{str(i): i for i in range(SMALL_BYTES)}],
    ],
    ids=["tensor", "array", "list", "dict"],
)
def test_an_object_that_has_grown_is_not_copied_at_every_step(
    trial: Trial, grown: list[Any]
) -> None:
    lazy, copied = Lazy(), []
    trial.job.track(lazy=lazy)
    for step in trial.job.steps(until=2):
        copied.append([thing for thing, _ in step._state.start._settings._objects])
        trial.take(step)
        lazy.moments = lazy.moments or grown
    assert copied == [[lazy], []]


def test_a_cut_in_the_second_loop_saves_the_state_before_the_first(trial: Trial) -> None:
    trial.agent.saves = [wire.Save(epoch=1, step=1)]
    weights = {}
    with pytest.raises(Ended, match="parked"):
        for step in trial.job.steps(until=5):
            weights[step.number - 1] = trial.model.weight.detach().clone()
            trial.take(step)
            if step.number == 2:
                a_cut(trial)
            trial.take(step)
    (parked,), (staged,) = trial.agent.of(wire.Parked), trial.agent.of(wire.Staged)
    assert (parked.step, parked.sound) == (1, True)
    (place,) = [t for t in staged.tensors if t.name == "model/weight"]
    with open(staged.path, "rb") as file:
        file.seek(place.at)
        raw = torch.frombuffer(bytearray(file.read(12)), dtype=torch.float32)
    assert torch.equal(raw.view(1, 3), weights[1])


def test_a_cut_in_the_second_loop_of_the_first_step_is_not_sound(trial: Trial) -> None:
    with pytest.raises(Ended, match="parked"):
        for step in trial.job.steps(until=5):
            trial.take(step)
            a_cut(trial)
            trial.take(step)
    (parked,) = trial.agent.of(wire.Parked)
    assert (parked.step, parked.sound) == (0, False)


def take_two_loops_at(trial: Trial, numbers: set[int], *, cut_at: int = 0) -> None:
    """Take two steps; those in `numbers` have two loops. Cut in the second loop of step `cut_at`."""
    first = trial.session.applied + 1
    for step in trial.job.steps(until=100):
        trial.take(step)
        if step.number in numbers:
            if step.number == cut_at:
                a_cut(trial)
            trial.take(step)
        trial.job.save()
        if step.number > first:
            break


def test_a_checkpoint_holds_that_a_step_had_two_loops(
    tmp_path: Path, a_trial: Callable[..., Trial]
) -> None:
    """So the first such step after a resume keeps a copy, too."""
    trial = a_trial().track()
    take_two_loops_at(trial, {1})
    trial.session.saves.copier.wait()
    staged = next(s for s in trial.agent.of(wire.Staged) if s.step == 1)
    resumed = a_trial(**commit(tmp_path, [staged])).track()
    resumed.agent.saves = [wire.Save(epoch=1, step=2)]
    with pytest.raises(Ended, match="parked"):
        take_two_loops_at(resumed, {3}, cut_at=3)
    (parked,) = resumed.agent.of(wire.Parked)
    assert (parked.step, parked.sound) == (2, True)


def test_a_newcomer_learns_it_from_the_state_that_it_takes(a_trial: Callable[..., Trial]) -> None:
    member, newcomer = a_trial().track(), a_trial().track()
    take_two_loops_at(member, {1})
    held = member.session.capture()
    next(newcomer.job.steps(until=9))
    newcomer.session.adopt(
        Taken(applied=2, tree=held.tree, tensors=held.tensors, parts=frozenset())
    )
    assert newcomer.session.most_reductions == 2


def test_a_checkpoint_of_an_older_version_lacks_that(trial: Trial) -> None:
    next(trial.job.steps(until=3))
    held = trial.session.capture()
    del held.tree["most_reductions"]
    trial.session.most_reductions = 2
    trial.session._restore_rest(held.tree, held.tensors.__getitem__)
    assert trial.session.most_reductions == 0


def run_until_bad_in_the_second_loop(trial: Trial, two_loops_from: int) -> None:
    for step in trial.job.steps(until=9):
        trial.take(step)
        if step.number >= two_loops_from:
            for batch in step.batches(trial.data):
                step.backward(trial.loss(batch) * (math.nan if step.number == 4 else 1))
            trial.optimizer.step()


@pytest.mark.parametrize(
    ("two_loops_from", "words", "saved"),
    [
        (4, "An earlier loop of this step was applied, and there is no copy of the state", []),
        (3, "Nothing of this step was applied", [3]),
    ],
)
def test_a_loss_that_is_not_finite_in_a_second_loop_tells_what_was_applied(
    trial: Trial, two_loops_from: int, words: str, saved: list[int]
) -> None:
    with pytest.raises(Ended):
        run_until_bad_in_the_second_loop(trial, two_loops_from)
    (failed,) = trial.agent.of(wire.Failed)
    assert words in failed.message
    assert [s.step for s in trial.agent.of(wire.Staged)] == saved


def decay(trial: Trial) -> None:
    with torch.no_grad():
        trial.model.weight.mul_(0.9)


def decay_unseen(trial: Trial) -> None:
    trial.model.weight.data.mul_(0.9)


@pytest.mark.parametrize("change", [decay, decay_unseen], ids=["in place", "through .data"])
def test_parameters_changed_before_the_loop_are_refused_at_the_first_step(
    trial: Trial, change: Callable[[Trial], None]
) -> None:
    with pytest.raises(Misuse, match=r"step 1: the tracked state model\.weight was changed before"):
        for step in trial.job.steps(until=5):
            change(trial)
            trial.take(step)


def test_so_is_an_average_of_the_weights_that_is_updated_before_the_loop(trial: Trial) -> None:
    average = torch.optim.swa_utils.AveragedModel(trial.model)
    trial.job.track(average=average)
    with pytest.raises(Misuse, match="average"):
        for step in trial.job.steps(until=5):
            average.update_parameters(trial.model)
            trial.take(step)


class Average:
    """An average of weights that is too large to be copied at each step."""

    def __init__(self) -> None:
        self.weights = torch.zeros(40_000)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": [self.weights]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights.copy_(state["weights"][0])


def track_more(trial: Trial) -> tuple[Average, torch.Tensor, torch.optim.Optimizer]:
    average, count = Average(), torch.zeros(1)
    momentum = torch.optim.SGD(trial.model.parameters(), lr=0.01, momentum=0.9)
    trial.optimizer = momentum
    trial.job.track(model=trial.model, momentum=momentum, average=average, count=count)
    return average, count, momentum


def replace_momentum(optimizer: torch.optim.Optimizer) -> None:
    for own in optimizer.state.values():
        own["momentum_buffer"] = torch.zeros_like(own["momentum_buffer"])


CHANGES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "average": lambda average, count, momentum: average.weights.add_(1),
    "count": lambda average, count, momentum: count.add_(1),
    "momentum": lambda average, count, momentum: [
        own["momentum_buffer"].zero_() for own in momentum.state.values()
    ],
    "momentum, replaced": lambda average, count, momentum: replace_momentum(momentum),
}


@pytest.mark.parametrize("what", CHANGES)
def test_so_is_other_large_state_also_at_later_steps(
    a_trial: Callable[..., Trial], what: str
) -> None:
    trial = a_trial()
    more = track_more(trial)
    name = what.partition(",")[0]
    with pytest.raises(Misuse, match=f"step 3: the tracked state {name} was changed before"):
        for step in trial.job.steps(until=5):
            if step.number == 3:
                CHANGES[what](*more)
            trial.take(step)


@pytest.mark.parametrize("what", CHANGES)
def test_a_step_in_which_it_was_changed_cannot_be_undone(
    a_trial: Callable[..., Trial], what: str
) -> None:
    """So the rank does not save it as the state before the step."""
    trial = a_trial()
    more = track_more(trial)
    with pytest.raises(Ended, match="parked"):
        for step in trial.job.steps(until=5):
            for batch in step.batches(trial.data):
                step.backward(trial.loss(batch))
                if step.number == 3:
                    CHANGES[what](*more)
                    a_cut(trial)
            trial.optimizer.step()
    (parked,) = trial.agent.of(wire.Parked)
    assert (parked.step, parked.sound) == (2, False)
    assert f"{what.partition(',')[0]} was changed before the step was applied" in parked.why


class Kept:
    """Keeps the last loss as it is, with its history."""

    def __init__(self) -> None:
        self.loss = torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return {"losses": [self.loss]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self.loss,) = state["losses"]


def test_an_object_may_keep_a_loss_as_it_is(trial: Trial) -> None:
    kept = Kept()
    trial.job.track(kept=kept)
    with pytest.raises(Ended, match="parked"):
        for step in trial.job.steps(until=5):
            was = kept.loss.item()
            if step.number == 2:
                a_cut(trial)
                kept.loss = torch.ones(())
            for batch in step.batches(trial.data):
                loss = trial.loss(batch)
                step.backward(loss)
            trial.optimizer.step()
            kept.loss = loss
    assert kept.loss.item() == was > 0
    assert kept.loss.is_leaf


@pytest.mark.parametrize("loops", [1, 2])
def test_a_schedule_that_steps_before_the_loop_is_put_back(trial: Trial, loops: int) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(trial.optimizer, gamma=0.5)
    trial.job.track(schedule=schedule)
    rates, begun = {}, []
    with pytest.raises(Ended, match="parked"):
        for step in trial.job.steps(until=5):
            rates[step.number] = schedule.get_last_lr()
            with warnings.catch_warnings(action="ignore"):  # torch expects optimizer.step first
                schedule.step()
            trial.optimizer.param_groups[0]["weight_decay"] = 0.1 * step.number
            begun.append(schedule.get_last_lr())
            for number in range(loops):
                if step.number == 3 and number == loops - 1:
                    a_cut(trial)
                trial.take(step)
                assert schedule.get_last_lr() == begun[-1], (
                    "the schedule must not change during a step"
                )
    (parked,) = trial.agent.of(wire.Parked)
    assert (parked.step, parked.sound) == (2, True)
    if loops == 1:
        assert schedule.get_last_lr() == rates[3]
        assert trial.optimizer.param_groups[0]["lr"] == rates[3][0]
        assert trial.optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.2)


def test_a_learning_rate_in_a_tensor_of_the_script_is_put_back_and_stays_that_tensor(
    a_trial: Callable[..., Trial],
) -> None:
    """With several loops in a step, the state before the step is put back for a moment."""
    trial, rate = a_trial(), torch.tensor(0.5)
    trial.optimizer = torch.optim.SGD(trial.model.parameters(), lr=rate)
    trial.track()
    (group,) = trial.optimizer.param_groups
    with pytest.raises(Ended, match="parked"):
        for step in trial.job.steps(until=5):
            rate.fill_(0.1 / step.number)
            for number in range(2):
                if step.number == 4 and number == 1:
                    a_cut(trial)
                trial.take(step)
                assert group["lr"] is rate
                assert float(rate) == pytest.approx(0.1 / step.number)
    (parked,) = trial.agent.of(wire.Parked)
    assert (parked.step, parked.sound) == (3, True)


def test_a_cut_in_evaluate_parks_at_the_step_that_it_marked(trial: Trial) -> None:
    with pytest.raises(Ended, match="parked"):
        for step in trial.job.steps(until=5):
            trial.take(step)
            for _ in trial.job.evaluate(trial.data):
                a_cut(trial)
    (parked,) = trial.agent.of(wire.Parked)
    assert (parked.step, parked.sound) == (1, True)
