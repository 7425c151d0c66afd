"""How a run on one machine ended: the final message and the exit status. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from everstep_contract import report

INTERRUPTED = 130
QUIET = (report.Cause.LEFT, report.Cause.AGENT, report.Cause.FENCED)
"""Ends of a single agent. If the job itself reported its end, that end is shown instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    status: int
    said: str = ""
    complaint: str = ""


def choose_report(
    found: Sequence[report.ExitReport], given_up: report.ExitReport | None = None
) -> report.ExitReport | None:
    """Prefer a report about the job to one about a single agent. Once the launcher has given up,
    its reason counts: the agents that it then kills only report the consequences.
    """
    done = next((r for r in found if r.cause is report.Cause.DONE), None)
    loud = next((r for r in found if r.cause not in QUIET), None)
    return done or given_up or loud or next(iter(found), None)


def conclude(
    reports: Sequence[report.ExitReport],
    *,
    run: str,
    committed: int,
    interrupted: bool,
    given_up: report.ExitReport | None = None,
) -> Conclusion:
    """`committed`: step of the newest checkpoint, 0 if there is none."""
    found = choose_report(reports, given_up)
    where = f"from step {committed}" if committed else "from the start: nothing was saved"
    again = f"run the same command again to resume {where} (run {run!r})"
    if interrupted and (found is None or found.cause is report.Cause.AGENT):
        return Conclusion(status=INTERRUPTED, said=again)
    if found is None:
        return Conclusion(status=1, complaint="every agent was killed", said=again)
    if found.cause is report.Cause.DONE:
        return Conclusion(status=0, said=f"done: {found.message}")
    if found.cause is report.Cause.STOPPED:
        text = f"{found.message}; resume with the same command (run {run!r})"
        return Conclusion(status=INTERRUPTED if interrupted else 0, said=text)
    if found.cause is report.Cause.FENCED:
        again = f"this one has stopped; the same command would take run {run!r} over again"
    name = "" if found.cause in QUIET else f"{found.cause.value}: "
    if found.cause not in QUIET:
        again = f"after fixing it, {again}" if committed else ""
    return Conclusion(status=1, complaint=f"{name}{found.message}", said=again)
