"""CPU cost of the coordinator's decisions with a long run log and with many agents.

Calls the coordinator's code on plain values, without cluster or network. Times are CPU
milliseconds, the minimum of several tries.
"""

import asyncio
import csv
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from everstep_agent import logline
from everstep_agent.checkpoint.commit_rules import decide_append
from everstep_agent.checkpoint.memory_tier import MemoryTier
from everstep_agent.context import Context
from everstep_agent.coordinator import boundary_turn, members
from everstep_agent.coordinator.breaks import list_breaks
from everstep_agent.coordinator.term import QUIET_TICK_SECONDS, Term
from everstep_agent.coordinator.watch import Watch
from everstep_agent.identity import Identity
from everstep_agent.peers.agent_report import AgentReport, State, WorkerReport
from everstep_agent.peers.epoch_level import EpochLevel, EpochMember, Stage
from everstep_agent.peers.follower import QUIET_HEARTBEAT_SECONDS
from everstep_agent.peers.group_store import GroupStore
from everstep_agent.runlog.rules import chain_of
from everstep_agent.runlog.run_log import RunLog
from everstep_agent.storage import open_store
from everstep_contract import env, levels
from everstep_contract.log import Claim, Commit, Entry, MemberId, Retire

BEFORE = Path(__file__).parent.parent / "before.csv"
"""The same measurements on an earlier commit; see README.md."""
ENTRIES = (1_000, 10_000, 100_000)
AGENTS = (64, 256, 1024)
COMMITS = 250
"""Commits between two claims of the measured log."""
KEEP = 3
CHUNKS = 8
"""Chunks of each checkpoint."""
UID = "uid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    name: str
    size: int
    ms: float


def measure() -> list[Cost]:
    return asyncio.run(_measure())


async def _measure() -> list[Cost]:
    found: list[Cost] = []
    for count in ENTRIES:
        found += measure_log(count)
    for count in AGENTS:
        found += measure_reports(count)
    return found


def measure_log(count: int) -> list[Cost]:
    term = _build_term(1)
    for entry in _build_log(count):
        term.run_log.index.add(entry)
    newest = term.run_log.newest_claim
    assert newest is not None
    term.change(term.state.begin_epoch(_build_epoch(4, newest)))
    commit = Commit(
        epoch=newest.epoch, token=newest.token, step=10**9, manifest="m", digest="0" * 64
    )

    def decide() -> object:
        index = term.run_log.index
        retired = index.is_retired("chunks/none")
        return decide_append(commit, index), retired, index.place_of(commit)

    return [
        Cost(name="turn of the coordinator, by log entries", size=count, ms=_best(term.note_left)),
        Cost(name="decision on a commit, by log entries", size=count, ms=_best(decide)),
    ]


def measure_reports(count: int) -> list[Cost]:
    """Cost of an agent's progress report, with its share of the coordinator's turns."""
    term = _build_term(count)
    claim = next(_build_log(1))
    term.run_log.index.add(claim)
    epoch = _build_epoch(count, claim)
    term.change(term.state.begin_epoch(epoch))
    reports = [_build_report(slot, epoch) for slot in range(count)]
    for report in reports:
        term.take(report)
    watch = Watch.start(term.now())
    turns = QUIET_HEARTBEAT_SECONDS / QUIET_TICK_SECONDS / count

    def take() -> None:
        for report in reports:
            term.take(report)

    def turn() -> None:
        now = term.now()
        list_breaks(epoch, term.reports.aged(now), term.wanted, idle=0.1, hang=300.0)
        watch.idle(max(term.applied().values()), now)
        workers = members.list_workers(epoch, term.reports.all())
        term.saves.pump(epoch, term.applied(), term.spent())
        boundary_turn.settle(term, watch, workers, now)
        term.note_left()

    def look() -> None:
        aged = [(r, 0.1) for r in reports]
        list_breaks(epoch, aged, term.wanted, idle=0.1, hang=300.0)

    return [
        Cost(name="look for breaks, by agents", size=count, ms=_best(look)),
        Cost(name="a report, by agents", size=count, ms=_best(take) / count + _best(turn) * turns),
    ]


def _best(call: Callable[[], object], tries: int = 7) -> float:
    spent = []
    for _ in range(tries):
        began = time.process_time()
        call()
        spent.append(time.process_time() - began)
    return min(spent) * 1000


