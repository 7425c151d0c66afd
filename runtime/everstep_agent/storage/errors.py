"""Errors of an object store, classified where they enter, so that code above this package sees no
foreign errors.

`transient` errors may pass by themselves and are worth a retry; the others need a person. Messages
name the object, the finding and the fix, and contain no secret.
"""

import re

from everstep_contract import levels


class StoreError(Exception):
    """The store answered with an error that a retry will not fix."""

    kind = "StoreError"
    transient = False

    def to_level(self) -> levels.StorageError:
        return levels.StorageError(kind=self.kind, message=str(self))


class NotFound(StoreError):
    kind = "NotFound"


class AlreadyExists(StoreError):
    """A create-only PUT found an object: its place is taken."""

    kind = "AlreadyExists"


class Denied(StoreError):
    kind = "AccessDenied"


class NoIdentity(Denied):
    """There are no keys, and the machine's cloud identity does not answer. On a new node it may take some
    seconds until it does (GKE's metadata server, EKS's pod identity agent).
    """


class BucketMissing(StoreError):
    kind = "BucketMissing"


class BadAddress(StoreError):
    """The URI, the run's name or an environment variable is invalid."""

    kind = "BadAddress"


class NoAtomicCreate(StoreError):
    """Two writers were both told that they had created the same object, so this store cannot hold a
    run log.
    """

    kind = "NoAtomicCreate"


class Unsupported(StoreError):
    """The store does not know this request, or a header in it."""

    kind = "Unsupported"


class TooLarge(StoreError):
    """The object is too large to have been written by Everstep, so it is not read into memory."""

    kind = "TooLarge"


class Unreachable(StoreError):
    kind = "Unreachable"
    transient = True


class Busy(Unreachable):
    """The store asks for fewer requests."""


class Conflict(Unreachable):
    """409: two writes of one key met, and the winner is not known yet."""

    kind = "Conflict"


class NoSpace(StoreError):
    """May pass: someone can free space while the job trains."""

    kind = "NoSpace"
    transient = True


_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]{1,100})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,300})</Message>")
_QUERY = re.compile(r"\?[^\s'\"]*")
_USER = re.compile(r"(?<=://)[^/\s'\"@]*@")
_REQUEST = re.compile(r"Generic \S+ error: Error performing \w+ (\w+://[^/\s]+)\S* in \S+ - ")
_METADATA = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")

_KEYS = {
    "s3": "AWS_ACCESS_KEY_ID",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_KEY",
}

