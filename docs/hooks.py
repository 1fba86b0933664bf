"""Bring files from outside of docs/ into the site.

README.md becomes the home page; CONTRIBUTING.md, CHANGELOG.md and experiments/README.md become pages. Pages link to other files
of the repository as ``../PATH``, so that the links work where the repository is browsed. Each such file is copied into the site
under PATH.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "experiments/README.md": "experiments.md",
}
_LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and every file that a page links to."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    linked = {path for page in files.documentation_pages() for path in _links(_folder(page), page.content_string)}
    for path in sorted(linked - set(PAGES)):
        if not path.startswith("docs/") and (ROOT / path).is_file():
            files.append(File.generated(config, _name(path), abs_src_path=str(ROOT / path)))
    sources: dict[str, str] = {}
    for file in files:
        if (other := sources.setdefault(file.dest_uri, file.src_uri)) != file.src_uri:
            raise PluginError(f"{other} and {file.src_uri} both become {file.dest_uri}: do not link to {file.src_uri}")
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to where the files are in the site, and keep a number and its error on one line of a table."""
    folder = _folder(page.file)
    markdown = re.sub(r"^\|.*", lambda row: row[0].replace(" ± ", "\u00a0±\u00a0"), markdown, flags=re.MULTILINE)
    return _LINK.sub(lambda link: _target(posixpath.normpath(posixpath.join(folder, link[1]))), markdown)


def _folder(page: File) -> str:
    """Return the folder that a page's links start from, relative to the root of the repository."""
    sources = {name: source for source, name in PAGES.items()}
    return posixpath.dirname(sources.get(page.src_uri, "docs/"))


def _links(folder: str, text: str) -> set[str]:
    return {posixpath.normpath(posixpath.join(folder, link)) for link in _LINK.findall(text)}


def _target(path: str) -> str:
    return PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else _name(path))


def _name(path: str) -> str:
    """Return the name of a file in the site. Web servers often hide files whose names begin with a dot."""
    return path.lstrip(".")
