"""Every misuse of the training API raises an error with the fix."""

# ruff: noqa: PT012 - the loop as a whole is what raises

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import prune

from everstep import NotUnderAgent, run
from everstep.errors import Misuse
from everstep_contract import wire
from runtime.a_job import Ended, Trial


def first_step(trial: Trial) -> Any:
    return next(iter(trial.job.steps(until=3)))


def test_list_of_batches(trial: Trial) -> None:
    with pytest.raises(Misuse, match=r"had no step\.backward or step\.skip.*list\(\) or zip\(\)"):
        list(first_step(trial).batches(trial.data))


def test_zip_of_two_loops(trial: Trial) -> None:
    step = first_step(trial)
    with pytest.raises(Misuse, match=r"did not end .*zip\(\) of two loops.*one dataset of both"):
        for _ in zip(step.batches(trial.data), step.batches(trial.data), strict=True):
            pass


def test_continue_before_backward(trial: Trial) -> None:
    with pytest.raises(Misuse, match="exactly one"):
        for _ in first_step(trial).batches(trial.data):
            continue


def test_a_swallowed_exception(trial: Trial) -> None:
    step = first_step(trial)
    with pytest.raises(Misuse, match="swallowed"):
        for _ in step.batches(trial.data):
            try:
                raise torch.OutOfMemoryError("no memory")
            except RuntimeError:
                pass


class FailsOnce(torch.autograd.Function):
    """Its backward runs out of memory, half way through the backward of the model."""

    @staticmethod
    def forward(_: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(_: Any, *grads: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError("no memory")


@pytest.mark.parametrize(("at", "skips"), [(1, False), (2, False), (1, True)])
def test_an_exception_that_is_swallowed_in_the_middle_of_a_backward(
    trial: Trial, at: int, skips: bool
) -> None:
    """A part of the gradient is in the sum by then."""
    step = first_step(trial)
    with pytest.raises(Misuse, match="swallowed"):
        for number, (inputs, wanted) in enumerate(step.batches(trial.data)):
            found = trial.model(inputs)
            if number == at:
                found = FailsOnce.apply(found) + trial.model.bias
            try:
                step.backward((found - wanted).square().mean())
            except torch.OutOfMemoryError:
                if skips:
                    step.skip()


def test_backward_twice_for_one_batch(trial: Trial) -> None:
    step = first_step(trial)
    with pytest.raises(Misuse, match=r"step\.backward\(loss_a \+ loss_b\)"):
        for batch in step.batches(trial.data):
            step.backward(trial.loss(batch))
            step.backward(trial.loss(batch))


def test_backward_and_skip_for_one_batch(trial: Trial) -> None:
    step = first_step(trial)
    with pytest.raises(Misuse, match=r"a second step\.backward or step\.skip"):
        for batch in step.batches(trial.data):
            step.backward(trial.loss(batch))
            step.skip()


def test_backward_outside_the_loop(trial: Trial) -> None:
    with pytest.raises(Misuse, match="belongs inside the loop"):
        first_step(trial).backward(torch.zeros((), requires_grad=True))


def test_skip_after_the_loop(trial: Trial) -> None:
    step = first_step(trial)
    trial.take(step)
    with pytest.raises(Misuse, match="belongs inside the loop"):
        step.skip()


def test_loss_backward_instead_of_step_backward(trial: Trial) -> None:
    with pytest.raises(Misuse, match=r"call step\.backward\(loss\)"):
        for batch in first_step(trial).batches(trial.data):
            trial.loss(batch).backward()


def test_break_out_of_the_loop_is_met_at_the_boundary(trial: Trial) -> None:
    with pytest.raises(Misuse, match=r"did not end \(break"):
        for step in trial.job.steps(until=3):
            for batch in step.batches(trial.data):
                step.backward(trial.loss(batch))
                break
    assert trial.agent.of(wire.Applied) == []


def test_a_step_without_a_loop(trial: Trial) -> None:
    with pytest.raises(Misuse, match=r"there was no loop over step\.batches"):
        for _ in trial.job.steps(until=3):
            pass


def test_the_loss_before_the_loop_ended(trial: Trial) -> None:
    with pytest.raises(Misuse, match="known once the loop"):
        _ = first_step(trial).loss


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (torch.zeros(2, requires_grad=True), r"shape \(2,\); use \.mean\(\)"),
        (0.5, r"0\.5; give the tensor .*without \.item\(\)"),
        (None, "None; give the tensor"),
    ],
)
def test_a_loss_that_is_not_one_number(trial: Trial, loss: Any, told: str) -> None:
    step = first_step(trial)
    with pytest.raises(Misuse, match=f"a loss of one number, found {told}"):
        for _ in step.batches(trial.data):
            step.backward(loss)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_weight(trial: Trial, weight: float) -> None:
    step = first_step(trial)
    with pytest.raises(Misuse, match="a weight is a finite number"):
        for batch in step.batches(trial.data):
            step.backward(trial.loss(batch), weight=weight)


def test_something_else_than_job_batches(trial: Trial) -> None:
    with pytest.raises(Misuse, match=r"step\.batches\(list\): it takes what job\.batches returned"):
        first_step(trial).batches([1, 2, 3])


def test_a_parameter_that_nobody_tracks(trial: Trial) -> None:
    stranger = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(Misuse, match="a parameter that no tracked module has"):
        first_step(trial).batches(trial.data, params=[stranger])


def test_parameters_from_a_generator_that_is_used_up(trial: Trial) -> None:
    parameters = trial.model.parameters()
    with pytest.raises(Misuse, match=r"params=…\): it is empty.*list\(model\.parameters\(\)\)"):
        for step in trial.job.steps(until=3):
            for batch in step.batches(trial.data, params=parameters):
                step.backward(trial.loss(batch))
    assert [a.step for a in trial.agent.of(wire.Applied)] == [1]


