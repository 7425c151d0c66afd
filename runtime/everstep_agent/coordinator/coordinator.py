"""The coordinator: a role that one agent of the job holds. It takes over the run, and then for each
epoch: gather, train, recover.

It talks to agents only through the levels that it publishes, and keeps nothing that its successor
could not rebuild: the run log is in the store, and the agents report their workers' positions.
"""

import asyncio
import time
from collections.abc import Collection
from functools import partial

from everstep_agent.checkpoint.manifests import Broken
from everstep_agent.checkpoint.restore import Fetcher
from everstep_agent.context import Context
from everstep_agent.coordinator import claim_behind, faults, fence, regroup, rounds
from everstep_agent.coordinator.breaks import Break
from everstep_agent.coordinator.gather import gather
from everstep_agent.coordinator.incidents import Cause
from everstep_agent.coordinator.recover import recover
from everstep_agent.coordinator.spent_time import read_spent_time
from everstep_agent.coordinator.term import Term
from everstep_agent.coordinator.train import train
from everstep_agent.peers.agent_report import FailureReport
from everstep_agent.peers.group_store import GroupStore
from everstep_agent.peers.messages import Levels
from everstep_agent.runlog import rules as runlog_rules
from everstep_agent.storage.errors import StoreError
from everstep_agent.storage.probe import probe
from everstep_contract import levels, report

FAILED = report.Cause.COORDINATOR.value
LOST = Break(
    cause="CoordinatorLost", message="the agent that coordinated the job was lost", certain=False
)


