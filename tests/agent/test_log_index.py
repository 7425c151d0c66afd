"""The index gives the same answers as reading the whole log, and stays fast after a week."""

import secrets
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from agent.a_run import claim, commit
from everstep_agent.runlog import rules
from everstep_agent.runlog.log_index import RETIRES, LogIndex
from everstep_contract import log
from everstep_contract.log import Claim, Commit, Done, Entry, Retire


def a_history() -> list[Entry]:
    first = claim(1)
    second = claim(2, resume=commit(1, 10), before=[first])
    return [first, commit(1, 10), commit(1, 20), second, commit(2, 15)]


def test_the_newest_commit_of_the_lineage_is_resumed_from() -> None:
    known = LogIndex(a_history())
    assert known.newest_resumable == commit(2, 15)
    assert list(known.resumable()) == [commit(2, 15), commit(1, 10)]
    assert LogIndex(a_history()[:3]).newest_resumable == commit(1, 20)
    assert LogIndex().newest_resumable is None


def test_a_retired_commit_is_not_resumed_from() -> None:
    retire = Retire(epoch=2, token="token002-rest", manifests=(commit(2, 15).manifest,))
    assert LogIndex([*a_history(), retire]).newest_resumable == commit(1, 10)
    assert LogIndex([*a_history(), retire]).is_retired(commit(2, 15).manifest)


def test_restarts_are_counted_by_cause_along_the_log() -> None:
    known = LogIndex([
        claim(1, job_uid="old"), claim(2), claim(3, cause="WorkerDied"),
        claim(4, cause="Leave"), claim(5, cause="WorkerDied"),
    ])  # fmt: skip
    assert known.restarts("uid") == {"WorkerDied": 2, "Leave": 1}
    assert known.restarts("old") == {}
    assert known.has_claimed("old")
    assert not known.has_claimed("other")


def test_a_member_of_many_claims_is_kept_once() -> None:
    """A job of 1,000 ranks and 1,000 losses would take 100 MB."""
    read = LogIndex(log.decode(log.encode(claim(epoch))) for epoch in range(1, 4))
    first, *later = read.claims
    assert len(first.members) > 1
    for other in later:
        assert [id(m) for m in other.members] == [id(m) for m in first.members]
    assert read.claims == [claim(epoch) for epoch in range(1, 4)]


def test_an_epochs_number_is_never_used_again() -> None:
    assert LogIndex().next_epoch == 1
    assert LogIndex(a_history()).next_epoch == 3


def test_a_run_has_ended_until_a_later_claim_goes_on_from_its_end() -> None:
    done = Done(epoch=2, token=claim(2).token, step=15)
    assert LogIndex([*a_history(), done]).done == done
    assert LogIndex([*a_history(), done, claim(3)]).done is None


def a_retire(step: int, chunks: int) -> Retire:
    keys = [f"chunks/token001/{step:010d}/b3-{secrets.token_hex(32)}" for _ in range(chunks)]
    manifest = f"manifests/1-{step}-token001.json"
    return Retire(epoch=1, token="token001-rest", manifests=(manifest,), chunks=tuple(keys))


def test_every_chunk_that_was_ever_retired_is_known_to_be() -> None:
    retires = [a_retire(step, 20) for step in (1, 1, 2, 3, 4, 5)]
    retires.append(Retire(epoch=1, token="t", chunks=("chunks/t/0000000001/odd", "chunks/t")))
    known = LogIndex([claim(1), *retires])
    assert all(known.is_retired(key) for retire in retires for key in retire.chunks)
    other = a_retire(1, 20).chunks
    assert not any(known.is_retired(key) for key in other)
    moved = [key.replace("token001", "token002") for key in retires[0].chunks]
    assert not any(known.is_retired(key) for key in moved), "another claim uploaded it again"
    assert not any(known.is_retired(k.replace("b3-", "")) for k in retires[0].chunks)
    assert not known.is_retired("chunks/t/0000000002/odd")
    assert list(known.retires) == retires[-RETIRES:]
    assert [known.place_of(retire) for retire in known.retires] == [5, 6, 7]
    assert len(known) == len(known.entries) == 8


def test_the_chunks_that_a_long_run_has_retired_take_little_memory() -> None:
    """The texts of the keys took 180 bytes each: 430 MiB for a month of a model of 7 billion."""
    tracemalloc.start()
    known = LogIndex([claim(1)])
    for step in range(50):
        known.add(a_retire(step, 1_000))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    kept = RETIRES * 1_000 * 200
    assert (used - kept) / 50_000 < 30


def test_an_entry_is_found_by_its_value() -> None:
    known = LogIndex(a_history())
    assert known.place_of(commit(1, 20)) == 2
    assert known.place_of(commit(1, 21)) is None
    assert known.find_commit(2, 15) == (4, commit(2, 15))


# --- compared with reading the whole log