def test_parameters_that_are_all_frozen(trial: Trial) -> None:
    trial.model.bias.requires_grad_(False)
    with pytest.raises(Misuse, match=r"params=…\): none of its parameters requires a gradient"):
        first_step(trial).batches(trial.data, params=[trial.model.bias])


def test_an_optimizer_that_gets_parameters_after_training_has_begun(
    a_trial: Callable[..., Trial],
) -> None:
    trial = a_trial(save_every_steps=1)
    trial.optimizer = torch.optim.SGD([trial.model.weight], lr=0.01)
    trial.track()
    with pytest.raises(Misuse, match=r"^optimizer: .*add_param_group.*Freeze"):
        for step in trial.job.steps(until=3):
            if step.number == 2:
                trial.optimizer.add_param_group({"params": [trial.model.bias]})
            trial.take(step)


def test_an_optimizer_that_gets_parameters_after_it_was_tracked(
    a_trial: Callable[..., Trial],
) -> None:
    """A restart would load the checkpoint before, into the groups that it had then."""
    trial = a_trial()
    trial.optimizer = torch.optim.SGD([trial.model.weight], lr=0.01)
    trial.track()
    trial.optimizer.add_param_group({"params": [trial.model.bias]})
    with pytest.raises(Misuse, match=r"^optimizer: .*after job\.track .*add_param_group"):
        first_step(trial)


def test_an_optimizer_that_is_tracked_before_its_module(a_trial: Callable[..., Trial]) -> None:
    """A restart could not load it there."""
    trial = a_trial()
    with pytest.raises(Misuse, match="track that module, too, in the same call or an earlier one"):
        trial.job.track(optimizer=trial.optimizer)


def sum_gradients(trial: Trial, step: Any) -> None:
    for batch in step.batches(trial.data):
        step.backward(trial.loss(batch))


def test_a_second_loop_that_would_drop_the_gradient_of_the_first(trial: Trial) -> None:
    step = first_step(trial)
    sum_gradients(trial, step)
    with pytest.raises(Misuse, match=r"drop the gradient of model\.weight.*losses in one loop"):
        sum_gradients(trial, step)


class Foreign(torch.optim.Optimizer):
    """Writes through `.data`, as many optimizers of other libraries do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-0.01)


def test_a_second_loop_after_an_optimizer_has_written_through_data(
    a_trial: Callable[..., Trial],
) -> None:
    """As in two epochs over the samples of one step."""
    trial = a_trial()
    trial.optimizer = Foreign(trial.model.parameters())
    trial.track()
    step = first_step(trial)
    trial.take(step)
    trial.take(step)


@pytest.mark.parametrize("use", ["zero_grad", "step"])
def test_a_second_loop_after_the_gradient_was_used(trial: Trial, use: str) -> None:
    step = first_step(trial)
    sum_gradients(trial, step)
    getattr(trial.optimizer, use)()
    sum_gradients(trial, step)


def test_a_second_loop_after_a_scaler_has_left_out_a_step(trial: Trial) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    trial.job.track(scaler=scaler)
    step = first_step(trial)
    for _ in range(2):
        for batch in step.batches(trial.data):
            step.backward(trial.loss(batch), scaler=scaler)
        trial.model.weight.grad.fill_(torch.inf)
        scaler.step(trial.optimizer)
        scaler.update()


def grow(model: torch.nn.Module) -> None:
    model.extra = torch.nn.Linear(1, 1)


def replace_weight(model: torch.nn.Module) -> None:
    model.weight = torch.nn.Parameter(torch.zeros(1, 3))


@pytest.mark.parametrize(("change", "name"), [(grow, "extra.weight"), (replace_weight, "weight")])
def test_a_module_that_gets_parameters_after_training_has_begun(
    trial: Trial, change: Callable[[torch.nn.Module], None], name: str
) -> None:
    steps = trial.job.steps(until=3)
    trial.take(next(steps))
    step = next(steps)
    change(trial.model)
    with pytest.raises(Misuse, match=f"^model.{name}: a tracked module got this parameter after"):
        step.batches(trial.data)


@pytest.mark.parametrize(("change", "name"), [(grow, "extra.weight"), (replace_weight, "weight")])
def test_a_module_that_gets_parameters_after_it_was_tracked(
    a_trial: Callable[..., Trial], change: Callable[[torch.nn.Module], None], name: str
) -> None:
    """A restart would load the checkpoint into the parameters that it had before."""
    trial = a_trial()
    trial.job.track(model=trial.model)
    change(trial.model)
    trial.optimizer = torch.optim.SGD(trial.model.parameters(), lr=0.01)
    trial.job.track(optimizer=trial.optimizer)
    with pytest.raises(
        Misuse, match=f"^model.{name}: the module got this parameter after job.track"
    ):
        first_step(trial)


def load_weights(model: torch.nn.Module) -> None:
    model.load_state_dict({"weight": torch.ones(1, 3), "bias": torch.ones(1)})


def initialise(model: torch.nn.Module) -> None:
    torch.nn.init.zeros_(model.weight)


def initialise_unseen(model: torch.nn.Module) -> None:
    """As in torch's tutorial of a DCGAN. It raises no version."""
    torch.nn.init.normal_(model.weight.data)


def replace_data(model: torch.nn.Module) -> None:
    model.weight.data = torch.ones(1, 3)


