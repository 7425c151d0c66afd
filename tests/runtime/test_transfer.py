"""The live state arrives as it was sent, for tensors of any size."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep import held_already, joining, state, transfer
from everstep.errors import StateError
from everstep.snapshot import Capture
from everstep_contract import wire
from runtime.a_job import Trial


class Keys:
    """The keys that an agent would hold, in this process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def send(self, frame: wire.StoreSet) -> None:
        with self._changed:
            self._values[frame.key] = frame.value
            self._changed.notify_all()

    def request(self, frame: Any) -> wire.StoreReply:
        with self._changed:
            match frame:
                case wire.StoreGet():
                    self._changed.wait_for(
                        lambda: frame.key in self._values, frame.timeout_ms / 1000
                    )
                    return wire.StoreReply(value=self._values.get(frame.key))
                case wire.StoreAllGather():
                    keys = [f"{frame.key}/{rank}" for rank in range(frame.world)]
                    self._values[keys[frame.rank]] = frame.value
                    self._changed.notify_all()
                    if not self._changed.wait_for(
                        lambda: all(key in self._values for key in keys), frame.timeout_ms / 1000
                    ):
                        return wire.StoreReply()
                    return wire.StoreReply(values=tuple(self._values[key] for key in keys))
                case wire.StoreCompareSet():
                    return wire.StoreReply(value=self._values.setdefault(frame.key, frame.desired))
                case wire.StoreCheck():
                    return wire.StoreReply(number=all(k in self._values for k in frame.keys))
        raise NotImplementedError(frame)


SMALL, EMPTY = torch.arange(3, dtype=torch.int16), torch.zeros(0, 4)
LARGE = torch.arange(transfer.PACK_BYTES // 4 + 1, dtype=torch.float32)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"empty": EMPTY},
        {"a": SMALL, "b": torch.tensor(2.5), "c": torch.ones(2, 2, dtype=torch.bfloat16)},
        {"large": LARGE, "empty": EMPTY},
        {"empty": EMPTY, "large": LARGE, "small": SMALL},
        {"small": SMALL, "large": LARGE, "empty": EMPTY, "last": SMALL},
    ],
    ids=lambda tensors: "+".join(tensors) or "none",
)
def test_each_tensor_arrives_as_it_was_sent(tensors: state.Tensors) -> None:
    keys, sent = Keys(), Capture(tree={"step": 7}, tensors=tensors)
    with ThreadPoolExecutor(2) as both:
        giving = both.submit(transfer.give, keys, 1, "k", 7, sent)
        taking = both.submit(transfer.take, keys, 1, "k")
        giving.result(timeout=60)
        found = taking.result(timeout=60)
    taken = found.tensors
    assert (found.applied, found.tree, found.parts) == (7, {"step": 7}, frozenset())
    assert list(taken) == list(tensors)
    for name, tensor in tensors.items():
        assert taken[name].dtype == tensor.dtype
        assert torch.equal(taken[name], tensor)


def test_a_large_tensor_travels_alone_and_an_empty_one_not_at_all() -> None:
    assert list(transfer._pack([1, transfer.PACK_BYTES + 1, 0, 1])) == [[0], [1], [3]]


def hand_over(sent: Capture, own: state.Tensors, torn: str = "") -> state.Tensors:
    keys = Keys()
    with ThreadPoolExecutor(2) as both:
        giving = both.submit(transfer.give, keys, 1, "k", 7, sent, lambda: torn)
        taking = both.submit(transfer.take, keys, 1, "k", own)
        assert giving.result(timeout=60) == torn
        return taking.result(timeout=60).tensors


def test_a_tensor_is_received_where_the_newcomer_has_one_that_fits() -> None:
    sent = {n: torch.arange(6.0).view(2, 3) for n in ("fits", "flat", "wide", "turned", "tied")}
    own = {
        "fits": torch.zeros(2, 3, requires_grad=True),
        "flat": torch.zeros(6),
        "wide": torch.zeros(2, 3, dtype=torch.float64),
        "turned": torch.zeros(3, 2).t(),
    }
    own["tied"] = own["fits"]
    taken = hand_over(Capture(tree={}, tensors=sent), own)
    assert all(torch.equal(taken[name], sent[name]) for name in sent)
    placed = [name for name in own if taken[name].data_ptr() == own[name].data_ptr()]
    assert placed == ["fits"]


