"""A job with one pod, for ckpt-chaos, which kills the process that it has started. Here that
process is the pod's agent, which writes every file of a checkpoint. It also plays the operator.

    chaos_job.py FOLDER [--new-pod]

`--new-pod`: the former pod is lost, together with its memory. The job fails if the run does not
continue from its newest commit, or if `everstep verify` finds a problem.
"""

import asyncio
import contextlib
import secrets
import shutil
import sys
from pathlib import Path

from everstep_agent.agent import Agent
from everstep_agent.peers.client import PeerClient, PeerError
from everstep_agent.pod import spawn
from everstep_agent.runlog.run_log import RunLog
from everstep_agent.storage import open_store
from everstep_agent.tools.verify import verify_run
from everstep_contract import env, levels, names, report

SCRIPT = Path(__file__).with_name("chaos_train.py")
PERIOD_SECONDS = 0.1
RUN = "chaos"


async def play(folder: Path, uid: str) -> str:
    """Run the job to its end. Returns what is wrong; empty: nothing."""
    uri = f"file://{folder}/store"
    (folder / "store").mkdir(parents=True, exist_ok=True)
    log = RunLog(open_store(uri, RUN, {}))
    await log.refresh()
    newest = log.index.newest_resumable
    committed = newest.step if newest else 0
    (folder / "began").unlink(missing_ok=True)
    spawner = spawn.SubprocessSpawner(str(SCRIPT), [str(folder)])
    agent = Agent(_build_settings(folder, uid, uri), spawner)
    operator = asyncio.create_task(_operate(agent))
    try:
        end = await agent.run()
    finally:
        operator.cancel()
        await asyncio.gather(operator, return_exceptions=True)
    if end.cause is not report.Cause.DONE:
        return f"the job ended with {end.cause.value}: {end.message}"
    # A run that was done already starts no worker.
    began = int((folder / "began").read_text()) if (folder / "began").exists() else committed
    print(f"resumed from step {began}", flush=True)
    if began < committed:
        return f"it went on from step {began}, and step {committed} was committed"
    verified = await verify_run(open_store(uri, RUN, {}))
    return "; ".join(verified.problems)


def _build_settings(folder: Path, uid: str, uri: str) -> env.AgentEnv:
    return env.AgentEnv(
        job=f"bench/{RUN}",
        job_uid=uid,
        slot=0,
        attempt=0,
        token=secrets.token_hex(8),
        pod_ip="127.0.0.1",
        port=0,
        uri=uri,
        run=RUN,
        save_every_steps=3,
        keep=1,
        memory=str(folder / "memory"),
        termination_log=str(folder / "memory/report"),
        zygote=0,
    )


async def _operate(agent: Agent) -> None:
    await agent.bound.wait()
    peer = levels.Peer(slot=0, attempt=0, address=agent.me.address)
    wanted = levels.Wanted(revision=1, min_workers=1, want_workers=1, max_workers=1, peers=(peer,))
    async with PeerClient(agent.me.address, agent.settings.token) as client:
        while True:
            with contextlib.suppress(PeerError):
                await client.call(names.WANTED_PATH, wanted, levels.Seen, timeout=2.0)
            await asyncio.sleep(PERIOD_SECONDS)


def main(folder: Path, *, new_pod: bool) -> int:
    if new_pod:
        shutil.rmtree(folder / "memory", ignore_errors=True)
    spawn.become_subreaper()
    problem = asyncio.run(play(folder, secrets.token_hex(8) if new_pod else "uid"))
    if problem:
        print(f"chaos_job: {problem}", file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), new_pod="--new-pod" in sys.argv))
