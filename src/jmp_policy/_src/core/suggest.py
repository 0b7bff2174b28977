"""Suggests the word that a misspelt one was meant to be."""

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType


def did_you_mean(word: str, words: Iterable[str], spellings: Mapping[str, str] = MappingProxyType({})) -> str:
    """Returns " Did you mean 'x'?" with the nearest word, or an empty text when no word is near.

    Words with the same letters in another order come first: 'fp61' is 'fp16', which difflib finds no nearer
    than 'fp64'.

    Args:
      word: as it was given.
      words: those that there are.
      spellings: what others call some of them.
    """
    words = list(words)
    named = [spellings[word]] if spellings.get(word) in words else []
    swapped = [w for w in words if sorted(w) == sorted(word)]
    near = named or swapped or difflib.get_close_matches(word, words, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
