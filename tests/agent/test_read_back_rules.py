"""Unit tests: which pod reads which chunks of a checkpoint back."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from agent.a_run import commit
from everstep_agent.coordinator.read_back_rules import SLOW_SECONDS, Turn, Unread, plan_turn
from everstep_agent.peers.agent_report import AgentReport
from everstep_agent.peers.read_back import ReadReport
from everstep_contract.ranges import to_ranges

SAVE = commit(1, 12)


def pod(slot: int, *read: int, problem: str = "", leaving: bool = False) -> AgentReport:
    found = ReadReport(manifest=SAVE.manifest, read=to_ranges(read), problem=problem)
    return AgentReport(
        slot=slot, attempt=0, incarnation=1, address="", read_back=found, leaving=leaving
    )


def of_former_version(slot: int) -> AgentReport:
    return replace(pod(slot), read_back=None)


def begin(*uploaders: int | None, sizes: Sequence[int] = ()) -> Turn:
    chunks = {
        place: Unread(bytes=(sizes or [10] * len(uploaders))[place], uploader=uploader)
        for place, uploader in enumerate(uploaders)
    }
    return Turn(commit=SAVE, unread=chunks)


def shares(turn: Turn) -> dict[int, list[int]]:
    """The places to read, by slot."""
    found: dict[int, list[int]] = {}
    for place, (slot, _, _) in sorted(turn.readers.items()):
        found.setdefault(slot, []).append(place)
    return found


def test_no_pod_reads_what_it_uploaded_and_all_read_about_as_much() -> None:
    uploaders = [slot for slot in range(3) for _ in range(10)]
    turn = plan_turn(begin(*uploaders), [pod(0), pod(1), pod(2)], 0.0)
    assert all(9 <= len(places) <= 11 for places in shares(turn).values()), shares(turn)
    assert all(turn.unread[p].uploader != slot for p, (slot, _, _) in turn.readers.items())


def test_shares_have_about_as_many_bytes_and_few_ranges() -> None:
    turn = plan_turn(begin(*[None] * 4, sizes=[1, 30, 1, 28]), [pod(0), pod(1)], 0.0)
    assert shares(turn) == {0: [0, 1], 1: [2, 3]}


def test_what_one_pod_uploaded_is_shared_by_all_others() -> None:
    turn = plan_turn(begin(*[1] * 30), [pod(0), pod(1), pod(2)], 0.0)
    assert {slot: len(places) for slot, places in shares(turn).items()} == {0: 15, 2: 15}


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(2, 5))
def test_every_chunk_has_a_reader_that_did_not_upload_it(uploaders: list[int], pods: int) -> None:
    turn = plan_turn(begin(*uploaders), [pod(slot) for slot in range(pods)], 0.0)
    assert sorted(turn.readers) == list(range(len(uploaders)))
    assert all(slot != uploaders[p] for p, (slot, _, _) in turn.readers.items())


def test_a_pod_that_is_alone_reads_its_own_chunks() -> None:
    assert shares(plan_turn(begin(0, 0), [pod(0)], 0.0)) == {0: [0, 1]}


def test_agents_of_a_former_version_and_leaving_ones_get_no_share() -> None:
    reports = [pod(0), of_former_version(1), pod(2, leaving=True)]
    assert shares(plan_turn(begin(0, 1, 2), reports, 0.0)) == {0: [0, 1, 2]}


def test_what_a_lost_pod_has_not_read_goes_to_the_others_and_nothing_else_moves() -> None:
    first = plan_turn(begin(1, 1, 2, 2, 0, 0), [pod(0), pod(1), pod(2)], 0.0)
    read, rest = (places := shares(first)[2])[0], places[1]
    turn = plan_turn(plan_turn(first, [pod(0), pod(1), pod(2, read)], 1.0), [pod(0), pod(1)], 2.0)
    assert read not in turn.unread, "a chunk that the lost pod had read must not be read again"
    assert turn.readers[rest][0] in (0, 1)
    kept = {p: r for p, r in first.readers.items() if p not in (read, rest)}
    assert kept.items() <= turn.readers.items()


def test_a_pod_without_progress_loses_its_share_and_one_with_progress_does_not() -> None:
    turn = plan_turn(begin(0, 1, 0, 1, 0, 1), [pod(0), pod(1)], 0.0)
    mine = shares(turn)[0]
    turn = plan_turn(turn, [pod(0, mine[0]), pod(1)], SLOW_SECONDS / 2)
    assert len(shares(turn)) == 2
    turn = plan_turn(turn, [pod(0, mine[0]), pod(1)], SLOW_SECONDS + 1)
    assert list(shares(turn)) == [0]
    # The slow pod gets no share again while another pod can read.
    turn = plan_turn(turn, [pod(0, *mine), pod(1)], SLOW_SECONDS + 2)
    assert list(shares(turn)) == [0]


def test_if_no_pod_advances_the_store_is_slow_and_all_keep_their_shares() -> None:
    first = plan_turn(begin(0, 1), [pod(0), pod(1)], 0.0)
    later = plan_turn(first, [pod(0), pod(1)], SLOW_SECONDS + 1)
    assert later.readers == first.readers
    assert not later.slow


def test_it_is_over_once_all_is_read_whoever_read_it() -> None:
    turn = plan_turn(begin(0, 1), [pod(0), pod(1)], 0.0)
    assert not turn.over
    assert plan_turn(turn, [pod(0, 0, 1), pod(1)], 1.0).over
    assert not plan_turn(turn, [pod(0, 0), pod(1, 0)], 1.0).over


def test_reports_about_another_checkpoint_do_not_count() -> None:
    other = replace(pod(1), read_back=ReadReport(manifest="manifests/x.json", read=((0, 2),)))
    assert not plan_turn(begin(0, 0), [pod(0), other], 0.0).over


def test_one_pod_that_finds_a_chunk_broken_ends_it() -> None:
    turn = plan_turn(begin(0, 1), [pod(0), pod(1, problem="chunks/x is corrupt")], 0.0)
    assert (turn.over, turn.problem) == (True, "chunks/x is corrupt")


def test_nobody_reads_while_nobody_reports() -> None:
    turn = plan_turn(begin(0, 1), [], 0.0)
    assert (shares(turn), turn.level().shares) == ({}, ())
    assert not turn.over


def test_what_is_read_changes_no_level() -> None:
    first = plan_turn(begin(0, 0, 1, 1), [pod(0), pod(1)], 0.0)
    later = plan_turn(first, [pod(0, 2), pod(1, 0)], 1.0)
    assert sorted(later.unread) == [1, 3]
    assert later.level() == first.level()


def test_the_level_names_each_share_in_short() -> None:
    level = plan_turn(begin(0, 0, 0, 1), [pod(0), pod(1)], 0.0).level()
    assert level.list_share((1, 0, 1)) == [0, 1, 2]
    assert [s.chunks for s in level.shares] == [((3, 4),), ((0, 3),)]
    assert level.list_share((5, 0, 1)) == []
