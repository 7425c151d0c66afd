"""A test that is named by its id runs, whatever its marks; what a run leaves out, it says."""

import pytest

LEFT_OUT = "not long"
"""The marks that `addopts` in pyproject.toml selects when nobody gives others."""


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == LEFT_OUT and _named(config):
        config.option.markexpr = ""
        config.stash[LIFTED] = True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests of files and folders that stand beside the named ids stay out."""
    if not config.stash.get(LIFTED, False):
        return
    named = _named(config)
    long = [i for i in items if i.get_closest_marker("long")]
    out = [i for i in long if not any(_is_named(i.nodeid, name) for name in named)]
    config.hook.pytest_deselected(items=out)
    items[:] = [i for i in items if i not in out]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    long = [i for i in terminalreporter.stats.get("deselected", ()) if i.get_closest_marker("long")]
    if long and config.option.markexpr in ("", LEFT_OUT):
        terminalreporter.write_line(
            f"{len(long)} long tests were left out: name one by its id, or give `-m long`."
        )


LIFTED = pytest.StashKey[bool]()


def _named(config: pytest.Config) -> tuple[str, ...]:
    """Ids on the command line, as pytest spells them."""
    root, here = config.rootpath, config.invocation_params.dir
    found = []
    for argument in config.args:
        path, colons, test = argument.partition("::")
        if colons:
            found.append((here / path).resolve().relative_to(root).as_posix() + "::" + test)
    return tuple(found)


def _is_named(nodeid: str, name: str) -> bool:
    """The id itself, or that of a test without its parameters, or of a class."""
    return nodeid == name or nodeid.startswith((name + "[", name + "::"))
