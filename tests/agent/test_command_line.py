"""Options of `everstep` with a wrong value are refused by name, with what to give."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from everstep_agent import cli, command_line
from everstep_contract import env, report


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["run", "t.py", "--store=~/x"], "store"),
        (["verify", "~/x"], "run"),
        (["fork", "r", "--step", "1", "--to=~/x"], "to"),
        (["fetch", "r", "--to=~/x"], "to"),
    ],
)
def test_a_folder_below_ones_home_is_no_folder_called_tilde(
    words: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shell replaces it in `--store=~/x`, nor does Python in `everstep.load("~/x")`."""
    monkeypatch.setenv("HOME", "/home/one")
    assert getattr(command_line.parse(words), name) == "/home/one/x"
    assert command_line.parse(["verify", "./~/x"]).run == "./~/x"


def test_files_are_fetched_to_this_machine_and_not_to_a_folder_called_s3(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        command_line.parse(["fetch", "r", "--to", "s3://bucket/x"])
    assert "'s3://bucket/x': expected a folder of this machine; `everstep fork`" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_the_limit_of_a_step_is_a_number_of_seconds(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    with pytest.raises(SystemExit):
        command_line.parse(["run", f"--hang-seconds={text}", "train.py"])
    said = capsys.readouterr().err
    assert f"--hang-seconds: '{text}': expected a number of seconds, more than 0" in said


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "0.5", "much"])
def test_the_factor_of_the_guard_is_off_or_at_least_one(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    with pytest.raises(SystemExit):
        command_line.parse(["run", f"--guard-factor={text}", "train.py"])
    said = capsys.readouterr().err
    assert f"--guard-factor: '{text}': expected 0 (off) or a number from 1 on" in said
    assert command_line.parse(["run", "--guard-factor=0", "train.py"]).guard_factor == 0


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["run", "--store", "", "train.py"], "--store"),
        (["run", "--run", " ", "train.py"], "--run"),
        (["verify", ""], "RUN"),
        (["fetch", "--to", "", "store/run"], "--to"),
        (["fork", "--step", "1", "--to", "", "store/run"], "--to"),
    ],
)
def test_an_empty_text_is_refused_before_it_means_the_current_folder(
    capsys: pytest.CaptureFixture[str], given: list[str], named: str
) -> None:
    with pytest.raises(SystemExit):
        command_line.parse(given)
    said = capsys.readouterr().err
    assert f"argument {named}: it is empty; is a variable of the shell not set?" in said


@pytest.mark.parametrize("given", [["run", "train.py", "--store"], ["verify"]])
def test_a_uri_with_too_few_slashes_is_not_taken_for_a_folder(
    capsys: pytest.CaptureFixture[str], given: list[str]
) -> None:
    with pytest.raises(SystemExit):
        command_line.parse([*given, "s3:/bucket/folder"])
    assert "write s3://…; for a folder of this name write ./s3:/" in capsys.readouterr().err
    assert "./s3:/a" in vars(command_line.parse([*given, "./s3:/a"])).values()


