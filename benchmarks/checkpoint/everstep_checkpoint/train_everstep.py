"""The training loop under Everstep, which saves by itself."""

import torch

import everstep
from everstep_checkpoint import workload

PLAN = workload.read_plan()
SAMPLES = 4096


class Data(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.rows = torch.randn(SAMPLES, workload.WIDTH)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return list(self.rows[torch.tensor(indices)])


def main(job: everstep.Job) -> None:
    model = workload.build_model(PLAN.mib)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    job.track(model=model, optimizer=optimizer)
    data = job.batches(
        Data(),
        global_batch=PLAN.batch * job.world_size,
        micro_batch=PLAN.batch,
        collate=torch.stack,
    )
    clock = workload.Clock(PLAN.folder, job.rank)
    for step in job.steps(until=PLAN.steps):
        for inputs in step.batches(data):
            clock.begin(step.number)
            step.backward(workload.compute_loss(model, inputs))
            clock.computed()
        clock.applying()
        optimizer.step()
        clock.applied()
    clock.write()


everstep.run(main, seed=0)
