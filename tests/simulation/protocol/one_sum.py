"""What must hold for the sums of a step and the ranks that applied them, whichever ranks die."""

from simulation.protocol.ranks import Gang, Rank
from simulation.protocol.rules import Move
from simulation.protocol.survivors import MICRO_BATCHES


def check(before: Gang, move: Move) -> str:
    after: Gang = move.after
    if after.stuck:
        return f"the survivors cannot go on in place: {after.stuck}"
    if not isinstance(move.who, int):
        return ""
    was = next(r for r in before.ranks if r.number == move.who)
    rank = next((r for r in after.ranks if r.number == move.who), None)
    if rank is None:
        return ""
    return one_copy(rank) or _once(after, was, rank) or alike(after, was, rank)


def one_copy(rank: Rank) -> str:
    """No rank needs another rank's state."""
    if rank.lacks:
        return f"rank {rank.number} lacks the sums of the vector that it was handed"
    return ""


def _once(after: Gang, was: Rank, rank: Rank) -> str:
    """Each micro-batch is in each sum once, and living ranks compute none twice for the same
    reduction.
    """
    new = rank.held - was.held
    for other in after.ranks if new else ():
        if other.number != rank.number and other.reduced > rank.reduced:
            return f"rank {rank.number} takes reduction {rank.reduced} again, complete for {other.number}"
        again = new & other.held if other.number != rank.number else frozenset(was.todo) & was.held
        if other.reduced == rank.reduced and again:
            return f"micro-batch {min(again)} of rank {other.number}, which lives, is taken again"
    if not rank.sent or was.sent:
        return ""
    members = after.members[rank.sent - 1]
    gang = [r for r in after.ranks + after.dead if r.number in members]
    if any((r.sent, r.reduced) != (rank.sent, rank.reduced) for r in gang):
        return ""
    taken = sorted(b for r in gang for b in r.held)
    return "" if taken == list(range(MICRO_BATCHES)) else f"micro-batches {taken} are in one sum"


def alike(after: Gang, was: Rank, rank: Rank) -> str:
    """Living ranks applied the same sums, and name the same epoch for the same step."""
    others = [r for r in after.ranks if r.number != rank.number]
    if rank.reduced > was.reduced:
        if was.kept.held:
            return f"rank {rank.number} has reduction {was.reduced}, and told that it has not"
        *epochs, vector, number = rank.last
        if 0 in epochs:
            return f"rank {rank.number} applied a bucket that was not summed: {rank.last}"
        if max(epochs) > vector or number != was.reduced:
            return f"rank {rank.number} applied sums that are newer than their vector: {rank.last}"
        for other in others:
            if other.reduced == rank.reduced and other.last != rank.last:
                return f"ranks {rank.number} and {other.number} applied different sums"
            if abs(other.reduced - rank.reduced) > 1:
                return f"ranks {rank.number} and {other.number} stand two reductions apart"
    if rank.steps > was.steps:
        for other in others:
            if other.steps == rank.steps and other.attributed != rank.attributed:
                return (
                    f"step {rank.steps} is of epoch {rank.attributed} on rank {rank.number}, "
                    f"of epoch {other.attributed} on rank {other.number}"
                )
    return ""
