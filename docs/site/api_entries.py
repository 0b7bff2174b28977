"""A hook of MkDocs: entries of the API show public names, and their arguments when a reader asks for them."""

import re
from typing import Any

#: `title="jmp_policy.Policy (jmp_policy._src.policy.policy.Policy)"` on links.
_AND_FILE = re.compile(r" \(jmp_policy\._src\.[\w.]+\)(?=\")")
#: `title="jmp_policy._src.policy.rules.Pattern"` on types without an entry of their own.
_FILE = re.compile(r'(?<=title=")jmp_policy\._src\.[\w.]*\.(?=\w+")')
#: The table of arguments, fields or errors below its title.
_TABLE = re.compile(
    r'<p><span class="doc-section-title">(Parameters|Attributes|Raises):</span></p>\s*(<table>.*?</table>)',
    re.S,
)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Shortens what a reader sees when pointing at a type, and folds the tables."""
    output = _TABLE.sub(r"<details><summary>\1</summary>\2</details>", output)
    return _FILE.sub("", _AND_FILE.sub("", output))