@pytest.mark.parametrize("change", [load_weights, initialise, initialise_unseen, replace_data])
def test_a_model_whose_weights_are_set_after_it_was_tracked(
    trial: Trial, change: Callable[[torch.nn.Module], None]
) -> None:
    """A restart would set them again, after the checkpoint was loaded."""
    change(trial.model)
    with pytest.raises(Misuse, match=r"^model\.weight: the script changed .*before job\.track"):
        first_step(trial)


def warm_up(model: torch.nn.Module) -> None:
    model(torch.ones(1, 3)).sum().backward()
    model.zero_grad()


def convert(model: torch.nn.Module) -> None:
    model.double().float()


@pytest.mark.parametrize("use", [warm_up, convert])
def test_a_model_may_be_used_between_track_and_steps(
    trial: Trial, use: Callable[[torch.nn.Module], None]
) -> None:
    use(trial.model)
    trial.take(first_step(trial))


def test_a_model_that_is_converted_after_it_was_tracked(trial: Trial) -> None:
    """A restart would load the moments of its optimizer in the former dtype, or on the former device."""
    trial.model.double()
    with pytest.raises(Misuse, match=r"^model\.weight: the script moved .*before job\.track"):
        first_step(trial)


def test_a_frozen_model_may_be_converted_after_it_was_tracked(trial: Trial) -> None:
    """No optimizer holds its parameters, so a restart converts it again, and loses nothing."""
    frozen = torch.nn.Linear(1, 1)
    trial.job.track(frozen=frozen)
    frozen.bfloat16()
    trial.take(first_step(trial))


def test_a_layer_whose_first_forward_sets_its_weights(a_trial: Callable[..., Trial]) -> None:
    trial = a_trial()
    trial.model = torch.nn.LazyLinear(1)
    trial.optimizer = torch.optim.SGD(trial.model.parameters(), lr=0.01)
    trial.track()
    trial.model(torch.ones(1, 3))
    trial.take(first_step(trial))


def test_a_module_that_is_pruned_after_training_has_begun(trial: Trial) -> None:
    """Its parameter has another name then, under which no rank that joins or restarts has one."""
    steps = trial.job.steps(until=4)
    trial.take(next(steps))
    trial.model.loss = torch.nn.MSELoss()
    trial.take(next(steps))
    prune.l1_unstructured(trial.model, "weight", amount=1)
    step = next(steps)
    with pytest.raises(Misuse, match=r"^model\.weight_orig: .*prune\.identity before job\.track"):
        step.batches(trial.data)


def test_a_module_whose_mask_was_made_before_it_was_tracked_can_be_pruned(
    a_trial: Callable[..., Trial],
) -> None:
    trial = a_trial()
    prune.identity(trial.model, "weight")
    trial.optimizer = torch.optim.SGD(trial.model.parameters(), lr=0.01)
    trial.track()
    for step in trial.job.steps(until=3):
        trial.take(step)
        trial.model.weight_mask[0, step.number - 1] = 0.0
    assert trial.model.weight_mask.tolist() == [[0.0, 0.0, 0.0]]


def test_another_loop_after_the_step_was_marked_applied(trial: Trial) -> None:
    step = first_step(trial)
    trial.take(step)
    list(trial.job.evaluate(trial.data))
    with pytest.raises(Misuse, match=r"after job\.evaluate"):
        step.batches(trial.data)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.SGD(parameters, lr=0.01, fused=True),
    "of another library": Foreign,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_change_of_state_after_the_step_was_marked_applied(
    a_trial: Callable[..., Trial], kind: str
) -> None:
    trial = a_trial()
    trial.optimizer = OPTIMIZERS[kind](trial.model.parameters())
    trial.track()
    with pytest.raises(
        Misuse, match=r"parameters, a learning rate or a schedule changed after job"
    ):
        for step in trial.job.steps(until=3):
            for batch in step.batches(trial.data):
                step.backward(trial.loss(batch))
            with trial.job.pause("export"):
                pass
            trial.optimizer.step()


@pytest.mark.parametrize(
    "call",
    [lambda t: next(t.job.evaluate(t.data)), lambda t: t.job.sum(1.0)],
    ids=["evaluate", "sum"],
)
def test_a_call_inside_the_inner_loop_that_belongs_after_it(
    trial: Trial, call: Callable[[Trial], object]
) -> None:
    step = first_step(trial)
    with pytest.raises(Misuse, match=r"did not end \(.*job\.sum within it.*call job\.sum after it"):
        for _ in step.batches(trial.data):
            call(trial)


def test_the_length_of_a_loop_that_is_not_used(trial: Trial) -> None:
    step = first_step(trial)
    assert len(step.batches(trial.data)) == 3
    with pytest.raises(Misuse, match=r"did not end \(.*len\(\) of one that is not used"):
        step.batches(trial.data)


def test_an_evaluation_that_goes_on_in_a_later_step(trial: Trial) -> None:
    steps = iter(trial.job.steps(until=3))
    trial.take(next(steps))
    evaluation = trial.job.evaluate(trial.data)
    next(evaluation)
    trial.take(next(steps))
    with pytest.raises(Misuse, match=r"It ended with that step: .*call job\.evaluate again"):
        next(evaluation)


def test_a_negative_limit(trial: Trial) -> None:
    with pytest.raises(Misuse, match="limit=-1"), trial.job.pause("export", limit=-1):
        pass


@pytest.mark.parametrize("value", ["3", np.array([1.0, 2.0]), torch.ones(2), torch.ones(0)])
def test_a_sum_of_something_else_than_numbers(trial: Trial, value: Any) -> None:
    trial.take(first_step(trial))
    with pytest.raises(Misuse, match="it adds numbers"):
        trial.job.sum(value)


