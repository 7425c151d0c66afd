"""What is often passed as a dataset but is none, and the line to write instead. Pure.

A loader has already decided which samples form a batch, for one number of ranks. If it were used as
an iterable dataset, each of its batches would count as one sample.
"""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, default_collate

from everstep.errors import Misuse

_PLAIN = {
    "SequentialSampler",
    "RandomSampler",
    "BatchSampler",
    "_InfiniteConstantSampler",
    "NoneType",
}
"""torch's own samplers, and torchdata's of the same names."""


def refuse(given: Any) -> None:
    """Raise `Misuse` for a loader (torchdata's StatefulDataLoader and accelerate's are DataLoaders,
    too), and for a dict of splits.
    """
    if isinstance(given, DataLoader):
        raise Misuse(_describe(given))
    if isinstance(given, dict):
        first = next(iter(given), "train")
        raise Misuse(
            f"job.batches({type(given).__name__}): it has {len(given)} entries by name, no samples by "
            f"number; give one of them: job.batches(dataset[{first!r}], …)"
        )


def build_line(loader: DataLoader[Any]) -> str:
    """Build the call that feeds the same dataset."""
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or "…"
    arguments = [f"global_batch={size} * ranks", f"micro_batch={size}"]
    if isinstance(loader.sampler, SequentialSampler):
        arguments.append("shuffle=False")
    if loader.collate_fn is not default_collate:
        arguments.append("collate=loader.collate_fn")
    if loader.num_workers and not isinstance(loader.dataset, IterableDataset):
        arguments.append(f"workers={loader.num_workers}")
    return f"job.batches(loader.dataset, {', '.join(arguments)})"


def _describe(loader: DataLoader[Any]) -> str:
    return (
        f"job.batches({type(loader).__name__}): a loader yields batches, and job.batches makes them itself, "
        "the same for any number of ranks. Give it the loader's dataset: "
        f"{build_line(loader)}{_describe_sampler(loader)}"
    )


def _describe_sampler(loader: DataLoader[Any]) -> str:
    """Describe what the call of `build_line` does not do."""
    samplers = (loader.sampler, loader.batch_sampler)
    own = [name for sampler in samplers if (name := type(sampler).__name__) not in _PLAIN]
    if not own:
        return ""
    if own[0] == "DistributedSampler":
        return "; ranks share the samples without a DistributedSampler"
    return (
        f". The order of its {own[0]} is not kept: choose samples in the dataset "
        "(torch.utils.data.Subset), and weights with step.backward(loss, weight=…)"
    )
