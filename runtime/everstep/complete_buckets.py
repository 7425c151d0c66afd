"""How many buckets of the current reduction are complete on this rank. If members are lost before the
reduction ends, the survivors do not sum again what is complete on all of them.

A rank reports the number with its standing. From then on no group is handed out before the next
epoch, so no buffer that counts is filled anew; what completes later does not count.
"""

from everstep.group import Group


class CompleteBuckets:
    """Used under the lock of `Membership`."""

    def __init__(self) -> None:
        self.buckets = 0
        """From the first on."""
        self._group: Group | None = None
        """The group in which the sums were launched last; None: in none yet."""

    def launch(self, group: Group | None) -> None:
        """The remaining buckets are about to be launched in `group`, which fills their buffers anew."""
        if group is not self._group and group is not None:
            self._group, self.buckets = group, group.complete_buckets

    def count(self, group: Group, buckets: int) -> None:
        """So many of those that were launched in `group` are complete."""
        if group is self._group:
            self.buckets = group.complete_buckets + buckets

    def end(self, group: Group | None) -> None:
        """The reduction is over. `group`: the one of the next reduction; None: it is still being formed."""
        self._group, self.buckets = None, 0
        if group is not None:
            group.complete_buckets = 0
