"""The images of the kind lab, each built only if its inputs changed. A label holds their digest."""

import hashlib
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep_lab import build
from everstep_lab.kind import tools
from everstep_lab.seam import LabError

REPOSITORY = Path(__file__).resolve().parents[4]
LABEL = "everstep.dev/inputs"
PYTHON_IMAGE = "python:3.11-slim"
PACKAGES = ("operator", "runtime")
_PASSED_ON = (
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image to build. Its paths are relative to the repository's root."""

    tags: tuple[str, ...]
    dockerfile: str
    inputs: tuple[str, ...]
    target: str = ""
    context: Path = REPOSITORY
    built_on: tuple[str, ...] = ()
    """Names of other images in `list_images` from which this one copies files."""
    part: str = "workers"
    """The nodes that run it: `workers`, `store`, or empty for none."""

    @property
    def name(self) -> str:
        return self.tags[0]


def version() -> str:
    document = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    return str(document["project"]["version"])


def list_images(minio: Path) -> list[Image]:
    """The images, in build order. `minio` is the folder of the MinIO binary."""
    locks = (".ci/locked", "constraints.txt", "pyproject.toml")
    sources = ("Dockerfile", ".ci/install-wheel", *locks, "README.md", "LICENSE", *PACKAGES)
    wheel = "everstep/wheel:dev"
    labs = "e2e/lab/images"
    return [
        Image(tags=(wheel,), dockerfile="Dockerfile", target="wheel", inputs=sources, part=""),
        Image(
            tags=(f"everstep/operator:{version()}",), dockerfile="Dockerfile", target="operator",
            inputs=sources,
        ),
        Image(
            tags=("everstep/e2e-trainer:dev", "everstep/byte-lm:dev"),
            dockerfile=f"{labs}/e2e-trainer.Dockerfile",
            inputs=(f"{labs}/e2e-trainer.Dockerfile", "examples/byte-lm"), built_on=(wheel,),
        ),
        Image(
            tags=("everstep/lab-node:dev",), dockerfile=f"{labs}/lab-node.Dockerfile",
            inputs=(
                f"{labs}/lab-node.Dockerfile", *locks, "e2e/lab/everstep_lab",
                "runtime/everstep_contract",
            ),
        ),
        Image(
            tags=("everstep/lab-minio:dev",), dockerfile=f"{labs}/lab-minio.Dockerfile",
            inputs=(f"{labs}/lab-minio.Dockerfile",), context=minio, part="store",
        ),
    ]  # fmt: skip


def ensure_images(say: Say) -> list[Image]:
    """Build missing and outdated images. Raises LabError with the last lines of a failed build."""
    images = list_images(build.ensure(build.OBJECT_STORE, say))
    base = _image_id(PYTHON_IMAGE)
    digests: dict[str, str] = {}
    for image in images:
        parents = [base, *(digests[name] for name in image.built_on)]
        digest = hash_inputs(_files(REPOSITORY, image.inputs), [*parents, str(image.context)])
        digests[image.name] = digest
        if not all(_built_from(tag) == digest for tag in image.tags):
            _build(image, digest, say)
    return images


def hash_inputs(files: Iterable[Path], more: Sequence[str]) -> str:
    """A digest of the files' names, modes and contents. The order of `files` does not matter."""
    total = hashlib.sha256(json.dumps(list(more)).encode())
    for path in sorted(files):
        mode = "x" if os.access(path, os.X_OK) else "-"
        inside = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(REPOSITORY)} {mode} {inside}\n".encode())
    return total.hexdigest()[:32]


def build_arguments(environ: Mapping[str, str], index: str) -> list[str]:
    """The host's pip mirror and proxies, as arguments of `docker build`."""
    passed = {name: environ[name] for name in _PASSED_ON if name in environ}
    if index:
        passed["PIP_INDEX_URL"] = index
    return [part for name, value in passed.items() for part in ("--build-arg", f"{name}={value}")]


def _files(root: Path, names: Iterable[str]) -> list[Path]:
    found = []
    for name in names:
        path = root / name
        if not path.exists():
            raise LabError(
                f"{path} does not exist: run the lab from a checkout of Everstep, images are built from it"
            )
        found += [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    return [path for path in found if "__pycache__" not in path.parts]


def _image_id(name: str) -> str:
    done = tools.run(
        [tools.find("docker"), "image", "inspect", "--format", "{{.Id}}", name], check=False
    )
    return done.stdout.strip()


def _built_from(tag: str) -> str:
    form = f'{{{{index .Config.Labels "{LABEL}"}}}}'
    argv = [tools.find("docker"), "image", "inspect", "--format", form, tag]
    return tools.run(argv, check=False).stdout.strip()


def _build(image: Image, digest: str, say: Say) -> None:
    say(f"building the image {image.name}")
    argv = [
        tools.find("docker"), "build", "--file", str(REPOSITORY / image.dockerfile),
        *(["--target", image.target] if image.target else []),
        *(part for tag in image.tags for part in ("--tag", tag)),
        "--label", f"{LABEL}={digest}", *build_arguments(os.environ, _pip_index()),
        str(image.context),
    ]  # fmt: skip
    done = subprocess.run(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        said = "\n".join(done.stdout.splitlines()[-25:])
        raise LabError(f"`docker build` of {image.name} failed with {done.returncode}:\n{said}")


def _pip_index() -> str:
    """The mirror that pip uses on this host (PIP_INDEX_URL or pip's configuration), or empty."""
    argv = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    if url := os.environ.get("PIP_INDEX_URL"):
        return url
    return tools.run(argv, check=False).stdout.strip()