class Coordinator:
    def __init__(
        self,
        context: Context,
        inherited: Levels | None,
        wanted: levels.Wanted,
        group: GroupStore,
        lost: Collection[str] = (),
        phase_since: float | None = None,
    ) -> None:
        self.term = Term(context, inherited, wanted, group, lost, phase_since)

    async def run(self) -> None:
        """Run until the job has ended; cancel it to give up the role.

        Raises any exception of coordinator code, including background work: such an exception is a
        bug in Everstep.
        """
        working = asyncio.create_task(self._work())
        beside = [
            asyncio.create_task(self._watch_log()),
            asyncio.create_task(self.term.clock.run()),
            asyncio.create_task(self.term.background.wait_failed()),
        ]
        try:
            # A job may run for any time, so there is no limit here; every wait inside has its own.
            done, _ = await asyncio.wait([working, *beside], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (working, *beside):
                task.cancel()
            await asyncio.gather(working, *beside, return_exceptions=True)

    async def _work(self) -> None:
        try:
            await self._open()
            await self._run_epochs()
        except StoreError as error:
            self.term.end(report.Cause.STORE, str(error))

    async def _watch_log(self) -> None:
        """Runs in parallel with everything else, so that an unavailable store blocks nothing."""
        began = self.term.now()
        while True:
            await asyncio.sleep(fence.FENCE_SECONDS)
            if self.term.ended:
                continue
            if self.term.state.faults and self.term.now() - began > faults.WINDOW_SECONDS:
                self.term.change(self.term.state.forget_faults())
            try:
                await fence.check_fence(self.term)
            except StoreError as error:
                self.term.end(report.Cause.STORE, str(error))

    async def close(self) -> None:
        await self.term.close()

    async def _open(self) -> None:
        term = self.term
        await term.persist(term.run_log.refresh)
        await term.persist(term.run_log.check_whole)
        if not term.run_log.index.has_claimed(term.settings.job_uid):
            found = await term.persist(lambda: probe(term.context.store))
            term.change(term.state.note(*found))
        if term.state.trains:
            await self._take_over()
        reason = decide_whose_run(term)
        if reason is not None:
            term.end(*reason)
            return
        await self._read_spent_time()
        term.publish()

    async def _take_over(self) -> None:
        """Take over the predecessor's epoch: note a commit made after its last levels, finish the
        read-back of that commit, and check whether a newer claim has replaced the epoch.
        """
        commit = self.term.newest_commit()
        if commit is not None:
            if commit.step > self.term.running.committed:
                self.term.saves.committed_at = time.monotonic()
            self.term.change(self.term.state.commit(commit))
            if not self.term.post_commit.is_good(commit):
                self.term.look_after(commit, {})
        claim_behind.start(self.term)
        await fence.check_fence(self.term)

    async def _read_spent_time(self) -> None:
        """Read the seconds from the newest manifest that can be read. The others are passed over here,
        because a claim that continues from such a checkpoint would give up all later ones.
        """
        term = self.term
        near = Fetcher(term.context.store, term.context.memory)
        while (commit := term.newest_commit()) is not None:
            try:
                manifest, _ = await term.persist(partial(near.find_manifest, commit))
            except Broken as error:
                term.line.say("manifest_broken", manifest=commit.manifest, message=str(error))
                term.change(term.state.pass_over(commit.manifest, str(error)))
                continue
            claim = next((c for c in term.run_log.claims if c.token == commit.token), None)
            same = claim is not None and claim.job_uid == term.settings.job_uid
            term.carried = read_spent_time(manifest, same_job=same)
            return

    async def _run_epochs(self) -> None:
        term = self.term
        if term.ended:
            return
        cause = await self._begin()
        while not term.ended:
            claimed = await gather(term, cause)
            if claimed is not None:
                cause = await train(term)
            elif term.state.trains and not term.ended:
                cause = await recover(term, LOST)
            else:
                return

    async def _begin(self) -> str:
        """Continue or recover the inherited epoch, if any. Returns the cause of the next epoch."""
        term = self.term
        known = term.state.faults
        if term.state.trains and faults.is_last_try(known):
            text, trace = faults.build_message(known), known[-1].traceback
            failure = FailureReport(cause=FAILED, message=text, traceback=trace)
            return await recover(term, Break(cause=FAILED, message=text, failure=failure))
        if term.goes_on:
            term.line.say("goes_on", epoch=term.running.number)
            self._keep_keys()
            return await train(term)
        if term.state.trains:
            return await self._take_up()
        return term.epoch.cause if term.epoch is not None else self._begin_again()

    def _keep_keys(self) -> None:
        """Keep the group's keys in this agent from now on, so that the former coordinator may end.
        Members ask for them only while a group forms or a newcomer copies its state.
        """
        term = self.term
        if term.running.store != term.me.address:
            term.group.open_epoch(term.running.number)
            term.change(term.state.keep_keys(term.me.address))

    async def _take_up(self) -> str:
        """Continue or recover the lost coordinator's epoch. Returns the cause of the next epoch."""
        term = self.term
        why = regroup.why_not_taken_up(term)
        if not why and await regroup.regroup(term, LOST) is None and not term.ended:
            return await train(term)
        return await recover(term, LOST)

    def _begin_again(self) -> str:
        """The next epoch's cause if no agent has reported an epoch; the log shows if there was one."""
        term = self.term
        mine = next((r for r in term.reports.all() if r.slot == term.me.slot), None)
        found = rounds.decide_beginning(
            term.run_log.newest_claim, mine, term.wanted, job_uid=term.settings.job_uid
        )
        if found.cause != "Start":
            term.open_incident(Cause(name=found.cause, message=found.message))
            term.line.say("begins_again", cause=found.cause, incident=term.state.incidents.id)
        return found.cause


def decide_whose_run(term: Term) -> tuple[report.Cause, str] | None:
    """Why this job may not use the run, or None. Uses only what was already read from the log."""
    settings, newest = term.settings, term.run_log.newest_claim
    done = term.run_log.done
    if newest is None:
        return None
    if newest.job_uid == settings.job_uid:
        if done is not None and done.token == newest.token:
            return report.Cause.DONE, f"trained to step {done.step}"
        return None
    if not runlog_rules.is_former_job(newest, term.run_log.claims, settings.job_uid):
        return report.Cause.FENCED, f"job {newest.job} ({newest.job_uid}) has taken the run over"
    where = f"{settings.uri}/{settings.run}"
    if settings.if_run_exists == "Refuse":
        return report.Cause.RUN_EXISTS, (
            f"the run {where} exists: job {newest.job} wrote it; set checkpoint.run to a new name,"
            " or checkpoint.ifRunExists to Resume"
        )
    given = settings.run_given or settings.run != settings.job
    if newest.job != settings.job and not given:
        return report.Cause.RUN_EXISTS, (
            f"the run {where} belongs to job {newest.job}; set checkpoint.run to continue it"
        )
    return None
