"""A real S3 server for the lab and for tests: MinIO with one folder of data, on loopback.

MinIO was chosen because its create-only PUT is atomic under a race (measured: one winner on 500 of
500 keys). It is only a test tool: built from source on the testing machine and never shipped.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from everstep_lab import build, places, procs
from everstep_lab.seam import LabError

BUCKET = "everstep"
REGION = "us-east-1"
_READY_SECONDS = 120.0


class ObjectStore:
    """A MinIO server. `start` after `stop` starts it again with the same port and data."""

    bucket = BUCKET
    region = REGION

    def __init__(self, binary: Path, folder: Path, *, ip: str, port: int, log: Path) -> None:
        self._binary, self._data, self._log = binary, folder / "data", log
        self.ip, self.port = ip, port
        self.access_key = "everstep-lab"
        self.secret_key = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{self.ip}:{self.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def environment(self) -> dict[str, str]:
        """The environment variables for S3 clients."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": self.region,
            "AWS_ALLOW_HTTP": "true",
        }

    def start(self) -> None:
        """Start the process, from the main thread. `is_ready` reports whether it serves."""
        if self._process is not None:
            return
        # MinIO treats each top-level folder of its data as a bucket.
        (self._data / self.bucket).mkdir(parents=True, exist_ok=True)
        env = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": str(self._data.parent),
            "MINIO_ROOT_USER": self.access_key,
            "MINIO_ROOT_PASSWORD": self.secret_key,
            "MINIO_BROWSER": "off",
            "MINIO_UPDATE": "off",
            "MINIO_CI_CD": "on",
            "MINIO_SITE_REGION": self.region,
        }
        argv = [
            str(self._binary), "server", "--address", f"{self.ip}:{self.port}",
            "--certs-dir", str(self._data.parent / "certs"), str(self._data),
        ]  # fmt: skip
        self._process = procs.spawn(argv, log=self._log, mark=self._data.parent, env=env)

    def check(self) -> None:
        """Raise LabError if the server was started and has ended unexpectedly."""
        if self._process is not None and self._process.poll() is not None:
            raise LabError(
                f"the object store ended with {self._process.returncode}:\n{procs.tail(self._log)}"
            )

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.endpoint}/minio/health/live", timeout=1) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait(self, seconds: float = _READY_SECONDS) -> None:
        """Block until the server serves requests.

        Raises LabError with the end of the log if it ends or is not ready in time.
        """
        end = time.monotonic() + seconds
        while not self.is_ready():
            self.check()
            if time.monotonic() > end:
                raise LabError(
                    f"the object store does not serve {self.endpoint} after {seconds:.0f} s:\n"
                    f"{procs.tail(self._log)}"
                )
            time.sleep(0.05)

    def stop(self, *, kill: bool = False) -> None:
        """Stop the server; its data are kept. With `kill`, send SIGKILL: its connections break."""
        if self._process is None:
            return
        if kill and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        procs.stop(self._process)
        self._process = None


@contextlib.contextmanager
def minio(folder: Path) -> Iterator[ObjectStore]:
    """Run a separate server on a free port. `folder` gets data and log; the caller removes it."""
    binary = build.ensure(build.OBJECT_STORE) / "minio"
    port = places.choose_port("127.0.0.1", 0)
    server = ObjectStore(binary, folder, ip="127.0.0.1", port=port, log=folder / "minio.log")
    try:
        server.start()
        server.wait()
        yield server
    finally:
        server.stop()
