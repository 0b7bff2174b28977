"""An extension of Griffe: docstrings, written for people and `help`, as the site wants them."""

import re
from typing import Any

import griffe

#: "low, high: both of them", and the lines that go on with it.
_SHARED = re.compile(r"^( +)(\w+(?:, \w+)+):((?: .*)?(?:\n\1 +.*)*)", flags=re.M)


class Docstrings(griffe.Extension):
    """Writes "Example:" as a section of code, an entry for each of several names, and powers as powers."""

    def on_instance(self, *, obj: Any, **kwargs: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is None:
            return
        text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
        text = re.sub(r"^( *)::$", r"\1", text, flags=re.M)
        text = re.sub(r"::$", ":", text, flags=re.M)
        text = _SHARED.sub(lambda entry: "\n".join(_entries(*entry.groups())), text)
        obj.docstring.value = "\n".join(map(_with_powers, text.split("\n")))


def _entries(indent: str, names: str, words: str) -> list[str]:
    return [f"{indent}{name}:{words}" for name in names.split(", ")]


def _with_powers(line: str) -> str:
    """A line whose `**` are no Markdown for bold; code is left as it is."""
    if line.lstrip().startswith((">>>", "...")):
        return line
    parts = line.split("`")
    return "`".join(p if i % 2 else p.replace("**", r"\*\*") for i, p in enumerate(parts))
