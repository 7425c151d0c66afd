"""Several ranks stage the tracked state, and any number of ranks reads it back."""

import contextlib
import errno
import json
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from everstep import checkpoint_reader, digests, staging, state
from everstep.buffers import Buffers
from everstep.checkpoint_reader import Checkpoint
from everstep.errors import Misuse, StateError
from everstep.shares import part_of
from everstep.slots import Slots
from everstep.tracked import Tracked
from everstep.transfer import Taken
from everstep_contract import codec, wire
from everstep_contract.places import Place, Places
from everstep_contract.units import ONE_RANK
from runtime.a_commit import commit
from runtime.a_job import Trial


def staged_by(folder: Path, tensors: state.Tensors, world: int) -> list[wire.Staged]:
    parts = []
    for rank in range(world):
        path = str(folder / f"part-{rank}")
        described = staging.write_part(path, tensors, part_of(ONE_RANK, rank, world))
        parts.append(wire.Staged(epoch=1, step=1, path=path, tensors=described))
    return parts


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_tensors_staged_by_any_number_of_ranks_read_back_equal(tmp_path: Path, world: int) -> None:
    tensors = {
        "matrix": torch.randn(7, 5),
        "half": torch.randn(3, 2).to(torch.bfloat16),
        "strided": torch.randn(6, 4).t(),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
    }
    said = commit(tmp_path, staged_by(tmp_path, tensors, world))
    checkpoint = Checkpoint(said["manifest"], said["places"])
    for name, value in tensors.items():
        assert torch.equal(checkpoint.tensor(name), value), name
        assert checkpoint.tensor(name).dtype == value.dtype


def test_a_single_element_may_have_any_stride(tmp_path: Path) -> None:
    """As a row of a transposed column has, or a slice of one element. torch views no bytes of such a one."""
    model = nn.Module()
    model.register_buffer("sliced", torch.arange(6.0).view(2, 3)[1:, 1])
    model.register_buffer("column", torch.arange(3.0).view(1, 3).t())
    tensors, staged = dict(model.named_buffers()), []
    for rank in range(4):
        part, path = part_of(ONE_RANK, rank, 4), str(tmp_path / f"part-{rank}")
        described, _ = Slots(str(tmp_path), f"slot-{rank}-").write(path, tensors, part)
        staged.append(wire.Staged(epoch=1, step=1, path=path, tensors=described))
        assert len(digests.tell(tensors, part)) == digests.WITNESSES
    said = commit(tmp_path, staged)
    into = {"sliced": torch.zeros(2, 3)[1:, 1], "column": torch.zeros(1, 3).t()}
    found = Checkpoint(said["manifest"], said["places"]).read(into)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert all(found[name] is tensor for name, tensor in into.items())
    buffers = Buffers(a_registry({"model": model}))
    held = buffers.hold()
    model.sliced.zero_()
    assert buffers.find_changed(held) == "model.sliced"


def test_what_is_read_may_be_changed_without_touching_the_chunk(tmp_path: Path) -> None:
    said = commit(tmp_path, staged_by(tmp_path, {"x": torch.ones(4)}, 1))
    Checkpoint(said["manifest"], said["places"]).tensor("x").zero_()
    assert Checkpoint(said["manifest"], said["places"]).tensor("x").sum() == 4


