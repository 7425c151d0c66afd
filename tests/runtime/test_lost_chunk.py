"""Real ranks under real agents: the store loses a chunk of a tensor that never changes."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from agent import gang as gangs
from agent.gang import Gang
from agent.unreliable import UnreliableStore
from everstep import Job, run
from everstep_agent import agent
from everstep_agent.pod import spawn
from everstep_agent.storage import opening
from everstep_agent.storage.retrying import Retrying
from runtime.test_ranks import a_dataset, a_model

EVERY = 25
"""Steps from one save to the next."""
LARGE = 100_000
"""Only the frozen tensor's chunks have as many bytes."""


class Forgetful(UnreliableStore):
    """It confirms the large chunks of the first save and does not store them."""

    sent: ClassVar[dict[str, list[int]]] = {}
    """Digest of a large chunk → the steps of the saves that sent it."""

    async def put(self, key: str, body: bytes | memoryview) -> None:
        if key.startswith("chunks/") and len(body) > LARGE:
            _, _, step, digest = key.split("/")
            self.sent.setdefault(digest, []).append(int(step))
            if int(step) == EVERY:
                return
        await super().put(key, body)


def a_script_with_a_frozen_layer(job: Job) -> None:
    model = a_model()
    frozen = nn.Parameter(torch.randn(256, 256), requires_grad=False)
    model.register_parameter("frozen", frozen)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    job.track(model=model, optimizer=optimizer)
    data = job.batches(a_dataset(), global_batch=24, micro_batch=2)
    for step in job.steps(until=10**6):
        for inputs, wanted in step.batches(data):
            step.backward(nn.functional.cross_entropy(model(inputs), wanted))
        optimizer.step()


async def test_later_checkpoints_do_not_name_a_chunk_that_the_store_has_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forgetful, "sent", {})
    forked = spawn.ForkSpawner(lambda: run(a_script_with_a_frozen_layer, seed=2))
    monkeypatch.setattr(gangs, "fork_script", lambda _: forked)

    def open_forgetful(*given: Any) -> Retrying:
        return Retrying(Forgetful(opening.open_raw(*given)))

    monkeypatch.setattr(agent, "open_store", open_forgetful)
    async with Gang(tmp_path, 2, in_place=1, hang_seconds=60.0, save_every_steps=EVERY) as gang:
        await gang.until(lambda s: any("is broken" in note for note in s.notes), 60.0)
        first = (await gang.until(lambda s: s.good is not None, 60.0)).good
        assert first is not None
        last = first.step + 8 * EVERY
        await gang.until(lambda s: s.good is not None and s.good.step >= last, 60.0)
        again = [steps for steps in Forgetful.sent.values() if len(steps) > 1]
        assert again, "no chunk holds the frozen tensor alone"
        assert max(max(steps) for steps in again) < last, "once verified, it is not sent again"
        await gang.suspend()
