"""A hook of MkDocs: files of the repository that pages link to come along into the site.

On disk a page links to `../examples/gan_digits.py`. In the site that is `files/examples/gan_digits.py`. A
link to a file that is not there stays as it is, and MkDocs warns. Pages that lie elsewhere, `PAGES`, become
pages of the site.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parent.parent.parent
_LINK = re.compile(r"\]\(\.\./([^)#\s]+)\)")
_RELATIVE = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")

#: Page of the site -> the file that it is.
PAGES = {"changelog.md": "CHANGELOG.md", "examples.md": "examples/README.md"}


def on_config(config: Any) -> Any:
    """Links to the repository where its address is given, as for a wheel (`hatch_build.py`).

    A link in the menu, and not MkDocs' `repo_url`: the theme would ask that server for its stars.
    """
    home = os.environ.get("PROJECT_HOME", "").rstrip("/")
    if home:
        config.nav.append({"Repository": home})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from elsewhere, and what any page links to outside of the documentation."""
    for page, name in PAGES.items():
        text = (ROOT / name).read_text()
        files.append(File.generated(config, page, content=seen_from_docs(text, posixpath.dirname(name))))
    texts = [file.content_string for file in files.documentation_pages()]
    for name in sorted({name for text in texts for name in _LINK.findall(text)} - set(PAGES.values())):
        if (ROOT / name).is_file():
            file = File.generated(
                config,
                f"files/{name}",
                abs_src_path=str(ROOT / name),
                inclusion=InclusionLevel.NOT_IN_NAV,
            )
            files.append(file)
    return files


def seen_from_docs(text: str, folder: str) -> str:
    """A page of another folder with its links as they would be in the documentation's."""

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        return f"]({posixpath.relpath(target, 'docs')}{link[2] or ''})"

    return _RELATIVE.sub(moved, text)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Points the links to where those files are."""
    pages = {name: page for page, name in PAGES.items()}

    def moved(link: re.Match[str]) -> str:
        place = pages.get(link[1], f"files/{link[1]}")
        return f"]({place})" if files.get_file_from_path(place) else link[0]

    return _LINK.sub(moved, markdown)
