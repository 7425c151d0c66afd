import base

import everstep


def main(job: everstep.Job) -> None:
    model, optimizer = base.build(job)
    data = job.batches(base.Numbers(), global_batch=8, micro_batch=4)
    for step in job.steps(until=4):
        for batch in step.batches(data):
            step.backward(model(batch).square().mean())
            break
        optimizer.step()


everstep.run(main)
