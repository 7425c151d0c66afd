"""State that belongs to one rank: that rank saves it, and the rank with the same number gets it back."""

import asyncio
import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from agent.gang import Gang, assert_exact
from everstep import Job, run
from everstep.errors import Misuse, StateError
from everstep_agent.pod import spawn
from everstep_contract import codec, report, wire
from everstep_contract.manifest import Manifest
from runtime.a_commit import commit
from runtime.a_job import Trial


class Buffer:
    """A growing buffer of the samples that this rank has seen."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "count": len(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def a_trial(folder: Path, **start: Any) -> tuple[Trial, Buffer]:
    folder.mkdir(exist_ok=True)
    trial, buffer = Trial(folder, **start), Buffer()
    trial.job.track_local(buffer=buffer)
    return trial.track(), buffer


def saved(folder: Path) -> wire.Staged:
    """The save of one rank after a step in which it has seen 1 and 2. Step 2 changes the buffer during the copy."""
    trial, buffer = a_trial(folder)
    steps = trial.job.steps(until=3)
    trial.take(next(steps))
    buffer.seen += [torch.tensor([1.0]), torch.tensor([2.0, 2.0])]
    trial.job.save()
    trial.take(step := next(steps))
    assert step.number == 2
    buffer.seen[0].fill_(9.0)
    trial.session.saves.copier.wait()
    (staged,) = trial.agent.of(wire.Staged)
    return staged


def notes(trial: Trial) -> list[str]:
    return trial.session.findings.notes


def test_it_comes_back_as_it_was_at_the_boundary(tmp_path: Path) -> None:
    said = commit(tmp_path, [saved(tmp_path / "first")])
    trial, buffer = a_trial(tmp_path / "second", **said)
    assert [t.tolist() for t in buffer.seen] == [[1.0], [2.0, 2.0]]
    assert notes(trial) == []


def test_it_is_no_part_of_what_ranks_compare(tmp_path: Path) -> None:
    staged = saved(tmp_path / "first")
    plain = Trial(tmp_path / "first").track()
    plain.session.saves.stage(1)
    (other,) = plain.agent.of(wire.Staged)
    assert any(t.name.startswith("$local/0/") for t in staged.tensors)
    assert staged.layout == other.layout


def test_another_number_of_ranks_drops_it_with_a_note(tmp_path: Path) -> None:
    said = commit(tmp_path, [saved(tmp_path / "first")])
    trial, buffer = a_trial(tmp_path / "second", **said, world=2)
    assert buffer.seen == []
    assert notes(trial) == [
        "the local state buffer begins as the script made it: it was saved by 1 rank, and the world size"
        " is 2 now"
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_save_that_one_rank_made_every_rank_tells_who_has_lost_it(
    tmp_path: Path, rank: int
) -> None:
    said = commit(tmp_path, [saved(tmp_path / "first")])
    path = Path(said["manifest"])
    of_two = replace(codec.loads(Manifest, path.read_bytes()), world=2)
    path.write_bytes(codec.dumps(of_two))
    trial, buffer = a_trial(tmp_path / "second", **said, world=2, rank=rank)
    assert len(buffer.seen) == (2 if rank == 0 else 0)
    (note,) = notes(trial)
    assert note.endswith("the checkpoint has none of rank 1")


def test_state_under_a_new_name_begins_anew_with_a_note_that_names_the_old_one(
    tmp_path: Path,
) -> None:
    said = commit(tmp_path, [saved(tmp_path / "first")])
    (tmp_path / "second").mkdir()
    trial, renamed = Trial(tmp_path / "second", **said).track(), Buffer()
    trial.job.track_local(replay=renamed)
    assert renamed.seen == []
    assert notes(trial) == [
        "the local state replay begins as the script made it: the checkpoint has the local state buffer only"
    ]
    next(trial.job.steps(until=3))
    assert notes(trial)[1].startswith("the checkpoint also has the local state buffer, which")


def test_state_that_is_no_longer_tracked_is_told_of(tmp_path: Path) -> None:
    said = commit(tmp_path, [saved(tmp_path / "first")])
    (tmp_path / "second").mkdir()
    trial = Trial(tmp_path / "second", **said).track()
    next(trial.job.steps(until=3))
    assert notes(trial) == [
        "the checkpoint also has the local state buffer, which the script does not track: it is ignored, and later"
        " checkpoints will lack it"
    ]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    said = commit(tmp_path, [saved(tmp_path / "first")])
    (tmp_path / "second").mkdir()
    trial = Trial(tmp_path / "second", **said)
    with pytest.raises(StateError, match=r"of kind tensor, .* the checkpoint has the kind object"):
        trial.job.track_local(buffer=torch.zeros(2))


def test_it_is_named_before_the_first_step(tmp_path: Path) -> None:
    trial = Trial(tmp_path).track()
    next(trial.job.steps(until=2))
    with pytest.raises(Misuse, match=r"job\.track_local comes before job\.steps"):
        trial.job.track_local(buffer=Buffer())


def a_script(job: Job, *, until: int, begins_at: int) -> None:
    """Each rank has its own count, and expects it when it resumes."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = torch.tensor([100.0 * job.rank])
    job.track(model=model, optimizer=optimizer)
    job.track_local(count=count)
    assert count.item() == 100 * job.rank + begins_at, (count, job.rank)
    data = job.batches(list(range(1000)), global_batch=6, micro_batch=2)
    for step in job.steps(until=until):
        for batch in step.batches(data):
            step.backward(model(torch.tensor([[float(i), 1.0] for i in batch])).mean())
        optimizer.step()
        count += 1


async def train(
    folder: Path, monkeypatch: pytest.MonkeyPatch, uid: str, *, until: int, begins_at: int
) -> None:
    forked = spawn.ForkSpawner(lambda: run(partial(a_script, until=until, begins_at=begins_at)))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: forked)
    async with asyncio.timeout(100), Gang(folder, 3, uid=uid, save_every_steps=2) as gang:
        ends = await gang.reports(60)
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}, ends
        await assert_exact(gang, until)


async def test_three_ranks_each_get_their_own_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await train(tmp_path, monkeypatch, "uid-1", until=4, begins_at=0)
    await train(tmp_path, monkeypatch, "uid-2", until=6, begins_at=4)


def a_script_that_goes_on(job: Job) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = torch.tensor([100.0 * job.rank])
    job.track(model=model, optimizer=optimizer)
    job.track_local(count=count)
    data = job.batches(list(range(1000)), global_batch=6, micro_batch=2)
    for step in job.steps(until=100):
        for batch in step.batches(data):
            time.sleep(0.02)
            step.backward(model(torch.tensor([[float(i), 1.0] for i in batch])).mean())
        optimizer.step()


async def test_ranks_that_join_in_place_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = spawn.ForkSpawner(lambda: run(a_script_that_goes_on))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: forked)
    async with asyncio.timeout(100), Gang(tmp_path, 3, in_place=1) as gang:
        await gang.until(lambda s: s.step >= 3)
        os.kill(gang.worker(1), signal.SIGKILL)
        seen = await gang.until(lambda s: s.notes)
        assert seen.notes[-1].startswith("ranks join after step ")
        assert seen.notes[-1].endswith(": their local state count begins as the script made it")
        ends = await gang.reports(60)
        assert {r.cause for r in ends.values()} == {report.Cause.DONE}
