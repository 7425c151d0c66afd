"""Classification of errors as real storage libraries raise them."""

import pytest

from everstep_agent.storage import errors
from everstep_agent.storage.errors import classify_error


class GenericError(Exception):
    pass


class AlreadyExistsError(Exception):
    pass


class PermissionDeniedError(Exception):
    pass


def s3(status: int, code: str) -> str:
    return (
        "Generic S3 error: Error performing PUT http://minio:9000/b/k in 1.6ms - Server returned"
        f" non-2xx status code: {status} Words: <Error><Code>{code}</Code><Message>m</Message>"
        "</Error>\n\nDebug source:\nGeneric { hidden }"
    )


LOCKED = s3(400, "InvalidRequest").replace(
    "<Message>m",
    "<Message>Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object requests with Object Lock"
    " parameters",
)
CASES = [
    (FileNotFoundError, (404, "NoSuchKey"), errors.NotFound, "no such"),
    (FileNotFoundError, (404, "NoSuchBucket"), errors.BucketMissing, "create it"),
    (AlreadyExistsError, (412, "PreconditionFailed"), errors.AlreadyExists, "it exists"),
    (AlreadyExistsError, (409, "ConditionalRequestConflict"), errors.Conflict, "409"),
    (AlreadyExistsError, (409, "BlobAlreadyExists"), errors.AlreadyExists, "it exists"),
    (AlreadyExistsError, (409, "BlobImmutableDueToPolicy"), errors.Denied, "a legal hold"),
    (AlreadyExistsError, (409, "SnapshotsPresent"), errors.Denied, "delete these"),
    (AlreadyExistsError, (409, "BlobArchived"), errors.Denied, "has archived it"),
    (PermissionDeniedError, (403, "InvalidObjectState"), errors.Denied, "has archived it"),
    (PermissionDeniedError, (403, "AccessDenied"), errors.Denied, "needs to read, write"),
    (PermissionDeniedError, (403, "ExpiredToken"), errors.Denied, "AWS_SESSION_TOKEN"),
    (PermissionDeniedError, (403, "RequestTimeTooSkewed"), errors.Unreachable, "set it"),
    (PermissionDeniedError, (403, "QuotaExceeded"), errors.NoSpace, "raise the quota"),
    (GenericError, (507, "XMinioStorageFull"), errors.NoSpace, "make room"),
    (GenericError, (503, "SlowDown"), errors.Busy, "SlowDown"),
    (GenericError, (429, "TooMany"), errors.Busy, "429"),
    (GenericError, (400, "InvalidBucketName"), errors.StoreError, "checkpoint.uri"),
    (GenericError, LOCKED, errors.StoreError, "set AWS_CHECKSUM_ALGORITHM=SHA256"),
    (GenericError, (301, "PermanentRedirect"), errors.StoreError, "AWS_REGION"),
    (GenericError, (400, "RequestTimeout"), errors.Unreachable, "RequestTimeout"),
    (GenericError, (400, "IncompleteBody"), errors.Unreachable, "IncompleteBody"),
    (GenericError, (501, "NotImplemented"), errors.Unsupported, "does not offer"),
    (GenericError, "HTTP error: error sending request", errors.Unreachable, "sending"),
    (GenericError, "PUT http://169.254.169.254/latest", errors.NoIdentity, "no credentials"),
    (GenericError, f"http://169.254.169.254/x {s3(404, '')}", errors.Denied, "no credentials"),
    (GenericError, "No space left on device (os error 28)", errors.NoSpace, "make room"),
    (PermissionError, "Permission denied (os error 13)", errors.Denied, "in a pod: runAsUser"),
    (GenericError, "Disk quota exceeded (os error 122)", errors.NoSpace, "raise the quota"),
    (GenericError, "Read-only file system (os error 30)", errors.Denied, "mount it writable"),
    (OSError, "Invalid argument (os error 22)", errors.Unsupported, "use another volume"),
    (GenericError, "no words that we know", errors.Unreachable, "no words"),
]


def test_a_server_that_is_away_reads_the_same_at_each_try_and_names_its_address() -> None:
    first, second = (
        str(classify_error(GenericError(text), doing="write", where="s3://b/k"))
        for text in (
            f"Generic S3 error: Error performing PUT http://10.0.0.1:9000/b/k in {took} - HTTP error:"
            " error sending request"
            for took in ("265.78µs", "1.000608ms")
        )
    )
    assert first == second
    assert first == (
        "cannot write s3://b/k: http://10.0.0.1:9000: HTTP error: error sending request"
    )


@pytest.mark.parametrize(("cls", "answer", "kind", "said"), CASES)
def test_foreign_errors_become_ours(
    cls: type[Exception], answer: tuple[int, str] | str, kind: type[errors.StoreError], said: str
) -> None:
    text = answer if isinstance(answer, str) else s3(*answer)
    ours = classify_error(cls(text), doing="write", where="s3://b/k")
    assert type(ours) is kind
    assert said in str(ours)
    assert "s3://b/k" in str(ours)
    assert "hidden" not in str(ours)


@pytest.mark.parametrize(
    ("where", "host", "key"),
    [
        ("s3://b/k", "169.254.170.2", "AWS_ACCESS_KEY_ID"),
        ("gs://b/k", "metadata.google.internal", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az://c/k", "169.254.169.254", "AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_who_has_no_credentials_is_told_which_this_store_takes(
    where: str, host: str, key: str
) -> None:
    foreign = GenericError(f"HTTP error: error sending request for url (http://{host}/x)")
    assert f"{key} is not set" in str(classify_error(foreign, doing="read", where=where))


def test_signatures_in_a_url_are_not_shown() -> None:
    foreign = GenericError("error for https://acc.blob.core/x?sig=SECRET&se=1 while sending")
    assert "SECRET" not in str(classify_error(foreign, doing="read", where="az://x"))


def test_the_password_of_an_endpoint_is_not_shown() -> None:
    foreign = GenericError(
        "Generic S3 error: Error performing GET http://me:pa55word@host:9000/b/k in 3ms - HTTP error: error"
        " sending request"
    )
    said = str(classify_error(foreign, doing="read", where="s3://b/k"))
    assert "http://…@host:9000: HTTP error" in said
    assert "pa55word" not in said


def test_only_errors_that_may_pass_are_worth_another_try() -> None:
    transient = {c.kind for c in (errors.Unreachable, errors.Conflict, errors.NoSpace)}
    every: list[type[errors.StoreError]] = [
        errors.StoreError,
        *errors.StoreError.__subclasses__(),
        errors.Conflict,
    ]
    assert {c.kind for c in every if c.transient} == transient
