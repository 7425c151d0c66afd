"""The control group of this process: where the kernel shows the limits of its container."""

from collections.abc import Sequence
from pathlib import Path

MOUNTS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def find_files(
    controller: str, v1: Sequence[str], v2: Sequence[str], mounts: Path = MOUNTS, own: Path = OWN
) -> tuple[Path, ...]:
    """The files `v1` or `v2`, whichever cgroup version the controller has; empty: the kernel shows none.

    In a container, the root of the mount may be the container's own cgroup, whatever path `own`
    names.
    """
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return ()
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    if controller in paths:
        top, path, files = mounts / controller, paths[controller], v1
    else:
        top, path, files = mounts, paths.get("", "/"), v2
    for folder in (top / path.lstrip("/"), top):
        if (folder / files[0]).exists():
            return tuple(folder / name for name in files)
    return ()
