"""Memory for saves is allocated before the first save, even for optimizer state created in the first step."""

import os
from pathlib import Path

import pytest
import torch

from everstep.slots import COUNT
from everstep.staging import lay_out
from everstep_contract import wire
from runtime.a_job import Trial


def list_slots(folder: Path) -> dict[int, int]:
    """Inode → bytes."""
    return {s.st_ino: s.st_size for p in folder.glob("slot-*") if (s := p.stat())}


@pytest.mark.parametrize("every", [0, 1, 2])
def test_the_saves_after_the_first_step_have_room_for_the_optimizers_state(
    tmp_path: Path, every: int
) -> None:
    trial = Trial(tmp_path, save_every_steps=every)
    trial.optimizer = torch.optim.AdamW(trial.model.parameters())
    trial.track()
    prepared: dict[int, int] = {}
    for step in trial.job.steps(until=6):
        trial.take(step)
        trial.session.saves.copier.wait()
        found = list_slots(tmp_path)
        if step.number > 1 + 2 * every:
            assert not prepared or found == prepared, "a save allocated memory"
            prepared = found
    held = trial.session.capture()
    whole = lay_out(held.tensors, trial.session.saves.part, held.own)[1]
    assert len(prepared) == COUNT
    assert min(prepared.values()) >= whole


def test_the_agent_knows_the_files_of_a_save_by_the_process_that_staged_it(tmp_path: Path) -> None:
    """It deletes those of a process that was killed before it reported them."""
    trial = Trial(tmp_path).track()
    for step in trial.job.steps(until=1):
        trial.take(step)
    trial.session.saves.copier.wait()
    trial.session.saves.stage(1, whole=True)
    paths = {staged.path for staged in trial.agent.of(wire.Staged)}
    assert len(paths) == 2
    assert paths == {str(path) for path in tmp_path.glob(f"*-{os.getpid()}-????????.part")}


def test_the_agent_gets_the_layout_of_the_state_once_in_each_epoch(tmp_path: Path) -> None:
    """It keeps the layouts of an epoch only, and names the tensors that differ between ranks by them."""
    trial = Trial(tmp_path).track()
    for step in trial.job.steps(until=1):
        trial.take(step)
    held = trial.session.capture()
    for number, epoch in enumerate([1, 1, 2, 2], start=1):
        trial.session.saves.stage_held(wire.SaveHeld(epoch=epoch, step=number), held)
    told = [staged.packed for staged in trial.agent.of(wire.Staged)[-4:]]
    assert [bool(packed) for packed in told] == [False, False, True, False]
