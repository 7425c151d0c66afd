"""Replaces mount paths in a pod's strings by paths on this machine.

A container of the lab has no file system of its own. A mount path such as `/everstep/memory` in its
command, arguments, environment or working directory is therefore replaced by the volume's folder.
Paths in a program's source or in a file are not replaced.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

# A match starts at the beginning of the text, after a space, a quote, `=`, `:` … or after file://.
# It ends at the end of a path component.
_START = r"(?:(?<![\w.\-/])|(?<=file://))"
_END = r"(?![\w.\-])"


@dataclass(frozen=True, slots=True)
class Paths:
    """`mapping` maps each mount path to a folder or file on this machine."""

    mapping: Mapping[str, str]

    def rewrite(self, text: str) -> str:
        """Replace mount paths, longer ones first. No part of the text is replaced twice."""
        known = {path.rstrip("/") or "/": host for path, host in self.mapping.items()}
        known.pop("/", None)
        if not known:
            return text
        longest = sorted(known, key=len, reverse=True)
        pattern = f"{_START}({'|'.join(map(re.escape, longest))}){_END}"
        return re.sub(pattern, lambda match: known[match.group(1)], text)
