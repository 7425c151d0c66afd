"""Unit tests of the faults that `make bench-storm` plans, and of a hang of a real process."""

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep_recovery import processes, workload
from everstep_storm import striking
from everstep_storm.faults import CALM, DEATHS, MIXED, Kind, Strike, plan_strikes
from everstep_storm.striking import Striker
from everstep_storm.systems import CONTENDERS


def test_ten_minutes_have_forty_faults_each_in_the_middle_of_its_interval() -> None:
    strikes = plan_strikes(DEATHS, seconds=600, every=15, seed=1)
    assert len(strikes) == 40
    assert {strike.kind for strike in strikes} == {Kind.DEATH}
    assert all(7.5 <= s.after - 15 * n <= 8 for n, s in enumerate(strikes))


def test_each_ten_faults_of_a_mixed_storm_have_the_whole_mix() -> None:
    strikes = plan_strikes(MIXED, seconds=600, every=15, seed=1)
    rounds = [Counter(s.kind for s in strikes[n : n + 10]) for n in range(0, 40, 10)]
    assert rounds == [{Kind.DEATH: 6, Kind.HANG: 3, Kind.NODE: 1}] * 4


def test_a_seed_draws_the_same_faults_for_each_system_and_another_seed_others() -> None:
    first, again, other = (plan_strikes(MIXED, seconds=60, every=5, seed=s) for s in (1, 1, 2))
    assert first == again != other


def test_an_undisturbed_run_has_no_fault() -> None:
    assert plan_strikes(CALM, seconds=600, every=15, seed=1) == ()


def test_a_system_that_cannot_lose_a_node_says_why_and_takes_the_deaths() -> None:
    (nvrx,) = [c for c in CONTENDERS if c.cannot]
    assert "no node" in nvrx.why_not(MIXED)
    assert nvrx.why_not(DEATHS) == ""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that looks like a rank of the run in `tmp_path`."""
    environ = {**os.environ, workload.OUT: str(tmp_path)}
    with subprocess.Popen(["sleep", "60"], env=environ) as process:
        (tmp_path / f"{process.pid}.jsonl").touch()
        while process.pid not in processes.list_own(tmp_path):  # it is still between fork and exec
            time.sleep(0.001)
        yield process
        process.kill()


def a_strike(kind: Kind) -> Strike:
    return Strike(after=0.0, kind=kind, place=0.0)


def test_a_stopped_rank_that_nobody_ends_is_ended_by_the_probe(
    tmp_path: Path, rank: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(striking, "PROBE_SECONDS", 0.0)
    striker = Striker(tmp_path, os.getpid())
    striker.strike(a_strike(Kind.HANG))
    os.waitid(
        os.P_PID, rank.pid, os.WSTOPPED | os.WNOWAIT
    )  # the signal takes effect a moment later
    assert processes.read_stat(Path(f"/proc/{rank.pid}/stat"))[0] == "T"
    striker.probe()
    assert rank.wait(10) == -signal.SIGKILL
    assert striker.probed == 1


def test_a_node_is_lost_with_the_rank_and_all_that_its_parent_started(
    tmp_path: Path, rank: "subprocess.Popen[bytes]"
) -> None:
    striker = Striker(tmp_path, os.getpid())
    striker.strike(a_strike(Kind.NODE))
    assert rank.wait(10) == -signal.SIGKILL
    assert [struck.pid for struck in striker.struck] == [rank.pid]


def test_a_fault_that_meets_no_living_rank_is_noted_as_such(tmp_path: Path) -> None:
    (tmp_path / f"{os.getpid()}.jsonl").touch()  # no rank, though a log has its pid
    striker = Striker(tmp_path, os.getpid())
    striker.strike(a_strike(Kind.DEATH))
    assert [struck.pid for struck in striker.struck] == [0]


def test_the_end_of_a_run_ends_its_stopped_processes_too(
    tmp_path: Path, rank: "subprocess.Popen[bytes]"
) -> None:
    rank.send_signal(signal.SIGSTOP)
    processes.end_all(tmp_path)
    assert rank.wait(10) == -signal.SIGKILL
