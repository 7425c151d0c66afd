"""Variants of what a rank of a unit does with its orders, each of which must fail."""

from dataclasses import replace
from typing import Any

from everstep.membership import Membership
from everstep_contract import wire
from everstep_contract.ranges import to_ranges


class OwnOrder(Membership):
    """A rank that has not begun computes its share in ascending order, whatever its sibling began with."""

    def _enter(self, frame: wire.Regroup) -> None:
        super()._enter(replace(frame, begun=None, begun_passes=0))


class Unequal(Membership):
    """A rank computes its share, however many passes its unit makes."""

    def _enter(self, frame: wire.Regroup) -> None:
        super()._enter(replace(frame, passes=0, begun_passes=0))


class FillersCount(Membership):
    """A rank reports its fillers as if it held their micro-batches."""

    def _describe(self, problem: str) -> Any:
        told, begun = super()._describe(problem), self._begun
        return told if begun is None else replace(told, share=to_ranges({p.index for p in begun}))
