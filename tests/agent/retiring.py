"""A store on which the job retires a checkpoint while somebody reads it."""

from agent.a_run import ARun, read_alone
from agent.unreliable import UnreliableStore
from everstep_agent.checkpoint.retention import Retention
from everstep_agent.storage import open_store


class RetiringStore(UnreliableStore):
    """At the next read of a chunk, `run` saves the next step first and retires all older checkpoints."""

    def __init__(self) -> None:
        super().__init__(open_store("memory://", "", {}))
        self.run: ARun | None = None

    async def get(self, key: str) -> bytes:
        run, reads = self.run, key.startswith("chunks/")
        if run is not None and reads:
            self.run = None
            step = run.log.commits[-1].step
            await run.save(step + 1, since=step)
            retention = Retention(self, run.log, keep=1)
            assert await retention.check(run.log.commits[-1], read_alone(self)) == ""
            assert run.claimed
            assert await retention.retire(run.claimed.token) is not None
        return await super().get(key)
