import re
from collections.abc import Iterator
from typing import Any

import pytest

from everstep_kubectl import checkpoints, cli, pins, readerpod
from everstep_kubectl.cluster import ClusterError
from everstep_kubectl.commands import checkpoint
from everstep_kubectl.commands import checkpoints as reading
from kubectl import recordings

PINNED = {"name": "before-lunch", "step": 40, "epoch": 1, "manifest": "manifests/1-40-x.json"}


def asked(name: str = "before-lunch", **status: Any) -> pins.Answer | None:
    return pins.decide_pinned(recordings.job(**status), name)


def test_a_checkpoint_that_has_the_name_is_told_with_its_step() -> None:
    text = "tiny: the checkpoint of step 40 is pinned as before-lunch (manifests/1-40-x.json)"
    assert asked(pinned=PINNED) == pins.Answer(ok=True, message=text)


def test_one_that_has_another_name_may_still_come() -> None:
    assert asked("after-lunch", pinned=PINNED) is None
    assert asked() is None


def test_a_name_that_was_given_up_cannot_be_used_again() -> None:
    answer = asked(pinned={**PINNED, "kept": False})
    assert answer is not None
    assert not answer.ok
    assert "has been unpinned; a run uses each name once" in answer.message


def test_a_job_that_is_over_saves_nothing() -> None:
    job = recordings.with_condition(recordings.job(), "Complete", "True")
    assert pins.decide_pinned(job, "x") == pins.Answer(
        ok=False, message="tiny is Complete: it saves no checkpoint any more"
    )


def test_a_job_that_is_being_deleted_saves_nothing() -> None:
    answer = pins.decide_pinned(recordings.deleted(recordings.job()), "before-lunch")
    assert answer is not None
    assert answer.message == "tiny is being deleted: it saves no checkpoint any more"


def test_a_name_that_cannot_be_one_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["checkpoint", "byte-lm", "--pin", "Before Lunch"]) == 2
    assert (
        "'Before Lunch' cannot name a checkpoint: use at most 63 lower-case"
        in capsys.readouterr().err
    )


def test_a_restored_job_does_not_pin_again() -> None:
    job = recordings.job()
    job["spec"]["checkpoint"]["pin"] = "before-lunch"
    restored = readerpod.build_restored(job, new="other", run="other")
    assert "pin" not in restored["spec"]["checkpoint"]


def test_the_list_names_the_pins() -> None:
    one = {"step": 40, "epoch": 1, "bytes": 1, "cause": "Start", "manifest": "m"}
    catalog = {"run": "r", "done": False, "job": "j", "retired": 0}
    shown = checkpoints.render_catalog(catalog | {"checkpoints": [one | {"pins": ["a", "b"]}]})
    assert "a, b" in shown
    older = checkpoints.render_catalog(catalog | {"checkpoints": [one]})  # by an image without pins
    assert re.search(r"^40 +1 ", older, re.MULTILINE)


class Board:
    """A cluster with one job, whose status changes once it was patched."""

    def __init__(self, job: dict[str, Any], *later: dict[str, Any]) -> None:
        self._job, self._later, self.patches = job, later, list[tuple[str, ...]]()

    def get(self, *_: str) -> "Board":
        return self

    def object(self) -> dict[str, Any]:
        return self._job

    def scope(self) -> list[str]:
        return []

    def begin(self, *call: str) -> "Board":
        self.patches.append(call)
        return self

    def text(self) -> str:
        return ""

    def watch(self, _: str, seconds: float) -> Iterator[tuple[str, dict[str, Any]]]:
        assert seconds > 0
        yield from (("MODIFIED", job) for job in self._later)


def pin(board: Board, *more: str) -> int:
    words = ["checkpoint", "tiny", "--pin", "before-lunch", *more]
    given = cli.build_parser().parse_args(words)
    cluster: Any = board
    return checkpoint.run(given, cluster)


def with_pin(step: int, saved: int = 40) -> dict[str, Any]:
    return recordings.job(pinned={**PINNED, "step": step}, checkpoint={"step": saved})


@pytest.mark.parametrize(
    ("kept", "status", "said"),
    [
        ({"before-lunch"}, 0, "already; nothing new was saved"),
        (set(), 1, "has been unpinned; a run uses each name once"),
    ],
)
def test_a_pin_that_the_job_reports_is_looked_up_in_the_run(
    kept: set[str],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The job learns some seconds later that its pin was removed, and a suspended one not at all."""
    monkeypatch.setattr(reading, "list_pins", lambda *_: kept)
    board = Board(with_pin(40))
    assert pin(board) == status
    assert said in capsys.readouterr().out
    assert not board.patches


def test_an_old_pin_that_is_reported_after_the_request_is_looked_up_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reading, "list_pins", lambda *_: set[str]())
    before = recordings.job(pinned={**PINNED, "name": "other"}, checkpoint={"step": 60})
    assert pin(Board(before, with_pin(40, 60))) == 1
    assert "has been unpinned" in capsys.readouterr().out


def test_a_new_pin_is_believed(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the right to create pods, too."""
    board = Board(recordings.job(checkpoint={"step": 40}), with_pin(44, 44))
    assert pin(board) == 0
    assert len(board.patches) == 1
    assert capsys.readouterr().out.startswith("tiny: the checkpoint of step 44 is pinned")


def test_a_run_that_cannot_be_read_is_told_beside_what_the_job_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> set[str]:
        raise ClusterError("pods is forbidden")

    monkeypatch.setattr(reading, "list_pins", refuse)
    assert pin(Board(with_pin(40))) == 0
    assert "could not be read to see whether the pin was removed since: pods is" in (
        capsys.readouterr().out
    )


def suspended(**status: Any) -> dict[str, Any]:
    job = recordings.job(**status)
    job["spec"]["suspend"] = True
    return job


def test_a_suspended_job_is_refused_at_once_with_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    board = Board(suspended())
    assert pin(board) == 1
    said = capsys.readouterr().out
    assert "tiny is suspended: it saves no checkpoint until it runs again" in said
    assert "kubectl everstep resume -n " in said
    assert not board.patches
    assert pin(board, "--no-wait") == 0
    assert len(board.patches) == 1


def test_a_job_that_is_suspended_meanwhile_is_not_waited_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert pin(Board(recordings.job(), suspended())) == 1
    assert "The request stays in the spec" in capsys.readouterr().out