def test_a_sum_of_arrays_and_tensors_of_one_number(trial: Trial) -> None:
    trial.take(first_step(trial))
    values = (
        np.float32(1),
        np.array([2.0]),
        torch.ones(1, 1),
        torch.tensor(4, requires_grad=False),
    )
    assert trial.job.sum(*values) == (1.0, 2.0, 1.0, 4.0)


def test_nothing_tracked(a_trial: Callable[..., Trial]) -> None:
    with pytest.raises(Misuse, match="nothing is tracked"):
        next(iter(a_trial().job.steps(until=3)))


def test_track_after_steps(trial: Trial) -> None:
    first_step(trial)
    with pytest.raises(Misuse, match=r"comes before job\.steps"):
        trial.job.track(other=trial.model)


def test_one_name_twice(trial: Trial) -> None:
    with pytest.raises(Misuse, match="tracked already"):
        trial.job.track(model=trial.model)


def test_a_call_of_track_that_is_refused_tracks_nothing(a_trial: Callable[..., Trial]) -> None:
    """Else a script that catches the error would save what it has not loaded from the checkpoint."""
    trial = a_trial()
    trial.job.track(model=trial.model)
    foreign = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    for refused in (object(), foreign):
        with pytest.raises(Misuse):
            trial.job.track(counts=torch.zeros(2), refused=refused)
        assert [*trial.session.tracked.objects] == ["model"]
    trial.job.track(counts=torch.zeros(2), optimizer=trial.optimizer)
    trial.take(next(trial.job.steps(until=2)))


def test_a_call_of_track_local_that_is_refused_tracks_nothing(trial: Trial) -> None:
    with pytest.raises(Misuse):
        trial.job.track_local(counts=torch.zeros(2), refused=object())
    assert not trial.session.local.names


def test_a_scaler_that_is_not_tracked(trial: Trial) -> None:
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(Misuse, match=r"job\.track\(scaler=scaler\)"):
        for step in trial.job.steps(until=2):
            for batch in step.batches(trial.data):
                step.backward(trial.loss(batch), scaler=scaler)


def take_with_scaled_loss(trial: Trial, scaler: torch.amp.GradScaler) -> None:
    step = next(iter(trial.job.steps(until=2)))
    for batch in step.batches(trial.data):
        step.backward(scaler.scale(trial.loss(batch)))
    scaler.step(trial.optimizer)
    scaler.update()


def test_a_scaler_that_is_not_tracked_and_scales_the_loss_itself(trial: Trial) -> None:
    with pytest.raises(Misuse, match=r"job\.track\(scaler=scaler\).*loss as it is"):
        take_with_scaled_loss(trial, torch.amp.GradScaler("cpu", init_scale=4.0))


def test_a_scaler_that_is_disabled_or_tracked_may_scale_the_loss(
    a_trial: Callable[..., Trial],
) -> None:
    take_with_scaled_loss(a_trial().track(), torch.amp.GradScaler("cpu", enabled=False))
    tracked = torch.amp.GradScaler("cpu", init_scale=4.0)
    trial = a_trial().track()
    trial.job.track(scaler=tracked)
    take_with_scaled_loss(trial, tracked)


def test_a_scaler_may_be_part_of_a_tracked_object(trial: Trial) -> None:
    class Precision:
        def __init__(self) -> None:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        def state_dict(self) -> dict[str, Any]:
            return self.scaler.state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.scaler.load_state_dict(state)

    own = Precision()
    trial.job.track(precision=own)
    take_with_scaled_loss(trial, own.scaler)


def test_a_disabled_scaler_need_not_be_tracked(trial: Trial) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    step = first_step(trial)
    for batch in step.batches(trial.data):
        step.backward(trial.loss(batch), scaler=scaler)
    assert trial.model.weight.grad is not None


def test_averaged_weights_that_stand_in_for_the_parameters_after_the_step(trial: Trial) -> None:
    weight = trial.model.weight
    averaged, own = torch.zeros_like(weight), weight.data
    with pytest.raises(Misuse, match="use a copy of the model"):
        for step in trial.job.steps(until=2):
            trial.take(step)
            weight.data = averaged
            list(trial.job.evaluate(trial.data))
            weight.data = own


def halve(rate: Any) -> Any:
    return rate.mul_(0.5) if isinstance(rate, torch.Tensor) else rate * 0.5


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["a number", "a tensor"])
@pytest.mark.parametrize("early", [True, False])
def test_a_learning_rate_that_depends_on_a_result(
    a_trial: Callable[..., Trial], rate: Any, early: bool
) -> None:
    """If a rank is lost between the two, the others save the step with the rate that it had."""
    trial = a_trial()
    trial.optimizer = torch.optim.SGD(trial.model.parameters(), lr=halve(rate) * 2)
    (group,) = trial.track().optimizer.param_groups

    def train() -> None:
        for step in trial.job.steps(until=3):
            if not early:
                group["lr"] = halve(group["lr"])
            trial.take(step)
            trial.job.sum(1.0)
            if early:
                group["lr"] = halve(group["lr"])

    if early:
        with pytest.raises(Misuse, match=r"a learning rate .* is set there"):
            train()
    else:
        train()


class Last:
    """Keeps the result of an evaluation until the next step."""

    loss: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss = state["loss"]


@pytest.mark.parametrize("early", [True, False])
def test_a_schedule_that_needs_the_result_of_an_evaluation(trial: Trial, early: bool) -> None:
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(trial.optimizer, patience=0)
    last = Last()
    trial.job.track(schedule=schedule, last=last)

    def train() -> None:
        for step in trial.job.steps(until=4):
            if last.loss is not None:
                schedule.step(last.loss)
            trial.take(step)
            (loss,) = trial.job.sum(1.0)
            if early:
                schedule.step(loss)
            last.loss = loss

    if early:
        with pytest.raises(Misuse, match=r"ReduceLROnPlateau\) steps before the loop of the next"):
            train()
    else:
        train()
        assert trial.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 100)


