"""An exception of a script is shown with the script's own frames, and names its line."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from everstep import script_errors, validate
from everstep.errors import Misuse
from everstep.script_errors import describe_error, describe_line, format_error
from runtime.a_job import Trial


class Broken:
    def __index__(self) -> int:
        raise ValueError("no number")


def caught(script: Callable[[], object]) -> BaseException:
    """The exception of a script that a frame of Everstep has called, as a worker does."""
    own: dict[str, Callable[[Callable[[], object]], None]] = {}
    exec(compile("def run(script):\n    script()", script_errors.__file__, "exec"), own)
    with pytest.raises((Misuse, ValueError, TypeError, AssertionError)) as found:
        own["run"](script)
    error = found.value
    assert error.__traceback__ is not None
    return error.with_traceback(error.__traceback__.tb_next)  # without the test's own


def ask_wrongly() -> None:
    validate.whole("until", "6")  # the line of the script


def pass_a_broken_object() -> None:
    validate.whole("until", Broken())


def line_of(script: Callable[[], object]) -> str:
    return f" (test_script_errors.py:{script.__code__.co_firstlineno + 1})"


def test_a_misuse_shows_no_frame_of_everstep() -> None:
    error = caught(ask_wrongly)
    assert "the line of the script" in format_error(error)
    assert "/everstep/" not in format_error(error)
    assert describe_line(error) == line_of(ask_wrongly)


def test_another_exception_shows_everything_below_the_script() -> None:
    error = caught(pass_a_broken_object)
    shown = format_error(error)
    assert "validate.py" in shown
    assert script_errors.__file__ not in shown
    assert describe_line(error) == line_of(Broken.__index__)


def fail_at_length() -> None:
    raise ValueError("x" * 10**7)


def test_a_script_that_asks_torch_for_its_rank_is_told_what_to_use() -> None:
    """A rank that joins has no group of torch before its first step."""
    told = describe_error(caught(torch.distributed.get_rank))
    assert "use job.rank and job.world_size" in told
    assert told.endswith("leave out init_process_group and DistributedDataParallel")


def test_a_long_text_hides_neither_the_line_nor_fills_each_report() -> None:
    """Agents, coordinator and operator repeat it in each report, and the status shows only the beginning."""
    told = describe_error(caught(fail_at_length))
    assert told.startswith("ValueError: xxx")
    assert told.endswith(f"x …{line_of(fail_at_length)}")
    assert len(told) < 2000


def test_an_exception_without_a_frame_of_the_script_is_shown_as_it_is() -> None:
    error = caught(int.from_bytes)  # misses its argument
    assert script_errors.__file__ in format_error(error)
    assert describe_line(error) == ""


def wrap_the_model() -> None:
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))


def form_the_group() -> None:
    torch.distributed.init_process_group("gloo")


def test_a_script_that_forms_the_group_again_is_told_to_leave_it_out(tmp_path: Path) -> None:
    """With several ranks there is a group already."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/keys", rank=0, world_size=1
    )
    try:
        told = describe_error(caught(form_the_group))
    finally:
        torch.distributed.destroy_process_group()
    assert told.endswith("leave out init_process_group and DistributedDataParallel")


@pytest.mark.parametrize("script", [wrap_the_model, form_the_group])
def test_a_script_that_is_still_distributed_as_before_is_told_what_to_leave_out(
    script: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    told = describe_error(caught(script))
    assert f"{line_of(script)}; Everstep forms the ranks' process group itself" in told
    assert told.endswith("leave out init_process_group and DistributedDataParallel")


def test_a_scaler_that_steps_within_the_loop_is_told_where_it_belongs(trial: Trial) -> None:
    scaler = torch.amp.GradScaler("cpu")
    trial.job.track(scaler=scaler)

    def script() -> None:
        for step in trial.job.steps(until=2):
            for batch in step.batches(trial.data):
                step.backward(trial.loss(batch), scaler=scaler)
                scaler.step(trial.optimizer)

    assert "call the scaler's step and update after the loop, once" in describe_error(
        caught(script)
    )
