"""How an agent ends: its exit report. Pure."""

from collections.abc import Mapping

from everstep_agent.peers.agent_report import FailureReport
from everstep_agent.peers.messages import End, Levels
from everstep_contract import levels, report


def from_end(end: End) -> report.ExitReport:
    return report.ExitReport(
        cause=report.Cause(end.cause),
        message=end.message,
        rank=end.rank,
        epoch=end.epoch,
        step=end.step,
        traceback=end.traceback,
        done=end.cause == report.Cause.DONE.value,
    )


def from_failure(failure: FailureReport) -> report.ExitReport:
    return report.ExitReport(
        cause=report.Cause(failure.cause),
        message=failure.message,
        step=failure.step,
        traceback=failure.traceback,
    )


def decide_left(published: Levels | None, slot: int, attempt: int) -> report.ExitReport | None:
    """The exit report of a pod that was asked to leave, once the store holds all its state; None:
    not yet.
    """
    left = published.seen.left if published else ()
    found = next((x for x in left if (x.slot, x.attempt) == (slot, attempt)), None)
    if found is None:
        return None
    committed = f"the checkpoint of step {found.step} is committed"
    return report.ExitReport(
        cause=report.Cause.LEFT,
        message=f"left; {committed if found.step else 'no checkpoint is committed yet'}",
        epoch=found.epoch,
        step=found.step,
    )


def decide_fenced(
    wanted: levels.Wanted, slot: int, attempt: int, over: str = ""
) -> report.ExitReport | None:
    """The exit report of a pod that was replaced or given up; None: it was not. `over`: why the run
    log gives the pod up; empty: it does not.
    """
    if over:
        return report.ExitReport(cause=report.Cause.FENCED, message=over)
    newer = max((p.attempt for p in wanted.peers if p.slot == slot), default=attempt)
    if newer <= attempt:
        return None
    return report.ExitReport(
        cause=report.Cause.FENCED, message=f"attempt {newer} of slot {slot} is the current one"
    )


def cut_off(coordinator: str, *, joined: bool) -> report.ExitReport:
    """`joined`: its workers may be in an epoch of the others."""
    text = (
        f"this pod cannot reach the coordinator at {coordinator}, which other pods follow: check the network between "
        "the two nodes. "
    )
    text += (
        "None of its workers trains any more, and it ends so that the others can continue without it"
        if joined
        else "It has not joined the job yet; its container is started again, and tries again"
    )
    return report.ExitReport(cause=report.Cause.AGENT, message=text)


def miscounted(incarnation: int, ended: int) -> report.ExitReport:
    """`incarnation`: this agent's; `ended`: how many starts of its container have ended."""
    text = (
        f"its agent counts this start of the container as number {incarnation}, but the kubelet reports that number "
        f"{ended} has ended: the pod's memory was lost, as when its node reboots, or the container once ended before "
        "its agent had started. The other pods take this start for dead, so it ends; the next one has the right number"
    )
    return report.ExitReport(cause=report.Cause.AGENT, message=text)


def left_alone() -> report.ExitReport:
    text = "left; nothing was trained here, and there is no coordinator any more"
    return report.ExitReport(cause=report.Cause.LEFT, message=text)


def left_late(copied: Mapping[str, int]) -> report.ExitReport:
    """`copied`: where copies of this pod's saves are → the newest step there, if it is later than
    the newest commit.
    """
    step = max(copied.values(), default=0)
    text = "left without a commit: the store did not take the save within the pod's grace period"
    if step:
        places = " and ".join(place for place, newest in copied.items() if newest == step)
        text += (
            f"; step {step} is in {places}, and the job continues from there if other pods continue, or"
            " if its next pods find all parts"
        )
    text += "; for slow stores raise terminationGracePeriodSeconds"
    return report.ExitReport(cause=report.Cause.LEFT, message=text)
