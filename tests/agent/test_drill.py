"""Unit tests of the drill of `everstep run --drill`."""

from dataclasses import replace

from everstep_agent.local.drill import STEPS, Drill
from everstep_contract import levels

PIDS = {0: 100, 1: 101, 2: 102}


def seen(step: int, lives: tuple[int, ...] = (1, 1, 1), **changes: object) -> levels.Seen:
    members = tuple(
        levels.Member(slot=s, attempt=0, incarnation=1, rank=s, life=life, step=step)
        for s, life in enumerate(lives)
    )
    values = {"run": "r", "epoch": 1, "running": True, "members": members, "step": step}
    return levels.Seen(**(values | changes))  # type: ignore[arg-type]


def incident(**changes: object) -> levels.RuntimeIncident:
    values = {
        "id": "new", "cause": "WorkerDied", "message": "rank 2 was killed", "step": 13,
        "phases": (levels.Phase(name="detect", ms=20), levels.Phase(name="regroup", ms=230)),
    }  # fmt: skip
    return levels.RuntimeIncident(**(values | changes))  # type: ignore[arg-type]


def test_it_kills_the_highest_rank_once_all_have_stepped_for_a_while():
    drill = Drill(workers=3)
    assert drill.choose(seen(0, running=False), PIDS) is None
    assert drill.choose(seen(7, lives=(1, 1)), PIDS) is None, "one of three is missing"
    assert drill.choose(seen(7), PIDS) is None
    assert drill.choose(seen(6 + STEPS), PIDS) is None
    assert drill.choose(seen(7 + STEPS), PIDS) == 102
    assert drill.choose(seen(8 + STEPS), PIDS) is None, "it kills only once"


def killed() -> Drill:
    drill = Drill(workers=3)
    old = incident(id="old", open=False)
    drill.choose(seen(0, incidents=(old,)), PIDS)
    assert drill.choose(seen(STEPS, incidents=(old,)), PIDS) == 102
    drill.killed_at = 50.0
    return drill


def test_it_is_over_when_all_train_again():
    drill, old = killed(), incident(id="old", open=False)
    assert not drill.follow(seen(11, incidents=(old,)), 50.1), "the kill has no incident yet"
    assert not drill.follow(seen(11, incidents=(old, incident())), 50.2)
    closed = incident(open=False)
    assert not drill.follow(seen(14, lives=(1, 1), incidents=(old, closed)), 50.4)
    grows = incident(id="grow", cause="Grow", open=True)
    assert not drill.follow(seen(15, incidents=(old, closed, grows)), 50.6)
    done = replace(grows, open=False)
    assert drill.follow(seen(16, lives=(1, 1, 2), incidents=(old, closed, done)), 50.9)
    assert drill.follow(seen(17, lives=(1, 1, 2), incidents=(old, closed, done)), 52.0)


def test_its_screen_tells_what_it_cost():
    drill = killed()
    after = seen(16, lives=(1, 1, 2), incidents=(incident(open=False),))
    drill.follow(after, 50.9)
    text = "\n".join(drill.describe(after))
    for part in (
        "rank 2 of 3 (SIGKILL)",
        "rank 2 was killed",
        "after 0.25 s (detect 20 ms, regroup 230 ms)",
        "after 0.9 s",
        "2 of 3 are the same, 1 new",
        "steps lost         0",
    ):
        assert part in text, text
