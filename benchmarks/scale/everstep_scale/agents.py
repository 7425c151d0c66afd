"""The agents of all jobs: they take `Wanted` and answer with the `Seen` of a job that trains.

Tokens are not checked here (the operator signs all the same): the key is the operator's secret.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from everstep_contract import codec
from everstep_contract.levels import CheckpointRef, Member, Scope, Seen, SlotAttempt
from everstep_scale.listening import address_of

STEP_SECONDS = 0.5
SAVE_STEPS = 100


@dataclass(slots=True)
class Agents:
    """A pod is an agent's once `start` was told of it; before that nobody answers there."""

    jobs: dict[str, str] = field(default_factory=dict)
    """Address → job."""
    asked: int = 0
    training: bool = False
    """False: the step that they are in takes for ever, so what the jobs say stays the same."""
    steps: dict[str, int] = field(default_factory=dict)
    """Job → the step that it says."""
    _began: dict[str, float] = field(default_factory=dict)

    def start(self, address: str, job: str) -> None:
        self.jobs[address] = job

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked += 1
        job = self.jobs.get(address_of(request))
        if job is None:
            return web.Response(status=503)
        if request.method == "GET":
            return web.json_response({"nonce": "simulated"})
        wanted = json.loads(await request.read())
        return web.Response(body=codec.dumps(self._seen(job, wanted)))

    def _seen(self, job: str, wanted: Mapping[str, Any]) -> Seen:
        """The group forms when all the pods that are wanted are there."""
        peers = wanted["peers"]
        if job not in self._began and len(peers) < wanted["want_workers"]:
            return Seen(run=f"default/{job}")
        now = time.monotonic()
        seconds = now - self._began.setdefault(job, now)
        if self.training or job not in self.steps:
            self.steps[job] = 1 + int(seconds / STEP_SECONDS)
        return build_seen(job, peers, self.steps[job], seconds)


def build_seen(job: str, peers: list[Mapping[str, Any]], step: int, seconds: float) -> Seen:
    saved = step - step % SAVE_STEPS
    age = seconds - saved * STEP_SECONDS
    places = sorted((int(p["slot"]), int(p["attempt"])) for p in peers)
    return Seen(
        run=f"default/{job}",
        epoch=1,
        running=True,
        coordinator=SlotAttempt(slot=places[0][0], attempt=places[0][1]),
        members=tuple(
            Member(
                slot=slot, attempt=attempt, incarnation=1, rank=rank, life=1, step=step,
                scope=Scope.STEP,
            )
            for rank, (slot, attempt) in enumerate(places)
        ),
        step=step,
        until=1_000_000,
        loss=1.0 + 1.0 / step,
        committed=CheckpointRef(epoch=1, step=saved, bytes=1 << 33, age_ms=round(age * 1000)),
        good=CheckpointRef(epoch=1, step=saved, bytes=1 << 33, age_ms=round(age * 1000)),
        seconds={"step": step * STEP_SECONDS, "wait": step * 0.01},
        age_ms=120,
    )  # fmt: skip