@st.composite
def logs(draw: st.DrawFn) -> list[Entry]:
    """Logs of claims, commits and retires in any order; each claim resumes any earlier commit."""
    entries: list[Entry] = [claim(1)]
    for _ in range(draw(st.integers(0, 25))):
        newest = [e for e in entries if isinstance(e, Claim)][-1]
        commits = [e for e in entries if isinstance(e, Commit)]
        kind = draw(st.sampled_from(["claim", "commit", "commit", "retire"]))
        if kind == "commit":
            step = draw(st.integers(1, 30))
            entries.append(
                commit(newest.epoch, step, manifest=f"manifests/{draw(st.integers(1, 9))}")
            )
        elif kind == "retire" and commits:
            gone = draw(st.sampled_from(commits)).manifest
            entries.append(Retire(epoch=newest.epoch, token=newest.token, manifests=(gone,)))
        elif kind == "claim":
            resume = draw(st.sampled_from(commits)) if commits else None
            before = [e for e in entries if isinstance(e, Claim)]
            entries.append(claim(newest.epoch + 1, resume=resume, before=before))
    return entries


def read_resumable(entries: list[Entry]) -> list[Commit]:
    newest = [e for e in entries if isinstance(e, Claim)][-1]
    retired = {m for e in entries if isinstance(e, Retire) for m in e.manifests}
    chain = rules.lineage_of(newest)
    return [
        e
        for e in reversed(entries)
        if isinstance(e, Commit)
        and rules.on_chain(e.epoch, e.step, chain)
        and e.manifest not in retired
    ]


def shorten(entries: list[Entry], *, links: int) -> list[Entry]:
    """The same log, with each claim's chain as its writer shortens it."""
    known = LogIndex()
    with mock.patch.object(rules, "RECENT_LINKS", links):
        for entry in entries:
            if isinstance(entry, Claim) and entry.chain:
                last = entry.chain[-1]
                chain = rules.chain_of(known.claims, commit(last.epoch, last.last_step))
                entry = replace(entry, chain=rules.shorten_chain(chain, known.first_steps()))
            known.add(entry)
    return list(known.entries)


@given(logs())
def test_a_shortened_chain_names_the_same_checkpoints(entries: list[Entry]) -> None:
    whole, short = LogIndex(entries), LogIndex(shorten(entries, links=1))
    assert list(short.resumable()) == list(whole.resumable())
    assert all(
        len(c.chain) <= len(d.chain) for c, d in zip(short.claims, whole.claims, strict=True)
    )


def test_a_claim_costs_the_same_after_a_thousand_losses() -> None:
    known = LogIndex([claim(1), commit(1, 5, pins=["kept"])])
    retire = Retire(epoch=1, token="token001-rest", manifests=(commit(1, 5).manifest,))
    known.add(retire)
    for epoch in range(1, 1000):
        chain = rules.continued_chain(known.claims, epoch, 10 * epoch)
        short = rules.shorten_chain(chain, known.first_steps())
        known.add(replace(claim(epoch + 1), chain=short))
    assert len(known.newest_claim.chain) == 1 + rules.RECENT_LINKS
    assert known.is_on_lineage(1, 5), "a later claim must know where a name's checkpoint lies"
    assert known.is_on_lineage(1000 - rules.RECENT_LINKS, 10)


@given(logs())
def test_entry_by_entry_it_says_what_the_whole_log_says(entries: list[Entry]) -> None:
    known = LogIndex()
    for count, entry in enumerate(entries, 1):
        known.add(entry)
        read = entries[:count]
        assert list(known.resumable()) == read_resumable(read)
        assert known.newest_claim == [e for e in read if isinstance(e, Claim)][-1]
        retired = {m for e in read if isinstance(e, Retire) for m in e.manifests}
        assert list(known.standing) == [
            e for e in read if isinstance(e, Commit) and e.manifest not in retired
        ]
        assert known.place_of(entry) == read.index(entry)


# --- its cost


def long_log(count: int) -> LogIndex:
    known, step, newest = LogIndex(), 0, claim(1)
    while len(known) < count:
        newest = claim(known.next_epoch, resume=known.newest_resumable, before=known.claims)
        known.add(newest)
        for _ in range(500):
            step += 1
            known.add(commit(newest.epoch, step))
            if step > 3:
                old = known.standing[0]
                chunks = tuple(f"{old.step}/{i}" for i in range(8))
                known.add(
                    Retire(
                        epoch=newest.epoch, token=newest.token, manifests=(old.manifest,), chunks=chunks
                    )
                )  # fmt: skip
    return known


def ask(known: LogIndex) -> object:
    """Query all that the coordinator needs for one turn and one commit."""
    return (
        known.newest_resumable, known.newest_claim, known.restarts("uid"), known.done,
        known.next_epoch, known.find_commit(1, 7), known.is_retired("9/1"), len(known.standing),
    )  # fmt: skip


def best(call: Callable[[], object]) -> float:
    spent = []
    for _ in range(50):
        began = time.process_time()
        call()
        spent.append(time.process_time() - began)
    return min(spent)


def test_a_question_costs_the_same_of_a_long_log() -> None:
    short, long = long_log(1_000), long_log(30_000)
    assert best(lambda: ask(long)) < 10 * best(lambda: ask(short))
