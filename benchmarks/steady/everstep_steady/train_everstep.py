"""The training loop under Everstep."""

import torch

import everstep
from everstep_recovery import layers
from everstep_steady import workload


def main(job: everstep.Job) -> None:
    torch.set_num_threads(1)
    model = workload.build_model()
    if workload.read_shard() > 1:
        layers.shard_model(model, job.mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.LEARNING_RATE)
    job.track(model=model, optimizer=optimizer)
    data = job.batches(
        workload.Numbers(),
        global_batch=workload.BATCH * job.world_size,
        micro_batch=workload.BATCH,
        collate=torch.stack,
    )
    clock, trace = workload.Clock(job.rank), workload.start_trace(job.rank)
    for step in job.steps(until=workload.MOST_STEPS):
        for batch in step.batches(data):
            step.backward(layers.compute_loss(model, batch))
        optimizer.step()
        clock.tick()
        if trace is not None:
            trace.step()


everstep.run(main, seed=0, exact_reduction=workload.is_exact())