def test_the_name_of_the_random_states(trial: Trial) -> None:
    with pytest.raises(Misuse, match=r"track\(random=…\).*choose another"):
        trial.job.track(random=torch.zeros(1))


def test_steps_twice(trial: Trial) -> None:
    first_step(trial)
    with pytest.raises(Misuse, match="called once"):
        first_step(trial)


class Counts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2**19))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x


@pytest.mark.parametrize("within", ["the steps", "the start-up"])
def test_a_large_buffer_that_forward_changes_in_an_evaluation(trial: Trial, within: str) -> None:
    """Such as the cache of a model that generates text. The script takes only the first batch."""
    counts = Counts()
    trial.job.track(counts=counts)

    def evaluate() -> None:
        for inputs, _ in trial.job.evaluate(trial.data):
            counts(inputs)
            break

    if within == "the start-up":
        evaluate()
    told = r"evaluate: forward changed the buffer counts\.seen \(2\.0 MiB\).*persistent=False"
    with pytest.raises(Misuse, match=told):
        for step in trial.job.steps(until=3):
            trial.take(step)
            evaluate()


class Registers(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(3), persistent=self.kept)
        return x * self.mask

    kept = True


class Caches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mask = torch.ones(3)
        return x * self.mask


class LoadsIt(Registers):
    """A module that makes the buffer when it loads it, as some of torch's do."""

    def _load_from_state_dict(self, *given: Any) -> None:
        self.register_buffer("mask", torch.zeros(3))
        super()._load_from_state_dict(*given)


def take_with(trial: Trial, layer: torch.nn.Module) -> None:
    trial.job.track(layer=layer)
    step = first_step(trial)
    for inputs, wanted in step.batches(trial.data):
        step.backward(trial.loss((layer(inputs), wanted)))


@pytest.mark.parametrize("kind", [Registers, Caches])
def test_a_buffer_that_forward_makes(trial: Trial, kind: type[torch.nn.Module]) -> None:
    """No restart could load a checkpoint with it."""
    with pytest.raises(Misuse, match=r"the buffer layer\.mask.*in __init__.*persistent=False"):
        take_with(trial, kind())


def test_a_buffer_that_forward_makes_and_that_can_be_loaded_or_is_not_saved(
    a_trial: Callable[..., Trial],
) -> None:
    cache = Registers()
    cache.kept = False
    for layer in (cache, LoadsIt()):
        take_with(a_trial().track(), layer)


def test_a_large_buffer_that_forward_changes(trial: Trial) -> None:
    counts = Counts()
    trial.job.track(counts=counts)
    step = first_step(trial)
    with pytest.raises(Misuse, match=r"changes the buffer counts\.seen \(2\.0 MiB\)"):
        for inputs, wanted in step.batches(trial.data):
            step.backward(trial.loss((counts(inputs), wanted)))


def test_a_gradient_that_comes_again_after_its_bucket_was_sent(trial: Trial) -> None:
    """One backward pass runs inside another, as in reentrant checkpointing of shared weights."""
    step = first_step(trial)

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                trial.model(torch.ones(1, 3)).sum().backward()
            return grad

    with pytest.raises(Misuse, match=r"use_reentrant=False, or step\.batches\(…, overlap=False\)"):
        for inputs, wanted in step.batches(trial.data):
            first = trial.model(Again.apply(inputs.requires_grad_()))
            step.backward((first - wanted).square().mean())


def test_the_same_without_overlap_is_fine(trial: Trial) -> None:
    step = first_step(trial)
    for batch in step.batches(trial.data, overlap=False):
        step.backward(trial.loss(batch))
    assert step._state.reductions == 1


def test_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVERSTEP_AGENT_SOCKET", raising=False)
    with pytest.raises(
        NotUnderAgent, match=r"not started by Everstep\. Start it with: everstep run"
    ):
        run(lambda job: None)


def test_a_users_own_exception_is_his(trial: Trial) -> None:
    with pytest.raises(ZeroDivisionError):
        for _ in trial.job.steps(until=3):
            _ = 1 / 0


def test_tqdm_and_enumerate_are_fine(trial: Trial) -> None:
    step = first_step(trial)
    loop = step.batches(trial.data)
    assert len(loop) == 3
    for _, batch in enumerate(loop):
        step.backward(trial.loss(batch))
    assert step._state.reductions == 1


def test_a_loop_that_is_over_and_is_used_again(trial: Trial) -> None:
    step = first_step(trial)
    loop = step.batches(trial.data)
    with pytest.raises(Misuse, match=r"is over, .*call step\.batches again"):
        for _ in range(2):
            for batch in loop:
                step.backward(trial.loss(batch))


@pytest.mark.parametrize("how", ["accumulates", "applies", "through .data", "drops"])
def test_gradients_of_a_step_that_nothing_applies_are_noted(trial: Trial, how: str) -> None:
    """As in a script that accumulates gradients over several steps."""
    for step in trial.job.steps(until=2):
        for batch in step.batches(trial.data):
            step.backward(trial.loss(batch))
        if how == "applies" or step.number == 2:
            trial.optimizer.step()
        if how == "through .data":
            trial.model.weight.data -= 0.1
        if how == "drops":
            trial.optimizer.zero_grad()
    first, second = trial.agent.of(wire.Applied)
    told = "step 1: no optimizer has applied its gradients, and the next step drops them"
    assert [told in note for note in first.notes] == ([True] if how == "accumulates" else [])
    assert second.notes == ()


