import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep_agent import command_line
from everstep_kubectl import cli, cluster, incidents, picture
from everstep_lab import cli as lab_cli
from kubectl import recordings

README = Path(cluster.__file__).with_name("README.md")
HEAVY = ("kubernetes", "kopf", "pydantic", "aiohttp", "yaml", "matplotlib", "torch", "asyncio")


def test_every_command_of_the_readme_is_one() -> None:
    lines = re.findall(r"^    kubectl everstep (.*)$", README.read_text(), re.M)
    assert len(lines) > 15
    for line in lines:
        words = shlex.split(line.split(">")[0])
        if words != ["--help"]:
            assert hasattr(cli.build_parser().parse_args(words), "module"), line


def test_the_fast_path_imports_nothing_heavy() -> None:
    code = (
        "import sys; import everstep_kubectl.cli, everstep_kubectl.commands.status, everstep_kubectl.jobs;"
        f"print([m for m in {HEAVY!r} + ('everstep_operator', 'everstep_agent') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_flags_of_kubectl_may_stand_before_and_behind_the_command() -> None:
    for words in ("-n a status", "status -n a"):
        assert cli.build_parser().parse_args(words.split()).namespace == "a"
    for words in ("-n a checkpoints ls j", "checkpoints -n a ls j", "checkpoints ls -n a j"):
        assert cli.build_parser().parse_args(words.split()).namespace == "a"


def list_options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from list_options(inner)
        else:
            yield parser.prog, action


@pytest.mark.parametrize(
    "build",
    [cli.build_parser, command_line.build_parser, lab_cli._parser],
    ids=["kubectl", "everstep", "lab"],
)
def test_help_explains_each_option_and_names_its_default(build: object) -> None:
    assert callable(build)
    for command, option in list_options(build()):
        where = f"{command} {option.option_strings or option.dest}"
        assert option.help, where
        if option.default not in (None, True, False, argparse.SUPPRESS):
            assert "default" in option.help, where


@pytest.mark.parametrize(
    "words",
    ["checkpoints restore j --as n --step -1", "drill j --slot -1", "report --log-lines -5"],
)
def test_a_negative_number_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.build_parser().parse_args(words.split())
    assert "expected a whole number, 0 or more" in capsys.readouterr().err


def test_without_a_command_it_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 2
    assert "timeline" in capsys.readouterr().out


def test_a_terminal_obeys_no_text_of_a_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message of a condition may be that of a script's exception."""

    def show(_: list[str]) -> int:
        print("job-1  \x1b]0;owned\x07\x9b2J\rReady\tyes\nß")
        return 0

    monkeypatch.setattr(cli, "run", show)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    monkeypatch.setenv("PYTHON_COLORS", "1")
    with pytest.raises(SystemExit):
        cli.main()
    assert os.environ["PYTHON_COLORS"] == "0", "Python 3.14 would colour --help, shown as text"
    assert capsys.readouterr().out == "job-1  \\x1b]0;owned\\x07\\x9b2J\\x0dReady\tyes\nß\n"


def test_a_missing_kubectl_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(cluster.PROGRAM, "no-such-kubectl")
    assert cli.run(["status"]) == 2
    assert "there is no 'no-such-kubectl' in PATH: install kubectl" in capsys.readouterr().err


def test_a_log_may_hold_any_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A support bundle is written even so."""
    program = tmp_path / "kubectl"
    program.write_text("#!/bin/sh\nprintf 'loss \\377 1\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv(cluster.PROGRAM, str(program))
    assert cluster.Cluster().begin("logs", "tiny-0-1").text() == "loss \ufffd 1\n"


@pytest.mark.parametrize("end", [">&-", "2>&-", "> /dev/full"])
def test_an_output_that_cannot_be_written_ends_in_no_traceback(end: str) -> None:
    command = f"{sys.executable} -m everstep_kubectl.cli status {end}"
    done = subprocess.run(
        ["sh", "-c", command],
        env={**os.environ, cluster.PROGRAM: "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.returncode == (2 if "full" in end else 0)


def test_a_cluster_without_everstep_is_told_from_one_that_is_away() -> None:
    missing = cluster.translate(
        'E1121 22:00:00.1 1 memcache.go:287] "Unhandled Error"\n'
        'error: the server doesn\'t have a resource type "resilienttrainingjobs"\n'
    )
    assert "helm install everstep" in str(missing)
    for kind, ours in (("nodequarantines", True), ("widgets", False)):
        said = cluster.translate(f'error: the server doesn\'t have a resource type "{kind}"')
        assert ("helm install everstep" in str(said)) == ours
    assert "helm install everstep" not in str(cluster.translate("error: connection refused"))
    assert "memcache" not in str(missing)
    assert isinstance(cluster.translate("Error from server (NotFound): x"), cluster.NotFound)
    assert str(cluster.translate("")) == "kubectl failed without a message"


def test_a_picture_is_a_picture(tmp_path: Path) -> None:
    found = incidents.build_incidents(recordings.job())
    picture.save("tiny", found, str(tmp_path / "t.png"))
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_of_an_unknown_format_is_named(tmp_path: Path) -> None:
    found = incidents.build_incidents(recordings.job())
    with pytest.raises(
        cluster.ClusterError, match=r"--file .*t\.txt: Format 'txt' is not supported"
    ):
        picture.save("tiny", found, str(tmp_path / "t.txt"))


def test_labels_in_the_picture_do_not_meet() -> None:
    moments = incidents.build_incidents(recordings.job())[0].moments
    rows = {m.name: row for m, row in picture.place_labels(moments)}
    assert rows["signal"] != rows["verdict"]
    assert rows["running"] == 0


def test_without_matplotlib_the_picture_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(cluster.ClusterError, match="pip install matplotlib"):
        picture.save("tiny", (), str(tmp_path / "t.png"))


@pytest.mark.parametrize("ends", ["exit 0", "echo 'unexpected EOF' >&2; exit 1"])
def test_a_watch_goes_on_after_its_connection_was_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: str
) -> None:
    """The API server is restarted while a command waits: neither a wrong answer nor a traceback."""
    program = tmp_path / "kubectl"
    program.write_text(
        f"""#!/bin/sh
        if mkdir {tmp_path}/first 2>/dev/null; then
            echo '{{"type": "ADDED", "object": {{"step": 1}}}}'; printf '{{"type": "MODI'; {ends}
        fi
        echo '{{"type": "ADDED", "object": {{"step": 2}}}}'; exec sleep 9
        """
    )
    program.chmod(0o755)
    monkeypatch.setenv(cluster.PROGRAM, str(program))
    monkeypatch.setattr(cluster, "PAUSE_SECONDS", 0.0)
    steps = (job["step"] for _, job in cluster.Cluster().watch("/jobs", 60.0))
    assert [next(steps), next(steps)] == [1, 2]
    steps.close()


def test_a_watch_that_cannot_begin_fails_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "kubectl"
    program.write_text("#!/bin/sh\necho 'Error from server (Forbidden): no' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv(cluster.PROGRAM, str(program))
    with pytest.raises(cluster.ClusterError, match="Forbidden"):
        next(cluster.Cluster().watch("/jobs", 60.0))
