"""What `everstep.run` does with a process that is no rank, with a second call, and if `main` returns too early."""

import os
from typing import NoReturn

import pytest

from everstep import Job, Misuse, run, worker
from everstep_contract import env, wire
from runtime.a_job import Ended, Trial


@pytest.fixture
def as_a_rank(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> Trial:
    """`run` gets the trial's session here, and ends the process by raising `Ended`."""

    def leave(status: int) -> NoReturn:
        raise Ended(f"status {status}")

    monkeypatch.setenv(env.AGENT_SOCKET, "/nowhere")
    monkeypatch.setattr(worker, "_joined", False)
    monkeypatch.setattr(worker, "_prepare", lambda: None)
    monkeypatch.setattr(worker, "_join", lambda *given: trial.session)
    monkeypatch.setattr(os, "_exit", leave)
    return trial


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, 0), (SystemExit(), 0), (SystemExit(5), 5), (SystemExit("no"), 1), (OSError(), 1)],
    ids=repr,
)
def test_a_child_that_the_script_forks_ends_without_a_word_to_the_agent(
    as_a_rank: Trial, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, status: int
) -> None:
    def main(job: Job) -> None:
        monkeypatch.setattr(os, "getpid", lambda: 1)  # as in a child
        if error is not None:
            raise error

    with pytest.raises(Ended, match=f"^status {status}$"):
        run(main)
    assert not as_a_rank.agent.frames


def test_a_second_call_is_refused(as_a_rank: Trial) -> None:
    said: list[str] = []

    def main(job: Job) -> None:
        with pytest.raises(Misuse) as found:
            run(main)
        said.append(str(found.value))

    with pytest.raises(Ended):
        run(main)
    assert "It is called once in a process" in said[0]


def test_a_script_that_stops_and_breaks_is_told_to_let_the_loop_end(as_a_rank: Trial) -> None:
    def main(job: Job) -> None:
        for step in job.steps(until=9):
            as_a_rank.take(step)
            job.stop()
            break

    with pytest.raises(Ended):
        run(main)
    (failed,) = as_a_rank.agent.of(wire.Failed)
    assert failed.message.endswith("and let the loop over job.steps end by itself")