def damage(place: Place) -> None:
    raw = bytearray(Path(place.path).read_bytes())
    raw[place.start + place.bytes * 2 // 3] ^= 1
    Path(place.path).write_bytes(raw)


def cut_short(place: Place) -> None:
    Path(place.path).write_bytes(Path(place.path).read_bytes()[:-1])


def remove(place: Place) -> None:
    Path(place.path).unlink()


HARM = [damage, cut_short, remove]


def read_places(said: dict[str, Any]) -> dict[str, Place]:
    return dict(codec.loads(Places, Path(said["places"]).read_bytes()).chunks)


@pytest.mark.parametrize("harm", HARM)
def test_a_chunk_that_is_damaged_is_read_from_another_copy(
    tmp_path: Path, harm: Callable[[Place], None]
) -> None:
    tensors = {f"t{i}": torch.randn(3, 1000) for i in range(200)}
    said = commit(tmp_path, staged_by(tmp_path, tensors, 2))
    _, second = sorted(read_places(said))
    asked = []

    def mend(digest: str, place: Place | None) -> Place:
        assert place is not None
        asked.append(digest)
        shutil.copy(tmp_path / "kept" / digest, tmp_path / f"copy-{digest}")
        return replace(place, path=str(tmp_path / f"copy-{digest}"))

    (tmp_path / "kept").mkdir()
    for digest, place in read_places(said).items():
        shutil.copy(place.path, tmp_path / "kept" / digest)
    harm(read_places(said)[second])
    found = Checkpoint(said["manifest"], said["places"], mend).read(dict.fromkeys(tensors))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert asked == [second]


@pytest.mark.parametrize("harm", HARM)
def test_a_chunk_whose_copies_are_all_damaged_is_refused(
    tmp_path: Path, harm: Callable[[Place], None]
) -> None:
    said = commit(tmp_path, staged_by(tmp_path, {"x": torch.ones(4)}, 1))
    (place,) = read_places(said).values()
    harm(place)
    with pytest.raises(StateError, match=r"copies of the chunk .* are damaged"):
        Checkpoint(said["manifest"], said["places"], lambda *_: place).tensor("x")
    with pytest.raises(StateError, match=r"the chunk .* is damaged"):
        Checkpoint(said["manifest"], said["places"]).tensor("x")


def test_only_the_chunks_that_a_rank_reads_are_asked_for(tmp_path: Path) -> None:
    """Each of 20 ranks has staged one row of `x`; this one reads two tensors of its own."""
    tensors = {"x": torch.randn(20, 3), "y": torch.randn(1, 5)}
    said = commit(tmp_path, staged_by(tmp_path, tensors, 20))
    all_places = read_places(said)
    Path(said["places"]).write_bytes(codec.dumps(Places(chunks={})))
    asked: list[tuple[str, Place | None]] = []

    def fetch(digest: str, damaged: Place | None) -> Place:
        asked.append((digest, damaged))
        return all_places[digest]

    checkpoint = Checkpoint(said["manifest"], said["places"], fetch)
    assert torch.equal(checkpoint.tensor("y"), tensors["y"])
    (first,) = asked
    assert torch.equal(checkpoint.tensor("x"), tensors["x"])
    assert sorted(asked) == sorted((digest, None) for digest in all_places)
    assert asked.count(first) == 1
    with pytest.raises(StateError, match="was not fetched"):
        Checkpoint(said["manifest"], said["places"]).tensor("x")


@contextlib.contextmanager
def descriptors(more: int) -> Iterator[None]:
    """A context in which this process can open only so many more files."""
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(0, held + 1 + more), former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, former)


def test_a_checkpoint_may_have_more_chunks_than_the_process_may_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_reader, "MOST_MAPS", 16)
    tensors = {"x": torch.randn(200, 3)}
    said = commit(tmp_path, staged_by(tmp_path, tensors, 200))
    with descriptors(64):
        found = Checkpoint(*places_of(said)).tensor("x")
    assert torch.equal(found, tensors["x"])


def test_a_process_without_descriptors_does_not_take_a_chunk_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "_touch", lambda self: None)
    reader = Checkpoint(*places_of(commit(tmp_path, staged_by(tmp_path, {"x": torch.ones(4)}, 1))))
    with descriptors(-1000), pytest.raises(StateError, match="Too many open files"):
        reader.tensor("x")


def test_a_module_is_read_into_its_own_tensors(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(700, 500), nn.BatchNorm1d(500))
    tensors: state.Tensors = {}
    tree = a_registry({"model": model}).capture(tensors)
    reader = Checkpoint(*places_of(commit(tmp_path, staged_by(tmp_path, tensors, 2))))
    read: list[Mapping[str, torch.Tensor]] = []

    def spy(wanted: Mapping[str, torch.Tensor | None]) -> Mapping[str, torch.Tensor]:
        read.append(reader.read(wanted))
        return read[-1]

    new = nn.Sequential(nn.Linear(700, 500), nn.BatchNorm1d(500))
    a_registry({"model": new}).load(["model"], tree, spy, torch.device("cpu"))
    for name, own in new.state_dict(keep_vars=True).items():
        assert torch.equal(own, model.state_dict()[name])
        assert read[0][f"model/{name}"] is own


