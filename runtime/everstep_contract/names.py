"""Names that operator, agent and tests must share."""

import re

GROUP = "everstep.dev"
VERSION = "v1alpha1"
KIND = "ResilientTrainingJob"
PLURAL = "resilienttrainingjobs"
QUARANTINE_KIND = "NodeQuarantine"
QUARANTINE_PLURAL = "nodequarantines"

LABEL_JOB = f"{GROUP}/job"
LABEL_JOB_UID = f"{GROUP}/job-uid"
LABEL_SLOT = f"{GROUP}/slot"
LABEL_ATTEMPT = f"{GROUP}/attempt"
NODE_RACK = "topology.kubernetes.io/rack"
"""Label of a node. Nodes with the same value may be lost together."""

ANNOTATION_PROOF = f"{GROUP}/pod-proof"
"""On a worker pod: proof that the operator created it for this slot and attempt."""

TAINT_QUARANTINE = f"{GROUP}/quarantine"
ANNOTATION_CORDONED = f"{GROUP}/cordoned-by"
ANNOTATION_ANSWERED = f"{GROUP}/answered-evidence"
ANNOTATION_EXPECTED_GPUS = f"{GROUP}/expected-gpus"

TRAINER_CONTAINER = "trainer"
AGENT_PORT = 7070
AGENT_PORT_NAME = "everstep"
TOKEN_KEY = "token"
WANTED_PATH = "/v1/wanted"
"""Where an agent receives `Wanted` and answers with `Seen`."""
MEMORY_VOLUME = "everstep-memory"
MEMORY_PATH = "/everstep/memory"
TERMINATION_LOG = "/dev/termination-log"

PIN = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
"""The name of a pinned checkpoint: a DNS label."""
PIN_RULE = "lower-case letters, digits and '-', at most 63, the first and the last no '-'"


def find_pin_problem(name: object) -> str:
    """Why a checkpoint cannot be pinned under this name; empty if it can."""
    if isinstance(name, str) and re.fullmatch(PIN, name, re.ASCII):
        return ""
    return f"{name!r:.80} cannot name a checkpoint: use {PIN_RULE}"


def pod_name(job: str, slot: int, attempt: int) -> str:
    """Computed, never generated, so that a repeated create finds its own pod."""
    return f"{job}-{slot}-{attempt}"


def incident_id(cause: str, slot: int, attempt: int) -> str:
    """Id of an interruption without a verdict. Every observer computes the same id, each time."""
    return f"{cause.lower()}-{slot}-{attempt}"
