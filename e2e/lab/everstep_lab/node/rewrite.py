"""Replaces mount paths in a pod's strings by paths of this machine.

A container here has no file system of its own, so a mount path such as `/everstep/memory` in its command,
arguments, environment and working directory is replaced by the volume's folder. Paths inside a
program's source or in a file are not replaced.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

# A path starts at the beginning, after a space, a quote, `=`, `:` … or after file://, and
# ends with its last component.
_START = r"(?:(?<![\w.\-/])|(?<=file://))"
_END = r"(?![\w.\-])"


@dataclass(frozen=True, slots=True)
class Paths:
    """`mapping`: mount path → folder or file on this machine."""

    mapping: Mapping[str, str]

    def rewrite(self, text: str) -> str:
        """Replace longer mount paths first, and no part of the text twice."""
        known = {path.rstrip("/") or "/": host for path, host in self.mapping.items()}
        known.pop("/", None)
        if not known:
            return text
        longest = sorted(known, key=len, reverse=True)
        pattern = f"{_START}({'|'.join(map(re.escape, longest))}){_END}"
        return re.sub(pattern, lambda match: known[match.group(1)], text)
