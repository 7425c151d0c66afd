"""A story of a pod that has to leave while others join: its notice ends before all hold for them."""

from simulation.protocol.led import Led
from simulation.protocol.rules import Rules
from simulation.protocol.world import Place
from simulation.test_step_first_stories import C0, C1, C2, begin


def one_leaves_late(leaver: Place, ahead: Place) -> Led:
    """Pod 0 coordinates, and its worker is replaced. Only one of the two members has come to the boundary at
    which all are to hold for the new worker when the notice of one of them ends.
    """
    rules = Rules(in_place=True, newcomers=True, steps=3)
    led = begin(3, C0, ("worker", "leave"), rules)
    led.do(*(f"{pod} applies" for pod in (C0, C1, C2)), f"{C0} loses its worker")
    led.do(f"{C0} holds epoch 1", f"{C0} steps first", f"{C0} claims, behind", f"{C0} invites")
    led.do(f"{ahead} applies", f"{C0} agrees with all to hold")
    led.do(f"{leaver} is to leave", f"{C0} hears who is to leave")
    led.do(f"{C0} lets leave, as its notice ends,")
    return led


def test_others_go_on_without_a_pod_that_leaves_ahead_of_them_or_behind() -> None:
    for leaver, ahead in ((C1, C1), (C1, C2)):
        led = one_leaves_late(leaver, ahead)
        led.do(f"{C0} holds epoch 2")
        assert led.end() == ""
