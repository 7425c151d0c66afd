"""What a job does while its object store fails, and afterwards."""

import asyncio

from everstep_demo.board import Object, condition
from everstep_demo.trial import Trial
from everstep_stories.scene import Scene


async def until_reported(trial: Trial, *, limit: float, reason: str = "") -> Object:
    """Wait until the condition CheckpointHealthy is False, with this reason if one is given; return
    the condition.

    This does not use the run log, which cannot be read while the store fails.
    """
    health: Object | None = None
    try:
        async with asyncio.timeout(limit):
            while not _is_bad(health, reason):
                await asyncio.sleep(0.3)
                health = condition(await trial.job(), "CheckpointHealthy")
    except TimeoutError:
        raise AssertionError(
            f"waited {limit:.0f} s for CheckpointHealthy=False {reason}; it is {health}"
        ) from None
    assert health is not None
    return health


def _is_bad(health: Object | None, reason: str) -> bool:
    return health is not None and health["status"] == "False" and reason in ("", health["reason"])


async def check_recovery(scene: Scene, trial: Trial, epoch: int) -> None:
    """Start the store. Check that commits continue in the same epoch, that the condition is True
    again, and that no sample is lost.
    """
    committed = trial.watch.committed
    await scene.start_store()

    async def healthy() -> bool:
        await trial.watch.refresh()
        now = condition(await trial.job(), "CheckpointHealthy")
        return trial.watch.committed > committed and now is not None and now["status"] == "True"

    with scene.timed("store back → commits again"):
        await trial.until("commits again", healthy, limit=90)
    assert trial.watch.epoch == epoch
    scene.recorder.outcome.steps_lost = 0
    await scene.check_samples(trial)
