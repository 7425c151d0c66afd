"""Whether a refused pod needs another template, or may be accepted later."""

import json

import pytest

from everstep_operator.answers import classify_error
from everstep_operator.jobs.apply import is_template_fault

WEBHOOK = (
    'admission webhook "validate.kyverno.svc-fail" denied the request: the team has no budget left'
)
POLICY = "pods \"lm-0-1\" is forbidden: ValidatingAdmissionPolicy 'images' with binding 'all' denied request: unsigned"


@pytest.mark.parametrize(
    ("status", "message", "of_the_template"),
    [
        (400, WEBHOOK, False),
        (403, WEBHOOK, False),
        (422, POLICY, False),
        (403, "pods is forbidden: exceeded quota: small", False),
        (422, "spec.containers[0].image: Required value", True),
        (400, "Pod in version v1 cannot be handled: json: unknown field", True),
        (403, 'pods is forbidden: violates PodSecurity "restricted:latest"', True),
    ],
)
def test_a_webhook_or_policy_may_allow_the_pod_later_whatever_status_it_gives(
    status: int, message: str, of_the_template: bool
) -> None:
    error = classify_error(status, json.dumps({"message": message}).encode())
    assert is_template_fault(error) is of_the_template
