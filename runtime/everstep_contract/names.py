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
PIN_RULE = "at most 63 lower-case letters, digits and '-', without '-' at the beginning or end"

JOB_NAME_LIMIT = 50
"""A pod's name is <name>-<slot>-<attempt> and must fit a label value of 63 characters."""
JOB_NAME = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
RUN = "^[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,199})*$"
RUN_LIMIT = 253


def find_job_name_problem(name: str) -> str:
    """Why a job cannot have this name; empty if it can."""
    if len(name) <= JOB_NAME_LIMIT and re.fullmatch(JOB_NAME, name):
        return ""
    return (
        f"{name!r:.80} cannot name a job: use at most {JOB_NAME_LIMIT} lower-case letters, digits and '-', "
        "without '-' at the beginning or end"
    )


def find_run_problem(name: str) -> str:
    """Why a job cannot have a run of this name; empty if it can."""
    if len(name) <= RUN_LIMIT and re.fullmatch(RUN, name):
        return ""
    return (
        f"{name!r:.80} cannot name a run: use at most {RUN_LIMIT} letters, digits, '_', '-', '.', and '/' between "
        "parts; no part begins with '.'"
    )


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
