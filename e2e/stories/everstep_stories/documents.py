"""The commands in the documents, extracted from their text so that none is missed."""

import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
README = "README.md"
CHART, TROUBLESHOOTING = "charts/everstep/README.md", "operator/TROUBLESHOOTING.md"
EXAMPLES = "examples/README.md"
PROGRAMS = ("kubectl", "helm", "docker", "everstep", "everstep-lab")
SECTIONS = (
    (README, "On your own cluster"),
    (CHART, "Install"),
    (CHART, "Arm"),
    (CHART, "Upgrade"),
    (CHART, "Uninstall"),
    (TROUBLESHOOTING, ""),
    (TROUBLESHOOTING, "Nodes"),
    (EXAMPLES, "The manifest"),
)
"""The sections for a platform team: file and heading; an empty heading means the text before the first one."""

BY_HAND = {
    "docker build --target operator --tag everstep/operator:0.1.0 .": "kind/images.py does it",
    "docker build --target trainer --tag everstep/trainer:0.1.0 .": "5 GB of torch: by hand",
    "docker build --tag everstep/byte-lm:dev examples/byte-lm": "on that base: by hand",
}
"""Commands that the story does not run, with the reason."""


def list_commands(text: str, heading: str) -> list[str]:
    """The commands in the section `heading`: lines of code blocks, and inline code that is a
    complete command.
    """
    section = read_section(text, heading)
    return [*_of_blocks(section), *_inline(section)]


def read_section(text: str, heading: str) -> str:
    """The section with that heading. Raises LookupError if there is none."""
    found: dict[str, list[str]] = {}
    name, fenced = "", False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if not fenced and (title := re.fullmatch(r"##+ (.+)", line)):
            name = title[1]
        found.setdefault(name, []).append(line)
    if heading not in found:
        raise LookupError(f"no section {heading!r}; there are: {', '.join(found)}")
    return "\n".join(found[heading])


def _of_blocks(section: str) -> Iterator[str]:
    fenced = False
    for line in section.splitlines():
        fenced ^= line.startswith("```")
        if (fenced or line.startswith("    ")) and _is_command(line.strip()):
            yield re.sub(r"\s+#\s.*", "", line.strip())


def _inline(section: str) -> Iterator[str]:
    """Inline code of three words or more without `…`; shorter code only names a program."""
    for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", section):
        if _is_command(span) and len(span.split()) >= 3 and "…" not in span and "|" not in span:
            yield span


def _is_command(line: str) -> bool:
    return line.split(" ", 1)[0] in PROGRAMS


def read_all() -> list[str]:
    """The commands of all SECTIONS in order, without repetitions."""
    found = [
        command
        for path, heading in SECTIONS
        for command in list_commands((REPOSITORY / path).read_text(), heading)
    ]
    return list(dict.fromkeys(found))
