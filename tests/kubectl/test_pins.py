import re
from typing import Any

import pytest

from everstep_kubectl import checkpoints, cli, pins, readerpod
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
    assert answer.message.endswith("has been unpinned: choose another name")


def test_a_job_that_is_over_saves_nothing() -> None:
    job = recordings.with_condition(recordings.job(), "Complete", "True")
    assert pins.decide_pinned(job, "x") == pins.Answer(
        ok=False, message="tiny is Complete: it saves no checkpoint any more"
    )


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
