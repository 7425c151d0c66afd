"""The cluster on which the stories run: a kind lab, the local lab, or any kubeconfig."""

import contextlib
import os
import re
import shutil
import ssl
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from everstep_lab import Lab
from everstep_lab.api import Api
from everstep_lab.config import LabConfig
from everstep_lab.seam import LabError

NODES: Mapping[str, int] = {"core": 3, "all": 4}
"""Nodes of the cluster, by the stories to run: in one story two of four nodes lose power."""
GPUS_PER_NODE = 2
KINDS = ("kind", "running", "local", "given")
STORE_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL")
LOCAL_IMAGES = Path(__file__).parent.parent / "images.yaml"


class NotHereError(Exception):
    """This cluster cannot do what a story needs; the message says which cluster can."""


class Cluster(Protocol):
    """What a story may do to a cluster."""

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, timeout: float = 60.0
    ) -> str: ...

    def api(self) -> Api: ...

    def fault(self, node: str, **fields: Any) -> str: ...

    def heal(self, node: str) -> str: ...

    def status(self) -> dict[str, Any]: ...

    def objectstore_stop(self) -> str: ...

    def objectstore_start(self) -> str: ...

    @property
    def store_environment(self) -> Mapping[str, str]: ...

    @property
    def kubeconfig(self) -> Path: ...


class Given:
    """Any cluster, with kubectl and helm from the PATH. It cannot break GPUs or stop the store."""

    def __init__(self, kubeconfig: Path, context: str = "") -> None:
        self._kubeconfig, self._context = kubeconfig, context
        for program in ("kubectl", "helm"):
            if shutil.which(program) is None:
                raise LabError(f"--kubeconfig needs {program} on the PATH")
        missing = [name for name in STORE_VARIABLES if name not in os.environ]
        if missing:
            raise LabError(
                f"--kubeconfig needs the object store's {', '.join(missing)} in the environment: "
                "the stories read the run log, and the jobs' Secret is made from them"
            )
        self._proxy: subprocess.Popen[str] | None = None
        self._url = ""

    @property
    def kubeconfig(self) -> Path:
        return self._kubeconfig

    @property
    def store_environment(self) -> Mapping[str, str]:
        return {k: v for k, v in os.environ.items() if k.startswith("AWS_")}

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, timeout: float = 60.0
    ) -> str:
        return self._run("kubectl", *arguments, stdin=stdin, check=check, timeout=timeout)

    def helm(self, *arguments: str, check: bool = True, timeout: float = 300.0) -> str:
        return self._run("helm", *arguments, check=check, timeout=timeout)

    def _run(
        self, *command: str, stdin: str | None = None, check: bool = True, timeout: float = 60.0
    ) -> str:
        done = subprocess.run(
            command, input=stdin, text=True, capture_output=True, check=False, timeout=timeout,
            env={**os.environ, "KUBECONFIG": str(self._kubeconfig)},
        )  # fmt: skip
        if check and done.returncode != 0:
            raise LabError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout if check else done.stdout + done.stderr

    def api(self) -> Api:
        """A client of `kubectl proxy`, which supports every kind of authentication."""
        if self._proxy is None:
            self._proxy = subprocess.Popen(
                ["kubectl", "proxy", "--port=0"], text=True, stdout=subprocess.PIPE,
                env={**os.environ, "KUBECONFIG": str(self._kubeconfig)},
            )  # fmt: skip
            assert self._proxy.stdout is not None
            found = re.search(r"127\.0\.0\.1:\d+", self._proxy.stdout.readline())
            if found is None:
                raise LabError("`kubectl proxy` did not start")
            self._url = f"http://{found[0]}"
        ca = ssl.get_default_verify_paths().cafile or ""
        return Api(self._url, token="", ca=ca)

    def close(self) -> None:
        if self._proxy is not None:
            self._proxy.terminate()
            self._proxy.wait()

    def fault(self, node: str, **fields: Any) -> str:
        raise NotHereError(
            f"this cluster cannot inject faults into {node}: {fields}; the kind lab can"
        )

    def heal(self, node: str) -> str:
        return f"nothing was broken on {node}"

    def status(self) -> dict[str, Any]:
        return {"nodes": {}}

    def objectstore_stop(self) -> str:
        raise NotHereError("the object store of this cluster cannot be stopped; the kind lab's can")

    def objectstore_start(self) -> str:
        return "the object store was not stopped"


@contextlib.contextmanager
def open_cluster(kind: str, kubeconfig: str, nodes: int, say: Any) -> Iterator[Cluster]:
    """Open a cluster (`kind` is one of KINDS), and close it after the block.

    A cluster that is created here has `nodes` nodes. A `running` or `given` cluster is not deleted.

    Raises:
        LabError: docker, kind or helm is missing, or the cluster did not start (with the reason).
    """
    if kind == "given":
        with contextlib.closing(Given(Path(kubeconfig))) as given:
            yield given
    elif kind == "local":
        config = LabConfig(
            nodes=nodes,
            gpus_per_node=GPUS_PER_NODE,
            images=str(LOCAL_IMAGES),
            operator_args=("--cordon-budget=2", "--figures-seconds=0.5"),
        )
        with Lab(config, say=say) as lab:
            yield lab
    else:
        from everstep_lab.kind.client import KindLab

        if kind == "running":
            yield KindLab.running()
            return
        kind_config = LabConfig(nodes=nodes, gpus_per_node=GPUS_PER_NODE)
        with KindLab(kind_config, say=say, operator=False) as kind_lab:
            yield kind_lab
