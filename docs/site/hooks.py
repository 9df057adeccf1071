"""mkdocs calls these: what pages link to outside docs/ becomes part of the site.

A link of a page is a path in the repository, and each path has one place in the site:

    docs/x.md           x.md
    CHANGELOG.md, ...   the page that PAGES names
    another file        source/<path>, a copy as plain text
    a folder            none: only the link's text is left
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"}
_DOCUMENTS: Final = {page: document for document, page in PAGES.items() if page != "index.md"}
_LONG: Final = ("changelog.md", "performance", "reliability")
_LINK: Final = re.compile(r"(?<!!)\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?( \"[^\"]*\")?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the documents beside docs/, and every file outside it that a page links to."""
    for page, document in _DOCUMENTS.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / document)))
    pages = files.documentation_pages()
    linked = {_path(page, match[2]) for page in pages for match in _LINK.finditer(page.content_string)}
    for path in sorted(linked):
        if _uri(path) == _copy_uri(path) and not (ROOT / path).is_dir():
            files.append(File.generated(config, _copy_uri(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let each link lead to its place in the site, and searches to guides before tables and lists of changes."""
    if page.file.src_uri.startswith(_LONG):
        page.meta["search"] = {"boost": 0.1}

    def replaced(match: re.Match[str]) -> str:
        path = _path(page.file, match[2])
        if (ROOT / path).is_dir():
            return match[1]
        uri = posixpath.relpath(_uri(path), posixpath.dirname(page.file.src_uri) or ".")
        return f"[{match[1]}]({uri}{match[3] or ''}{match[4] or ''})"

    return _LINK.sub(replaced, markdown)


def _path(file: File, link: str) -> str:
    folder = posixpath.dirname(_DOCUMENTS.get(file.src_uri, f"docs/{file.src_uri}"))
    return posixpath.normpath(posixpath.join(folder, link))


def _uri(path: str) -> str:
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path) or _copy_uri(path)


def _copy_uri(path: str) -> str:
    return f"source/{path}.txt"