# --- input of the measurements


def _build_term(workers: int) -> Term:
    settings = env.AgentEnv(
        job="ns/job", job_uid=UID, slot=0, attempt=0, token="t", pod_ip="127.0.0.1", uri="memory://",
        run="ns/job", memory="", termination_log="",
    )  # fmt: skip
    me = Identity(slot=0, attempt=0, incarnation=1, address="host-0:7070")
    store = open_store("memory://", "", {})
    line = logline.Log(io.StringIO())
    memory = MemoryTier(Path("no-folder"))
    log = RunLog(store)
    context = Context(settings=settings, me=me, store=store, run_log=log, memory=memory, line=line)
    peers = tuple(levels.Peer(slot=s, attempt=0, address=f"host-{s}") for s in range(workers))
    return Term(context, None, levels.Wanted(want_workers=workers, peers=peers), GroupStore())


def _build_log(count: int) -> Iterator[Entry]:
    """A log of claims and commits, in which each old commit is retired."""
    place, step, claims = 0, 0, list[Claim]()
    commits: list[Commit] = []
    while place < count:
        claims.append(_build_claim(len(claims) + 1, claims, commits[-1] if commits else None))
        for entry in [claims[-1], *_build_saves(claims[-1], step, commits)]:
            if place < count:
                yield entry
            place += 1
        step += COMMITS


def _build_claim(epoch: int, claims: list[Claim], resume: Commit | None) -> Claim:
    return Claim(
        epoch=epoch,
        token=f"token-{epoch}",
        members=tuple(
            MemberId(slot=s, attempt=0, incarnation=1, rank=0, life=epoch) for s in range(4)
        ),
        coordinator="host-0:7070",
        job_uid=UID,
        job="ns/job",
        chain=chain_of(claims, resume),
        cause="WorkerDied",
    )


def _build_saves(claim: Claim, done: int, commits: list[Commit]) -> Iterator[Entry]:
    for step in range(done + 1, done + COMMITS + 1):
        commits.append(
            Commit(
                epoch=claim.epoch, token=claim.token, step=step, digest="0" * 64,
                manifest=f"manifests/{claim.epoch:08d}-{step:010d}-token.json",
            )
        )  # fmt: skip
        yield commits[-1]
        if len(commits) > KEEP:
            old = commits[-KEEP - 1]
            chunks = tuple(f"chunks/{old.epoch}/{old.step:010d}/{k:064x}" for k in range(CHUNKS))
            yield Retire(
                epoch=claim.epoch, token=claim.token, manifests=(old.manifest,), chunks=chunks
            )


def _build_epoch(count: int, claim: Entry) -> EpochLevel:
    members_ = tuple(
        EpochMember(
            slot=s,
            attempt=0,
            incarnation=1,
            node_rank=s,
            first=s,
            lives=(1,),
            address=f"host-{s}:7070",
        )
        for s in range(count)
    )
    return EpochLevel(number=claim.epoch, token=claim.token, stage=Stage.RUNNING, members=members_)


def _build_report(slot: int, epoch: EpochLevel) -> AgentReport:
    worker = WorkerReport(local=0, life=1, pid=100 + slot, state=State.TRACKED, applied=5)
    return AgentReport(
        slot=slot, attempt=0, incarnation=1, address=f"host-{slot}:7070", epoch=epoch.number,
        workers=(worker,), seconds={"step": 1.0},
    )  # fmt: skip


# --- the table


def load_before(path: Path = BEFORE) -> dict[tuple[str, int], float]:
    with path.open(newline="") as file:
        return {(row["name"], int(row["size"])): float(row["ms"]) for row in csv.DictReader(file)}


def render(costs: list[Cost], before: dict[tuple[str, int], float]) -> str:
    """A table of CPU milliseconds, before and now."""
    lines = [f"{'':<42} {'size':>8} {'before ms':>11} {'now ms':>9}"]
    for c in costs:
        was = before.get((c.name, c.size))
        then = f"{was:.3f}" if was is not None else "-"
        lines.append(f"{c.name:<42} {c.size:>8} {then:>11} {c.ms:>9.3f}")
    return "\n".join(lines)
