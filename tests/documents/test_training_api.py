"""`examples/README.md` documents the training API as it is in the code."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import everstep
from everstep.job import Job
from everstep.step import Step

PAGE = (Path(__file__).parents[2] / "examples/README.md").read_text()
API = PAGE.partition("## The training API")[2]
CODE = "\n".join(re.findall(r"```python\n(.*?)```", API, re.S))
SIGNATURE = re.compile(r"^(everstep|job|step)\.(\w+)(\(.*?\) -> [^\n]+)$", re.S | re.M)
OWNERS = {"everstep": everstep, "job": Job, "step": Step}
FOUND = {f"{owner}.{name}": rest for owner, name, rest in SIGNATURE.findall(CODE)}
ALSO_READ = re.compile(r"`(?:job|step)\.(\w+)`")


def parts(function: ast.FunctionDef) -> tuple[str, str]:
    """Return the arguments without `self`, and the return type."""
    function.args.args = [a for a in function.args.args if a.arg != "self"]
    returned = ast.unparse(function.returns) if function.returns else ""
    return ast.unparse(function.args), returned


def in_code(name: str) -> tuple[str, str]:
    owner, _, member = name.partition(".")
    source = inspect.getsource(getattr(OWNERS[owner], member))
    (function,) = ast.parse(inspect.cleandoc("\n" + source)).body
    assert isinstance(function, ast.FunctionDef)
    arguments, returned = parts(function)
    if any(ast.unparse(d) == "contextmanager" for d in function.decorator_list):
        returned = returned.replace("Iterator", "AbstractContextManager")
    return arguments, returned


@pytest.mark.parametrize("name", FOUND)
def test_a_signature_is_that_of_the_code(name: str) -> None:
    (function,) = ast.parse(f"def f{FOUND[name]}: ...").body
    assert isinstance(function, ast.FunctionDef)
    assert parts(function) == in_code(name)


def public(owner: type) -> set[str]:
    return {name for name in vars(owner) if not name.startswith("_")}


def test_every_call_and_attribute_is_told() -> None:
    told = {name.partition(".")[2] for name in FOUND} | set(ALSO_READ.findall(API))
    assert public(Job) <= told
    assert public(Step) <= told
    assert {e for e in everstep.__all__ if e.endswith(("Error", "Misuse", "Agent"))} <= set(
        re.findall(r"`(?:everstep\.)?(\w+)`", API)
    )
