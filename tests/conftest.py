"""A test named by its id runs, whatever its marks.

A run reports how many long tests it left out. Property tests have no time limit for an example, because
that time says more about the machine.
"""

import pytest
from hypothesis import settings

settings.register_profile("everstep", deadline=None)
settings.load_profile("everstep")

LEFT_OUT = "not long"
"""The mark expression that `addopts` in pyproject.toml selects by default."""


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == LEFT_OUT and _named(config):
        config.option.markexpr = ""
        config.stash[LIFTED] = True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tests of files and folders that are named beside the ids."""
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
    """The test ids on the command line, as pytest spells them."""
    root, here = config.rootpath, config.invocation_params.dir
    found = []
    for argument in config.args:
        path, colons, test = argument.partition("::")
        if colons:
            found.append((here / path).resolve().relative_to(root).as_posix() + "::" + test)
    return tuple(found)


def _is_named(nodeid: str, name: str) -> bool:
    """Whether `name` is this id, the id without its parameters, or the id of its class."""
    return nodeid == name or nodeid.startswith((name + "[", name + "::"))
