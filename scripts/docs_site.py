"""Adds to the site the pages outside of docs/, and the files that pages link to.

In the repository a link such as ``../examples/sweep.py`` leads to the file. The site holds only docs/, so this MkDocs
hook makes each such file a page of the site, and lets the link lead there.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
#: Pages of the site that are files of the repository's root.
FROM_ROOT = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}
#: Pages that have every word, and answer few questions: the search names them behind the others.
_BEHIND = ("api/", "changelog", "contributing", "architecture", "extending", "theory", "benchmarks")
_LANGUAGES = {".json": "json", ".md": "markdown", ".py": "python", ".toml": "toml", ".yml": "yaml"}
_LINK = re.compile(r"(?<=\]\()(?P<target>[^)#\s:]+)(?P<anchor>#[^)\s]*)?(?=\))")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages."""
    for page, name in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    pages = [file for file in files if file.is_documentation_page()]
    pointed_to = {path for page in pages for path in _pointed_to(page)}
    for path in sorted(pointed_to.union(*map(_files_of, pointed_to))):
        files.append(File.generated(config, _page_of(path), content=_shown(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Makes links to files of the repository lead to their pages, and ranks pages for the search."""
    here = page.file.src_uri
    if here.startswith("source/"):
        page.meta["search"] = {"exclude": True}
        return markdown
    if here.startswith(_BEHIND):
        page.meta["search"] = {"boost": 0.3}

    def lead(link: re.Match[str]) -> str:
        path = _in_repository(here, link["target"])
        if not (ROOT / path).exists():
            return link[0]  # MkDocs reports it.
        return posixpath.relpath(_page_of(path), posixpath.dirname(here) or ".") + (link["anchor"] or "")

    return _LINK.sub(lead, markdown)


def _pointed_to(page: File) -> Iterator[str]:
    """Returns the files and folders of the repository, outside of the site, that a page links to."""
    for link in _LINK.finditer(page.content_string):
        path = _in_repository(page.src_uri, link["target"])
        if (ROOT / path).exists() and _page_of(path).startswith("source/"):
            yield path


def _files_of(path: str) -> list[str]:
    """Returns the content of a folder; nothing for a file."""
    inside = sorted(file for file in (ROOT / path).glob("*") if file.suffix in _LANGUAGES)
    return [file.relative_to(ROOT).as_posix() for file in inside]


def _in_repository(page: str, target: str) -> str:
    """Returns the file that a link of a page leads to in the repository."""
    home = FROM_ROOT.get(page, f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(home), target))


def _page_of(path: str) -> str:
    """Returns the site's path of a file of the repository."""
    for page, name in FROM_ROOT.items():
        if path == name:
            return page
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def _shown(path: str) -> str:
    if (ROOT / path).is_dir():
        folder = posixpath.dirname(_page_of(path))
        links = [f"- [{file}]({posixpath.relpath(_page_of(file), folder)})" for file in _files_of(path)]
        return f"# {path}\n\n" + "\n".join(links) + "\n"
    text = (ROOT / path).read_text(encoding="utf-8")
    return f"# {path}\n\n~~~~{_LANGUAGES.get(Path(path).suffix, 'text')}\n{text.rstrip()}\n~~~~\n"
