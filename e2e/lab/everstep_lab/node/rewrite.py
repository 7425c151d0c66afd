"""Mount paths in a pod's strings become paths of this machine.

A container here has no file system of its own, so `/everstep/memory` in its command, arguments,
environment and working directory is replaced by the folder that stands for it. A path inside a
program's source or in a file is not seen.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

# A path starts after nothing, a space, a quote, `=`, `:` … or as the path of file:///path, and
# ends where its last name ends.
_START = r"(?:(?<![\w.\-/])|(?<=file://))"
_END = r"(?![\w.\-])"


@dataclass(frozen=True, slots=True)
class Paths:
    """`mapping`: mount path → folder or file on this machine."""

    mapping: Mapping[str, str]

    def rewrite(self, text: str) -> str:
        """Longer mount paths first, each place at most once."""
        known = {path.rstrip("/") or "/": host for path, host in self.mapping.items()}
        known.pop("/", None)
        if not known:
            return text
        longest = sorted(known, key=len, reverse=True)
        pattern = f"{_START}({'|'.join(map(re.escape, longest))}){_END}"
        return re.sub(pattern, lambda match: known[match.group(1)], text)
