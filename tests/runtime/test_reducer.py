"""What the reducer puts into `.grad`."""

import pytest
import torch

from everstep import buckets
from everstep import reducer as module
from everstep.group import LocalGroup
from everstep.reducer import Reducer

WIDTH = 4


class WithIdle(LocalGroup):
    """A group with a second rank, which has no gradients."""

    world = 2


GROUPS = pytest.mark.parametrize("group", [LocalGroup(), WithIdle()], ids=["alone", "two"])


class Training:
    """A rank that takes steps on one layer."""

    def __init__(self, layer: torch.nn.Module, group: LocalGroup) -> None:
        self.layer, self.group = layer, group
        self.reducer = Reducer()

    def reduce(self, scale: float, *, factor: float = 1.0) -> None:
        group, named = self.group, dict(self.layer.named_parameters())
        self.reducer.begin_step()
        self.reducer.begin(named, 1)
        rows = torch.full((2, WIDTH, 3, 3), scale)
        loss = self.layer(rows if isinstance(self.layer, torch.nn.Conv2d) else rows[:, :, 0, 0])
        self.reducer.backward(loss.sum(), overlap=None)
        self.reducer.flush(group)
        self.reducer.start_last(torch.zeros(1))
        assert self.reducer.end() is not None
        self.reducer.deliver([1.0] * len(named), factor)


def gradient(layer: torch.nn.Module) -> torch.Tensor:
    found = next(layer.parameters()).grad
    assert found is not None
    return found


def test_a_rank_that_is_alone_gets_its_own_gradients_and_has_no_buffers() -> None:
    layer, reducer = torch.nn.Linear(WIDTH, 1), Reducer()
    reducer.begin(dict(layer.named_parameters()), 1)
    reducer.backward(layer(torch.ones(2, WIDTH)).sum(), overlap=None)
    own = reducer._own[0]
    reducer.flush(LocalGroup())
    reducer.start_last(torch.zeros(1))
    assert reducer.end() is not None
    reducer.deliver([1.0, 1.0], 0.5)
    assert own is not None
    assert gradient(layer).data_ptr() == own.data_ptr()
    assert gradient(layer).tolist() == [[1.0] * WIDTH]
    assert all(bucket.flat is None for bucket in reducer._plan.buckets)


def test_a_rank_that_is_alone_may_have_no_gradient() -> None:
    layer, reducer = torch.nn.Linear(WIDTH, 1), Reducer()
    reducer.begin(dict(layer.named_parameters()), 1)
    reducer.flush(LocalGroup())
    reducer.start_last(torch.zeros(1))
    assert reducer.end() is not None
    reducer.deliver([0.0, 0.0], 0.5)
    assert [p.grad for p in layer.parameters()] == [None, None]
    assert reducer.measure(sampled=False) == 0.0


def test_a_rank_that_is_no_longer_alone_sums_in_buffers() -> None:
    training = Training(torch.nn.Linear(WIDTH, 1), LocalGroup())
    training.reduce(1.0)
    kept = gradient(training.layer)
    training.group = WithIdle()
    training.reduce(2.0)
    assert all(bucket.flat is not None for bucket in training.reducer._plan.buckets)
    assert gradient(training.layer).tolist() == [[4.0] * WIDTH]
    assert training.reducer.measure(sampled=False) == pytest.approx((WIDTH * 16 + 4) ** 0.5)
    training.group = LocalGroup()
    training.reduce(3.0)
    assert gradient(training.layer).tolist() == [[6.0] * WIDTH]
    assert training.reducer.measure(sampled=False) == pytest.approx((WIDTH * 36 + 4) ** 0.5)
    assert kept.tolist() == [[2.0] * WIDTH]


def test_the_gradient_is_no_copy_of_the_sum() -> None:
    training = Training(torch.nn.Linear(WIDTH, 1), WithIdle())
    places = set()
    for scale in (1.0, 2.0):
        training.reduce(scale)
        places.add(gradient(training.layer).untyped_storage().data_ptr())
    assert len(places) == 1
    assert gradient(training.layer).tolist() == [[4.0] * WIDTH]


@GROUPS
@pytest.mark.parametrize("keep", [lambda g: g, lambda g: g.view(-1), lambda g: g[0]])
def test_a_gradient_that_the_script_keeps_stays_as_it_is(keep, group) -> None:
    training = Training(torch.nn.Linear(WIDTH, 1), group)
    kept = []
    for number in range(1, 5):
        training.reduce(float(number))
        kept.append(keep(gradient(training.layer)))
    assert [k.flatten()[0].item() for k in kept] == [2.0, 4.0, 6.0, 8.0]


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="an older torch")
@GROUPS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_gradient_has_the_dtype_that_the_script_chose(
    dtype: torch.dtype, group: LocalGroup
) -> None:
    training = Training(torch.nn.Linear(WIDTH, 1), group)
    training.layer.weight.grad_dtype = dtype
    for scale in (1.0, 3.0):
        training.reduce(scale, factor=0.5)
        assert gradient(training.layer).dtype == dtype
        assert gradient(training.layer).tolist() == [[scale] * WIDTH]
        assert training.layer.bias.grad.dtype == torch.float32
    assert training.reducer.measure(sampled=False) == pytest.approx((WIDTH * 9 + 1) ** 0.5)


