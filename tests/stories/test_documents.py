"""What counts as a command in a document."""

import pytest

from everstep_stories import documents

TEXT = """# Title

    helm first

## Use it

Say `kubectl get pods -A` and look at `kubectl logs`; write `helm upgrade … --x`.

    kubectl apply -f a.yaml      # all of it
    a line that is no command

```
## no heading
helm install a b   # c
```

## Next

`helm test a -n b`
"""


def test_lines_of_blocks_and_whole_inline_commands_count() -> None:
    assert documents.list_commands(TEXT, "Use it") == [
        "kubectl apply -f a.yaml",
        "helm install a b",
        "kubectl get pods -A",
    ]
    assert documents.list_commands(TEXT, "") == ["helm first"]
    assert documents.list_commands(TEXT, "Next") == ["helm test a -n b"]


def test_a_heading_that_is_gone_is_named_with_those_that_are_there() -> None:
    with pytest.raises(LookupError, match=r"no section 'Gone'; there are: .*Use it, Next"):
        documents.list_commands(TEXT, "Gone")


def test_the_documents_have_their_sections_and_what_is_left_to_hands_stands_in_them() -> None:
    assert set(documents.BY_HAND) <= set(documents.read_all())
