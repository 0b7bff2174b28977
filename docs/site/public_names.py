"""A hook of MkDocs: where the site shows a type's full name, it is not the one of the file that it is in."""

import re
from typing import Any

#: `title="jmp_policy.Policy (jmp_policy._src.policy.policy.Policy)"` on links.
_AND_FILE = re.compile(r" \(jmp_policy\._src\.[\w.]+\)(?=\")")
#: `title="jmp_policy._src.policy.rules.Pattern"` on types without an entry of their own.
_FILE = re.compile(r'(?<=title=")jmp_policy\._src\.[\w.]*\.(?=\w+")')


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Shortens what a reader sees when pointing at a type."""
    return _FILE.sub("", _AND_FILE.sub("", output))