def test_a_piece_that_lies_scattered_in_its_tensor_is_read(tmp_path: Path) -> None:
    """For example, a tensor that is sharded by columns."""
    whole = torch.randn(6, 4)
    parts = []
    for rank in range(2):
        path = tmp_path / f"part-{rank}"
        path.write_bytes(whole[:, 2 * rank : 2 * rank + 2].contiguous().numpy().tobytes())
        columns = wire.StagedTensor(
            name="x", dtype="float32", shape=(6, 4), offsets=(0, 2 * rank), lengths=(6, 2), at=0
        )
        parts.append(wire.Staged(epoch=1, step=1, path=str(path), tensors=(columns,)))
    assert torch.equal(Checkpoint(*places_of(commit(tmp_path, parts))).tensor("x"), whole)


def test_pieces_that_lie_otherwise_in_the_file_than_in_the_tensor_are_read(tmp_path: Path) -> None:
    """A row has 2,804 bytes, so the second rank's rows do not begin at a multiple of 64 bytes."""
    tensors = {"x": torch.randn(1001, 701)}
    reader = Checkpoint(*places_of(commit(tmp_path, staged_by(tmp_path, tensors, 2))))
    into = torch.zeros(1001, 701)
    assert reader.read({"x": into})["x"] is into
    assert torch.equal(into, tensors["x"])


def test_a_script_that_sets_a_default_device_can_resume(tmp_path: Path) -> None:
    """As `torch.set_default_device("cuda")` does."""
    tensors = {"x": torch.randn(7, 5), "y": torch.randn(3)}
    reader = Checkpoint(*places_of(commit(tmp_path, staged_by(tmp_path, tensors, 2))))
    other = torch.zeros(7, 5, dtype=torch.float64)
    with torch.device("meta"):
        found = reader.read({"x": other, "y": None}) | {"z": reader.tensor("y")}
    assert torch.equal(found["x"], tensors["x"])
    assert torch.equal(found["y"], tensors["y"])
    assert torch.equal(found["z"], tensors["y"])


def places_of(said: dict[str, Any]) -> tuple[str, str]:
    return said["manifest"], said["places"]


def test_a_manifest_that_is_broken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(StateError, match=r"cannot read the checkpoint .*manifest\.json"):
        Checkpoint(str(tmp_path / "manifest.json"), str(tmp_path / "places.json"))


class Ema:
    """A user's object that is no module, but has `state_dict` and `load_state_dict`."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"decay": 0.9, "shadow": [torch.zeros(2)]}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = values


def full_state() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}]
    )
    schedule = lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    average = swa_utils.AveragedModel(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return {
        "model": model, "optimizer": optimizer, "schedule": schedule, "average": average,
        "scaler": scaler, "ema": Ema(), "temperature": torch.ones(2),
    }  # fmt: skip


def train(objects: dict[str, Any], steps: int) -> list[float]:
    losses = []
    for number in range(steps):
        torch.manual_seed(number)
        loss = objects["model"](torch.randn(8, 3)).square().mean()
        objects["optimizer"].zero_grad()
        objects["scaler"].scale(loss).backward()
        objects["scaler"].step(objects["optimizer"])
        objects["scaler"].update()
        objects["schedule"].step()
        objects["average"].update_parameters(objects["model"])
        objects["ema"].values["shadow"][0] += loss.detach()
        objects["temperature"] *= 0.9
        losses.append(loss.item())
    return losses


def a_registry(objects: dict[str, Any]) -> Tracked:
    tracked = Tracked()
    for name, thing in objects.items():
        tracked.add(name, thing)
    return tracked


def test_training_goes_on_from_a_capture_as_if_it_had_not_stopped() -> None:
    old = full_state()
    train(old, 3)
    tensors: state.Tensors = {}
    tree = json.loads(json.dumps(a_registry(old).capture(tensors)))
    kept = {name: t.clone() for name, t in tensors.items()}
    expected = train(old, 4)
    new = full_state()
    a_registry(new).load(list(new), tree, lambda wanted: kept, torch.device("cpu"))
    assert train(new, 4) == expected
    assert new["schedule"].get_last_lr() == old["schedule"].get_last_lr()
    assert torch.equal(new["average"].module[0].weight, old["average"].module[0].weight)
    assert torch.equal(new["ema"].values["shadow"][0], old["ema"].values["shadow"][0])
    assert torch.equal(new["temperature"], old["temperature"])
    assert new["scaler"].state_dict() == old["scaler"].state_dict()


CPU = torch.device("cpu")


class Wide(torch.optim.Optimizer):
    """Keeps its moments in float32, as optimizers for half-precision weights do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                own = self.state[p]
                own.setdefault("moment", torch.zeros(p.shape)).add_(p.grad.float(), alpha=1 / 3)
                p.data.add_(own["moment"].to(p.dtype), alpha=-group["lr"])


