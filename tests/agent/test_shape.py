"""Rules for the source code, checked by reading it."""

import ast
from collections.abc import Iterator
from pathlib import Path

AGENT = Path(__file__).parents[2] / "runtime" / "everstep_agent"
MOST_ARGUMENTS = 6


def list_constructors() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted(AGENT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    assert isinstance(node, ast.ClassDef)
                    yield f"{path.relative_to(AGENT)}: {node.name}", method


def count_arguments(method: ast.FunctionDef) -> int:
    found = method.args
    return len(found.posonlyargs) + len(found.args) + len(found.kwonlyargs) - 1


def test_no_constructor_takes_more_than_six_arguments() -> None:
    found = dict(list_constructors())
    assert len(found) > 30
    assert [n for n, m in found.items() if count_arguments(m) > MOST_ARGUMENTS] == []


def test_what_calls_itself_pure_is_held_to_it() -> None:
    """Each module whose docstring contains "Pure" is listed in the contract in `.importlinter`."""
    contract = (AGENT.parents[1] / ".importlinter").read_text()
    pure = [
        "everstep_agent." + ".".join(path.relative_to(AGENT).with_suffix("").parts)
        for path in sorted(AGENT.rglob("*.py"))
        if "Pure" in (ast.get_docstring(ast.parse(path.read_text())) or "")
    ]
    assert len(pure) > 20
    assert [module for module in pure if f"    {module}\n" not in contract] == []
