"""Reads the next place of the log to check whether the run still belongs to this job (rule 5)."""

from everstep_agent.coordinator.term import Term
from everstep_agent.runlog import rules as runlog_rules
from everstep_contract import report

FENCE_SECONDS = 10.0
"""How often the next place of the log is read; rule 5 allows 30 s."""


async def check_fence(term: Term) -> None:
    """Ends the job if another claim has replaced this one. Waits while the store is unavailable."""
    await term.persist(term.run_log.refresh)
    await term.persist(term.run_log.check_kept)
    _judge(term)


def end_if_taken_over(term: Term) -> None:
    """Ends the job if a claim of another job was read. It does not wait for the next look: until then
    the other job's checkpoints would count as this job's.
    """
    newest = term.run_log.newest_claim
    if newest is not None and newest.job_uid != term.settings.job_uid:
        _judge(term)


def _judge(term: Term) -> None:
    epoch = term.epoch  # not before the read: this term may itself claim the next epoch meanwhile
    if epoch is None:
        return
    gang = runlog_rules.Gang(
        epoch=epoch.claimed,
        job_uid=term.settings.job_uid,
        pods=frozenset((m.slot, m.attempt) for m in epoch.members),
    )
    verdict = runlog_rules.fenced(term.run_log.newest_claim, gang)
    if not verdict.ok:
        term.end(report.Cause.FENCED, verdict.message)
