"""Options of `everstep` with a wrong value are refused by name, with what to give."""

import pytest

from everstep_agent import command_line


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_the_limit_of_a_step_is_a_number_of_seconds(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    with pytest.raises(SystemExit):
        command_line.parse(["run", f"--hang-seconds={text}", "train.py"])
    said = capsys.readouterr().err
    assert f"--hang-seconds: '{text}': expected a number of seconds, more than 0" in said