@pytest.mark.parametrize("when", ["at once", "in a later batch"])
@pytest.mark.parametrize("before", ["never trained", "trained"])
def test_a_parameter_that_is_unfrozen_within_the_loop(trial: Trial, before: str, when: str) -> None:
    """Its gradient would be that of some batches of one rank, or none."""
    bias = trial.model.bias
    bias.requires_grad_(before == "trained")
    with pytest.raises(Misuse, match=r"^step 2: model\.bias was frozen .*unfrozen within.*between"):
        for step in trial.job.steps(until=3):
            bias.requires_grad_(before == "trained" and step.number == 1)
            for index, batch in enumerate(step.batches(trial.data)):
                if step.number == 2 and index >= (when == "in a later batch"):
                    bias.requires_grad_(True)
                step.backward(trial.loss(batch))
            trial.optimizer.step()
    assert [applied.step for applied in trial.agent.of(wire.Applied)] == [1]


def test_a_parameter_that_is_unfrozen_for_a_part_of_each_batch(trial: Trial) -> None:
    """From the second step on it is frozen when the loop begins."""
    bias = trial.model.bias
    with pytest.raises(Misuse, match=r"^step 2: model\.bias was frozen"):
        for step in trial.job.steps(until=3):
            for batch in step.batches(trial.data):
                bias.requires_grad_(True)
                step.backward(trial.loss(batch))
                bias.requires_grad_(False)
            trial.optimizer.step()


@pytest.mark.parametrize("chosen", ["by the optimizers", "by the script"])
def test_a_parameter_that_the_loop_does_not_sum_may_be_unfrozen_within_it(
    trial: Trial, chosen: str
) -> None:
    """Its gradient is dropped. It would change the norm that clipping uses, on each rank in another way."""
    other = torch.nn.Linear(1, 1).requires_grad_(False)
    trial.job.track(other=other)
    params = None if chosen == "by the optimizers" else [*trial.model.parameters()]
    for step in trial.job.steps(until=2):
        for batch in step.batches(trial.data, params=params):
            other.weight.requires_grad_(True)
            step.backward(other(trial.loss(batch).view(1, 1)).sum())
        assert other.weight.grad is None
        assert trial.model.weight.grad is not None
        other.weight.requires_grad_(False)


def test_a_parameter_that_the_script_chooses_and_unfreezes_within_the_loop(trial: Trial) -> None:
    bias = trial.model.bias.requires_grad_(False)
    step = first_step(trial)
    with pytest.raises(Misuse, match=r"^step 1: model.bias was frozen"):
        for batch in step.batches(trial.data, params=trial.model.parameters()):
            bias.requires_grad_(True)
            step.backward(trial.loss(batch))


def test_parameters_that_no_gradient_can_have(trial: Trial) -> None:
    """Such as the packed weights of a quantised layer."""
    packed = torch.nn.Module()
    packed.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    trial.job.track(packed=packed)
    for step in trial.job.steps(until=2):
        trial.take(step)
    assert not packed.weight.requires_grad


def test_a_parameter_may_be_frozen_for_a_part_of_each_batch(trial: Trial) -> None:
    """As the discriminator of a GAN is while the generator's loss is computed."""
    for step in trial.job.steps(until=2):
        for batch in step.batches(trial.data):
            trial.model.requires_grad_(False)
            held = trial.loss(batch)
            trial.model.requires_grad_(True)
            step.backward(trial.loss(batch) + held)
        assert trial.model.bias.grad is not None
        trial.optimizer.step()


def test_parameters_are_frozen_and_unfrozen_between_two_loops(trial: Trial) -> None:
    weight, bias = trial.model.weight, trial.model.bias
    for step in trial.job.steps(until=3):
        for chosen, other in ((weight, bias), (bias, weight)):
            chosen.requires_grad_(True)
            other.requires_grad_(False)
            for batch in step.batches(trial.data, params=[chosen]):
                step.backward(trial.loss(batch))
            assert chosen.grad is not None
        trial.optimizer.step()


