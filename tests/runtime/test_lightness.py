"""An optimizer works without torch's compiler, and with it as soon as somebody loads it."""

import subprocess
import sys

SCRIPT = """
import sys, torch
from everstep import lightness
lightness.defer_compiler()

def steps():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        optimizer = kind(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return model.weight.tolist()

without = steps()
assert "torch._dynamo" not in sys.modules
import torch._dynamo
assert steps() == without
print("equal")
"""


def test_steps_are_the_same_with_and_without_the_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout == "equal\n", done.stderr
