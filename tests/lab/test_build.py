"""The lab's binaries: the Go version, the cache key and the folder."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from everstep_lab import build
from everstep_lab.seam import LabError


@pytest.fixture
def module(tmp_path: Path) -> build.Module:
    folder = tmp_path / "module"
    folder.mkdir()
    (folder / "go.mod").write_text("module m\n")
    (folder / "go.sum").write_text("")
    return build.Module(
        folder=folder,
        title="m",
        binaries=("one", "two"),
        ldflags="-s",
        renamed={},
        cold_seconds=60.0,
    )


def executable(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def go_command(path: Path, version: str) -> Path:
    return executable(path, f"#!/bin/sh\necho {version}\n")


@pytest.mark.parametrize(
    ("version", "enough"),
    [("go1.26.8", True), ("go1.27", True), ("go2.0", True), ("go1.25.9", False), ("", False)],
)
def test_go_must_be_1_26_or_newer(version: str, enough: bool) -> None:
    assert build.is_new_enough(version) is enough


def test_a_folder_of_ready_binaries_is_used_as_it_is(module: build.Module, tmp_path: Path) -> None:
    for name in module.binaries:
        executable(tmp_path / "ready" / name)
    environ = {"EVERSTEP_LAB_BIN": str(tmp_path / "ready")}
    assert build.ensure(module, environ=environ) == tmp_path / "ready"


def test_a_ready_folder_that_lacks_a_binary_is_refused_by_name(
    module: build.Module, tmp_path: Path
) -> None:
    executable(tmp_path / "ready" / "one")
    with pytest.raises(LabError, match=r"lacks two"):
        build.ensure(module, environ={"EVERSTEP_LAB_BIN": str(tmp_path / "ready")})


def test_a_module_of_which_the_ready_folder_has_nothing_is_built_as_ever(
    module: build.Module, tmp_path: Path
) -> None:
    executable(tmp_path / "ready" / "three")
    environ = {"EVERSTEP_LAB_BIN": str(tmp_path / "ready"), "EVERSTEP_GO": "/nowhere/go"}
    with pytest.raises(LabError, match=r"EVERSTEP_GO=/nowhere/go"):
        build.ensure(module, environ=environ)


def test_a_go_that_is_too_old_is_named_with_its_version(tmp_path: Path) -> None:
    old = go_command(tmp_path / "go", "go1.20.1")
    with pytest.raises(LabError, match=rf"{old} is go1\.20\.1"):
        build.find_go({"EVERSTEP_GO": str(old)})


def test_a_go_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"EVERSTEP_GO=.*nowhere"):
        build.find_go({"EVERSTEP_GO": str(tmp_path / "nowhere")})


def test_what_is_in_the_cache_is_not_built_again(module: build.Module, tmp_path: Path) -> None:
    go = go_command(tmp_path / "go", "go1.26.8")
    environ = {"EVERSTEP_GO": str(go), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    cached = build.cache_root(environ) / build.cache_key(module, "go1.26.8")
    for name in module.binaries:
        executable(cached / name)
    assert build.ensure(module, environ=environ) == cached


def test_a_changed_pin_or_another_go_gives_another_place(module: build.Module) -> None:
    before = build.cache_key(module, "go1.26.8")
    assert build.cache_key(module, "go1.27.0") != before
    (module.folder / "go.sum").write_text("changed\n")
    assert build.cache_key(module, "go1.26.8") != before


def test_a_failed_build_shows_its_last_lines_and_leaves_no_half_of_a_folder(
    module: build.Module, tmp_path: Path
) -> None:
    script = '#!/bin/sh\n[ "$1" = env ] && { echo go1.26.8; exit; }\necho broken >&2; exit 3\n'
    go = executable(tmp_path / "go", script)
    environ = {"EVERSTEP_GO": str(go), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with pytest.raises(LabError, match=r"failed with 3:\nbroken"):
        build.ensure(module, lambda _: None, environ)
    assert [p.name for p in build.cache_root(environ).iterdir() if p.is_dir()] == []


def test_a_build_says_how_long_is_left_for_all_that_is_missing(
    module: build.Module, tmp_path: Path
) -> None:
    """A fake Go lists three packages, compiles them and links two commands."""
    script = (
        '#!/bin/sh\n[ "$1" = env ] && { echo go1.26.8; exit; }\n'
        '[ "$1" = list ] && { echo a; echo b; echo c; exit; }\n'
        'for last; do :; done\nwhile [ "$1" != -o ]; do shift; done\n'
        'echo a >&2; echo b >&2; touch "$2/one" "$2/two"\n'
    )
    go = executable(tmp_path / "go", script)
    environ = {"EVERSTEP_GO": str(go), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    other = dataclasses.replace(module, folder=tmp_path / "other", title="o", cold_seconds=180.0)
    shutil.copytree(module.folder, other.folder)
    (other.folder / "go.sum").write_text("another\n")
    said: list[str] = []
    folders = build.ensure_all([module, other], said.append, environ)
    assert [sorted(p.name for p in folder.iterdir()) for folder in folders] == [["one", "two"]] * 2
    assert "building m (once; about 4 min left for all missing binaries)" in said[0]
    assert any("building o (once; " in text for text in said)
    assert build.ensure_all([module, other], said.append, environ) == folders
    assert len([text for text in said if text.startswith("building")]) == 2
