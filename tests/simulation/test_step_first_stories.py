"""Why a step before its claim needs its rules: stories with so many faults that no search reaches
them. Each breaks an invariant if its rule is removed.
"""

from simulation.protocol import step_first_variants
from simulation.protocol.led import Led
from simulation.protocol.rules import Rules

LOST = "which is not committed"
C0, C1, C2, C3 = ((slot, 1) for slot in range(4))
"""Pods: (slot, attempt)."""


def in_place(**changes: object) -> Rules:
    return Rules(in_place=True, **changes)  # type: ignore[arg-type]


def begin(slots: int, coordinator: tuple[int, int], faults: tuple[str, ...], rules: Rules) -> Led:
    led = Led(slots, faults, rules)
    led.do(f"{coordinator} coordinates", f"{coordinator} opens a round")
    led.do(f"{coordinator} claims 1 of")
    return led


def a_rank_that_was_ahead_has_saved(rules: Rules) -> Led:
    """Pod 1 coordinates, and has taken a step that pod 0 has not taken. It is told to stop the job,
    cannot reach pod 0, and saves. Meanwhile pod 0 has taken the role, and holds the epoch. Then the
    two pods reach each other again, and pod 1 loses its worker.
    """
    led = begin(2, C1, ("duel", "link", "stop", "worker"), rules)
    led.do(f"{C1} applies", "job is to stop", f"{C1} hears of the stop", f"{C0} coordinates, too")
    led.do(f"{C0} loses sight of {C1}", f"{C0} asks to join", f"{C1} cuts", f"{C1} has step saved")
    led.do(f"{C1} commits", "all reach each other again", f"{C1} lays the role down")
    led.do(f"{C1} loses its worker")
    return led


def a_survivor_is_in_anothers_claim(rules: Rules, *, asked: bool) -> Led:
    """Pod 2 coordinates; its worker and that of pod 3 are dead, and a third worker dies. While pod
    2 stands still, pod 3 claims an epoch for the only survivor. Nobody hears of this claim, because
    pod 3 is started again.

    Args:
        asked: pod 2 had asked for an epoch of the same number before it stood still.
    """
    led = begin(4, C2, ("worker", "worker", "worker", "pause", "agent"), rules)
    led.do(*(f"({slot}, 1) applies" for slot in range(4)))
    for lost in (C2, C3):
        led.do(f"{lost} loses its worker", f"{C2} holds epoch", f"{C2} steps first")
        led.do(f"{C2} claims, behind")
    if asked:
        led.do(f"{C1} loses its worker")
        led.hold(f"{C2} holds epoch 3", f"{C2} stands still")
    else:
        led.do(f"{C2} stands still", f"{C1} loses its worker")
    led.do(f"{C3} coordinates", f"{C3} asks to join")
    led.hold(f"{C3} steps first", f"{C3} claims, behind", f"{C3} is started again")
    led.do(f"{C2} goes on again")
    if not asked:
        led.do(f"{C2} holds epoch 3")
    return led


def test_survivors_do_not_step_first_behind_a_dead_rank_that_may_have_saved() -> None:
    led = a_rank_that_was_ahead_has_saved(in_place())
    assert not led.can(f"{C0} steps first")
    assert led.end() == ""
    led = a_rank_that_was_ahead_has_saved(in_place(step_first=step_first_variants.after_a_cut))
    led.do(f"{C0} steps first", f"{C0} applies")
    assert LOST in led.end()


def test_a_survivor_that_has_joined_another_epoch_since_does_not_step_first() -> None:
    led = a_survivor_is_in_anothers_claim(in_place(), asked=False)
    assert not led.can(f"{C2} steps first")
    assert led.end() == ""
    unpromised = in_place(step_first=step_first_variants.unpromised)
    led = a_survivor_is_in_anothers_claim(unpromised, asked=False)
    led.do(f"{C2} steps first")
    assert LOST in led.end()


def test_a_survivor_is_promised_to_a_coordinators_epoch_not_to_its_number() -> None:
    led = a_survivor_is_in_anothers_claim(in_place(), asked=True)
    assert not led.can(f"{C2} steps first")
    assert led.end() == ""
    led = a_survivor_is_in_anothers_claim(in_place(by_token=False), asked=True)
    led.do(f"{C2} steps first")
    assert LOST in led.end()
