"""Access to the API server: `kubectl` itself, as a child process.

Every login method of the user's kubeconfig works. `begin` starts the child and returns at once, so
that the modules that show the answer are imported while the server answers: the plugin should start
in less than 300 ms.
"""

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

Object = dict[str, Any]
JOBS = "resilienttrainingjobs.everstep.dev"
QUARANTINES = "nodequarantines.everstep.dev"
_SHORT = tuple(f'"{kind.partition(".")[0]}"' for kind in (JOBS, QUARANTINES))
"""As kubectl names a kind that there is not: without its group."""
API = "/apis/everstep.dev/v1alpha1"
PROGRAM = "EVERSTEP_KUBECTL"
"""Environment variable that names another kubectl than the one in PATH."""

PAUSE_SECONDS = 1.0
"""Between the end of a watch's connection and the next one."""


_LOG_LINE = re.compile(r"[EWI]\d{4} ")


class ClusterError(Exception):
    """kubectl's error in one or a few lines, with the remedy if it is known."""


class NotFound(ClusterError):
    """There is no such object."""


class Reading:
    """A running kubectl."""

    def __init__(self, child: "subprocess.Popen[str]", stdin: str | None) -> None:
        self._child, self._stdin = child, stdin

    def text(self) -> str:
        """Wait for its end and return its standard output. Raises ClusterError if it failed."""
        out, error = self._child.communicate(self._stdin)
        if self._child.returncode:
            raise translate(error)
        return out

    def object(self) -> Object:
        found: Object = json.loads(self.text())
        return found

    def items(self) -> list[Object]:
        """The objects of a list. A single object counts as a list of one, no output
        (--ignore-not-found) as an empty list.
        """
        text = self.text()
        if not text.strip():
            return []
        found = json.loads(text)
        if str(found.get("kind", "")).endswith("List"):
            return list(found.get("items") or [])
        return [found]


class Cluster:
    """The cluster that the user's flags select.

    Args:
        flags: --context and --kubeconfig, as the user gave them.
        namespace: as the user gave it; None: kubectl chooses it, also in a pod without kubeconfig.
    """

    def __init__(self, flags: Sequence[str] = (), namespace: str | None = None) -> None:
        self._flags, self._namespace = list(flags), namespace

    def begin(self, *arguments: str, stdin: str | None = None) -> Reading:
        return Reading(self._start(arguments, stdin is not None), stdin)

    def get(self, *arguments: str, everywhere: bool = False) -> Reading:
        """`kubectl get ARGUMENTS -o json` in the namespace."""
        return self.begin("get", *arguments, *self.scope(everywhere), "-o", "json")

    def scope(self, everywhere: bool = False) -> list[str]:
        if everywhere:
            return ["--all-namespaces"]
        return [] if self._namespace is None else ["--namespace", self._namespace]

    def lines(self, *arguments: str) -> Iterator[str]:
        """Yield the lines of kubectl's output as they come, until it ends or fails."""
        child = self._start(arguments, False)
        assert child.stdout is not None
        try:
            yield from child.stdout
        finally:
            child.kill()
            child.communicate()

    def watch(self, path: str, seconds: float) -> Iterator[tuple[str, Object]]:
        """Yield (type, object) for each change below `path` (with its query) until the time is
        over. First comes an ADDED for each object that exists, also after the connection was lost
        (the API server was restarted, say). The consumer may stop at any time.
        """
        until, begun = time.monotonic() + seconds, False
        while (left := until - time.monotonic()) > 0:
            try:
                for event in self._watch_once(path, left):
                    begun = True
                    yield event
            except ClusterError:
                if not begun:
                    raise
            time.sleep(max(0.0, min(PAUSE_SECONDS, until - time.monotonic())))

    def _watch_once(self, path: str, seconds: float) -> Iterator[tuple[str, Object]]:
        """Until the server or the network ends the connection."""
        joint = "&" if "?" in path else "?"
        query = f"{path}{joint}watch=true&timeoutSeconds={max(1, round(seconds))}"
        child = self._start(("get", "--raw", query), False)
        assert child.stdout is not None
        try:
            for line in child.stdout:
                if not line.endswith("\n"):
                    break  # the connection was lost within it
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise ClusterError(str(event["object"].get("message")))
                yield event["type"], event["object"]
            if child.wait():
                raise translate(child.stderr.read() if child.stderr else "")
        finally:
            child.kill()
            child.communicate()

    def _start(self, arguments: Sequence[str], speaks: bool) -> "subprocess.Popen[str]":
        program = os.environ.get(PROGRAM, "kubectl")
        try:
            return subprocess.Popen(
                [program, *self._flags, *arguments],
                stdin=subprocess.PIPE if speaks else subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                encoding="utf-8", errors="replace",  # a pod's log may hold any bytes
            )  # fmt: skip
        except FileNotFoundError:
            text = f"there is no {program!r} in PATH: install kubectl, or name one in {PROGRAM}"
            raise ClusterError(text) from None


def translate(error: str) -> ClusterError:
    """The error with kubectl's last lines, and the remedy if it is known."""
    said = error.strip().splitlines()
    lines = [line for line in said if not _LOG_LINE.match(line)] or said[-1:]
    text = "\n".join(lines) or "kubectl failed without a message"
    if "doesn't have a resource type" in text and any(kind in text for kind in _SHORT):
        hint = (
            "Everstep is not installed there: helm install everstep charts/everstep -n everstep-system "
            "--create-namespace (or is this the wrong --context?)"
        )
        return ClusterError(f"{text}\n{hint}")
    if "(NotFound)" in text:
        return NotFound(text)
    return ClusterError(text)
