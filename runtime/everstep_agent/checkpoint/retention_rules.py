"""Which checkpoints are kept, and what may be deleted. Pure.

The invariant: the newest good checkpoint, any newer one and any pinned one are never retired, and
nothing that is kept names a retired object. A checkpoint is pinned only by its own commit, so no
retire can be decided between the two.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from everstep_agent.runlog.log_index import LogIndex
from everstep_contract.log import Commit, Retire


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """Leftovers of saves that were never committed."""

    manifests: frozenset[str] = frozenset()
    chunks: frozenset[str] = frozenset()


def choose_retired(log: LogIndex, good: Collection[str], keep: int) -> list[Commit]:
    """Commits to give up, oldest first: all that were committed before the `keep`-th newest good
    one, except those that are pinned.

    Args:
        good: keys of manifests of checkpoints that were read back and found complete.
        keep: how many good ones stay, at least 1.
    """
    if keep < 1:
        raise ValueError(
            f"keep={keep}: at least one checkpoint must be kept; set checkpoint.keep to 1 or more"
        )
    kept = list(islice((c for c in log.resumable() if c.manifest in good), keep))
    older = log.standing_before(kept[-1]) if len(kept) == keep else []
    return [c for c in older if not log.is_pinned(c)]


def build_retire(
    token: str,
    epoch: int,
    given_up: Sequence[tuple[Commit, Collection[str]]],
    kept: Collection[str],
) -> Retire:
    """The entry that retires checkpoints, without chunks that a kept manifest names.

    Args:
        given_up: each with the keys of its chunks; none if its manifest cannot be read.
        kept: keys of the chunks that kept manifests name.
    """
    chunks = {key for _, keys in given_up for key in keys}.difference(kept)
    return Retire(
        epoch=epoch,
        token=token,
        manifests=tuple(c.manifest for c, _ in given_up),
        chunks=tuple(sorted(chunks)),
    )


def choose_garbage(
    keys: Iterable[str], named: Collection[str], log: LogIndex, step: int
) -> Garbage:
    """Those of `keys` that nothing names, now or later. A save can no longer be committed unless
    its step is after the newest commit's. If the listing is stale, only some garbage is missed.

    Args:
        named: chunks of the manifests that stay.
        step: the step of the newest commit.
    """
    loose = (
        k for k in keys if k not in named and not log.is_committed(k) and not log.is_retired(k)
    )
    old = [k for k in loose if (at := step_of(k)) is not None and at <= step]
    return Garbage(
        manifests=frozenset(k for k in old if k.startswith("manifests/")),
        chunks=frozenset(k for k in old if k.startswith("chunks/")),
    )


def step_of(key: str) -> int | None:
    """The step in a key that Everstep wrote."""
    found = _STEP.fullmatch(key)
    return int(found.group(1) or found.group(2)) if found else None


_STEP = re.compile(
    r"manifests/[0-9]+-([0-9]{1,18})-[\w-]+\.json|chunks/[\w-]+/([0-9]{1,18})/(?:b3-)?[0-9a-f]{64}",
    re.ASCII,
)
