"""A hook of MkDocs: a page that explains a word comes before one that lists it."""

from typing import Any

#: Pages that mention everything: lists, tables of numbers, and files that come along.
_LISTS = ("api", "changelog", "conformance", "internals", "results/", "files/")
#: Pages that explain what newcomers ask for.
_FIRST = ("index.md", "choosing.md", "policies.md", "loss_scaling.md", "migrating.md", "debugging.md")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> None:
    """Sets what a page's own `search: boost:` would set, without a table of it at the head of the page."""
    path = page.file.src_uri
    boost = 2 if path in _FIRST else 0.2 if path.startswith(_LISTS) else 1
    page.meta.setdefault("search", {})["boost"] = boost
