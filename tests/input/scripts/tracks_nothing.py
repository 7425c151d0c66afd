import base
import torch

import everstep


def main(job: everstep.Job) -> None:
    model = torch.nn.Linear(base.WIDTH, 1)
    data = job.batches(base.Numbers(), global_batch=8, micro_batch=4)
    for step in job.steps(until=4):
        for batch in step.batches(data):
            step.backward(model(batch).square().mean())


everstep.run(main)
