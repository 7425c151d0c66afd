"""What must hold for sums between units, whichever ranks die."""

from everstep_contract.units import Mesh
from simulation.protocol import one_sum
from simulation.protocol.ranks import Gang, Rank
from simulation.protocol.rules import Move


def check(before: Gang, move: Move, mesh: Mesh, micro_batches: int) -> str:
    after: Gang = move.after
    if after.still:
        return "nothing can happen any more"
    lost = {mesh.unit_of(r.number) for r in after.dead} | after.broken
    whole = not {mesh.unit_of(r.number) for r in after.ranks} <= lost
    if after.stuck and whole:
        return f"a whole unit cannot go on in place: {after.stuck}"
    if len(after.members) > len(before.members):
        return _whole(after, mesh)
    was = next((r for r in before.ranks if r.number == move.who), None)
    rank = next((r for r in after.ranks if r.number == move.who), None)
    if was is None or rank is None:
        return ""
    return (
        one_sum.one_copy(rank)
        or _in_lockstep(after, rank, mesh)
        or _once(after, was, rank, mesh, micro_batches)
        or one_sum.alike(after, was, rank)
    )


def _whole(after: Gang, mesh: Mesh) -> str:
    """The members of the newest epoch are whole units, with each rank at its place, and none of
    these units has lost a rank.
    """
    members = after.members[-1]
    dead = {mesh.unit_of(r.number) for r in after.dead}
    for rank, number in enumerate(members):
        if mesh.unit_of(number) in dead:
            return f"rank {number} of a lost unit is in the next epoch"
        if mesh.place_of(number) != mesh.place_of(rank):
            return f"rank {number} has another place in its unit than before"
    return ""


def _in_lockstep(after: Gang, rank: Rank, mesh: Mesh) -> str:
    """Within a unit, a rank that sends has made as many passes as the others that have sent.
    Siblings make the same passes in the same order.
    """
    for other in after.ranks:
        if other.number == rank.number or other.reduced != rank.reduced:
            continue
        if mesh.unit_of(other.number) != mesh.unit_of(rank.number):
            continue
        same = rank.sent and rank.sent == other.sent
        if same and len(rank.passes) != len(other.passes):
            return (
                f"ranks {rank.number} and {other.number} of a unit make unequal numbers of passes"
            )
        siblings = mesh.data_index(other.number) == mesh.data_index(rank.number)
        pairs = zip(_entered(rank), _entered(other), strict=False)
        if siblings and any(a != b for a, b in pairs):
            return f"ranks {rank.number} and {other.number} should make the same passes in the same order"
    return ""


def _entered(rank: Rank) -> tuple[int, ...]:
    return (*rank.passes, *rank.todo[: rank.inside])


def _once(after: Gang, was: Rank, rank: Rank, mesh: Mesh, micro_batches: int) -> str:
    """Each micro-batch is in a sum once, by data index, and no rank computes a micro-batch that
    another living unit holds.
    """
    index = mesh.data_index(rank.number)
    new = rank.held - was.held
    for other in after.ranks if new else ():
        if other.reduced > rank.reduced:
            return f"rank {rank.number} takes reduction {rank.reduced} again, complete for {other.number}"
        lives = all(
            any(r.number == n for r in after.ranks) for n in mesh.list_unit_of(other.number)
        )
        elsewhere = mesh.data_index(other.number) != index and other.reduced == rank.reduced
        if lives and elsewhere and new & other.held:
            return f"micro-batch {min(new & other.held)} of rank {other.number}, whose unit lives, is taken again"
    if not rank.sent or was.sent:
        return ""
    members = after.members[rank.sent - 1]
    gang = [r for r in after.ranks + after.dead if r.number in members]
    if any((r.sent, r.reduced) != (rank.sent, rank.reduced) for r in gang):
        return ""
    by_index = {(mesh.data_index(r.number), b) for r in gang for b in r.held}
    taken = sorted(b for _, b in by_index)
    return "" if taken == list(range(micro_batches)) else f"micro-batches {taken} are in one sum"