_ARCHIVED = (
    "a lifecycle rule has archived it: bring it back to a class that can be read at once, and except"
    " checkpoint.uri from the rule"
)
_FIXES = {
    "InvalidAccessKeyId": "the store does not know this AWS_ACCESS_KEY_ID; correct the Secret",
    "SignatureDoesNotMatch": (
        "AWS_SECRET_ACCESS_KEY does not belong to AWS_ACCESS_KEY_ID; correct the Secret"
    ),
    "ExpiredToken": (
        "AWS_SESSION_TOKEN has expired; use keys that outlive the job, or the cloud identity"
    ),
    "InvalidToken": "AWS_SESSION_TOKEN does not belong to AWS_ACCESS_KEY_ID; correct the Secret",
    "RequestTimeTooSkewed": "this node's clock differs from the store's by minutes; set it",
    "PermanentRedirect": "the bucket is in another region; set AWS_REGION",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set AWS_REGION",
    "InvalidBucketName": "correct the bucket in checkpoint.uri",
    "BlobImmutableDueToPolicy": (
        "an immutability policy or a legal hold keeps it; Everstep deletes old checkpoints, so use a container"
        " without one, or delete them yourself later"
    ),
    "SnapshotsPresent": "Azure deletes no blob that has snapshots; delete these",
    "InvalidObjectState": _ARCHIVED,
    "BlobArchived": _ARCHIVED,
    "BlobBeingRehydrated": _ARCHIVED,
}
_HELD = ("BlobImmutableDueToPolicy", "SnapshotsPresent", "BlobArchived", "BlobBeingRehydrated")
"""Azure answers these with 409. They do not pass by themselves."""
_BUSY = ("SlowDown", "ServerBusy", "TooManyRequests", "RequestLimitExceeded")
_CUT = ("RequestTimeout", "IncompleteBody")
"""S3 answers these with 400 if the connection was too slow or broke: the request may be repeated."""
_FULL = ("XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "QuotaExceeded")
_LACKING = (22, 38, 95)
"""EINVAL, ENOSYS, EOPNOTSUPP: what some FUSE and network file systems answer to fsync of a folder."""
_OF_LOCK = (
    "the bucket has a default retention: set AWS_CHECKSUM_ALGORITHM=SHA256 in the container's environment; what"
    " Everstep deletes takes room until its retention ends"
)
_GRANT = "the identity needs to read, write, delete and list below checkpoint.uri"
_OF_FOLDER = "give the user of this process access to the folder (chown, chmod; in a pod: runAsUser, fsGroup)"


def classify_error(error: BaseException, *, doing: str, where: str) -> StoreError:
    """The `StoreError` for a foreign one.

    Args:
        doing: the verb, for people: "write", "read", …
        where: the object, for people: `s3://bucket/prefix/key`.
    """
    text = str(error).split("Debug source")[0].strip()
    if isinstance(error, OSError) and error.errno:
        text += f" (os error {error.errno})"
    name = type(error).__name__
    code = _first(_CODE, text)
    status = int(_first(_STATUS, text) or 0)
    found = f"cannot {doing} {where}"
    if code == "NoSuchBucket" or "ContainerNotFound" in text or "bucket does not exist" in text:
        return BucketMissing(
            f"{found}: the bucket does not exist; create it or correct checkpoint.uri (--store)"
        )
    if any(host in text for host in _METADATA):
        key = _KEYS.get(where.partition(":")[0], _KEYS["s3"])
        return (Denied if 400 <= status < 500 else NoIdentity)(
            f"{found}: no credentials: {key} is not set and this machine has no cloud"
            " identity; set it, or in a pod give the container the credentials (envFrom of a Secret) or a"
            " serviceAccountName with access"
        )
    if isinstance(error, FileNotFoundError) or name == "NotFoundError":
        return NotFound(f"{found}: there is no such object")
    if code in _HELD:
        return Denied(f"{found}: {_said(text, code, status)}; {_FIXES[code]}")
    if name in ("AlreadyExistsError", "PreconditionError", "NotModifiedError"):
        # S3: ConditionalRequestConflict; the winner is not decided yet. Azure answers 409, too, if
        # the object exists.
        if status == 409 and "BlobAlreadyExists" not in text:
            return Conflict(f"{found}: two writers met (409)")
        return AlreadyExists(f"{found}: it exists")
    return _classify_rest(error, text, name, code, status, found)


def _classify_rest(
    error: BaseException, text: str, name: str, code: str, status: int, found: str
) -> StoreError:
    said = _said(text, code, status)
    fix = _OF_LOCK if "Object Lock" in said else _FIXES.get(code, "")
    if code == "RequestTimeTooSkewed":  # 403, but it passes once the clock was set
        return Unreachable(f"{found}: {said}; {fix}")
    if status == 507 or code in _FULL:  # before 403, with which Ceph answers QuotaExceeded
        return NoSpace(f"{found}: {said}; make room, or raise the quota")
    # S3 answers 400 to an expired session token.
    refused = (
        status in (401, 403)
        or code in ("ExpiredToken", "InvalidToken")
        or name in ("PermissionDeniedError", "UnauthenticatedError")
    )
    if isinstance(error, PermissionError) or "os error 13)" in text:
        return Denied(f"{found}: {said}; {_OF_FOLDER}")
    if refused:
        return Denied(f"{found}: {said}; {fix or _GRANT}")
    if "os error 30)" in text:
        return Denied(f"{found}: the file system is read-only; mount it writable")
    if "os error 28)" in text:
        return NoSpace(f"{found}: no space or no inodes left; make room")
    if "os error 122)" in text:
        return NoSpace(f"{found}: the disk quota is used up; make room, or raise the quota")
    if any(f"os error {number})" in text for number in _LACKING):
        return Unsupported(
            f"{found}: {said}; the file system of this folder lacks an operation that Everstep needs: use"
            " another volume, or an object store"
        )
    if (
        "os error 20)" in text
        or "os error 2)" in text
        or isinstance(error, (ValueError, TypeError))
    ):
        return BadAddress(f"{found}: {said}; correct checkpoint.uri")
    if "redirect without LOCATION" in text:  # a 301 of S3, whose code the client does not expose
        return StoreError(f"{found}: {said}; {_FIXES['PermanentRedirect']}")
    if 300 <= status < 500 and status not in (408, 409, 425, 429) and code not in _CUT:
        return StoreError(f"{found}: {said}" + (f"; {fix}" if fix else ""))
    if status == 501:
        return Unsupported(f"{found}: {said}; this store does not offer it")
    busy = status in (429, 503) or code in _BUSY
    return (Busy if busy else Unreachable)(f"{found}: {said}")


def _said(text: str, code: str, status: int) -> str:
    """The store's own message in one line, without secrets."""
    if code:
        message = _first(_MESSAGE, text)
        return f"{status} {code}" + (f" ({message})" if message else "")
    words = hide_secrets(" ".join(text.split()))
    words = _REQUEST.sub(r"\1: ", words)  # drop the object, which is named already, and the time
    return words[:300] or "no answer"


def hide_secrets(text: str) -> str:
    """The text without the query strings of URLs, which contain Azure's signatures, and without their user and
    password, which the URL of an endpoint or a proxy may hold.
    """
    return _USER.sub("…@", _QUERY.sub("", text))


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found.group(1) if found else ""
