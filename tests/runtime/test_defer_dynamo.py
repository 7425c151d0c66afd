"""An optimizer works without torch's compiler, and with it once a script imports it."""

import importlib
import os
import sys
import traceback

import torch

from everstep import defer_dynamo


def steps() -> list[list[float]]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        optimizer = kind(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    weights: list[list[float]] = model.weight.tolist()
    return weights


def compare() -> None:
    defer_dynamo.defer_compiler()
    without = steps()
    assert "torch._dynamo" not in sys.modules
    importlib.import_module("torch._dynamo")
    assert steps() == without


def test_steps_are_the_same_with_and_without_the_compiler() -> None:
    """Runs in a fork, so that no other test runs with the compiler loaded."""
    pid = os.fork()
    if pid == 0:
        try:
            compare()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0
