"""The identity of this agent: one start of its container."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    slot: int
    attempt: int
    incarnation: int
    address: str

    @property
    def place(self) -> tuple[int, int]:
        return self.slot, self.attempt

    @property
    def id(self) -> tuple[int, int, int]:
        return self.slot, self.attempt, self.incarnation
