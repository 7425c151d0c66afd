"""Where members come: a boundary at which all wait until a newcomer has the state of one of them."""

import threading

from everstep import transfer
from everstep.errors import StateError
from everstep.session import Session
from everstep.snapshot import Capture
from everstep_contract import wire


def wait_for_newcomers(session: Session) -> None:
    """A member's side: hold at this boundary, hand the state over if asked, until the next epoch.

    Each transfer has a thread of its own: gloo does not return if the newcomer dies while the two
    connect, and this rank must go on then. What such a thread still reads is used by nobody.
    """
    session.membership.hold_here()
    if session.local.names:
        session.note(
            f"ranks join after step {session.applied}: their local state {session.local.names} begins as"
            " the script made it"
        )
    with session.meter.charging("wait", waiting=True):
        while (order := session.membership.next_order()) is not None:
            given = (order, session.applied, session.capture())
            threading.Thread(target=_give, args=(session, *given), daemon=True).start()


def _give(session: Session, order: wire.GiveState, applied: int, capture: Capture) -> None:
    try:
        transfer.give(session.agent, order.epoch, order.key, applied, capture)
    except (RuntimeError, TimeoutError) as error:
        session.note(f"the state could not be handed to a newcomer: {error!r:.200}")


def take_state(session: Session) -> None:
    """The newcomer's side, before its first step."""
    with session.meter.charging("wait", waiting=True):
        while (order := session.membership.next_order()) is not None:
            session.agent.send(_take(session, order))
    if session.broken:
        session.park(session.applied, sound=False, why="the epoch ended before it could join")


def _take(session: Session, order: wire.GiveState | wire.TakeState) -> wire.StateTaken:
    try:
        session.adopt(*transfer.take(session.agent, order.epoch, order.key))
    except (RuntimeError, TimeoutError, StateError) as error:
        return wire.StateTaken(epoch=order.epoch, applied=0, problem=f"{error!r:.300}")
    return wire.StateTaken(epoch=order.epoch, applied=session.applied)
