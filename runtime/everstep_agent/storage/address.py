"""The address of a run: `<uri>/<run>/`. Pure: everything comes from the arguments."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import quote, unquote, urlsplit

from everstep_agent.storage.errors import BadAddress

_SEGMENT = re.compile(r"[A-Za-z0-9._=@+-]{1,200}")
_USER = re.compile(r"(?<=://)[^/@]*@")
SCHEMES = ("file", "s3", "gs", "az", "memory")
GIVEN = "checkpoint.uri (in a command: --store, RUN or --to)"
"""Where an address comes from, for error messages."""
_TRUE = ("1", "true", "yes", "on")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    scheme: str
    bucket: str
    """Bucket or container; for file:// the folder of the URI, absolute."""
    prefix: str
    """Below the bucket, the run included; no slash at either end."""

    @property
    def uri(self) -> str:
        if self.scheme == "file":
            return file_uri(str(PurePosixPath(self.bucket) / self.prefix))
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")


def file_uri(path: str) -> str:
    """The URI of a folder, whose name may have any characters, and bytes that are not UTF-8. `path`:
    absolute.
    """
    return "file://" + quote(path, errors="surrogateescape")


def check_key(key: str, what: str = "key") -> str:
    """The key itself, if it cannot lead out of its folder.

    Raises:
        BadAddress: empty segments, `.`, `..`, or a character other than letters, digits and
            `._=@+-`.
    """
    for segment in key.split("/"):
        if segment in (".", "..") or not _SEGMENT.fullmatch(segment):
            raise BadAddress(
                f"{what} {key!r}: segment {segment!r} is not allowed; use letters, digits "
                "and . _ = @ + - between single slashes"
            )
    return key


def parse_uri(uri: str, run: str = "") -> Address:
    """Raises `BadAddress`, which names the URI without its secrets, the problem, and what is expected."""
    shown = _hide_secrets(uri)
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise BadAddress(f"{GIVEN} {shown!r}: {error}") from None
    if parts.scheme not in SCHEMES:
        expected = ", ".join(f"{s}://" for s in SCHEMES[:-1])
        raise BadAddress(f"{GIVEN} {shown!r}: it must begin with one of {expected}")
    if parts.query or parts.fragment:
        raise BadAddress(
            f"{GIVEN} {shown!r}: what follows ? or # has no meaning here; leave it out (in"
            " the name of a folder write %3F and %23)"
        )
    if run:
        check_key(run, "checkpoint.run (--run; by default the script's name)")
    below = unquote(parts.path, errors="surrogateescape")
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not below.startswith("/"):
            raise BadAddress(f"{GIVEN} {shown!r}: a folder is written file:///absolute/path")
        return Address(scheme="file", bucket=str(PurePosixPath(below)), prefix=run)
    if parts.scheme != "memory":
        _check_bucket(parts.netloc, parts.scheme, shown)
    prefix = "/".join(p for p in (below.strip("/"), run) if p)
    if prefix:
        check_key(prefix, f"{GIVEN} with the run's name")
    return Address(scheme=parts.scheme, bucket=parts.netloc, prefix=prefix)


def _check_bucket(bucket: str, scheme: str, shown: str) -> None:
    if not bucket:
        raise BadAddress(f"{GIVEN} {shown!r}: names no bucket; write {scheme}://bucket/prefix")
    if "@" in bucket:
        raise BadAddress(
            f"{GIVEN} {shown!r}: keys do not belong in an address, which is shown in messages; give them in the"
            f" environment, and write {scheme}://bucket/prefix"
        )


def _hide_secrets(uri: str) -> str:
    """The URI as it may be shown: without user and password, and without its query, which may be a signature."""
    head, mark, _ = uri.partition("?")
    return _USER.sub("…@", head) + ("?…" if mark else "")


def build_s3_config(environ: Mapping[str, str]) -> tuple[dict[str, str], bool]:
    """obstore's settings, and whether plain http is allowed, from the variables that S3 users know.

    Without a key in the environment, obstore uses the cloud identity (web identity, container or
    instance credentials).

    Raises:
        BadAddress: one half of a key pair is missing.
    """
    found = {
        "access_key_id": environ.get("AWS_ACCESS_KEY_ID", ""),
        "secret_access_key": environ.get("AWS_SECRET_ACCESS_KEY", ""),
        "session_token": environ.get("AWS_SESSION_TOKEN", ""),
        "region": environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION", ""),
        "endpoint": environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL", ""),
    }
    if bool(found["access_key_id"]) != bool(found["secret_access_key"]):
        missing = "AWS_SECRET_ACCESS_KEY" if found["access_key_id"] else "AWS_ACCESS_KEY_ID"
        raise BadAddress(f"{missing} is not set, but its other half is; set both or neither")
    endpoint = found["endpoint"]
    if endpoint and urlsplit(endpoint).scheme not in ("http", "https"):
        shown = "…@" + endpoint.rpartition("@")[2] if "@" in endpoint else endpoint
        raise BadAddress(f"AWS_ENDPOINT_URL {shown!r}: write http://host:port or https://host")
    if endpoint and not found["region"]:
        found["region"] = "us-east-1"
    allow = environ.get("AWS_ALLOW_HTTP", "").lower() in _TRUE or endpoint.startswith("http://")
    return {k: v for k, v in found.items() if v}, allow
