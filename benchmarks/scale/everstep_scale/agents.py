"""The simulated agents of all jobs, behind the real agents' HTTP server: they receive `Wanted` and
answer with the `Seen` of a job that trains.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep_agent.peers import http
from everstep_contract import codec, names
from everstep_contract.levels import CheckpointRef, Member, Scope, Seen, SlotAttempt

STEP_SECONDS = 0.5
SAVE_STEPS = 100


@dataclass(slots=True)
class Agents:
    """A pod's address answers only after `start`."""

    asked: int = 0
    training: bool = False
    """If False, no step ever ends, so the jobs' reports stay the same."""
    steps: dict[str, int] = field(default_factory=dict)
    """Job → the step that it reports."""
    _began: dict[str, float] = field(default_factory=dict)
    _servers: list[http.Server] = field(default_factory=list)

    async def start(self, address: str, job: str, token: str) -> None:
        async def answer(body: bytes) -> bytes:
            self.asked += 1
            return codec.dumps(self._seen(job, json.loads(body)))

        server = http.Server(token, {names.WANTED_PATH: answer})
        await server.open(address, names.AGENT_PORT)
        self._servers.append(server)

    async def close(self) -> None:
        for server in self._servers:
            await server.close()

    def _seen(self, job: str, wanted: Mapping[str, Any]) -> Seen:
        """The job's report. Its group forms once all wanted pods exist."""
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
