"""A save is copied beside the next step, and yet holds the state of its boundary."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep import saves, slots, snapshot
from everstep.buffers import SMALL_BYTES, Buffers
from everstep.errors import StateError
from everstep.snapshot import Capture
from everstep.staging import NoRoom
from everstep.tracked import Tracked
from everstep_contract import wire
from everstep_contract.report import Cause
from runtime.a_job import Ended, Trial

LIMIT = 20.0


class Slow:
    """Replaces numpy's copy in the copier's thread. The first copy waits for `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self._copy = np.copyto
        monkeypatch.setattr(slots.np, "copyto", self)

    def __call__(self, room: Any, source: Any) -> None:
        self.began.set()
        assert self.go.wait(LIMIT)
        self._copy(room, source)


def weights_in(staged: wire.Staged) -> torch.Tensor:
    (found,) = [t for t in staged.tensors if t.name == "model/weight"]
    raw = Path(staged.path).read_bytes()[found.at : found.at + 12]
    return torch.frombuffer(bytearray(raw), dtype=torch.float32)


def steps(trial: Trial, seen: list[torch.Tensor]) -> Any:
    for step in trial.job.steps(until=3):
        seen.append(trial.model.weight.detach().clone().reshape(-1))
        yield step


def test_the_step_computes_meanwhile_and_waits_before_it_applies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(tmp_path, save_every_steps=1).track()
    slow, seen = Slow(monkeypatch), list[torch.Tensor]()
    computed, applied = threading.Event(), threading.Event()

    def train() -> None:
        for number, step in enumerate(steps(trial, seen), 1):
            for batch in step.batches(trial.data):
                step.backward(trial.loss(batch))
                if number == 2:
                    computed.set()
            if number == 2:
                applied.set()
            trial.optimizer.step()

    running = threading.Thread(target=train, daemon=True)
    running.start()
    assert slow.began.wait(LIMIT)
    assert computed.wait(LIMIT), "the second step must compute while the first one's save is copied"
    assert not applied.wait(0.2), "the second step's loop must not end before that copy is complete"
    slow.go.set()
    running.join(LIMIT)
    first, second, third = trial.agent.of(wire.Staged)
    assert [s.step for s in (first, second, third)] == [1, 2, 3]
    assert torch.equal(weights_in(first), seen[1])
    assert torch.equal(weights_in(second), seen[2])


def test_a_tensor_that_changes_in_the_middle_of_the_copy_costs_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(tmp_path, save_every_steps=1).track()
    slow = Slow(monkeypatch)
    for number, step in enumerate(trial.job.steps(until=3), 1):
        for batch in step.batches(trial.data):
            if number == 2 and not slow.go.is_set():
                assert slow.began.wait(LIMIT)
                with torch.no_grad():
                    trial.model.weight.add_(1.0)
                slow.go.set()
            step.backward(trial.loss(batch))
        if number == 1:
            slow.go.clear()
        trial.optimizer.step()
        if number > 1:
            slow.go.set()
    torn, second, third = trial.agent.of(wire.Staged)
    assert (torn.step, torn.path) == (1, "")
    assert "model/weight was changed while it was copied" in torn.problem
    assert second.path
    assert third.path
    assert list(tmp_path.glob("1-1-*")) == []


def test_a_copy_that_fails_costs_the_save_and_leaves_its_slot_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        monkeypatch.undo()
        raise RuntimeError("out of memory")

    trial = Trial(tmp_path, save_every_steps=1).track()
    monkeypatch.setattr(saves.digests, "tell", fail)
    for step in trial.job.steps(until=3):
        trial.take(step)
    assert [s.problem for s in trial.agent.of(wire.Staged)] == ["out of memory", "", ""]
    assert list(tmp_path.glob("1-1-*")) == []


def test_state_that_no_save_can_store_ends_the_job(tmp_path: Path) -> None:
    trial = Trial(tmp_path, save_every_steps=1).track()
    with pytest.raises(StateError, match="cannot store a builtins"):  # noqa: PT012 - the loop raises
        for step in trial.job.steps(until=4):
            trial.take(step)
            if step.number == 2:
                trial.optimizer.state[trial.model.weight]["seen"] = {1}


def test_a_last_state_that_is_too_large_for_the_agent_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(tmp_path).track()
    send = trial.agent.send

    def refuse(frame: Any) -> None:
        if isinstance(frame, wire.Staged) and frame.path:
            raise StateError("the state takes 75 MiB")
        send(frame)

    monkeypatch.setattr(trial.agent, "send", refuse)
    with pytest.raises(Ended, match="status 1"):  # noqa: PT012 - the loop as a whole is what raises
        for step in trial.job.steps(until=2):
            trial.take(step)
    (failed,) = trial.agent.of(wire.Failed)
    assert failed.message == "no checkpoint of the last step: the state takes 75 MiB"


def test_what_forward_changes_is_saved_as_of_the_boundary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BatchNorm's statistics and the random states are copied at the boundary."""
    trial = Trial(tmp_path, save_every_steps=1)
    norm = torch.nn.BatchNorm1d(3)
    trial.model = torch.nn.Sequential(norm, trial.model)  # type: ignore[assignment]
    trial.optimizer = torch.optim.SGD(trial.model.parameters(), lr=0.01)
    trial.track()
    slow, means = Slow(monkeypatch), list[torch.Tensor]()
    for step in trial.job.steps(until=2):
        assert norm.running_mean is not None
        means.append(norm.running_mean.clone())
        for batch in step.batches(trial.data):
            step.backward(trial.loss(batch))
            slow.go.set()
        trial.optimizer.step()
    first, _ = trial.agent.of(wire.Staged)
    (found,) = [t for t in first.tensors if t.name == "model/0.running_mean"]
    raw = Path(first.path).read_bytes()[found.at : found.at + 12]
    assert torch.equal(torch.frombuffer(bytearray(raw), dtype=torch.float32), means[1])
    assert not torch.equal(means[0], means[1])


def test_what_forward_changes_is_copied_under_each_name_of_its_module() -> None:
    model, tracked = torch.nn.Module(), Tracked()
    model.norm = torch.nn.BatchNorm1d(3)
    model.layers = torch.nn.Sequential(model.norm)
    tracked.add("model", model)
    shot = snapshot.take(tracked, Buffers(tracked), Capture(tree={}, tensors={}))
    held = shot.list_state()
    model.layers(torch.ones(2, 3))
    assert shot.find_changed(held) == ""
    assert torch.equal(held.tensors["model/layers.0.running_mean"], torch.zeros(3))


def test_tensors_that_stand_in_for_parameters_beside_the_copy_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(tmp_path, save_every_steps=1)
    trial.model.register_buffer("large", torch.ones(SMALL_BYTES))
    trial.track()
    armed, swapped, listed = threading.Event(), threading.Event(), threading.Event()
    list_state = snapshot.Snapshot.list_state

    def list_beside(shot: snapshot.Snapshot) -> snapshot.Capture:
        if not armed.is_set():
            return list_state(shot)
        assert swapped.wait(LIMIT)
        held = list_state(shot)
        listed.set()
        return held

    def wait_for_the_list(*_: Any) -> None:
        swapped.set()
        assert listed.wait(LIMIT)

    monkeypatch.setattr(snapshot.Snapshot, "list_state", list_beside)
    zeros = {key: torch.zeros_like(t) for key, t in trial.model.state_dict().items()}
    for number, step in enumerate(trial.job.steps(until=3), 1):
        before = trial.model.weight.detach().clone().reshape(-1)
        for batch in step.batches(trial.data):
            if number == 3 and not swapped.is_set():
                hook = trial.model.register_forward_pre_hook(wait_for_the_list)
                torch.func.functional_call(trial.model, zeros, torch.zeros(1, 3))
                hook.remove()
            step.backward(trial.loss(batch))
        trial.optimizer.step()
        if number == 2:
            armed.set()
    second = trial.agent.of(wire.Staged)[1]
    assert (second.step, second.problem) == (2, "")
    assert torch.equal(weights_in(second), before)
    (large,) = [t for t in second.tensors if t.name == "model/large"]
    raw = Path(second.path).read_bytes()[large.at : large.at + 4 * SMALL_BYTES]
    assert torch.frombuffer(bytearray(raw), dtype=torch.float32).eq(1).all()


def test_a_learning_rate_that_is_a_tensor_may_change_before_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(tmp_path, save_every_steps=1)
    trial.optimizer = torch.optim.SGD(trial.model.parameters(), lr=torch.tensor(0.01))
    trial.track()
    slow = Slow(monkeypatch)
    for number, step in enumerate(trial.job.steps(until=2), 1):
        trial.optimizer.param_groups[0]["lr"].fill_(0.01 / number)
        slow.go.set()
        trial.take(step)
    assert [s.problem for s in trial.agent.of(wire.Staged)] == ["", ""]


def test_a_script_that_fails_beside_a_copy_loses_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(tmp_path, save_every_steps=1).track()
    slow = Slow(monkeypatch)
    threading.Timer(0.2, slow.go.set).start()
    for number, step in enumerate(trial.job.steps(until=3), 1):
        if number == 2:
            with pytest.raises(BaseException, match="status 1"):
                trial.session.fail(Cause.USER_ERROR, "the script failed")
            break
        trial.take(step)
    frames = [type(f).__name__ for f in trial.agent.frames]
    assert frames.index("Staged") < frames.index("Failed")


def test_a_last_copy_that_does_not_end_counts_as_a_hang_and_the_wait_for_room_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank in a wait for others is under no limit."""
    trial = Trial(tmp_path).track()
    session = trial.session
    at, began = session.meter.position, session.meter.position.since
    copies: list[tuple[bool, float]] = []
    waits: list[bool] = []
    write, wait = session.saves.slots.write, session.agent.cut.wait

    def copy(*given: Any) -> Any:
        copies.append((at.waiting, at.since))
        if len(copies) < 3:
            raise NoRoom("full")
        return write(*given)

    def wait_for_room(seconds: float) -> bool:
        waits.append(at.waiting)
        return wait(0.001)

    monkeypatch.setattr(session.saves.slots, "write", copy)
    monkeypatch.setattr(session.agent.cut, "wait", wait_for_room)
    for step in trial.job.steps(until=1):
        trial.take(step)
        began = at.since
    assert waits == [True, True]
    assert [waiting for waiting, _ in copies] == [False] * 3
    since = [began, *(limited for _, limited in copies)]
    assert since == sorted(set(since)), "each try has the whole limit"
