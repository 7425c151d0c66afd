"""The check that `helm test` runs, in the operator's image: does this installation work?

Standard library only. Tries each check for up to a minute in all, prints a line for each, and ends with 1 if one
failed.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = Path(os.environ.get("EVERSTEP_ACCOUNT", "/var/run/secrets/kubernetes.io/serviceaccount"))
API = os.environ.get(
    "EVERSTEP_API",
    f"https://{os.environ.get('KUBERNETES_SERVICE_HOST', 'kubernetes.default.svc')}"
    f":{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}",
)
PATIENCE = float(os.environ.get("EVERSTEP_PATIENCE", "60"))
RENEWAL = float(os.environ.get("EVERSTEP_RENEWAL", "10"))
"""Seconds after which a holder that has not renewed the Lease does not act any more."""
KINDS = {"resilienttrainingjobs", "nodequarantines"}


def ask_api(path: str) -> dict:
    request = urllib.request.Request(
        API + path, headers={"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"}
    )
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, timeout=5, context=context) as answer:
        return json.load(answer)


def kinds_are_served() -> str:
    found = {each["name"] for each in ask_api("/apis/everstep.dev/v1alpha1")["resources"]}
    return f"not served: {', '.join(sorted(KINDS - found))}" if KINDS - found else ""


def operator_is_ready() -> str:
    url = os.environ["EVERSTEP_OPERATOR_URL"] + "/readyz"
    with urllib.request.urlopen(url, timeout=5) as answer:
        return "" if answer.status == 200 else f"{url} answers {answer.status}"


def read_lease() -> dict:
    namespace = os.environ["EVERSTEP_NAMESPACE"]
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/everstep-operator"
    return ask_api(path)["spec"]


def a_replica_leads() -> str:
    """A holder that has died, or was uninstalled, stays in the Lease; one that leads renews it."""
    first = read_lease()
    if not first.get("holderIdentity"):
        return "the Lease everstep-operator has no holder"
    end = time.monotonic() + RENEWAL
    while "renewTime" in first and read_lease().get("renewTime") == first["renewTime"]:
        if time.monotonic() > end:
            return (
                f"{first['holderIdentity']} holds the Lease everstep-operator and does not renew it"
            )
        time.sleep(0.5)
    return ""


def try_until(question, end: float) -> str:
    while True:
        try:
            why_not = question()
        except (urllib.error.URLError, OSError, ValueError, KeyError) as error:
            why_not = f"{type(error).__name__}: {error}"
        if not why_not or time.monotonic() > end:
            return why_not
        time.sleep(1)


def main() -> int:
    end = time.monotonic() + PATIENCE
    failed = False
    for question in (kinds_are_served, operator_is_ready, a_replica_leads):
        why_not = try_until(question, end)
        failed = failed or bool(why_not)
        text = question.__name__.replace("_", " ")
        print(
            f"{'no ' if why_not else 'yes'}  {text}{': ' + why_not if why_not else ''}", flush=True
        )
    return 1 if failed else 0


sys.exit(main())
