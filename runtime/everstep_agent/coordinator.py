"""The coordinator: a role that one agent of the job holds. It takes the run over, then epoch after
epoch: gather, train, recover.

It talks to agents through the levels on its board only, and holds nothing that its successor could
not find again: the run log is in the store, the workers' positions with their agents.
"""

import asyncio
import time

from everstep_agent import logline, rounds, runlog_rules, training
from everstep_agent.breaks import Break
from everstep_agent.checkpoint.manifests import Broken, fetch_manifest
from everstep_agent.desk import Desk, Identity
from everstep_agent.gathering import gather
from everstep_agent.messages import Levels, Stage
from everstep_agent.recovering import recover
from everstep_agent.storage.errors import StoreError
from everstep_agent.storage.probe import probe
from everstep_agent.storage.retrying import Retrying
from everstep_agent.training import check_fence, train
from everstep_contract import env, levels, report


class Coordinator:
    def __init__(
        self,
        *,
        settings: env.AgentEnv,
        me: Identity,
        store: Retrying,
        line: logline.Log,
        inherited: Levels | None,
        wanted: levels.Wanted,
    ) -> None:
        self.desk = Desk(
            settings=settings, me=me, store=store, line=line, inherited=inherited, wanted=wanted
        )

    async def run(self) -> None:
        """Until the job has ended for all agents; cancel it to lay the role down."""
        watching = asyncio.create_task(self._watch_log())
        try:
            await self._open()
            await self._epochs()
        except StoreError as error:
            self.desk.end(report.Cause.STORE, str(error))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch_log(self) -> None:
        """Beside everything else: a store that is away holds up nothing."""
        while not self.desk.ended:
            await asyncio.sleep(training.FENCE_SECONDS)
            try:
                await check_fence(self.desk)
            except StoreError as error:
                self.desk.end(report.Cause.STORE, str(error))

    async def close(self) -> None:
        await self.desk.close()

    async def _open(self) -> None:
        desk = self.desk
        await desk.persist(desk.run_log.refresh)
        await desk.persist(desk.run_log.check_whole)
        if not any(c.job_uid == desk.settings.job_uid for c in desk.run_log.claims):
            desk.notes = tuple(await desk.persist(lambda: probe(desk.store)))
        if desk.epoch is not None and desk.epoch.stage is not Stage.OVER:
            await self._take_over()
        reason = decide_whose_run(desk)
        if reason is not None:
            desk.end(*reason)
            return
        commit = desk.newest_commit()
        if commit is not None:
            try:
                manifest = await desk.persist(lambda: fetch_manifest(desk.store, commit))
                desk.base_seconds = manifest.seconds
            except Broken as error:
                desk.line.say("manifest_broken", manifest=commit.manifest, message=str(error))
                desk.broken.add(commit.manifest)
        desk.publish()

    async def _take_over(self) -> None:
        """What was committed after our predecessor last spoke counts; a newer claim than its ends
        it.
        """
        desk = self.desk
        assert desk.epoch is not None
        commit = desk.newest_commit()
        if commit is not None and commit.epoch == desk.epoch.number:
            desk.set_epoch(committed=max(commit.step, desk.epoch.committed))
        await check_fence(desk)

    async def _epochs(self) -> None:
        desk = self.desk
        cause = "Start"
        if desk.epoch is not None and desk.epoch.stage is not Stage.OVER and not desk.ended:
            lost = Break(cause="CoordinatorLost", message="its coordinator is gone", certain=False)
            cause = await recover(desk, lost)
        elif desk.epoch is not None:
            cause = desk.epoch.cause
        else:
            cause = self._begin_again()
        while not desk.ended:
            claimed = await gather(desk, cause)
            if claimed is not None:
                cause = await train(desk)
            elif desk.epoch is not None and desk.epoch.stage is not Stage.OVER and not desk.ended:
                lost = Break(
                    cause="CoordinatorLost", message="its coordinator is gone", certain=False
                )
                cause = await recover(desk, lost)
            else:
                return

    def _begin_again(self) -> str:
        """Nobody has told us of an epoch: the log knows whether there was one."""
        desk = self.desk
        mine = next((r for r in desk.reports.all() if r.slot == desk.me.slot), None)
        found = rounds.decide_beginning(
            desk.run_log.newest_claim, mine, desk.wanted, job_uid=desk.settings.job_uid
        )
        if found.cause != "Start":
            desk.incidents.open(
                desk.new_incident(), found.cause, found.message, now=time.monotonic(), slots=()
            )
            desk.line.say("begins_again", cause=found.cause, incident=desk.incidents.id)
        return found.cause


def decide_whose_run(desk: Desk) -> tuple[report.Cause, str] | None:
    """Why this job may not use the run, or None. Reads only what was read of the log."""
    settings, newest = desk.settings, desk.run_log.newest_claim
    done = desk.run_log.done
    if newest is None:
        return None
    if newest.job_uid == settings.job_uid:
        if done is not None and done.token == newest.token:
            return report.Cause.DONE, f"trained to step {done.step}"
        return None
    if not runlog_rules.is_former_job(newest, desk.run_log.claims, settings.job_uid):
        return report.Cause.FENCED, f"job {newest.job} ({newest.job_uid}) has taken the run over"
    where = f"{settings.uri}/{settings.run}"
    if settings.if_run_exists == "Refuse":
        return report.Cause.RUN_EXISTS, (
            f"the run {where} exists: job {newest.job} wrote it; set checkpoint.run to a new name,"
            " or checkpoint.ifRunExists to Resume"
        )
    if newest.job != settings.job and settings.run == settings.job:
        return report.Cause.RUN_EXISTS, (
            f"the run {where} belongs to job {newest.job}; set checkpoint.run to go on with it"
        )
    return None
