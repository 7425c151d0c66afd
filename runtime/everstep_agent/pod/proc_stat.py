"""The kernel's word on a process or a thread: /proc/PID/stat."""


def read_stat(folder: str) -> list[str]:
    """Its fields from the state (R, S, D, T, Z, …) on, which follows the name.

    Args:
        folder: /proc/PID, or /proc/PID/task/TID.

    Raises:
        OSError: it is gone.
    """
    with open(f"{folder}/stat") as file:
        return file.read().rpartition(")")[2].split()
