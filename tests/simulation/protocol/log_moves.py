"""The store's create-only PUT at the log's next place."""

from simulation.protocol.rules import Rules
from simulation.protocol.world import World


def is_free(world: World, place: int, rules: Rules) -> bool:
    """Whether a create-only PUT at this place of the log succeeds."""
    return not rules.create_only or place >= len(world.log) or world.log[place] == 0


def written(world: World, place: int, entry: int, rules: Rules) -> tuple[int, ...]:
    if place < len(world.log) and world.log[place] == 0:
        return (*world.log[:place], entry, *world.log[place + 1 :])
    return (*(world.log if rules.create_only else world.log[:place]), entry)


def without(faults: tuple[str, ...], kind: str) -> tuple[str, ...]:
    at = faults.index(kind)
    return (*faults[:at], *faults[at + 1 :])