def compute_apart(trial: Trial) -> None:
    trial.model(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize("number", [1, 2])
def test_a_gradient_that_is_computed_before_the_loop(trial: Trial, number: int) -> None:
    """Such as that of a penalty, which the loop would drop."""
    with pytest.raises(
        Misuse, match=rf"^step {number}: model\.\w+ has a gradient .*step\.backward"
    ):
        for step in trial.job.steps(until=3):
            if step.number == number:
                compute_apart(trial)
            trial.take(step)
    assert len(trial.agent.of(wire.Applied)) == number - 1


@pytest.mark.parametrize("tracks", ["before", "after"])
def test_a_gradient_that_is_computed_before_the_steps(
    a_trial: Callable[..., Trial], tracks: str
) -> None:
    trial = a_trial()
    if tracks == "before":
        trial.track()
    compute_apart(trial)
    if tracks == "after":
        trial.track()
    with pytest.raises(Misuse, match=r"has a gradient .*optimizer\.zero_grad\(\)"):
        trial.take(first_step(trial))


@pytest.mark.parametrize("number", [0, 2])
def test_a_gradient_of_a_parameter_that_was_frozen_since(trial: Trial, number: int) -> None:
    """The optimizer would apply it at each step."""
    bias = trial.model.bias

    def compute_it() -> None:
        bias.requires_grad_(True)
        compute_apart(trial)
        bias.requires_grad_(False)
        trial.model.weight.grad = None

    bias.requires_grad_(False)
    if number == 0:
        compute_it()
    with pytest.raises(Misuse, match=r"model\.bias has a gradient"):
        for step in trial.job.steps(until=2):
            if step.number == number:
                compute_it()
            trial.take(step)
    assert len(trial.agent.of(wire.Applied)) == max(0, number - 1)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("place", ["before", "top", "loop", "after"])
def test_zero_grad_where_scripts_have_it(
    a_trial: Callable[..., Trial], to_none: bool, place: str
) -> None:
    """In each of these places it drops what the script has computed for itself."""
    plain = a_trial().track()
    for step in plain.job.steps(until=3):
        plain.take(step)
    trial = a_trial().track()

    def reach(where: str) -> None:
        if where == place:
            trial.optimizer.zero_grad(set_to_none=to_none)

    compute_apart(trial)
    reach("before")
    if place == "after":
        trial.optimizer.zero_grad()
    for step in trial.job.steps(until=3):
        if place == "top":
            compute_apart(trial)
        reach("top")
        batches = step.batches(trial.data)
        reach("loop")
        for batch in batches:
            step.backward(trial.loss(batch))
        trial.optimizer.step()
        reach("after")
    assert torch.equal(trial.model.weight, plain.model.weight)
    assert torch.equal(trial.model.bias, plain.model.bias)


def gradient(trial: Trial) -> torch.Tensor:
    found = trial.model.weight.grad
    assert found is not None
    return found.clone()


def test_a_gradient_may_be_added_to_that_of_the_global_batch(trial: Trial) -> None:
    """After the loop, where each rank computes the same. The next step drops it, as all that are left."""
    for step in trial.job.steps(until=3):
        assert trial.model.weight.grad is None
        sum_gradients(trial, step)
        of_batch = gradient(trial)
        compute_apart(trial)
        assert torch.equal(trial.model.weight.grad, of_batch + 1)
        trial.optimizer.step()
        compute_apart(trial)


def test_zeros_that_zero_grad_has_left_are_not_applied(a_trial: Callable[..., Trial]) -> None:
    """To an optimizer a gradient of zero is one: here it would decay the weights that the loop leaves out."""
    trial = a_trial()
    trial.optimizer = torch.optim.SGD(trial.model.parameters(), lr=0.1, weight_decay=0.5)
    trial.track()
    before = trial.model.bias.detach().clone()
    compute_apart(trial)
    trial.optimizer.zero_grad(set_to_none=False)
    step = first_step(trial)
    for batch in step.batches(trial.data, params=[trial.model.weight]):
        step.backward(trial.loss(batch))
    trial.optimizer.step()
    assert torch.equal(trial.model.bias, before)


def test_zero_grad_within_the_loop_does_nothing(trial: Trial) -> None:
    step = first_step(trial)
    for batch in step.batches(trial.data):
        step.backward(trial.loss(batch))
        trial.optimizer.zero_grad()
    assert trial.model.weight.grad is not None


def test_an_optimizer_that_steps_within_the_loop_would_train_nothing(trial: Trial) -> None:
    """As in a script that accumulates gradients."""
    step = first_step(trial)
    with pytest.raises(
        Misuse, match=r"SGD\.step\(\) within the loop .*after the loop, once for each"
    ):
        for number, batch in enumerate(step.batches(trial.data)):
            step.backward(trial.loss(batch))
            if number % 2:
                trial.optimizer.step()
                trial.optimizer.zero_grad()


def test_a_schedule_that_steps_within_the_loop(trial: Trial) -> None:
    """Each rank would make as many steps of it as it has batches."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(trial.optimizer, gamma=0.5)
    trial.job.track(schedule=schedule)
    with pytest.raises(
        Misuse,
        match=r"step 2: schedule\.step\(\) was called within .*after the loop, once for each",
    ):
        for step in trial.job.steps(until=3):
            for batch in step.batches(trial.data):
                step.backward(trial.loss(batch))
                if step.number == 2:
                    schedule.step()
            trial.optimizer.step()
            schedule.step()
    assert [a.step for a in trial.agent.of(wire.Applied)] == [1]


@pytest.mark.parametrize("tracked", [True, False])
def test_a_schedule_that_is_not_tracked_is_noted(trial: Trial, tracked: bool) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(trial.optimizer, gamma=0.5)
    if tracked:
        trial.job.track(schedule=schedule)
    for step in trial.job.steps(until=2):
        trial.take(step)
        schedule.step()
    first, second = trial.agent.of(wire.Applied)
    told = "a learning-rate schedule was made for optimizer, and none is tracked"
    assert [told in note for note in first.notes] == ([] if tracked else [True])
    assert second.notes == ()


@pytest.mark.parametrize("clears", [True, False])
def test_an_optimizer_that_steps_in_backward(a_trial: Callable[..., Trial], clears: bool) -> None:
    """One for each parameter, in a hook, which saves the memory for gradients."""
    trial = a_trial()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in trial.model.parameters()}

    def apply(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        if clears:
            optimizers[parameter].zero_grad()

    for parameter in trial.model.parameters():
        parameter.register_post_accumulate_grad_hook(apply)
    trial.job.track(model=trial.model)
    with pytest.raises(Misuse, match=r"SGD\.step\(\) within .*this rank alone.* in backward"):
        trial.take(first_step(trial))


def test_an_optimizer_may_step_when_the_next_loop_has_not_begun(trial: Trial) -> None:
    step = first_step(trial)
    for batch in step.batches(trial.data, params=[trial.model.weight]):
        step.backward(trial.loss(batch))
    coming = step.batches(trial.data, params=[trial.model.bias])
    trial.optimizer.step()
    for batch in coming:
        step.backward(trial.loss(batch))


def test_within_the_loop_another_model_may_be_trained(trial: Trial) -> None:
    other = torch.nn.Linear(3, 1)
    of_other = torch.optim.Adam(other.parameters())
    step = first_step(trial)
    for batch in step.batches(trial.data):
        of_other.step()
        step.backward(trial.loss(batch))


def test_ending_is_no_exception_a_script_can_swallow() -> None:
    assert not issubclass(Ended, Exception)


def test_a_save_outside_of_a_step(trial: Trial) -> None:
    with pytest.raises(Misuse, match=r"inside the loop over job\.steps"):
        trial.job.save()


def test_a_pin_that_cannot_be_a_name(trial: Trial) -> None:
    first_step(trial)
    with pytest.raises(Misuse, match=r"job.save: pin: 'Epoch 1' cannot name a checkpoint"):
        trial.job.save(pin="Epoch 1")


def test_an_optimizer_that_is_not_tracked_and_trains_nothing(a_trial: Callable[..., Trial]) -> None:
    """Two optimizers, and one was forgotten: its parameters would never get a gradient."""
    trial = a_trial()
    head = torch.nn.Linear(1, 1)
    forgotten = torch.optim.SGD(head.parameters(), lr=0.1)
    trial.job.track(model=trial.model, head=head, optimizer=trial.optimizer)
    step = first_step(trial)
    for inputs, wanted in step.batches(trial.data):
        step.backward((head(trial.model(inputs)) - wanted).square().mean())
    trial.optimizer.step()
    with pytest.raises(
        Misuse, match=r"this SGD is not tracked.*head\.bias, head\.weight.*job\.track"
    ):
        forgotten.step()


def test_an_optimizer_whose_state_would_be_lost(a_trial: Callable[..., Trial]) -> None:
    trial = a_trial()
    trial.optimizer = torch.optim.Adam(trial.model.parameters())
    trial.job.track(model=trial.model)
    with pytest.raises(Misuse, match=r"this Adam is not tracked.*begin without its state"):
        trial.take(first_step(trial))


def test_optimizers_that_need_not_be_tracked(a_trial: Callable[..., Trial]) -> None:
    """One without state; one of a model that is not tracked; one within a tracked object."""

    class Wrapped:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict

    class Around(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer.param_groups, {})
            self._inner = optimizer

        def state_dict(self) -> dict[str, Any]:
            return self._inner.state_dict()

    trial = a_trial()
    trial.job.track(model=trial.model)
    other = torch.nn.Linear(1, 1)
    of_other = torch.optim.Adam(other.parameters())
    other(torch.ones(1)).sum().backward()
    step = first_step(trial)
    trial.take(step)
    of_other.step()

    for wrap in (Wrapped, Around):
        wrapping = a_trial()
        wrapping.optimizer = torch.optim.Adam(wrapping.model.parameters())
        wrapping.job.track(model=wrapping.model, optimizer=wrap(wrapping.optimizer))
        wrapping.take(first_step(wrapping))


class Agent:
    """Holds a model in a state of its own."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.state_dict, self.load_state_dict = model.state_dict, model.load_state_dict


LOCAL: dict[str, Callable[[torch.nn.Module, torch.optim.Optimizer], dict[str, Any]]] = {
    "nowhere": lambda other, its: {},
    "both": lambda other, its: {"other": other, "its": its},
    "the model": lambda other, its: {"other": other},
    "an object": lambda other, its: {"agent": Agent(other)},
}


@pytest.mark.parametrize("where", LOCAL)
@pytest.mark.parametrize("when", ["within the loop", "after it"])
def test_a_model_and_its_optimizer_that_are_both_forgotten_are_noted(
    trial: Trial, where: str, when: str
) -> None:
    """Unless each rank is to train its own."""
    other = torch.nn.Linear(3, 1)
    its = torch.optim.Adam(other.parameters())
    trial.job.track_local(**LOCAL[where](other, its))

    def train() -> None:
        its.zero_grad()
        other(torch.ones(1, 3)).sum().backward()
        its.step()

    for step in trial.job.steps(until=3):
        for batch in step.batches(trial.data):
            step.backward(trial.loss(batch))
            if when == "within the loop":
                train()
        trial.optimizer.step()
        if when == "after it":
            train()
    first, *others = trial.agent.of(wire.Applied)
    told = "Adam.step() trains parameters that no tracked module has"
    assert [told in note for note in first.notes] == ([True] if where == "nowhere" else [])
    assert [applied.notes for applied in others] == [(), ()]


def test_an_untracked_optimizer_of_frozen_weights_trains_nothing(trial: Trial) -> None:
    other = torch.nn.Linear(3, 1).requires_grad_(False)
    its = torch.optim.Adam(other.parameters())
    for step in trial.job.steps(until=1):
        trial.take(step)
        its.step()
    (applied,) = trial.agent.of(wire.Applied)
    assert applied.notes == ()


class Bare(torch.optim.Optimizer):
    """Wraps an optimizer and does not call `Optimizer.__init__`, as accelerate's does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._inner = optimizer
        self.state, self.param_groups = optimizer.state, optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:
        self._inner.step()


def test_a_wrapper_that_is_an_optimizer_by_name_only(a_trial: Callable[..., Trial]) -> None:
    trial = a_trial(save_every_steps=1)
    trial.optimizer = Bare(torch.optim.Adam(trial.model.parameters()))
    trial.track()
    for step in trial.job.steps(until=2):
        trial.take(step)
    assert [staged.step for staged in trial.agent.of(wire.Staged)] == [1, 2]


def test_after_the_steps_any_optimizer_may_step(a_trial: Callable[..., Trial]) -> None:
    trial = a_trial()
    trial.track()
    for step in trial.job.steps(until=1):
        trial.take(step)
    torch.optim.Adam(trial.model.parameters()).step()
