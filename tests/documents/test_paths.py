"""The files that the documents name exist, and a package's table names all of its files."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "runtime/everstep_agent"
PACKAGES = sorted(p.parent.name for p in AGENT.glob("*/README.md"))
TABLES = [*(AGENT / name for name in PACKAGES), ROOT / "runtime/everstep"]
DOCS = sorted((ROOT / "docs").glob("*.md"))
FILE = re.compile(r"`([\w./]+\.(?:py|yaml|csv))`")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
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


@pytest.mark.parametrize(
    "page",
    [*DOCS, ROOT / "README.md", *sorted(ROOT.glob("*/README.md"))],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_every_link_leads_somewhere(page: Path) -> None:
    targets = [t for t in LINK.findall(page.read_text()) if "://" not in t]
    assert [t for t in targets if not (page.parent / t).exists()] == []


def _exists(name: str) -> bool:
    if name.startswith(OWN):
        return (ROOT / name).is_file()
    return any(any((ROOT / own).glob(f"**/{name}")) for own in OWN)
