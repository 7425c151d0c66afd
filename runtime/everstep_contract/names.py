"""Names that operator, agent and tests must spell alike."""

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

TAINT_QUARANTINE = f"{GROUP}/quarantine"
ANNOTATION_CORDONED = f"{GROUP}/cordoned-by"
ANNOTATION_ANSWERED = f"{GROUP}/answered-evidence"
ANNOTATION_EXPECTED_GPUS = f"{GROUP}/expected-gpus"

TRAINER_CONTAINER = "trainer"
AGENT_PORT = 7070
AGENT_PORT_NAME = "everstep"
TOKEN_KEY = "token"
MEMORY_VOLUME = "everstep-memory"
MEMORY_PATH = "/everstep/memory"
TERMINATION_LOG = "/dev/termination-log"


def pod_name(job: str, slot: int, attempt: int) -> str:
    """Computed, never generated: a create that is repeated meets itself."""
    return f"{job}-{slot}-{attempt}"


def incident_id(cause: str, slot: int, attempt: int) -> str:
    """Of an interruption that no verdict has named: the same whoever sees it first, and every time."""
    return f"{cause.lower()}-{slot}-{attempt}"
