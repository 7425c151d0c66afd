"""The training loop under stock DistributedDataParallel."""

from torch.nn.parallel import DistributedDataParallel

from everstep_steady.train_torch import train

train(DistributedDataParallel)
