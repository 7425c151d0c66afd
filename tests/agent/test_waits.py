"""The README's tables list every wait of the agent and the coordinator, with the code's limit."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

AGENT = Path(__file__).parents[2] / "runtime" / "everstep_agent"
LIMITED = re.compile(r"^\| `([\w/.]+)` `(\w+_SECONDS)` \| ([^|]+) \|", re.MULTILINE)
UNLIMITED = re.compile(r"^\| `([\w/.]+\.py)` `([a-z_]+)` \|", re.MULTILINE)
AT = {"sleep": 0, "timeout": 0, "wait_for": 1, "happens": 1, "until": 1, "result_unless": 2}
"""The limit's position among the arguments of each function."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(AGENT.rglob("*.py")):
        yield str(path.relative_to(AGENT)), ast.parse(path.read_text())


def list_limits() -> Iterator[tuple[str, str, str]]:
    for name, module in modules():
        for node in module.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Name) and target.id.endswith("_SECONDS"):
                    assert isinstance(node, ast.Assign)
                    yield name, target.id, ast.unparse(node.value)


def waits_without_limit(function: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that wait without a limit, or with a limit that has no name."""
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and _waits(call):
            limit = _limit(call)
            named = limit is not None and any(
                isinstance(part, ast.Name | ast.Attribute) for part in ast.walk(limit)
            )
            if not named:
                yield call


def _called(call: ast.Call) -> tuple[str, str]:
    """Return the name of the called function, and the name of the object that it belongs to."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr, getattr(call.func.value, "id", "")
    return getattr(call.func, "id", ""), ""


def _waits(call: ast.Call) -> bool:
    name, owner = _called(call)
    if name == "wait":
        return owner == "asyncio" or not (call.args or call.keywords)
    if name in ("sleep", "timeout", "wait_for"):
        return owner == "asyncio"
    return name in ("happens", "result_unless") or (name == "until" and len(call.args) > 1)


def _limit(call: ast.Call) -> ast.expr | None:
    given = next((k.value for k in call.keywords if k.arg in ("timeout", "seconds")), None)
    at = AT.get(_called(call)[0])
    return call.args[at] if given is None and at is not None and len(call.args) > at else given


def list_unlimited() -> set[tuple[str, str]]:
    return {
        (name, function.name)
        for name, module in modules()
        for function in ast.walk(module)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for _ in waits_without_limit(function)
    }


def page() -> str:
    text = (AGENT / "README.md").read_text()
    return text[text.index("## Waits") : text.index("## Choices, and why")]


def test_each_limit_has_a_row_with_the_same_figure_and_each_row_is_one() -> None:
    assert set(list_limits()) == set(LIMITED.findall(page()))


def test_a_wait_without_a_named_limit_says_what_bounds_it() -> None:
    assert list_unlimited() == set(UNLIMITED.findall(page()))


def test_each_row_says_what_is_waited_for_and_what_follows() -> None:
    rows = [line.split("|")[1:-1] for line in page().splitlines() if line.startswith("| `")]
    assert all(cell.strip() for row in rows for cell in row)


def test_a_wait_is_found_by_its_form() -> None:
    def found(code: str) -> int:
        return len(list(waits_without_limit(ast.parse(code))))

    assert found("await asyncio.sleep(0.3)") == 1
    assert found("await asyncio.sleep(PAUSE_SECONDS)") == 0
    assert found("await asyncio.wait(tasks)") == 1
    assert found("await asyncio.wait(tasks, timeout=None)") == 1
    assert found("await asyncio.wait(tasks, timeout=END_SECONDS)") == 0
    assert found("await event.wait()") == 1
    assert found("await happens(event, 5.0)") == 1
    assert found("async with asyncio.timeout(2):\n    await x") == 1
    assert found("await result_unless(call, over, POLL_SECONDS)") == 0