@pytest.mark.parametrize("text", ["0", "-1", "2.0", "two"])
def test_a_number_of_workers_is_a_whole_number_of_at_least_one(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    with pytest.raises(SystemExit):
        command_line.parse(["run", f"--workers={text}", "train.py"])
    assert f"--workers: '{text}': expected a whole number, 1 or more" in capsys.readouterr().err


def test_an_unknown_option_without_a_command_is_refused_with_the_help_to_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        command_line.parse(["--json"])
    assert "unrecognized arguments: --json; see: everstep --help" in capsys.readouterr().err


def test_options_that_a_pod_does_not_use_are_told(tmp_path: Path) -> None:
    settings = env.AgentEnv(
        job="ns/j", job_uid="u", slot=0, attempt=0, token="t", pod_ip="127.0.0.1", uri="file:///s", run="r",
        memory=str(tmp_path), termination_log=str(tmp_path / "log"),
    )  # fmt: skip
    given = ["--mesh", "shard=2", "--no-in-place", "--keep=3", "--preload=json", "--no-zygote"]
    done = subprocess.run(
        [sys.executable, "-m", "everstep_agent.cli", "run", *given, "/nowhere/train.py"],
        env={**os.environ, **settings.to_env()}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr.splitlines() == [
        "everstep: --mesh, --no-in-place in a pod's command: no effect; the job's spec sets it",
        "everstep: there is no script '/nowhere/train.py'",
    ]


@pytest.mark.parametrize("given", [["-m", "pkg.train"], ["pkg.train", "-m"]])
def test_a_module_instead_of_a_file_is_told_what_to_give(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command_line.parse(["run", *given])
    assert "unrecognized arguments: -m; give the script's file" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["run", "train.py"], ["verify", "everstep-store/train"]])
def test_everstep_without_its_runtime_says_what_to_install(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: list[str],
) -> None:
    """As after `pip install .`, which is enough for the kubectl plugin."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(cli, "RUN_NEEDS", ("json", "absent"))
    monkeypatch.setattr(cli, "STORE_NEEDS", ("json", "absent"))
    assert cli.run(given) == 2
    assert "everstep: absent not installed for " in (said := capsys.readouterr().err)
    assert "pip install '.[runtime]'" in said


def test_an_image_without_the_runtime_fails_the_job_and_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = env.AgentEnv(
        job="ns/j", job_uid="u", slot=0, attempt=0, token="t", pod_ip="127.0.0.1", uri="file:///s", run="r",
        memory=str(tmp_path), termination_log=str(tmp_path / "log"),
    )  # fmt: skip
    monkeypatch.setattr(cli, "RUN_NEEDS", ("absent",))
    for name, value in settings.to_env().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "train.py").write_text("")
    status = cli._run_agent(command_line.parse(["run", f"{tmp_path}/train.py"]), [], None)  # type: ignore[arg-type]
    found = report.decode((tmp_path / "log").read_bytes())
    assert (found.cause, status) == (report.Cause.SCRIPT_ERROR, found.exit_code())
    assert "absent not installed" in found.message


def test_an_argument_of_the_script_is_not_taken_for_the_beginning_of_an_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        command_line.parse(["run", "train.py", "--k", "5"])
    assert "arguments of the script go after --: train.py -- --k 5" in capsys.readouterr().err


def test_the_value_of_an_argument_before_the_script_is_not_named_as_the_script(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        command_line.parse(["run", "--lr", "0.1", "train.py"])
    assert "arguments of the script go after --: train.py -- --lr 0.1" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["run", "train.py"], ["verify", "everstep-store/train"]])
def test_a_current_folder_that_was_removed_is_named(tmp_path: Path, given: list[str]) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    command = f"rmdir {folder}; exec {sys.executable} -m everstep_agent.cli {' '.join(given)}"
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.splitlines()[1:]) == (2, [])
    assert "everstep: the current folder: No such file or directory" in done.stderr


@pytest.mark.parametrize(
    "shell",
    [
        "{python} -m everstep_agent.cli {verify} >&-",
        "{python} -m everstep_agent.cli {verify} >/dev/full",
    ],
)
def test_an_output_that_cannot_be_written_ends_in_no_traceback(tmp_path: Path, shell: str) -> None:
    command = shell.format(python=sys.executable, verify=f"verify {tmp_path}/no-run")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode != 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_of_the_output_that_has_seen_enough_changes_no_status(
    tmp_path: Path, unbuffered: str
) -> None:
    """`| head`. Images set PYTHONUNBUFFERED, with which a line is written when it is printed."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "everstep_agent.cli", "verify", str(tmp_path)],
        stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_help_is_shown_where_not_every_character_can_be() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "everstep_agent.cli", "run", "--help"],
        capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert rb"MODULE,\u2026" in done.stdout


def test_a_script_with_a_name_that_no_run_can_have_is_refused_with_the_option_to_set(
    tmp_path: Path,
) -> None:
    (tmp_path / "my train.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "everstep_agent.cli", "run", "my train.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "checkpoint.run (--run; by default the script's name) 'my train'" in done.stderr
    assert not (tmp_path / "everstep-store").exists()


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the interpreter finalized, which may abort a process that reads from a store."""

    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    ended: list[int] = []
    monkeypatch.setattr(cli, "run", interrupted)
    monkeypatch.setattr(cli, "leave", ended.append)
    monkeypatch.setattr(cli, "_prepare_output", lambda: None)
    cli.main()
    assert ended == [130]


def test_ctrl_c_while_the_program_is_imported_shows_no_traceback() -> None:
    code = """
import os, signal, sys
from everstep_agent import console

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have set it to be ignored

class Interrupted:
    def find_spec(self, name, path, target=None):
        if name == "everstep_agent.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupted())
console.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_script_that_is_a_folder_is_named_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["run", f"{tmp_path}/"]) == 2
    said = capsys.readouterr().err
    assert f"is a folder: give the script in it, such as {tmp_path}/train.py" in said


def test_a_missing_script_is_named_with_the_folder_in_which_it_was_sought(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert [cli.run(["run", name]) for name in ("/nowhere/a.py", "b.py")] == [2, 2]
    missing, sought = capsys.readouterr().err.splitlines()
    assert missing == "everstep: there is no script '/nowhere/a.py'"
    assert sought == f"everstep: there is no script 'b.py' in {os.getcwd()}"
