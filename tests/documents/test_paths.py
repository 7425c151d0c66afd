"""The files and headings that the documents name exist, and a package's table names all of its files."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "runtime/everstep_agent"
PACKAGES = sorted(p.parent.name for p in AGENT.glob("*/README.md"))
TABLES = [*(AGENT / name for name in PACKAGES), ROOT / "runtime/everstep"]
DOCS = sorted((ROOT / "docs").glob("*.md"))
FILE = re.compile(r"`([\w./]+\.(?:py|yaml|csv))`")
FOLDERS = [d for d in ROOT.iterdir() if d.is_dir() and d.name != "build" and d.name[0] != "."]
PAGES = sorted([*ROOT.glob("*.md"), *(page for d in FOLDERS for page in d.rglob("[!.]*.md"))])
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
OWN = ("operator/", "runtime/", "charts/", "tests/", "examples/", "e2e/")


def test_every_package_of_the_agent_has_a_readme() -> None:
    assert sorted(p.parent.name for p in AGENT.glob("*/__init__.py")) == PACKAGES


@pytest.mark.parametrize("folder", TABLES, ids=lambda p: p.name)
def test_a_package_lists_exactly_its_files(folder: Path) -> None:
    listed = set(FILE.findall((folder / "README.md").read_text()))
    assert listed == {p.name for p in folder.iterdir() if p.suffix in {".py", ".csv"}} - {
        "__init__.py"
    }


@pytest.mark.parametrize("page", DOCS, ids=lambda p: p.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    missing = [name for name in FILE.findall(page.read_text()) if not _exists(name)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    targets = [t for t in LINK.findall(page.read_text()) if "://" not in t]
    assert [t for t in targets if not _leads_somewhere(page, t)] == []


def test_anchors_are_those_of_the_headings() -> None:
    text = "# One `two`\n```\n# no heading\n```\n## A [link](x.md), too\n## One two\n"
    assert list_anchors(text) == {"one-two", "a-link-too", "one-two-1"}


def _leads_somewhere(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    found = page.parent / path if path else page
    if not found.exists():
        return False
    return not anchor or found.suffix != ".md" or anchor in list_anchors(found.read_text())


def list_anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings; a repeated one gets a number."""
    found: Counter[str] = Counter()
    anchors = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        anchors.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return anchors


def _exists(name: str) -> bool:
    if name.startswith(OWN):
        return (ROOT / name).is_file()
    return any(any((ROOT / own).glob(f"**/{name}")) for own in OWN)
