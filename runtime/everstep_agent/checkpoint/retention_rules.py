"""Which checkpoints are kept, and what may be deleted. Pure.

The invariant: the newest good checkpoint is never retired, nor anything newer than it; what is
retired is named by nothing that stays.
"""

import re
from collections.abc import Collection, Iterable, Sequence

from everstep_agent import runlog_rules
from everstep_agent.runlog_rules import Retired
from everstep_contract.log import Commit, Entry, Retire
from everstep_contract.manifest import Manifest


def choose_retired(entries: Sequence[Entry], good: Collection[str], keep: int) -> list[Commit]:
    """Commits to give up, oldest first: all that were committed before the `keep`-th newest good
    one.

    Args:
        good: keys of manifests that were read back and found whole.
        keep: how many good ones stay, at least 1.
    """
    if keep < 1:
        raise ValueError(
            f"keep={keep}: at least one checkpoint must stay; set checkpoint.keep to 1 or more"
        )
    kept = [c for c in runlog_rules.list_resumable(entries) if c.manifest in good][:keep]
    if len(kept) < keep:
        return []
    retired = runlog_rules.list_retired(entries).manifests
    oldest = entries.index(kept[-1])
    return [e for e in entries[:oldest] if isinstance(e, Commit) and e.manifest not in retired]


def build_retire(
    token: str,
    epoch: int,
    given_up: Iterable[tuple[Commit, Manifest | None]],
    kept: Iterable[Manifest],
) -> Retire:
    """The entry for these; a chunk that a kept manifest names stays. None: a manifest that cannot
    be read.
    """
    stays = {c.key for m in kept for c in m.chunks}
    pairs = list(given_up)
    chunks = {c.key for _, m in pairs if m for c in m.chunks} - stays
    return Retire(
        epoch=epoch,
        token=token,
        manifests=tuple(c.manifest for c, _ in pairs),
        chunks=tuple(sorted(chunks)),
    )


def choose_garbage(
    keys: Iterable[str], named: Collection[str], retired: Retired, step: int
) -> Retired:
    """Of these keys those that nothing names and nothing will: a save of a step that is not after
    the newest commit's can no longer be committed. A listing that lags behind only misses some.
    """
    held = set(named) | retired.manifests | retired.chunks
    old = [k for k in keys if k not in held and (at := step_of(k)) is not None and at <= step]
    return Retired(
        manifests=frozenset(k for k in old if k.startswith("manifests/")),
        chunks=frozenset(k for k in old if k.startswith("chunks/")),
    )


def step_of(key: str) -> int | None:
    """The step that a key of ours names."""
    found = _STEP.fullmatch(key)
    return int(found.group(1) or found.group(2)) if found else None


_STEP = re.compile(
    r"manifests/[0-9]+-([0-9]{1,18})-[\w-]+\.json|chunks/[\w-]+/([0-9]{1,18})/[0-9a-f]{64}",
    re.ASCII,
)
