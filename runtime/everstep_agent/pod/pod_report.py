"""A pod's report to the coordinator."""

from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.peers.epoch_level import EpochLevel
from everstep_agent.pod import device_waits
from everstep_agent.pod.components import Components
from everstep_agent.pod.worker_frames import WorkerFrames
from everstep_agent.pod.worker_report import build_worker_report, find_unheard_of
from everstep_contract import levels, position


class PodReport:
    """`former` is the position of the workers before the container's last restart."""

    def __init__(self, parts: Components, frames: WorkerFrames, former: position.Position) -> None:
        self._parts = parts
        self._frames = frames
        self._former = former

    def build(self, now: float) -> AgentReport:
        parts, frames, former = self._parts, self._frames, self._former
        context, epoch, workers = parts.context, parts.epoch, parts.workers
        current = [workers.current[i] for i in sorted(workers.current)]
        for worker in current:
            if not parts.seconds.rests(worker.local):
                parts.seconds.page(worker.local, worker.life, worker.position())
        lead = current[0] if current else None
        received, expected = parts.joining.count_bytes()
        stuck, waits = parts.deaths.stuck, parts.deaths.waits
        return AgentReport(
            slot=context.me.slot,
            attempt=context.me.attempt,
            incarnation=context.me.incarnation,
            address=context.me.address,
            joined=epoch.joined,
            joined_token=epoch.joined_token,
            epoch=epoch.number,
            workers=tuple(
                build_worker_report(w, w.position(), w.exit_text(), now) for w in current
            ),
            fresh=workers.ready_lives(),
            ended=workers.processes.ended_lives(),
            prepared=workers.prepared_lives(),
            taken=parts.joining.step,
            received=received,
            expected=expected,
            in_place=workers.can_regroup(),
            fixed=next((w.tracked.fixed for w in current if w.alive and w.tracked), ""),
            leaving=parts.holds.leaving,
            notice=parts.holds.measure_notice(now),
            acked=epoch.arming.acked,
            passed=epoch.arming.passed(epoch.level, current),
            staged=min((w.staged for w in current), default=0),
            kept=parts.saves.list_held(len(current)),
            copied=parts.copies.peer_step,
            cut=epoch.cut_heard,
            held=self._find_held(),
            unsent=parts.saves.list_unsent(),
            unsent_of=parts.saves.known,
            former_epoch=former.epoch,
            former_step=former.applied,
            until=lead.tracked.until if lead and lead.tracked else None,
            loss=lead.applied.loss if lead and lead.applied else None,
            pins=parts.saves.pins,
            notes=frames.notes,
            own_notes=frames.own_notes,
            not_joined=self._why_not_joined(),
            dropped=context.dropped(),
            uploading=parts.saves.busy,
            state_bytes=lead.tracked.bytes if lead and lead.tracked else 0,
            read_back=parts.share_reader.report(),
            broken=parts.restorer.broken,
            storage_error=self._find_storage_error(),
            stuck=stuck.message if stuck else "",
            device_deaths=device_waits.to_levels(waits, *context.me.place, now),
            # Whether the failure ends the job depends on whether it has trained.
            failure=parts.deaths.failure if epoch.run_known else None,
            seconds=parts.seconds.total(now, self._waits_as()),
        )

    def _waits_as(self) -> str:
        """The time ledger's category for local ranks that wait now."""
        newest, holds = self._parts.epoch.newest, self._parts.holds
        stops = newest is not None and (
            newest.end is not None or newest.wanted.stop is not levels.Stop.NONE
        )
        leaves = newest is not None and self._parts.context.me.slot in newest.wanted.leave
        if stops or leaves or holds.ending:
            return "idle"
        return "startup" if self._parts.epoch.number == 0 else "regroup"

    def _why_not_joined(self) -> str:
        fatal = self._parts.deaths.fatal
        if fatal is not None and not self._parts.workers.group_over():
            rest = "the other ranks of this pod go on, and this one is not replaced"
            return f"{fatal.message}; {rest}"
        return self._parts.holds.describe()

    def _find_held(self) -> EpochLevel | None:
        if self._parts.workers.group_over():
            return None
        epoch = self._parts.epoch
        return find_unheard_of(epoch.level, epoch.newest, kept_out=self._parts.kept_out)

    def _find_storage_error(self) -> levels.StorageError | None:
        parts, trouble = self._parts, self._parts.context.store.trouble
        waits = trouble.to_level() if trouble else None
        return parts.restorer.error or parts.saves.error or parts.share_reader.error or waits
