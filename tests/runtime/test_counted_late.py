"""A step that one rank has counted, while the others still apply it. Real ranks under real agents."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from agent.gang import Gang, assert_exact
from everstep import Job, run
from everstep_agent.pod import spawn
from runtime import a_paced_script

STEPS = 30
LATE = 6


def die_in(seconds: float) -> None:
    def die() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()


def a_script(job: Job) -> None:
    """At one step rank 3 dies while ranks 1 and 2 apply it, and rank 0, which alone has counted it,
    dies after the survivors have formed their group.
    """

    def pause(step: int) -> None:
        if step == LATE and job.epoch == 1:
            if job.rank in (0, 3):
                die_in(0.4 if job.rank == 3 else 1.5)
            if job.rank in (1, 2):
                time.sleep(3.0)
            if job.rank == 3:
                time.sleep(60.0)
        time.sleep(0.02)

    a_paced_script.main(job, STEPS, pause)


async def test_it_belongs_to_the_epoch_in_which_it_was_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawner = spawn.ForkSpawner(lambda: run(a_script, seed=2))
    monkeypatch.setattr(spawn, "SubprocessSpawner", lambda _: spawner)
    async with Gang(tmp_path, 4, in_place=1, hang_seconds=60.0) as gang:
        await gang.reports()
        claims = (await gang.run_log()).claims
        assert [len(c.members) for c in claims[:3]] == [4, 3, 2]
        assert [c.chain[-1].last_step for c in claims[1:3]] == [LATE, LATE]
        assert sum(i.steps_lost for s in gang.history for i in s.incidents) == 0
        await assert_exact(gang, STEPS)
