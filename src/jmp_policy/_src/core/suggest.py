"""Suggesting the word that was meant."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """The question "Did you mean 'x'?" behind a space, or nothing when no word is near.

    Swapped letters are the nearest: 'fp61' is 'fp16', which difflib finds no nearer than 'fp64'.
    """
    words = list(words)
    swapped = [w for w in words if sorted(w) == sorted(word)]
    near = swapped or difflib.get_close_matches(word, words, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
