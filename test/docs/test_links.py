"""Relative links lead somewhere, and every page can be found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .blocks import PAGES, ROOT

OTHERS = (ROOT / "models/needle/README.md", ROOT / "benchmark/needle/traces/README.md")
DOCS = ROOT / "docs"


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def links(page: Path) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in link]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, spaces to hyphens, everything else but letters, digits, _ and - left out."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", (*PAGES, *OTHERS), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT) and target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{target.name} has no section #{anchor}"


def test_the_index_has_every_page() -> None:
    listed = {(DOCS / link.partition("#")[0]).name for link in links(DOCS / "README.md")}
    assert listed >= {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    assert "docs/README.md" in links(ROOT / "README.md")


def test_every_picture_is_shown() -> None:
    shown = {(page.parent / link).resolve() for page in PAGES for link in links(page)}
    assert shown >= {path for path in DOCS.iterdir() if path.suffix in (".png", ".svg")}


def test_source_names_pages_that_exist() -> None:
    for folder in ("python", "sgl-kernel", "benchmark", "test"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cuh", ".cu"):
                for name in re.findall(r"docs/([\w-]+\.md)", path.read_text()):
                    assert (DOCS / name).is_file(), f"{path.relative_to(ROOT)} names docs/{name}"
