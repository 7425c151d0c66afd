"""How the ranks choose one way to form their group, and when a group can be kept."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep import Job, forming, meeting, run
from everstep.errors import Misuse
from everstep.group import TorchGroup
from everstep.store import AgentStore
from everstep_contract import env, wire
from runtime.an_agent import agent
from runtime.killed_ranks import a_script, assert_exact
from runtime.test_regroup import WORLD, undisturbed
from runtime.test_transfer import Keys

__all__ = ["undisturbed"]
reconfigurable = pytest.mark.skipif(
    not forming.can_reconfigure(), reason="this torch cannot reconfigure a group"
)


@pytest.mark.parametrize("capable", [False, True])
@pytest.mark.parametrize("setting", [forming.AUTO, forming.REINIT])
def test_unless_it_is_forced_a_group_is_made_anew(capable: bool, setting: str) -> None:
    assert forming.choose_forming(capable, setting) == forming.REINIT


def test_reconfigure_can_be_forced_where_torch_can() -> None:
    assert forming.choose_forming(True, forming.RECONFIGURE) == forming.RECONFIGURE
    with pytest.raises(Misuse, match=r"EVERSTEP_GROUP_FORMING=reconfigure needs torch 2\.14"):
        forming.choose_forming(False, forming.RECONFIGURE)


@pytest.mark.parametrize("capable", [False, True])
def test_an_unknown_way_is_refused_with_those_that_there_are(capable: bool) -> None:
    with pytest.raises(Misuse, match="=rebuild: set it to auto, reinit or reconfigure"):
        forming.choose_forming(capable, "rebuild")


def test_a_worker_with_an_unknown_way_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(forming.SETTING, "rebuild")
    monkeypatch.setenv("EVERSTEP_AGENT_SOCKET", "/nowhere")
    with pytest.raises(Misuse, match="EVERSTEP_GROUP_FORMING=rebuild"):
        run(lambda job: None)


def test_a_rank_that_cannot_go_the_way_of_rank_0_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forming, "can_reconfigure", lambda: False)
    shared = Keys()

    def go(rank: int) -> str:
        way = forming.REINIT if rank else forming.RECONFIGURE
        endpoint = meeting.listen(2, "127.0.0.1", way)
        place = forming.Place(1, rank, 2, "127.0.0.1", endpoint=endpoint)
        try:
            forming._meet(AgentStore(shared, 1), place, forming.AUTO)
        except RuntimeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(go, range(2)))
    assert all("rank 0 has EVERSTEP_GROUP_FORMING=reconfigure" in one for one in said)
    assert all("give all ranks the same setting" in one for one in said)


class NoRequests:
    """An agent that must not be asked."""

    def send(self, frame: Any) -> None:
        raise AssertionError(frame)

    request = send


def meet(rank: int, *own: meeting.Endpoint, said: Sequence[str]) -> forming.meeting.Met:
    place = forming.Place(1, rank, 2, "127.0.0.1", endpoint=own[rank], endpoints=said)
    return forming._meet(AgentStore(NoRequests(), 1), place, forming.AUTO)


def test_ranks_that_know_all_endpoints_meet_without_their_agents() -> None:
    own = [forming.listen(2, "127.0.0.1") for _ in range(2)]
    said = [one.text for one in own]
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda rank: meet(rank, *own, said=said), range(2))
    assert first.mesh is not None
    assert second.mesh is not None
    first.mesh.send(b"here")
    assert second.mesh.receive() == {0: b"here"}


def test_a_rank_refuses_a_group_that_was_planned_with_another_endpoint_of_it() -> None:
    own = [forming.listen(2, "127.0.0.1") for _ in range(3)]
    said = [own[2].text, own[1].text]
    with pytest.raises(RuntimeError, match="planned with another endpoint of rank 0"):
        meet(0, *own, said=said)
    for one in own:
        one.close()


@reconfigurable
def test_ranks_with_different_settings_form_one_group(
    tmp_path: Path, undisturbed: list[wire.Applied]
) -> None:
    main = a_script()

    def with_own_setting() -> None:
        rank = int(os.environ[env.POSITION_FILE].rpartition("-")[2])
        os.environ[forming.SETTING] = forming.RECONFIGURE if rank % 2 else forming.REINIT
        run(main, seed=4)

    with agent(tmp_path, with_own_setting, WORLD) as ours:
        ours.wait_applied(3, [0, 1, 2, 3])
        ours.kill(1)
        ours.regroup()
        ours.finish()
        assert_exact(ours, undisturbed, [0, 2, 3])


@reconfigurable
def test_where_an_operation_hangs_torchs_group_is_made_anew_and_the_others_keep_theirs(
    tmp_path: Path, undisturbed: list[wire.Applied], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(forming.SETTING, forming.RECONFIGURE)

    def before(job: Job) -> None:
        leave, make, rank = TorchGroup.leave, forming._make, job.rank
        monkeypatch.setattr(TorchGroup, "leave", lambda self: leave(self) and rank != 0)

        def note(*place: Any, **settings: Any) -> None:
            print(f"rank {rank} makes a group", flush=True)
            make(*place, **settings)

        monkeypatch.setattr(forming, "_make", note)

    with agent(tmp_path, lambda: run(a_script(before), seed=4), WORLD) as ours:
        ours.wait_applied(3, [0, 1, 2, 3])
        ours.kill(1)
        ours.regroup()
        ours.finish()
        assert_exact(ours, undisturbed, [0, 2, 3])
        assert [line for line in ours.output().splitlines() if "makes" in line] == [
            "rank 0 makes a group"
        ]


def test_a_group_can_be_left_once_its_operations_have_returned() -> None:
    ranks = two_ranks()
    assert ranks[0].leave(), "no operation was launched"
    ranks = two_ranks()
    ranks[0].all_reduce(torch.ones(1))
    assert not ranks[0].leave(), "its operation waits for the other rank"
    assert ranks[0].all_reduce(torch.ones(1)) is None
    ranks[1].all_reduce(torch.ones(1)).wait()
    ranks[0]._newest.wait()
    assert ranks[0].leave()


def two_ranks() -> list[TorchGroup]:
    """Two ranks of one group over gloo, in this process. Cutting the group shuts down no socket."""
    keys = Keys()

    def make(rank: int) -> TorchGroup:
        pair = forming.form_pair(keys, epoch=1, key="k", rank=rank)
        return TorchGroup(rank, 2, (), pair._made)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(make, range(2)))
