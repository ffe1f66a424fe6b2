"""Add files outside of docs/ that pages link to to the site: Markdown as pages, others unchanged.

This hook of mkdocs.yml makes links work both on the site and where a code host shows the files. It also warns about
pages that load anything from elsewhere.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"(?<=\]\()([^)\s#]+)")
LOADED = re.compile(r"<(?:script|img|iframe)\b[^>]*\ssrc=\"?(?:https?:)?//|<link\b[^>]*stylesheet[^>]*https?://")

log = logging.getLogger("mkdocs.hooks.links")


def linked(page: Path) -> Iterator[Path]:
    for link in LINK.findall(page.read_text()):
        target = (page.parent / link).resolve()
        if "://" not in link and target.is_file() and target.is_relative_to(ROOT):
            yield target


def address(path: Path) -> str:
    if path == ROOT / "README.md":  # the site has a front page of its own
        return "index.md"
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()


@event_priority(50)  # before the redirects, which may lead to these files
def on_files(files: Files, config: Any) -> Files:
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    known = {address(page) for page in waiting}
    while waiting:
        for target in linked(waiting.pop()):
            if address(target) in known or target.is_relative_to(DOCS):
                continue
            known.add(address(target))
            files.append(File.generated(config, address(target), abs_src_path=str(target)))
            if target.suffix == ".md":
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = Path(page.file.abs_src_path)

    def moved(link: re.Match[str]) -> str:
        target = (source.parent / link[0]).resolve()
        if "://" in link[0] or not target.is_file():
            return link[0]
        return posixpath.relpath(address(target), posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(moved, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    if LOADED.search(output):
        log.warning("%s loads something from elsewhere", page.file.src_uri)
    return output
