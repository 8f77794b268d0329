"""Hooks of MkDocs: pages and files of the repository that the documentation links to become part of its site.

Links that leave docs/ are relative paths, which work in a clone and where a repository is shown. In the site the linked
files have the same paths under `repository/`: Markdown as pages, with what these link to, and other files as they are.
A link to a file that does not exist stays as it is, so that `mkdocs build --strict` names it and fails.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

FOLDER = "repository"  # of the site

LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=(?:#[^)\s]*)?\))")  # the target of a link or image, without its anchor


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to outside of the documentation, and what the added pages link to."""
    root, docs = folders(config)
    pending = [posixpath.join(docs, file.src_uri) for file in files.documentation_pages()]
    added: set[str] = set()
    while pending:
        path = pending.pop()
        for target in linked_files(root, path):
            if target in added or is_inside(target, docs):
                continue
            added.add(target)
            uri = posixpath.join(FOLDER, target)
            files.append(
                File.generated(config, uri, abs_src_path=str(root / target), inclusion=InclusionLevel.NOT_IN_NAV)
            )
            if target.endswith(".md"):
                pending.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between the documentation and the rest of the repository into links of the site."""
    root, docs = folders(config)
    uri = page.file.src_uri
    own = uri.removeprefix(f"{FOLDER}/") if uri.startswith(f"{FOLDER}/") else posixpath.join(docs, uri)

    def of_site(match: re.Match[str]) -> str:
        target = repository_path(own, match[0])
        if not (root / target).is_file():
            return match[0]
        there = posixpath.relpath(target, docs) if is_inside(target, docs) else posixpath.join(FOLDER, target)
        return posixpath.relpath(there, posixpath.dirname(uri))

    return LINK.sub(of_site, markdown)


def folders(config: MkDocsConfig) -> tuple[Path, str]:
    """Return the repository's folder, and that of the documentation inside it."""
    root = Path(config.config_file_path).parent
    return root, Path(config.docs_dir).relative_to(root).as_posix()


def linked_files(root: Path, page: str) -> Iterator[str]:
    """Yield the files of the repository that a page links to, by their paths in it."""
    for target in LINK.findall((root / page).read_text(encoding="utf-8")):
        path = repository_path(page, target)
        if not path.startswith("../") and (root / path).is_file():
            yield path


def repository_path(page: str, target: str) -> str:
    """Return the path in the repository that a page's relative link means; of an address, no file's."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def is_inside(path: str, folder: str) -> bool:
    """Return whether a path of the repository lies in a folder."""
    return path.startswith(f"{folder}/")
