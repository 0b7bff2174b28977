"""A hook of MkDocs: files of the repository that pages link to come along into the site.

On disk a page links to `../examples/gan_digits.py`. In the site that is `files/examples/gan_digits.py`. A
link to a file that is not there stays as it is, and MkDocs warns.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parent.parent.parent
_LINK = re.compile(r"\]\(\.\./([^)#\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds what any page links to outside of the documentation."""
    texts = [file.content_string for file in files.documentation_pages()]
    for name in sorted({name for text in texts for name in _LINK.findall(text)}):
        if (ROOT / name).is_file():
            file = File.generated(
                config,
                f"files/{name}",
                abs_src_path=str(ROOT / name),
                inclusion=InclusionLevel.NOT_IN_NAV,
            )
            files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Points the links to where those files are."""

    def moved(link: re.Match[str]) -> str:
        return f"](files/{link[1]})" if files.get_file_from_path(f"files/{link[1]}") else link[0]

    return _LINK.sub(moved, markdown)
