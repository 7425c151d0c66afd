"""torch's rendezvous store. The agents keep the keys, so it does not die with a rank."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from everstep_contract import wire

FORMATION_LIMIT = timedelta(seconds=300)
"""How long a rank waits for a key of another one while the group is formed."""


class Requests(Protocol):
    def send(self, frame: Any) -> None: ...
    def request(self, frame: Any) -> Any: ...


class StoreClosed(RuntimeError):
    """The epoch of these keys is over."""


class AgentStore(dist.Store):  # type: ignore[name-defined,misc]
    """Keys of one epoch; each call is a frame to the agent. Values are bytes."""

    def __init__(self, agent: Requests, epoch: int, prefix: str = "") -> None:
        super().__init__()
        self._agent = agent
        self._epoch = epoch
        self._prefix = prefix
        self._limit = FORMATION_LIMIT
        self._waited: tuple[str, bytes] | None = None
        """Key and value of the newest request, if it was a wait: torch gets that key next."""

    def enter(self, epoch: int) -> None:
        """Use the keys of this epoch from now on."""
        self._epoch, self._waited = epoch, None

    def set(self, key: str, value: str | bytes) -> None:
        self._waited = None
        self._agent.send(
            wire.StoreSet(epoch=self._epoch, key=self._name(key), value=_to_text(value))
        )

    def get(self, key: str) -> bytes:
        waited, self._waited = self._waited, None
        if waited is not None and waited[0] == key:
            return waited[1]
        return self._wait_for(key, self._limit)

    def wait(self, keys: Sequence[str], limit: timedelta | None = None) -> None:
        for key in keys:
            self._waited = (key, self._wait_for(key, limit or self._limit))

    def add(self, key: str, amount: int) -> int:
        return self._ask(
            wire.StoreAdd(epoch=self._epoch, key=self._name(key), amount=amount)
        ).number

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        reply = self._ask(
            wire.StoreCompareSet(
                epoch=self._epoch,
                key=self._name(key),
                expected=_to_text(expected),
                desired=_to_text(desired),
            )
        )
        return wire.from_text(reply.value or "")

    def check(self, keys: Sequence[str]) -> bool:
        return bool(
            self._ask(wire.StoreCheck(epoch=self._epoch, keys=tuple(map(self._name, keys)))).number
        )

    def all_gather(self, key: str, rank: int, world: int, value: str) -> list[str]:
        """Give `value` to all ranks. Return the values of all ranks, in their order, once each of them
        has called this. Raises `TimeoutError` if one has not.
        """
        frame = wire.StoreAllGather(
            epoch=self._epoch,
            key=self._name(key),
            rank=rank,
            world=world,
            value=_to_text(value),
            timeout_ms=_to_ms(self._limit),
        )
        values = self._ask(frame).values
        if not values:
            raise TimeoutError(f"not all {world} ranks have set {key!r} within {self._limit}")
        return [wire.from_text(one).decode() for one in values]

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(wire.StoreDelete(epoch=self._epoch, key=self._name(key))).number)

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout

    def clone(self) -> "AgentStore":
        return AgentStore(self._agent, self._epoch, self._prefix)

    def _name(self, key: str) -> str:
        return self._prefix + key

    def _wait_for(self, key: str, limit: timedelta) -> bytes:
        reply = self._ask(
            wire.StoreGet(epoch=self._epoch, key=self._name(key), timeout_ms=_to_ms(limit))
        )
        if reply.value is None:
            raise TimeoutError(f"no rank has set {key!r} within {limit}")
        return wire.from_text(reply.value)

    def _ask(self, frame: Any) -> wire.StoreReply:
        self._waited = None
        reply: wire.StoreReply = self._agent.request(frame)
        if reply.error:
            raise StoreClosed(reply.error)
        return reply


def _to_ms(limit: timedelta) -> int:
    return int(limit.total_seconds() * 1000)


def _to_text(value: str | bytes) -> str:
    """torch's own code passes bytes."""
    return wire.to_text(value.encode() if isinstance(value, str) else bytes(value))