def test_without_torchs_count_of_uses_gradients_are_copies(monkeypatch) -> None:
    monkeypatch.setattr(buckets, "_storage_uses", None)
    training = Training(torch.nn.Linear(WIDTH, 1), WithIdle())
    training.reduce(1.0)
    kept = gradient(training.layer)
    training.reduce(2.0)
    assert kept.tolist() == [[2.0] * WIDTH]
    assert gradient(training.layer).tolist() == [[4.0] * WIDTH]


@GROUPS
def test_a_gradient_has_the_memory_format_of_its_parameter(group: LocalGroup) -> None:
    layer = torch.nn.Conv2d(WIDTH, 2, 3).to(memory_format=torch.channels_last)
    Training(layer, group).reduce(1.0)
    assert gradient(layer).stride() == layer.weight.stride()
    assert gradient(layer).eq(2.0).all()


@GROUPS
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_factor_and_the_norm_cover_all_gradients(
    exact: bool, dtype: torch.dtype, group: LocalGroup
) -> None:
    layer, reducer = torch.nn.Linear(WIDTH, 1).to(dtype), Reducer(exact=exact)
    named = dict(layer.named_parameters())
    reducer.begin(named, 1)
    loss = layer(torch.ones(2, WIDTH, dtype=dtype)).sum()
    reducer.backward(loss, overlap=None)
    reducer.flush(group)
    reducer.start_last(torch.zeros(1))
    assert reducer.end() is not None
    reducer.deliver([1.0, 1.0], 0.5)
    assert [p.grad.flatten().tolist() for p in named.values()] == [[1.0] * WIDTH, [1.0]]
    norm = reducer.measure(sampled=False)
    assert norm == pytest.approx((WIDTH + 1) ** 0.5, rel=1e-2)


@GROUPS
@pytest.mark.parametrize("rows", [7, 32])
def test_an_estimate_of_the_norm_is_near_it(rows: int, group: LocalGroup) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(module.BLOCK, module.SAMPLED * rows, bias=False)
    training = Training(layer, group)
    training.reducer.begin(dict(layer.named_parameters()), 1)
    weight = torch.randn(layer.weight.shape)
    training.reducer.backward((layer.weight * weight).sum(), overlap=None)
    training.reducer.flush(group)
    training.reducer.start_last(torch.zeros(1))
    assert training.reducer.end() is not None
    training.reducer.deliver([1.0], 1.0)
    exact = float(weight.norm())
    assert training.reducer.measure(sampled=False) == pytest.approx(exact, rel=1e-4)
    near = training.reducer.measure(sampled=True)
    assert near == pytest.approx(exact, rel=0.02)
    assert (near == training.reducer.measure(sampled=False)) is (
        layer.weight.numel() < module.LEAST_SAMPLED
    )


@GROUPS
@pytest.mark.parametrize("exact", [False, True])
def test_complex_gradients_are_added_as_pairs_of_real_numbers(
    exact: bool, group: LocalGroup
) -> None:
    torch.manual_seed(0)
    layer = torch.nn.ParameterDict(
        {
            "odd": torch.randn(3),
            "flat": torch.randn(2, 3, dtype=torch.complex64),
            "turned": torch.nn.Parameter(torch.randn(4, 2, dtype=torch.complex64).t()),
        }
    )
    named = dict(layer.named_parameters())

    def compute_loss(weight: complex) -> torch.Tensor:
        terms = (p * weight if p.is_complex() else p * abs(weight) for p in named.values())
        return sum((t + t.conj() * 2j).abs().square().sum() for t in terms)  # type: ignore[return-value]

    weights = (1 + 2j, -3j)
    losses = [compute_loss(w) for w in weights]
    wanted = torch.autograd.grad((losses[0] + losses[1]) / 2, list(named.values()))
    reducer = Reducer(exact=exact)
    reducer.begin(named, 2)
    for weight in weights:
        reducer.backward(compute_loss(weight), overlap=None)
    reducer.flush(group)
    reducer.start_last(torch.zeros(1))
    assert reducer.end() is not None
    reducer.deliver([1.0] * 3, 0.5)
    for parameter, gradient in zip(named.values(), wanted, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()
        assert torch.allclose(parameter.grad, gradient)
    norm = sum(float(g.abs().square().sum()) for g in wanted) ** 0.5
    assert reducer.measure(sampled=False) == pytest.approx(norm, rel=1e-5)


def test_buffers_that_no_loop_uses_any_more_are_freed() -> None:
    layers = [torch.nn.Linear(WIDTH, 1) for _ in range(3 * module.PLAN_STEPS)]
    reducer = Reducer()
    for step, layer in enumerate(layers):
        reducer.begin_step()
        for first, own in ((True, layer), (False, layers[-1 - step % 2])):
            reducer.begin(dict(own.named_parameters()), 1, first=first)
            reducer.flush(LocalGroup())
            reducer.start_last(torch.zeros(1))
            assert reducer.end() is not None
            reducer.deliver([0.0, 0.0], 1.0)
        assert len(reducer._plans) <= module.PLAN_STEPS + 3
    kept = list(reducer._plans.values())
    reducer.begin_step()
    reducer.begin(dict(layers[-1].named_parameters()), 1)
    assert reducer._plan in kept, "a plan in use stays"
