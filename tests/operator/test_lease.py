"""Who may act: decisions about the Lease, and electors against a toy API server with a fake clock."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from everstep_operator import kube, lease
from everstep_operator.election import Elector, LeaseLost
from everstep_operator.lease import Lease, Renew, Sighting, Take, Timing, Wait, decide_lease

TIMING = Timing()


def held_by(holder: str, **changes: Any) -> Lease:
    fields: dict[str, Any] = {
        "seconds": 15.0, "acquired": "then", "renewed": "now", "transitions": 3, "version": "7",
    }  # fmt: skip
    return Lease(holder=holder, **(fields | changes))


@pytest.mark.parametrize(
    ("found", "age", "expected"),
    [
        (None, 0.0, Take(reason="there was none")),
        (held_by(""), 0.0, Take(reason="it was released")),
        (held_by("me"), 99.0, Renew()),
        (held_by("other"), 14.0, Wait(holder="other", seconds=1.0)),
        (held_by("other"), 15.0, Take(reason="other did not renew it for 15 s")),
        (held_by("other", seconds=30.0), 29.0, Wait(holder="other", seconds=1.0)),
    ],
)
def test_a_lease_is_taken_when_its_own_duration_is_over(
    found: Lease | None, age: float, expected: lease.Decision
) -> None:
    assert decide_lease(Sighting(lease=found, since=100.0), "me", 100.0 + age) == expected


def test_only_a_record_that_changed_starts_the_wait_anew() -> None:
    first = lease.build_sighting(None, held_by("other"), 10.0)
    assert lease.build_sighting(first, held_by("other"), 20.0).since == 10.0
    assert lease.build_sighting(first, held_by("other", renewed="later"), 20.0).since == 20.0


def test_the_holders_clock_is_never_read() -> None:
    """A renewal counts from when we saw it, even if its time is in 2099 or 1970."""
    for renewed in ("2099-01-01T00:00:00.000000Z", "1970-01-01T00:00:00.000000Z"):
        seen = lease.build_sighting(None, held_by("other", renewed=renewed), 0.0)
        assert decide_lease(seen, "me", 14.9) == Wait(holder="other", seconds=pytest.approx(0.1))


def test_candidates_wait_until_the_holder_has_stopped_also_for_parts_of_a_second() -> None:
    timing = Timing(lease=10.4, renew=10.2, retry=2.0)
    written = lease.to_lease(lease.build_held("n", "ns", None, "other", timing.lease, 1e9))
    assert written.seconds >= timing.renew


def test_taking_over_counts_a_transition_and_renewing_does_not() -> None:
    taken = lease.build_held("n", "ns", held_by("other"), "me", 15, 1e9)
    renewed = lease.build_held("n", "ns", held_by("me"), "me", 15, 1e9)
    assert taken["spec"]["leaseTransitions"] == 4
    assert renewed["spec"]["leaseTransitions"] == 3
    assert renewed["spec"]["acquireTime"] == "then"
    assert taken["metadata"]["resourceVersion"] == "7"


@dataclass(slots=True)
class ToyServer:
    """Holds one Lease and replaces it only at its current version. Does not answer while `away`."""

    object: dict[str, Any] | None = None
    version: int = 0
    away: bool = False
    denies_create: bool = False

    async def get(self, kind: kube.Kind, name: str, namespace: str | None = None) -> Any:
        self._answer()
        if self.object is None:
            raise kube.Gone(404, "NotFound", "not found")
        return self.object

    async def create(self, kind: kube.Kind, body: Any, namespace: str | None = None) -> Any:
        self._answer()
        if self.denies_create:
            raise kube.Denied(403, "Forbidden", "may not create")
        if self.object is not None:
            raise kube.AlreadyExists(409, "AlreadyExists", "exists")
        return self._store(body)

    async def replace(self, kind: kube.Kind, name: str, namespace: str | None, body: Any) -> Any:
        self._answer()
        if self.object is None:
            raise kube.Gone(404, "NotFound", "not found")
        if body["metadata"]["resourceVersion"] != self.object["metadata"]["resourceVersion"]:
            raise kube.Conflict(409, "Conflict", "changed")
        return self._store(body)

    def _store(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self.version += 1
        metadata = {**body["metadata"], "resourceVersion": str(self.version)}
        self.object = {**body, "metadata": metadata}
        return self.object

    def _answer(self) -> None:
        if self.away:
            raise kube.Transient(0, "ClientError", "no answer")

    @property
    def holder(self) -> str:
        assert self.object is not None
        return str(self.object["spec"]["holderIdentity"])


@dataclass(slots=True)
class Two:
    """Two electors whose clocks run at the same rate but show different times."""

    server: ToyServer = field(default_factory=ToyServer)
    now: float = 0.0
    a: Elector = field(init=False)
    b: Elector = field(init=False)

    def __post_init__(self) -> None:
        self.a = self.elector("a", 1000.0)
        self.b = self.elector("b", -5000.0)

    def elector(self, name: str, skew: float) -> Elector:
        port: Any = self.server
        where = ("everstep-system", "everstep-operator")
        return Elector(port, where, name, TIMING, clock=lambda: self.now + skew, wall=lambda: skew)

    def acting(self) -> list[str]:
        return [n for n, e in (("a", self.a), ("b", self.b)) if e.seconds_left() > 0]

    async def pass_time(self, seconds: float, *electors: Elector) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += min(TIMING.retry, end - self.now)
            for elector in electors:
                await elector.turn()


async def test_one_takes_the_lease_and_the_other_stands_by() -> None:
    two = Two()
    await two.a.turn()
    await two.b.turn()
    await two.pass_time(60, two.a, two.b)
    assert two.acting() == ["a"]
    assert not two.b.leading.is_set()


async def test_of_two_that_ask_at_once_one_wins() -> None:
    two = Two()
    two.server.object = None
    found = await two.a._read()
    await two.b.turn()
    with pytest.raises(kube.AlreadyExists):
        await two.a._write(found, 0.0)
    assert two.acting() == ["b"]


async def test_a_holder_that_dies_is_followed_when_its_lease_is_over_and_never_two_act() -> None:
    two = Two()
    await two.a.turn()
    await two.b.turn()
    for _ in range(9):
        await two.pass_time(2, two.b)  # a does not run, so its gate closes by itself
        assert len(two.acting()) <= 1
    assert two.acting() == ["b"]
    assert two.server.holder == "b"


async def test_there_is_a_time_in_which_nobody_acts() -> None:
    two = Two()
    await two.a.turn()
    await two.b.turn()
    await two.pass_time(11, two.b)
    assert two.acting() == []


async def test_a_holder_that_wakes_from_a_long_sleep_may_write_nothing() -> None:
    """As after SIGSTOP or on a paused machine. The gate depends on the clock alone, so no task has to
    run to close it.
    """
    two = Two()
    await two.a.turn()
    two.now += 10
    assert two.a.seconds_left() <= 0


async def test_a_holder_that_cannot_renew_ends_with_the_reason() -> None:
    two = Two()
    await two.a.turn()
    two.server.away = True
    with pytest.raises(LeaseLost, match=r"not renewed for 10 s \(Transient: no answer\)"):
        await two.pass_time(10, two.a)
    assert two.acting() == []


async def test_a_short_silence_of_the_api_server_costs_nothing() -> None:
    two = Two()
    await two.a.turn()
    two.server.away = True
    await two.pass_time(8, two.a)
    two.server.away = False
    await two.pass_time(2, two.a)
    assert two.acting() == ["a"]


async def test_a_released_lease_is_taken_at_the_next_look() -> None:
    two = Two()
    await two.a.turn()
    await two.b.turn()
    await two.a.release()
    assert two.acting() == []
    await two.b.turn()
    assert two.acting() == ["b"]


async def test_who_never_led_releases_nothing() -> None:
    two = Two()
    await two.a.turn()
    await two.b.turn()
    await two.b.release()
    assert two.server.holder == "a"


async def test_a_holder_whose_lease_was_seized_ends_at_its_next_look() -> None:
    two = Two()
    await two.a.turn()
    await two.b._write(await two.b._read(), two.b._clock())
    with pytest.raises(LeaseLost, match="b has taken it"):
        await two.a.turn()
    assert two.acting() == ["b"]


async def test_where_no_operator_ever_acted_nothing_has_to_be_seized() -> None:
    two = Two()
    two.server.denies_create = True
    await two.a.seize()
    assert two.a.seconds_left() > 0


async def test_a_lease_that_was_deleted_is_made_again_by_its_holder() -> None:
    two = Two()
    await two.a.turn()
    two.server.object = None
    await two.pass_time(2, two.a)
    assert two.acting() == ["a"]
    assert two.server.holder == "a"
