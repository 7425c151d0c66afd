"""The store that torch's process groups see."""

from typing import Any

from everstep.store import AgentStore
from everstep_contract import wire


class Agent:
    """Keeps keys and counts the requests."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}
        self.asked: list[str] = []
        self.epochs: list[int] = []

    def send(self, frame: Any) -> None:
        self.epochs.append(frame.epoch)
        self.keys[frame.key] = frame.value

    def request(self, frame: Any) -> wire.StoreReply:
        self.asked.append(type(frame).__name__)
        self.epochs.append(frame.epoch)
        if isinstance(frame, wire.StoreGet):
            return wire.StoreReply(value=self.keys.get(frame.key))
        return wire.StoreReply(number=1)


def test_a_key_that_was_waited_for_is_got_without_another_request() -> None:
    agent = Agent()
    store = AgentStore(agent, 1)
    store.set("a", b"1")
    store.wait(["a"])
    assert store.get("a") == b"1"
    assert agent.asked == ["StoreGet"]


def test_only_the_newest_request_is_remembered_and_once() -> None:
    agent = Agent()
    store = AgentStore(agent, 1)
    store.set("a", b"1")
    store.set("b", b"2")
    store.wait(["a", "b"])
    assert [store.get("a"), store.get("b")] == [b"1", b"2"]
    store.wait(["a"])
    store.set("a", b"3")
    assert store.get("a") == b"3"
    store.wait(["a"])
    store.check(["a"])
    agent.keys["a"] = wire.to_text(b"4")
    assert store.get("a") == b"4"
    agent.keys["a"] = wire.to_text(b"5")
    assert store.get("a") == b"5"


def test_the_keys_of_the_epoch_that_was_entered_last_are_asked_for() -> None:
    agent = Agent()
    store = AgentStore(agent, 1)
    store.set("a", b"1")
    store.wait(["a"])
    store.enter(2)
    agent.keys["a"] = wire.to_text(b"2")
    assert store.get("a") == b"2"
    store.set("b", b"3")
    assert agent.epochs == [1, 1, 2, 2]
