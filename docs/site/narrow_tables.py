"""A hook of MkDocs: code in tables breaks between words (`loss_scaled`, `LossScale`), and not inside one."""

import re
from typing import Any

_TABLE = re.compile(r"<table>.*?</table>", re.S)
_CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Adds the places; here and not earlier, so that the search index has whole words."""
    return _TABLE.sub(lambda table: _CODE.sub(_breakable, table[0]), output)


def _breakable(code: re.Match[str]) -> str:
    text = re.sub(r"(?<=\w)([_./=(,\[])(?=[^\W\d]|[&\"'])", r"\1<wbr>", code[0])
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "<wbr>", text)
