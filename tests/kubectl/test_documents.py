import json

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from everstep_kubectl import documents, jobs
from kubectl import recordings

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(JSON)
@example(1e16)
@example(
    ["\ufeff\x85\U0001f600", "1e3", "- a", "", "~", "0x1", "12:30:00", "=", "<<", "2026-01-01"]
)
@settings(max_examples=150)
def test_what_is_written_as_yaml_is_read_back_the_same(value: object) -> None:
    assert yaml.safe_load(documents.to_yaml(value)) == value


def test_views_are_documents_with_names_as_the_api_writes_them() -> None:
    job = jobs.build_job(recordings.job(), recordings.NOW)
    document = json.loads(documents.write(job, "json"))
    assert document["checkpointStep"] == 2550
    assert document["incidents"][0]["cost"]["gpuSeconds"] == 18.6
    assert yaml.safe_load(documents.write(job, "yaml")) == document
