"""How a rank waits: its own time limit is not a failure, and a cut ends every wait."""

import time
from datetime import timedelta

import pytest

from everstep.group import TorchGroup


class Operation:
    """A gloo operation that completes at a moment of the test's choice; its errors look alike."""

    def __init__(self, complete_after: int | None, fails: bool = False) -> None:
        self.left, self.fails = complete_after, fails

    def is_completed(self) -> bool:
        return self.left == 0

    def wait(self, limit: timedelta) -> None:
        if self.left is None:
            time.sleep(0.001)
            raise RuntimeError("Operation timed out!")
        if self.left > 0:
            self.left -= 1
            raise RuntimeError("Operation timed out!")
        if self.fails:
            raise RuntimeError("Connection closed by peer")


@pytest.fixture
def group() -> TorchGroup:
    made = TorchGroup.__new__(TorchGroup)
    made._sockets, made._cut_at, made._over_nccl, made.abandoned = [], None, False, False
    return made


@pytest.mark.parametrize("waits", [0, 1, 2])
def test_an_operation_that_completes_just_after_a_limit_has_not_failed(
    group: TorchGroup, waits: int
) -> None:
    assert group.wait([Operation(complete_after=waits)])


@pytest.mark.parametrize("waits", [0, 1, 2])
def test_an_operation_that_failed_is_found_out(group: TorchGroup, waits: int) -> None:
    assert not group.wait([Operation(complete_after=0), Operation(waits, fails=True)])


def test_an_operation_that_never_returns_is_abandoned_after_a_cut(group: TorchGroup) -> None:
    group.cut()
    began = time.monotonic()
    assert not group.wait([Operation(complete_after=None)])
    assert group.abandoned
    assert time.monotonic() - began < 5
