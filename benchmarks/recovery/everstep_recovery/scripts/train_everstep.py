"""The training script under Everstep."""

import torch

import everstep
from everstep_recovery import layers, workload


def main(job: everstep.Job) -> None:
    torch.set_num_threads(1)
    model = workload.build_model()
    if workload.read_shard() > 1:
        layers.shard_model(model, job.mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.LEARNING_RATE)
    job.track(model=model, optimizer=optimizer)
    data = job.batches(
        workload.Numbers(),
        global_batch=workload.MICRO_BATCH * workload.MICRO_BATCHES * job.world_size,
        micro_batch=workload.MICRO_BATCH,
        shuffle=False,
    )
    log = workload.StepLog()
    for step in job.steps(until=workload.steps()):
        used: list[int] = []
        for indices, rows in step.batches(data):
            with log.one_pass():
                step.backward(layers.compute_loss(model, rows))
            used += indices.tolist()
        optimizer.step()
        log.step(step.number, job.rank, job.world_size, used)
        log.state(step.number, model)


everstep.run(main, seed=0, exact_reduction=workload.is_exact())
