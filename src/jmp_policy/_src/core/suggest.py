"""Suggests the word that a misspelt one was meant to be."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" with the nearest word, or an empty text when no word is near.

    Words with the same letters in another order come first: 'fp61' is 'fp16', which difflib finds no nearer
    than 'fp64'.
    """
    words = list(words)
    swapped = [w for w in words if sorted(w) == sorted(word)]
    near = swapped or difflib.get_close_matches(word, words, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
