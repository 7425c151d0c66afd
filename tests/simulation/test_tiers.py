"""Saves in memory and their copies: every order of staging, copying, commits, deaths and lost nodes."""

from typing import Any

import pytest

from simulation.protocol.near import Near
from simulation.protocol.search import Bounds, Found, search
from simulation.protocol.tiers import Keeping

AMPLE = 3600.0


def explore(model: Any) -> Found:
    found = search(model, model.start(), Bounds(seconds=AMPLE))
    print(f"{found.states} states, {found.moves} moves: {found.broken or 'nothing broken'}")
    return found


def test_once_a_commit_is_copied_the_loss_of_either_node_leaves_it_whole() -> None:
    found = explore(Keeping())
    assert not found.broken, "\n".join([found.broken, *found.story])
    assert found.complete
    assert found.finished > 0


@pytest.mark.parametrize(
    ("variant", "broken"),
    [
        (Keeping(until_committed=False), "nobody has part"),
        (Keeping(rewinds=False), "pod 0 holds"),
        (Keeping(by_digest=False), "nobody has part"),
    ],
    ids=[
        "a copy stays only until a newer save is staged",
        "another epoch's chain stays in memory",
        "a copy that is not the commit's is restored",
    ],
)
def test_each_rule_is_needed(variant: Keeping, broken: str) -> None:
    assert broken in explore(variant).broken


def test_a_near_save_that_is_kept_outlives_all_processes_and_either_node() -> None:
    found = explore(Near())
    assert not found.broken, "\n".join([found.broken, *found.story])
    assert found.complete
    assert found.finished > 0


@pytest.mark.parametrize(
    "variant",
    [Near(waits_for_copies=False), Near(keeps_former=False)],
    ids=[
        "it is kept before its copies are complete",
        "a pod drops the former one when it makes the next",
    ],
)
def test_each_rule_of_near_saves_is_needed(variant: Near) -> None:
    assert "is whole" in explore(variant).broken