def test_a_default_device_does_not_move_what_is_handed_over() -> None:
    """As `torch.set_default_device("cuda")` does."""
    keys, sent = Keys(), Capture(tree={}, tensors={"large": LARGE, "a": SMALL, "b": SMALL})

    def elsewhere(act: Callable[..., Any], *given: Any) -> Any:
        with torch.device("meta"):
            return act(keys, 1, "k", *given)

    with ThreadPoolExecutor(2) as both:
        giving = both.submit(elsewhere, transfer.give, 7, sent)
        taking = both.submit(elsewhere, transfer.take)
        giving.result(timeout=60)
        taken = taking.result(timeout=60).tensors
    assert all(torch.equal(taken[name], sent.tensors[name]) for name in sent.tensors)


def test_large_tensors_travel_in_pieces_and_each_one_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", transfer.PACK_BYTES)
    keys, sent = Keys(), Capture(tree={}, tensors={"large": LARGE, "small": SMALL})
    told: list[tuple[int, int]] = []
    with ThreadPoolExecutor(2) as both:
        giving = both.submit(transfer.give, keys, 1, "k", 7, sent)
        taking = both.submit(transfer.take, keys, 1, "k", tell=lambda *found: told.append(found))
        giving.result(timeout=60)
        taken = taking.result(timeout=60).tensors
    assert torch.equal(taken["large"], LARGE)
    size = transfer.PACK_BYTES + 4 + 6
    assert told == [(2**20, size), (2**20 + 4, size), (size, size)]


def test_what_the_newcomer_has_already_is_not_sent() -> None:
    sent = {"has": LARGE, "differs": LARGE + 1, "trained": LARGE + 2}
    own = {n: LARGE.clone() for n in sent}
    told: list[tuple[int, int]] = []
    has = held_already.tell(own, [own["trained"]])
    keys = Keys()
    with ThreadPoolExecutor(2) as both:
        giving = both.submit(transfer.give, keys, 1, "k", 7, Capture(tree={}, tensors=sent))
        taking = both.submit(
            transfer.take, keys, 1, "k", own, has, lambda *found: told.append(found)
        )
        giving.result(timeout=60)
        taken = taking.result(timeout=60).tensors
    assert list(taken) == list(sent)
    assert all(torch.equal(taken[name], sent[name]) for name in sent)
    assert set(has) == {"has", "differs"}
    size = 2 * len(LARGE) * 4
    assert told[-1] == (size, size)


def test_an_older_newcomer_gets_large_tensors_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", transfer.PACK_BYTES)
    keys = Keys()

    def take_as_before() -> tuple[int, torch.Tensor]:
        pair = transfer.forming.form_pair(keys, epoch=1, key="k", rank=1)
        length, verdict = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
        pair.receive(length)
        pair.receive(torch.empty(int(length), dtype=torch.uint8))
        whole = torch.empty_like(LARGE)
        pair.receive(whole)
        pair.receive(verdict)
        return int(verdict), whole

    with ThreadPoolExecutor(2) as both:
        sent = Capture(tree={}, tensors={"large": LARGE})
        giving = both.submit(transfer.give, keys, 1, "k", 7, sent)
        verdict, taken = both.submit(take_as_before).result(timeout=60)
        giving.result(timeout=60)
    assert verdict == 0
    assert torch.equal(taken, LARGE)


def test_a_state_that_changed_on_its_way_is_not_taken() -> None:
    with pytest.raises(StateError, match="changed while it was handed over"):
        hand_over(Capture(tree={}, tensors={"a": SMALL}), {}, torn="model/a")


@pytest.mark.parametrize("gone_on", [False, True])
def test_a_change_after_the_members_have_gone_on_without_the_newcomer_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone_on: bool
) -> None:
    """The transfer to a newcomer that was left out may still run while they apply the next step."""
    trial = Trial(tmp_path).track()
    next(iter(trial.job.steps(until=3)))
    session = trial.session
    shot = session.take_snapshot()

    def give(*given: Any) -> str:
        if gone_on:
            session.membership.epoch += 1
        with torch.no_grad():
            trial.model.weight.add_(1.0)
        found: str = given[-1]()
        return found

    monkeypatch.setattr(transfer, "give", give)
    joining._give(session, wire.GiveState(epoch=1, key="k"), 0, shot, shot.list_state)
    assert session.gave_torn is not gone_on
    assert bool(session.findings.own_notes) is not gone_on
