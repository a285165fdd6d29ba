"""The documents: links that lead somewhere, commands and modules that exist, the API reference."""

from __future__ import annotations

from html.parser import HTMLParser
import importlib.util
from pathlib import Path
import re
import subprocess
import sys
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"python3? -m ((?:tff_programs|configs|feast_tf|benchmarks)[\w.]*)")
PATH = re.compile(r"`((?:feast_tf|tff_programs|configs|tests|docs|examples|benchmarks)/[\w./]*)`")
name_of = lambda path: path.name


def text_of(document: Path) -> str:
    return document.read_text("utf-8")


def anchors_of(document: Path) -> set[str]:
    """The fragments that GitHub gives the headings of a document."""
    prose = re.sub(r"```.*?```", "", text_of(document), flags=re.DOTALL)
    headings = re.findall(r"^#+ +(.*?) *$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document):
    broken = []
    for link in LINK.findall(text_of(document)):
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme == "https" and parts.netloc, link
            continue
        target = (document.parent / unquote(parts.path)).resolve() if parts.path else document
        if not target.exists() or ROOT not in (target, *target.parents):
            broken.append(link)
        elif parts.fragment and parts.fragment not in anchors_of(target):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_named_files_and_commands_exist(document):
    text = text_of(document)
    missing = [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    missing += [module for module in COMMAND.findall(text)
                if not (ROOT / module.replace(".", "/")).with_suffix(".py").exists()]
    assert missing == []


class _Page(HTMLParser):
    """The links of a page and what they may point at."""

    def __init__(self, path: Path):
        super().__init__()
        self.links, self.anchors = [], {""}
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.anchors.add(attributes.get("id", ""))
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pdoc") is None or
                    importlib.util.find_spec("tensorflow_federated") is None,
                    reason="the reference is made where pdoc and all of feast_tf can be imported")
def test_the_reference_has_every_module_and_no_broken_link(tmp_path):
    command = [sys.executable, ROOT / "docs" / "build_api.py", "--output_dir", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Warn: " not in result.stderr and "UserWarning: Error" not in result.stderr
    pages = {path: _Page(path) for path in tmp_path.rglob("*.html")}
    modules = {path.relative_to(ROOT).with_suffix("") for path in (ROOT / "feast_tf").rglob("*.py")}
    modules = {module.parent if module.name == "__init__" else module for module in modules}
    assert {path.relative_to(tmp_path).with_suffix("") for path in pages} >= modules
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target not in pages or unquote(parts.fragment) not in pages[target].anchors:
                broken.append(f"{path.name}: {link}")
    assert broken == []
    flower = (tmp_path / "feast_tf" / "interop" / "flower.html").read_text("utf-8")
    assert "FeastStrategy" in flower and "round that is under way" not in flower.split("<pre>")[0]
