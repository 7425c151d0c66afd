"""Stories of survivors that a claim names although they have joined another coordinator's epoch by
then. They cannot enter the claimed epoch, and they hold the only copy of the state.
"""

from simulation.protocol.led import Led
from simulation.protocol.rules import Rules
from simulation.test_step_first_stories import C0, C1, C2, LOST, begin, in_place

STEP_OF_EPOCH_1 = "1"
"""The model's digest of a state that one step of epoch 1 trained."""


def a_step_and_a_loss(faults: tuple[str, ...], rules: Rules) -> Led:
    """Pod 0 coordinates; its worker dies after a step that is not committed."""
    led = begin(3, C0, ("worker", *faults), rules)
    led.do(*(f"{pod} applies" for pod in (C0, C1, C2)), f"{C0} loses its worker")
    led.do(f"{C0} holds epoch")
    return led


def all_survivors_have_joined_a_rivals_epoch(rules: Rules) -> Led:
    """Pod 0 claims epoch 2, and stands still before any pod hears of it. Pod 1 takes the role, and
    asks both survivors to join epoch 3. Then pod 0 continues, and pod 1 gives up the role.
    """
    led = a_step_and_a_loss(("pause",), rules)
    led.hold(f"{C0} steps first", f"{C0} claims, behind", f"{C0} stands still")
    led.do(f"{C1} coordinates", f"{C1} asks to join 3", f"{C0} goes on again")
    led.hold(f"{C1} lays the role down")
    return led


def the_only_survivor_inside_dies(rules: Rules) -> Led:
    """Pod 0 claims epoch 2, and loses its connection to pod 2, which takes the role, too, and joins
    its own epoch 3. Pod 1 enters epoch 2, and loses its worker.
    """
    led = a_step_and_a_loss(("link", "duel", "worker"), rules)
    led.hold(f"{C0} steps first", f"{C0} claims, behind", f"{C0} loses sight of {C2}")
    led.hold(f"{C2} coordinates, too", f"{C2} is told", f"{C2} hears {C2}")
    led.hold(f"{C2} asks to join 3", f"{C2} is told {C2}")
    led.do(f"{C1} loses its worker")
    led.hold("all reach each other again", f"{C2} lays the role down")
    return led


def a_claimed_newcomer_dies(rules: Rules) -> Led:
    """Pod 0 claims epoch 3, with pod 1 and its own new worker, and stands still. Pod 1 takes the
    role, and joins its own epoch 4. The new worker enters epoch 3, and dies.
    """
    led = begin(2, C0, ("worker", "worker", "pause"), rules)
    led.do(f"{C0} applies", f"{C1} applies", f"{C0} loses its worker", f"{C0} holds epoch 1")
    led.do(f"{C0} steps first", f"{C0} claims, behind", f"{C0} invites", f"{C0} agrees with all")
    led.do(f"{C0} has the state handed over", f"{C0} takes the state of {C1}")
    led.hold(f"{C0} claims, in place, 3", f"{C0} stands still")
    led.do(f"{C1} coordinates", f"{C1} asks to join 4")
    led.hold(f"{C0} goes on again", f"{C0} is told {C0}", f"{C0} loses its worker")
    led.hold(f"{C1} lays the role down")
    return led


def test_an_epoch_ends_no_worker_that_it_names() -> None:
    led = all_survivors_have_joined_a_rivals_epoch(in_place())
    led.do(f"{C1} is told", f"{C0} holds epoch 2", f"{C0} gives up on going on in place")
    led.do(
        f"{C0} ends epoch 2",
        f"{C0} adopts an epoch 1",
        f"{C0} has all parts",
        f"{C0} commits (1, 1)",
    )
    assert led.world.entries()[-1].digest == STEP_OF_EPOCH_1  # type: ignore[union-attr]
    assert led.end() == ""
    led = all_survivors_have_joined_a_rivals_epoch(in_place(named_stay=False))
    assert LOST in led.end()


def test_a_dead_rank_of_an_epoch_that_never_began_hinders_nobody() -> None:
    led = the_only_survivor_inside_dies(in_place())
    assert led.end() == ""
    led = the_only_survivor_inside_dies(in_place(leave_empty=False))
    assert "no end" in led.end()
    led = the_only_survivor_inside_dies(in_place(named_stay=False))
    assert LOST in led.end()


def test_what_is_saved_of_the_former_epoch_is_committed_under_a_claim_with_newcomers() -> None:
    rules = Rules(in_place=True, newcomers=True, steps=3)
    assert a_claimed_newcomer_dies(rules).end() == ""
