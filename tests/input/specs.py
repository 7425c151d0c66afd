"""Specs that a user might send: a valid one in which fields have other values, taken from the schema."""

import copy
import math
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from everstep_operator import crd, model
from job_builders import a_spec

Path = tuple[str | int, ...]

NASTY = (
    "", " ", "x", "0", "-1", "true", "null", "\x00", "a\nb", "\x7f", "\x85", "\xa0", "\u2028", "\u202e",
    "\u200b", "\ufeff", "\U0001f680", "ä", "../../etc", "/etc/passwd", "..", ".", "a/../b", "a//b", "%2e%2e",
    "$(reboot)", "`id`", "; rm -rf /", "{{7*7}}", "s3://", "s3://b", "s3://b/", "s3://b/f", "s3://b//f", "s3:/b/f",
    "s3://b/../f", "s3://b/./f", "s3://b/.f", "s3://b/..", "s3://user:secret@b/f", "s3://b:80/f", "s3://b/f?x=1",
    "s3://b/f#x", "s3://b/f%2e", "s3://b/f\xa0", "s3://b/f\u2003g", "s3://b/f\u202eg", "s3://b/ä", "S3://b/f",
    "gs://b/f", "az://b/f@1", "file:///", "file:///a b", "file:///data/größe", "file:///a/../b", "file://host/x",
    "http://b/f", "http://169.254.169.254/latest", "1Gi", "0", "1.5Gi", "9999999999999Ti", "999999999999Ti",
    "Resume", "Refuse", "resume", "Note", "SaveAndStop", "everstep.dev/quarantine", "run/part", "run/.hidden",
    "run\n", "s3://b/f\n", "1Gi\n",
)  # fmt: skip
OTHER_TYPES: tuple[Any, ...] = (None, True, False, 0, 1, -1, 1.5, "", "3", [], [None], {}, {"x": 1})


def fields(schema: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield every field of the spec, both objects and leaves; for a list, its first entry."""
    for name, inner in (schema.get("properties") or {}).items():
        yield (*path, name), inner
        yield from fields(inner, (*path, name))
    if isinstance(schema.get("items"), dict):
        yield (*path, 0), schema["items"]
        yield from fields(schema["items"], (*path, 0))


FIELDS = tuple(fields(crd.build_schema(model.JobSpec)))


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return values of the field's type, values around its bounds, and values of other types."""
    kinds = {"integer": _numbers, "number": _numbers, "string": _strings, "array": _lists}
    own = kinds.get(schema.get("type", ""))
    closed = schema.get("type") == "object" and "properties" in schema
    other = st.sampled_from([v for v in OTHER_TYPES if not (closed and v == {"x": 1})])
    return st.one_of(own(schema), own(schema), other) if own else other


def _numbers(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    low, high = schema.get("minimum", 0), schema.get("maximum", 2**31)
    near = [bound + more for bound in (low, high) for more in (-1, 0, 1)]
    edges = [*near, 10**6, 2**31, 2**63 - 1, -(2**63), 10**30]
    return st.one_of(st.sampled_from(edges), st.integers(int(low), int(high)))


def _strings(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    longest = schema.get("maxLength", 300)
    long = [f"s3://b/{c * (longest - 7 + more)}" for c in ("a", "a/", "ä") for more in (0, 1)]
    long += [c * (longest + more) for c in ("a", "ä", "\U0001f680") for more in (0, 1)]
    known = st.sampled_from((*NASTY, *long, *schema.get("enum", ()), "a" * 2**20))
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
    paths = st.text("ab._=@+-/~:\\", max_size=12).map(lambda s: f"s3://{s}")
    return st.one_of(known, text, paths)


def _lists(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    longest = schema.get("maxItems", 3)
    items = [{"key": "k", "name": f"n{k}"} for k in range(longest + 1)]
    return st.sampled_from([items, items[:-1], [{}], ["x"], [1], [None], [[]]])


@st.composite
def specs(draw: st.DrawFn) -> tuple[dict[str, Any], list[Path]]:
    """A spec, and the paths of its replaced fields."""
    spec: dict[str, Any] = a_spec()
    chosen = draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3))
    for path, schema in chosen:
        spec = replaced(spec, path, draw(values(schema)))
    return spec, [path for path, _ in chosen]


def replaced(document: Any, path: Path, value: Any) -> Any:
    """Return a copy with `value` at `path`. Missing objects on the path are created."""
    if not path:
        return copy.deepcopy(value)
    key, rest = path[0], path[1:]
    if isinstance(key, int):
        items = list(document) if isinstance(document, list) else []
        return [replaced(items[0] if items else None, rest, value), *items[1:]]
    own = dict(document) if isinstance(document, dict) else {}
    return {**own, key: replaced(own.get(key), rest, value)}


def as_stored(document: Any) -> Any:
    """Return the document as the API server stores it: null fields are absent, and 3.0 is 3."""
    if isinstance(document, dict):
        return {k: as_stored(v) for k, v in document.items() if v is not None}
    if isinstance(document, list):
        return [as_stored(item) for item in document]
    if isinstance(document, float) and document.is_integer() and not math.isinf(document):
        return int(document)
    return document