class Nested(Wide):
    """Keeps them in lists and dicts, as Shampoo and SOAP do their factors, beside a text."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for own in self.state.values():
            moment = own["moment"].clone()
            own.update(factors=[moment, {"deep": (moment * 2, 3)}], kind="wide")


@pytest.mark.parametrize("kind", [torch.optim.NAdam, Wide, Nested])
def test_the_state_of_an_optimizer_keeps_its_dtype(kind: Any) -> None:
    def build() -> tuple[Tracked, nn.Module, Any]:
        torch.manual_seed(0)
        model, tracked = nn.Linear(3, 1).bfloat16(), Tracked()
        tracked.add("model", model)
        tracked.add("optimizer", optimizer := kind(model.parameters()))
        return tracked, model, optimizer

    def train(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()

    first, model, optimizer = build()
    for _ in range(3):
        train(model, optimizer)
    held: state.Tensors = {}
    trees = first.capture(held)
    stored = {n: t.detach().clone() for n, t in held.items()}
    second, same, loaded = build()
    second.load(["model", "optimizer"], trees, lambda wanted: {n: stored[n] for n in wanted}, CPU)
    found: state.Tensors = {}
    second.capture(found)
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in held.items()}
    assert all(torch.equal(t, held[n]) for n, t in found.items())
    assert {own.get("kind") for own in loaded.state.values()} <= {None, "wide"}
    for each in ((model, optimizer), (same, loaded)):
        train(*each)
    assert torch.equal(model.weight, same.weight)
    other, narrow = Tracked(), nn.Linear(3, 1)
    other.add("model", narrow)
    other.add("optimizer", cast := kind(narrow.parameters()))
    other.load(["model", "optimizer"], trees, lambda wanted: {n: stored[n] for n in wanted}, CPU)
    moments = state.list_tensors(
        [t for own in cast.state.values() for k, t in own.items() if k != "step"]
    )
    assert {t.dtype for t in moments} == {torch.float32}, "as the weights of the edited script"


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_fused_optimizer_goes_on_with_parameters_in_another_memory_format(kind: Any) -> None:
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def build() -> tuple[Tracked, Any]:
        torch.manual_seed(0)
        model, tracked = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), Tracked()
        tracked.add("model", model)
        tracked.add("optimizer", kind(model.parameters(), lr=0.1, fused=True, **settings))
        return tracked, model

    def train(tracked: Tracked, model: nn.Module) -> None:
        model.weight.grad = torch.empty_like(model.weight).copy_(
            torch.arange(24.0).view(3, 2, 2, 2)
        )
        tracked.objects["optimizer"][1].step()

    first, second = build(), build()
    train(*first)
    held: state.Tensors = {}
    trees = first[0].capture(held)
    stored = {n: t.clone(memory_format=torch.contiguous_format) for n, t in held.items()}
    second[0].load(
        ["model", "optimizer"], trees, lambda wanted: {n: stored[n] for n in wanted}, CPU
    )
    for each in (first, second):
        train(*each)
    assert torch.equal(first[1].weight, second[1].weight)


@pytest.mark.parametrize("stored_as", ["tensor", "number"])
def test_a_script_goes_on_setting_what_it_holds_of_an_optimizer(stored_as: str) -> None:
    """Its learning rate in a tensor, one of its groups, its state: also after they were loaded."""
    first = torch.tensor(0.5) if stored_as == "tensor" else 0.5
    tensors: state.Tensors = {}
    model, rate = nn.Linear(2, 1), torch.tensor(0.1)
    new = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.1)
    ((group,), groups, own) = new.param_groups, new.param_groups, new.state

    stored = nn.Linear(2, 1)
    old = torch.optim.SGD(stored.parameters(), lr=first, momentum=0.9)
    stored(torch.ones(1, 2)).sum().backward()
    old.step()
    tree = a_registry({"model": stored, "optimizer": old}).capture(tensors)
    registry = a_registry({"model": model, "optimizer": new})
    registry.load(["optimizer"], tree, lambda wanted: tensors, CPU)

    assert new.param_groups is groups
    assert groups[0] is group
    assert group["lr"] is rate
    assert (float(rate), group["momentum"]) == (0.5, 0.9)
    assert new.state is own
    assert torch.equal(own[model.weight]["momentum_buffer"], torch.ones(1, 2))


def test_an_optimizer_is_stored_by_the_names_of_its_parameters() -> None:
    objects = full_state()
    train(objects, 1)
    tensors: state.Tensors = {}
    tree = a_registry(objects).capture(tensors)["optimizer"]["state"]
    assert tree["param_groups"][1]["params"] == ["model.2.weight", "model.2.bias"]
    assert "optimizer/state/model.2.bias/exp_avg" in tensors


def test_parameters_in_another_order_get_their_own_state() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    old = torch.optim.SGD(list(model.parameters()), lr=0.1, momentum=0.9)
    model(torch.randn(1, 2)).sum().backward()
    old.step()
    tensors: state.Tensors = {}
    tree = a_registry({"model": model, "optimizer": old}).capture(tensors)
    new = torch.optim.SGD(list(model.parameters())[::-1], lr=0.1, momentum=0.9)
    registry = a_registry({"model": model, "optimizer": new})
    registry.load(["optimizer"], tree, lambda wanted: tensors, torch.device("cpu"))
    for parameter in model.parameters():
        assert torch.equal(
            new.state[parameter]["momentum_buffer"], old.state[parameter]["momentum_buffer"]
        )


def test_a_wrapped_model_loads_what_a_bare_one_saved() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.module = inner

    bare, wrapped = nn.Linear(2, 2), Wrapper(nn.Linear(2, 2))
    tensors: state.Tensors = {}
    tree = a_registry({"model": bare}).capture(tensors)
    a_registry({"model": wrapped}).load(
        ["model"], tree, lambda wanted: tensors, torch.device("cpu")
    )
    assert torch.equal(wrapped.module.weight, bare.weight)


def resumed(trial: Trial, a_trial: Callable[..., Trial], folder: Path) -> Trial:
    for step in trial.job.steps(until=2):
        trial.take(step)
    return a_trial(**commit(folder, trial.agent.of(wire.Staged)[-1:]))


def test_a_job_resumes_with_its_state_and_random_numbers(
    trial: Trial, a_trial: Callable[..., Trial], tmp_path: Path
) -> None:
    after = resumed(trial, a_trial, tmp_path)
    drawn = torch.rand(3)
    torch.manual_seed(99)
    after.track()
    assert torch.equal(after.model.weight, trial.model.weight)
    step = next(iter(after.job.steps(until=3)))
    assert step.number == 3
    assert torch.equal(torch.rand(3), drawn)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: step / 10),
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, total_iters=10),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[4],
    ),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=10),
}


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["a number", "a tensor"])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_that_is_made_after_its_optimizer_was_loaded(
    a_trial: Callable[..., Trial], tmp_path: Path, kind: str, rate: Any
) -> None:
    """One that is made sets the learning rate to that of its beginning."""

    def train(trial: Trial, until: int) -> list[float]:
        held = rate.clone() if isinstance(rate, torch.Tensor) else rate
        trial.optimizer = torch.optim.SGD(trial.model.parameters(), lr=held, momentum=0.9)
        trial.track()
        schedule = SCHEDULES[kind](trial.optimizer)
        trial.job.track(schedule=schedule)
        rates = []
        for step in trial.job.steps(until=until):
            trial.take(step)
            rates.append(float(trial.optimizer.param_groups[0]["lr"]))
            schedule.step()
        return rates

    undisturbed = train(a_trial(), 6)
    first = a_trial()
    rates = train(first, 3)
    rates += train(a_trial(**commit(tmp_path, first.agent.of(wire.Staged)[-1:])), 6)
    assert rates == undisturbed


def taken_over(folder: Path, how: str, first: Trial, after: Callable[..., Trial]) -> Trial:
    """A rank that goes on after `first`, whose script `after` has run up to `job.steps`."""
    if how == "restarts":
        trial = after(**commit(folder, first.agent.of(wire.Staged)[-1:]))
        trial.session.settle(9)
        return trial
    held, trial = first.session.capture(), after()
    trial.session.settle(9)
    applied = first.session.applied
    trial.session.adopt(
        Taken(applied=applied, tree=held.tree, tensors=held.tensors, parts=frozenset())
    )
    return trial


@pytest.mark.parametrize("how", ["restarts", "joins"])
@pytest.mark.parametrize("edited", [False, True])
def test_a_parameter_that_the_script_has_unfrozen_stays_so(
    tmp_path: Path, how: str, edited: bool
) -> None:
    """Unless the script was edited since: then it freezes what it says."""

    def begin(folder: str, frozen: bool = True, **start: Any) -> Trial:
        (tmp_path / folder).mkdir()
        trial = Trial(tmp_path / folder, **start).track()
        trial.model.bias.requires_grad_(not frozen)
        return trial

    first = begin("first")
    for step in first.job.steps(until=3):
        if step.number == 2:
            first.model.bias.requires_grad_(True)
            first.model.weight.requires_grad_(False)
        first.take(step)
    after = taken_over(tmp_path, how, first, lambda **s: begin("after", not edited, **s)).model
    assert [after.weight.requires_grad, after.bias.requires_grad] == [edited, True]


@pytest.mark.parametrize("how", ["restarts", "joins"])
@pytest.mark.parametrize("edited", [False, True])
def test_a_module_that_the_script_has_put_in_eval_mode_stays_so(
    tmp_path: Path, how: str, edited: bool
) -> None:
    def begin(folder: str, frozen: bool = True, **start: Any) -> Trial:
        (tmp_path / folder).mkdir()
        trial = Trial(tmp_path / folder, **start)
        layers = [nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.2)), nn.Dropout(0.3)]
        trial.model = nn.Sequential(nn.Linear(3, 1), *layers)  # type: ignore[assignment]
        trial.optimizer = torch.optim.SGD(trial.model.parameters(), lr=0.1)
        layers[1].train(not frozen)
        return trial.track()

    def modes(trial: Trial) -> list[bool]:
        return [module.training for module in trial.model.modules()]

    first = begin("first")
    for step in first.job.steps(until=2):
        first.take(step)
        first.model.eval()
        first.model[1][0].train()
    assert modes(first) == [False, False, False, True, False, False]
    after = taken_over(tmp_path, how, first, lambda **s: begin("after", not edited, **s))
    assert modes(after) == ([True] * 6 if edited else modes(first))


def test_a_job_that_had_reached_the_end_has_no_more_steps(
    trial: Trial, a_trial: Callable[..., Trial], tmp_path: Path
) -> None:
    after = resumed(trial, a_trial, tmp_path).track()
    assert list(after.job.steps(until=2)) == []
    assert after.session.finished
    assert after.agent.of(wire.Staged) == []


def test_another_name_than_the_checkpoint_has_is_refused(
    trial: Trial, a_trial: Callable[..., Trial], tmp_path: Path
) -> None:
    after = resumed(trial, a_trial, tmp_path)
    with pytest.raises(
        StateError, match=r"track\(net=…\): the checkpoint has no 'net', it has model, optimizer"
    ):
        after.job.track(net=after.model)


def test_another_shape_than_the_checkpoint_has_is_refused(
    trial: Trial, a_trial: Callable[..., Trial], tmp_path: Path
) -> None:
    after = resumed(trial, a_trial, tmp_path)
    with pytest.raises(StateError, match="model: the checkpoint does not fit"):
        after.job.track(model=nn.Linear(4, 4))


@pytest.mark.parametrize(
    "stored", [torch.tensor(2.0), torch.ones(1), torch.ones(3), torch.ones(1, 2)]
)
@pytest.mark.parametrize("how", ["restarts", "joins"])
def test_so_is_another_shape_of_a_tensor(tmp_path: Path, stored: torch.Tensor, how: str) -> None:
    """Also if torch would repeat the stored numbers to fill it."""

    def begin(folder: str, scale: torch.Tensor, **start: Any) -> Trial:
        (tmp_path / folder).mkdir()
        trial = Trial(tmp_path / folder, **start).track()
        trial.job.track(scale=scale)
        return trial

    first = begin("first", stored)
    for step in first.job.steps(until=2):
        first.take(step)
    shapes = re.escape(f"of shape {tuple(stored.shape)}, and the script tracks one of shape (2,).")
    own = torch.zeros(2)
    with pytest.raises(StateError, match=f"^scale: the checkpoint does not fit: .*{shapes} Build"):
        taken_over(tmp_path, how, first, lambda **start: begin("after", own, **start))
    assert own.tolist() == [0.0, 0.0]


def test_what_is_no_longer_tracked_is_noted(
    trial: Trial, a_trial: Callable[..., Trial], tmp_path: Path
) -> None:
    after = resumed(trial, a_trial, tmp_path)
    after.job.track(model=after.model)
    for step in after.job.steps(until=3):
        after.take(step)
    (applied,) = after.agent.of(wire.Applied)
    (note,) = applied.notes
    assert note.startswith("the checkpoint also has optimizer, which the script does not track")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_of_another_dtype_than_the_checkpoint_is_noted(
    trial: Trial, a_trial: Callable[..., Trial], tmp_path: Path, dtype: torch.dtype
) -> None:
    after = resumed(trial, a_trial, tmp_path)
    after.job.track(model=after.model.to(dtype))
    notes = after.session.findings.notes
    if dtype == torch.float32:
        assert notes == []
    else:
        (note,) = notes
        assert "model/bias (float32, now float64), model/weight (float32, now float64)" in note
        assert "not continued bit for bit" in note


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (3, "has no state_dict"),
        (nn.parallel.DataParallel(nn.Linear(1, 1)), "track the model that it wraps"),
    ],
)
def test_what_has_no_state_cannot_be_tracked(thing: Any, words: str) -> None:
    with pytest.raises(Misuse, match=words):
        Tracked().add("thing", thing)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_tensor_into_which_nothing_can_be_loaded_is_refused(persistent: bool) -> None:
    """Otherwise the run would train, and could not be continued after its first loss."""
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].register_buffer("mask", torch.ones(1).expand(3), persistent=persistent)
    model[0].register_buffer("ids", torch.arange(3).expand(1, -1))
    if not persistent:
        Tracked().add("model", model)
        return
    with pytest.raises(Misuse, match=r"several elements of model\.0\.mask are .*clone"):
        Tracked().add("model", model)
    with pytest.raises(Misuse, match="several elements of shared are"):
        Tracked().add("shared", torch.zeros(()).expand(2))


def test_an_optimizer_of_an_untracked_model_is_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1)
    with pytest.raises(Misuse, match=r"shape \(1, 3\) that no tracked module has"):
        a_registry({"optimizer": optimizer}).capture({})


def test_a_part_that_finds_no_room_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without inodes not even an empty file can be made, and without address space it cannot be mapped."""
    tensors = {"x": torch.ones(4)}
    part = part_of(ONE_RANK, 0, 1)
    with pytest.raises(staging.NoRoom, match="no room for"):
        staging.write_part(str(tmp_path / "missing/part"), tensors, part)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(staging.mmap, "mmap", refuse)
    with pytest.raises(staging.NoRoom, match="Cannot allocate memory"):
        staging.write_part(str(tmp_path / "part"), tensors, part)
    assert list(tmp_path.iterdir()) == []
