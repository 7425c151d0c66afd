"""Units: the ranks that together hold one whole copy of the model, and the places within a unit.

The ranks of a unit are consecutive. Within a unit the tensor dimension is the inner one, as in
torch's `init_device_mesh(…, (shard, tensor))`: rank = (unit × shard + shard index) × tensor +
tensor index.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

DIMENSIONS = ("shard", "tensor")
NOT_YET = ("pipeline", "context")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """How a unit's ranks divide the model; one rank by default."""

    shard: int = 1
    """Ranks over which each parameter is sharded (FSDP2). They compute different micro-batches."""
    tensor: int = 1
    """Ranks that divide the computation of each layer. They compute the same micro-batches."""

    @property
    def unit(self) -> int:
        """Ranks of a unit."""
        return self.shard * self.tensor

    def unit_of(self, rank: int) -> int:
        return rank // self.unit

    def place_of(self, rank: int) -> int:
        """A rank's place in its unit. The ranks with the same place, one in each unit, hold the
        same part of the model.
        """
        return rank % self.unit

    def list_unit(self, unit: int) -> range:
        """The ranks of a unit."""
        return range(unit * self.unit, (unit + 1) * self.unit)

    def list_unit_of(self, rank: int) -> range:
        """The ranks of a rank's unit."""
        return self.list_unit(self.unit_of(rank))

    def list_replicas(self, rank: int, world: int) -> range:
        """The ranks with the same place as this rank, one in each unit."""
        return range(self.place_of(rank), world, self.unit)

    def holds_unit(self, ranks: Collection[int]) -> bool:
        """Whether all ranks of a unit are among these."""
        return any(set(self.list_unit_of(rank)) <= set(ranks) for rank in ranks)

    def data_index(self, rank: int) -> int:
        """Index of the share of the micro-batches that a rank computes. The tensor ranks of one
        shard compute the same share.
        """
        return rank // self.tensor

    def count_shares(self, world: int) -> int:
        return world // self.tensor

    def list_sharers(self, rank: int, world: int) -> range:
        """The ranks with the same tensor index, one for each share."""
        return range(rank % self.tensor, world, self.tensor)

    def counts(self, rank: int) -> bool:
        """Whether this rank represents its share in the vector and in the ledger."""
        return rank % self.tensor == 0

    def count_slots(self, ranks: int) -> int:
        """The fewest slots of `ranks` ranks each that form a whole number of units. Of `ranks` and
        the ranks of a unit, one must be a multiple of the other (`why_not_slots`).
        """
        return max(1, self.unit // ranks)

    def why_not_slots(self, ranks: int) -> str:
        """Why units cannot be laid out on pods of `ranks` ranks; empty: they can."""
        if self.unit % ranks == 0 or ranks % self.unit == 0:
            return ""
        return f"a unit has {self.unit} ranks ({self}) and a pod {ranks}: one must be a multiple of the other"

    def round_down(self, ranks: int) -> int:
        """The largest number of ranks, at most `ranks`, that is a whole number of units."""
        return ranks - ranks % self.unit

    def why_not_whole(self, ranks: int) -> str:
        """Why `ranks` is not a whole number of units, and which numbers are; empty: it is one."""
        below = self.round_down(ranks)
        if below == ranks:
            return ""
        fix = " or ".join(str(n) for n in (below, below + self.unit) if n)
        return f"is not a whole number of units of {self.unit} ({self}): use {fix}"

    def __str__(self) -> str:
        """The form that `parse` reads."""
        named = {"shard": self.shard, "tensor": self.tensor}
        return ",".join(f"{k}={n}" for k, n in named.items() if n > 1) or "shard=1"


ONE_RANK = Mesh()
"""Each rank holds the whole model."""


def form_units(
    slots: Iterable[int], together: int, awaited: Collection[int] = ()
) -> list[tuple[int, ...]]:
    """Group these slots into units: neighbours first, then the remaining slots by number.

    Args:
        together: slots of a unit (`Mesh.count_slots`). Slots are neighbours if they have the same
            slot // together.
        awaited: slots that may become ready soon. Their neighbours wait for them, and do not form a
            unit with others.

    Returns:
        Complete units only, in the order of their lowest slots.
    """
    groups: dict[int, list[int]] = {}
    for slot in sorted(slots):
        groups.setdefault(slot // together, []).append(slot)
    kept = {slot // together for slot in awaited}
    whole = [tuple(group) for group in groups.values() if len(group) == together]
    parts = [g for number, g in groups.items() if len(g) < together and number not in kept]
    rest = [slot for group in parts for slot in group]
    cut = len(rest) - len(rest) % together
    return sorted([*whole, *(tuple(rest[at : at + together]) for at in range(0, cut, together))])


def parse(text: str) -> Mesh:
    """Parse a mesh such as `shard=2,tensor=2`; a dimension that is not named is 1.

    Raises:
        ValueError: names what is wrong and what to write instead.
    """
    found: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, number = (p.strip() for p in part.partition("="))
        if name in NOT_YET:
            raise ValueError(f"{name}: not yet supported; use shard and tensor")
        if name not in DIMENSIONS:
            raise ValueError(
                f"{name!r} is no dimension; write shard=2, tensor=2 or shard=2,tensor=2"
            )
        if name in found:
            raise ValueError(f"{name} is given twice")
        if not number.isascii() or not number.isdigit() or int(number) < 1:
            raise ValueError(f"{name}={number}: give it a whole number of ranks, 1 or more")
        found[name] = int(number)
    return Mesh(**found)
