"""How the ranks of an epoch meet, and exchange gloo's addresses over their own connections."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from everstep import mesh
from everstep.meeting import MeshStore, Met, listen, meet
from everstep.mesh import Mesh

T = TypeVar("T")
LIMIT = timedelta(seconds=30)


def in_each(ranks: int, act: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(act, range(ranks)))


def meet_all(ways: list[str], addresses: list[str | None]) -> list[Met]:
    world = len(ways)
    endpoints = [listen(world, *of) for of in zip(addresses, ways, strict=True)]
    texts = [endpoint.text for endpoint in endpoints]
    return in_each(world, lambda rank: meet(rank, endpoints[rank], texts))


@pytest.fixture
def meshes() -> list[Mesh]:
    met = meet_all(["any"] * 3, ["127.0.0.1"] * 3)
    return [one.mesh for one in met if one.mesh is not None]


def test_all_ranks_go_the_way_of_rank_0_and_are_connected() -> None:
    met = meet_all(["this", "that", "that"], ["127.0.0.1"] * 3)
    assert [one.way for one in met] == ["this"] * 3
    for rank, one in enumerate(met):
        assert one.mesh is not None
        one.mesh.send(b"%d" % rank)
    for rank, one in enumerate(met):
        assert one.mesh is not None
        assert one.mesh.receive() == {other: b"%d" % other for other in {0, 1, 2} - {rank}}


@pytest.mark.parametrize(
    "addresses", [[None, None], ["127.0.0.1", None], [None, "127.0.0.1"]], ids=str
)
def test_ranks_meet_without_connections_if_one_has_no_address(addresses: list[str | None]) -> None:
    assert [one.mesh for one in meet_all(["w", "w"], addresses)] == [None, None]


def test_too_many_ranks_meet_without_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "RANKS", 1)
    assert [one.mesh for one in meet_all(["w", "w"], ["127.0.0.1"] * 2)] == [None, None]


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"this rank cannot listen at 192\.0\.2\.1"):
        listen(2, address="192.0.2.1", way="w")


def test_each_rank_finds_what_the_others_have_set(meshes: list[Mesh]) -> None:
    def go(rank: int) -> list[bytes]:
        keys = MeshStore(meshes[rank], LIMIT)
        found = []
        for turn in ("first", "second"):
            keys.set(f"{turn}/{rank}", b"%d of %s" % (rank, turn.encode()))
            for other in range(3):
                keys.wait([f"{turn}/{other}"])
                found.append(bytes(keys.get(f"{turn}/{other}")))
        return found

    wanted = [b"%d of %s" % (rank, turn) for turn in (b"first", b"second") for rank in range(3)]
    assert in_each(3, go) == [wanted] * 3


def test_gloo_forms_its_group_with_one_exchange(meshes: list[Mesh]) -> None:
    """Nothing is left in the connections, which carry the reductions' numbers next."""

    def go(rank: int) -> dict[int, bytes] | None:
        keys = MeshStore(meshes[rank], LIMIT)
        made: Any = dist.ProcessGroupGloo(keys, rank, 3, LIMIT)
        made.barrier().wait()
        meshes[rank].send(b"next")
        return meshes[rank].receive()

    assert in_each(3, go) == [dict.fromkeys({0, 1, 2} - {rank}, b"next") for rank in range(3)]


def test_a_lost_rank_ends_the_wait_of_the_others(meshes: list[Mesh]) -> None:
    def go(rank: int) -> None:
        if rank == 2:
            meshes[2].cut()
            return
        keys = MeshStore(meshes[rank], LIMIT)
        keys.set(f"{rank}", b"here")
        with pytest.raises(RuntimeError, match="a rank was lost while the group was formed"):
            keys.wait(["2"])

    in_each(3, go)


def test_a_rank_that_never_comes_ends_the_wait_of_the_others(meshes: list[Mesh]) -> None:
    keys = MeshStore(meshes[0], timedelta(seconds=0.01))
    keys.set("0", b"here")
    with pytest.raises(RuntimeError, match="a rank took too long while the group was formed"):
        keys.wait(["1"])


def test_a_rank_that_has_to_leave_waits_for_no_other(
    meshes: list[Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "LOOK_MS", 1)

    def look() -> None:
        raise RuntimeError("leave")

    with pytest.raises(RuntimeError, match="leave"):
        MeshStore(meshes[0], LIMIT, look).wait(["1"])
