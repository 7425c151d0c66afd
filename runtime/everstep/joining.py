"""How newcomers join: from one boundary on, no sum is complete until the newcomer holds the state
of a member. Meanwhile the members compute their share of the next step.
"""

import threading
import time
from collections.abc import Callable, Mapping
from functools import cache

from everstep import device, held_already, transfer
from everstep.errors import StateError
from everstep.session import Session
from everstep.sharded import local_of
from everstep.snapshot import Capture, Snapshot
from everstep_contract import wire

TELL_SECONDS = 1.0
"""How often a newcomer reports to its agent how much of the state it has received."""


def let_join(session: Session, epoch: int) -> None:
    """The member's side, at a boundary of `epoch`. No sum is complete until the next epoch, so the
    next step changes only small state, which is copied here. The rest can be handed over while that
    step computes.

    After the last step there is no next one, and a script that changes its state within the loop
    cannot hand it over during a step: such a rank waits here.
    """
    if session.local.names:
        session.note(
            f"ranks join after step {session.applied}: their local state {session.local.names} begins as"
            " the script made it"
        )
    shot, applied, membership = session.take_snapshot(), session.applied, session.membership
    if session.applied == session.until or session.gave_torn:
        membership.hold_here(epoch)
        with session.meter.charging("wait", waiting=True):
            _follow_orders(session, epoch, shot, applied)
    else:
        membership.hold_next(epoch)
        _begin(_follow_orders, session, epoch, shot, applied)


def _follow_orders(session: Session, epoch: int, shot: Snapshot, applied: int) -> None:
    """Hand the state over as ordered. Each transfer has a thread of its own: gloo does not return
    if the newcomer dies while the two connect, and this rank must continue then. Nobody uses what
    such a thread still reads.
    """
    list_state = cache(shot.list_state)
    while (order := session.membership.next_order(epoch)) is not None:
        _begin(_give, session, order, applied, shot, list_state)


def _begin(act: Callable[..., None], *given: object) -> None:
    threading.Thread(target=act, args=given, name="everstep-give", daemon=True).start()


def _give(
    session: Session,
    order: wire.GiveState,
    applied: int,
    shot: Snapshot,
    list_state: Callable[[], Capture],
) -> None:
    over = False

    def find_changed(held: Capture) -> str:
        """As `Snapshot.find_changed`. Once the members have gone on without this newcomer, a step has
        changed the state as it should.
        """
        nonlocal over
        changed = shot.find_changed(held)
        over = session.epoch != order.epoch
        return changed

    try:
        with device.beside(shot.marked):
            held = list_state()
            torn = transfer.give(
                session.agent,
                order.epoch,
                order.key,
                applied,
                held,
                lambda: find_changed(held),
            )
    except (RuntimeError, TimeoutError) as error:
        session.note_own(f"the state could not be handed to a newcomer: {error!r:.200}")
        return
    if torn and not over:
        session.gave_torn = True
        session.note_own(
            f"{torn} was changed while a joining rank copied it. From now on this rank stops its steps while another "
            "joins. To avoid that, change it after the loop over step.batches"
        )


def take_state(session: Session) -> None:
    """The newcomer's side: take the state of a member before the first step."""
    with session.meter.charging("wait", waiting=True):
        has = _tell_held(session)
        while (order := session.membership.next_order(session.start.epoch)) is not None:
            session.agent.send(_take(session, order, has))
            has = {}
    if session.broken:
        session.park(session.applied, sound=False, why="the epoch ended before it could join")


def _tell_held(session: Session) -> dict[str, str]:
    """Digest what may be the same on the members, which take steps meanwhile."""
    modules = {name for name, _ in session.tracked.of_kind("module")}
    tensors = {
        name: local_of(tensor)
        for name, tensor in session.capture().tensors.items()
        if name.partition("/")[0] in modules
    }
    trained = session.tracked.trained_parameters().values()
    return held_already.tell(tensors, [local_of(parameter) for parameter in trained])


def _take(
    session: Session, order: wire.GiveState | wire.TakeState, has: Mapping[str, str]
) -> wire.StateTaken:
    told = 0.0

    def tell(received: int, expected: int) -> None:
        nonlocal told
        now = time.monotonic()
        if received == expected or now - told >= TELL_SECONDS:
            told = now
            session.agent.send(
                wire.TakingState(epoch=order.epoch, received=received, expected=expected)
            )

    try:
        own = {name: local_of(t) for name, t in session.capture().tensors.items()}
        session.adopt(transfer.take(session.agent, order.epoch, order.key, own, has, tell))
    except StateError as error:
        return wire.StateTaken(
            epoch=order.epoch, applied=0, problem=f"{error!s:.300}", differs=True
        )
    except (RuntimeError, TimeoutError) as error:
        return wire.StateTaken(epoch=order.epoch, applied=0, problem=f"{error!r:.300}")
    return wire.StateTaken(epoch=order.epoch, applied=session.applied)
