"""Run by `test_no_room.py` with a tmpfs of 1 MiB as the folder `sys.argv[1]`: a worker of one rank
saves after each step, while room comes and goes.
"""

import os
import sys
from pathlib import Path

import torch

from everstep import staging
from everstep.shares import Part
from everstep_contract import wire
from runtime.a_job import Trial


def main(folder: Path) -> None:
    trial = Trial(folder, save_every_steps=1)
    trial.model = torch.nn.Linear(100, 1500)  # 0.6 MiB; one copy fits, two do not
    trial.optimizer = torch.optim.SGD(trial.model.parameters(), lr=0.01)
    inputs = torch.ones(12, 100)
    trial.dataset = torch.utils.data.TensorDataset(inputs, torch.ones(12, 1500))
    trial.data = trial.job.batches(trial.dataset, global_batch=6, micro_batch=2)
    trial.track()
    trial.agent.uploads = False
    send = trial.agent.send

    def free(frame: object) -> None:
        """Act as the agent: when the last save finds no room, upload and remove an older part."""
        send(frame)
        told = trial.agent.frames[-1]
        if isinstance(told, wire.Staged) and told.problem and told.step == 4:
            os.unlink(next(folder.glob("1-1-*.part")))

    trial.agent.send = free  # type: ignore[method-assign]
    for step in trial.job.steps(until=4):
        trial.take(step)
    staged = trial.agent.of(wire.Staged)
    assert [(s.step, bool(s.problem)) for s in staged] == [
        (1, False), (2, True), (3, True), (4, True), (4, False),
    ], [(s.step, s.problem) for s in staged]  # fmt: skip
    problem = staged[1].problem
    assert "no room for 0.6 MiB" in problem, problem
    assert "stagingMemory" in problem
    try:
        staging.write_part(str(folder / "x"), {"a": torch.zeros(2**20)}, Part())
    except staging.NoRoom:
        assert not (folder / "x").exists()
    else:
        raise AssertionError("4 MiB in 1")
    print("steps went on:", problem)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
