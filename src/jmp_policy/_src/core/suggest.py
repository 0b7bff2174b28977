"""Suggests the word that a misspelt one was meant to be, and refuses unknown keys of settings."""

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from jmp_policy._src.core.settings import shown


def did_you_mean(
    word: str,
    words: Iterable[str],
    spellings: Mapping[str, str] = MappingProxyType({}),
    cutoff: float = 0.6,
) -> str:
    """Returns " Did you mean 'x'?" with the nearest word, or an empty text when no word is near.

    Words with the same letters in another order come first: 'fp61' is 'fp16', which difflib finds no nearer
    than 'fp64'.

    Args:
      word: as it was given.
      words: those that there are.
      spellings: what others call some of them.
      cutoff: how alike a word must be, from 0 to 1, as for `difflib`.
    """
    words = list(words)
    named = [spellings[word]] if spellings.get(word) in words else []
    swapped = [w for w in words if sorted(w) == sorted(word)]
    near = named or swapped or difflib.get_close_matches(word, words, n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""


def check_keys(
    settings: Iterable[str],
    known: Iterable[str],
    what: str,
    spellings: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raises ValueError for a key that the settings of something do not have.

    Args:
      settings: the keys that were given.
      known: those that there are.
      what: whose they are, as the message says it.
      spellings: what others call some of them.
    """
    known = list(known)
    if unknown := [key for key in settings if key not in known]:
        hint = next(filter(None, (did_you_mean(str(key), known, spellings) for key in unknown)), "")
        raise ValueError(
            f"Unknown key {', '.join(map(shown, unknown))} in the settings of {what}.{hint} Known: "
            f"{', '.join(known)}."
        )
