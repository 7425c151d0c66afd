import base
import torch

import everstep


class Spoilt(base.Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 17:
            raise ValueError("sample 17: expected 4 columns, found 3")
        return super().__getitem__(index)


base.Numbers = Spoilt
everstep.run(base.main)
