"""Which save a running epoch's boundary is to be armed for: one by the clock, a near save, or one for a pin."""

import math
from collections.abc import Sequence

from everstep_agent.coordinator import boundaries, members, near_saves
from everstep_agent.coordinator.term import Term
from everstep_agent.coordinator.watch import Watch
from everstep_agent.peers.agent_report import WorkerReport
from everstep_agent.peers.epoch_level import Stage
from everstep_agent.peers.partners import choose_partners, list_places

DROPPED_SECONDS = 10.0
"""How long after a change of membership another save replaces one that it has dropped. Lost ranks often
come back sooner; their join would wait for the save, and drop it, too.
"""
RESTLESS_SECONDS = 30.0
"""How long after the first save that was dropped since the newest commit nobody waits for that any more. In a job
whose members change more often, a save is then made after each change, until one is committed.
"""
PIN_SECONDS = 10.0
"""How long the staging of a save that carries a pin may take before another save is made for it."""


def start_watch(term: Term, now: float) -> Watch:
    """The watch for an epoch that begins, or that another coordinator has led so far. In the second case the time since
    the newest commit counts on, and what the other one had not committed is to be saved again.
    """
    watch, epoch = Watch.start(now), term.running
    if epoch.stage is Stage.STARTING and epoch.in_place is None:
        return watch
    watch.near = watch.near.renew()
    watch.save_at = now - term.saves.age if epoch.committed else -math.inf
    if _find_newest(term, epoch.resume) > epoch.committed:
        watch.note_dropped(epoch.committed, now)
    return watch


def is_save_due(term: Term, watch: Watch, now: float) -> bool:
    return boundaries.is_save_due(
        term.settings.save_every_seconds,
        since_last=now - watch.save_at,
        busy=is_saving(term),
    )


def is_dropped_due(term: Term, watch: Watch, workers: Sequence[WorkerReport], now: float) -> bool:
    """Whether to make a save because a change of membership has dropped one. Otherwise a job whose
    members change often would commit nothing for long.
    """
    committed = term.running.committed
    if watch.dropped_at is None or committed > watch.dropped_at:
        return False
    calm = now - watch.began >= DROPPED_SECONDS
    if not calm and now - watch.dropped_since < RESTLESS_SECONDS:
        return False
    return not (_is_any_under_way(term) or _is_save_near(term, workers))


def is_near_due(term: Term, watch: Watch, workers: Sequence[WorkerReport], now: float) -> bool:
    epoch, limit = term.running, term.settings.max_redo_seconds
    soon = _is_save_near(term, workers)
    return near_saves.is_wanted(epoch, limit) and not soon and watch.near.is_due(limit, now)


def _is_save_near(term: Term, workers: Sequence[WorkerReport]) -> bool:
    """Whether a save at an interval in steps follows soon."""
    furthest = max((w.applied for w in workers), default=0)
    return near_saves.is_save_near(furthest, _find_interval(term))


def _find_interval(term: Term) -> int:
    """After how many steps each rank saves by itself; 0: it does not."""
    every = term.running.save_every_steps
    return term.settings.save_every_steps if every is None else every


def follow_near_saves(term: Term, watch: Watch, now: float) -> None:
    """Publish which near save is kept."""
    epoch, limit = term.running, term.settings.max_redo_seconds
    if not near_saves.is_wanted(epoch, limit):
        return
    reports = term.reports.all()
    partners = choose_partners(list_places(epoch.members, term.wanted.peers))
    copying = partners if term.settings.peer_bandwidth else ()
    kept = watch.near.follow(
        members.find_held(epoch, reports),
        members.find_copied(epoch, reports, copying),
        stalled=lambda: count_stalled(term),
        limit=limit,
        now=now,
    )
    if kept > epoch.kept:
        term.change(term.state.keep(kept))


def count_stalled(term: Term) -> float:
    """Seconds for which saves have delayed each rank so far."""
    return term.spent().total().get("stall", 0.0) / max(1, term.running.world)


def want_pin(term: Term, workers: Sequence[WorkerReport]) -> None:
    """Let the checkpoint of any step that ends from now on carry the operator's pin."""
    if len(workers) == term.running.world:
        until = term.board.levels.seen.until
        following = max(w.applied for w in workers) + 1
        term.saves.pins.want(term.wanted.pin, following if until is None else min(following, until))


def is_pin_due(term: Term, watch: Watch, now: float) -> bool:
    """Whether to arm a save for a pin, because no save that would carry it is under way. A pin that
    the script asks for comes with a save of the script's own, which is waited for first.
    """
    epoch, pins = term.running, term.saves.pins
    following = max(term.applied().values(), default=0) + 1
    due = pins.list_due(following, term.run_log.index)
    if not due:
        watch.pin_at = None
        return False
    if watch.pin_at is None:
        watch.pin_at = now if term.wanted.pin in due else now + PIN_SECONDS
    if is_under_way(term, epoch.committed + 1) or is_saving(term) or now < watch.pin_at:
        return False
    watch.pin_at = now + PIN_SECONDS
    return True


def is_under_way(term: Term, step: int) -> bool:
    """Whether all ranks have staged this step, or a later one, and it may still be committed."""
    return term.staged >= step and not term.saves.why_given_up(term.running.number, term.staged)


def is_any_uncommitted(term: Term, watch: Watch, workers: Sequence[WorkerReport]) -> bool:
    """Whether the ranks have begun a save that is not committed yet; not all may have staged it."""
    by_step = _find_newest(term, max((w.applied for w in workers), default=0))
    begun = max(by_step, watch.saved) > term.running.committed
    return begun or _is_any_under_way(term)


def _find_newest(term: Term, step: int) -> int:
    """The newest step, up to this one, after which each rank saves by itself; 0: there is none."""
    every = _find_interval(term)
    return step - step % every if every > 0 else 0


def _is_any_under_way(term: Term) -> bool:
    return is_saving(term) or is_under_way(term, term.running.committed + 1)


def is_saving(term: Term) -> bool:
    return term.saves.busy or bool(term.saves.pending(term.running.number))
