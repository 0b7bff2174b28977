"""Finds the precision that autocast uses in a part of a program, by the markers and rules for its name stack.

A marker is a named scope, which every operation traced within it carries into the jaxpr. No global or
thread-local state is read, so a jitted function that was traced once is right everywhere, and a marker
outside of `autocast` does nothing.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jmp_policy._src.core.dtype_words import check_has_range, parse_dtype
from jmp_policy._src.policy.patterns import matches
from jmp_policy._src.policy.recipes import is_staying

_MARKER = re.compile(r"autocast\[([\w:+@-]+)\]")


class Region(NamedTuple):
    """Precision of a part of a program.

    Args:
      half: the half dtype, None where operations run as they were traced.
      lower: whether operations of all lists run in half.
      path: names of the scopes around it.
      why: the marker or rule that decided, as reports show it.
      recipe: float8 recipe of its products, None for those in half.
    """

    half: Any
    lower: bool = False
    path: tuple[str, ...] = ()
    why: str = ""
    recipe: str | None = None


def compute_dtype(dtype: np.dtype, given: object) -> np.dtype | None:
    """Returns the half dtype that a policy's compute dtype asks for; None for float32.

    Raises:
      ValueError: for other dtypes than float16, bfloat16 and float32.
    """
    if dtype.name in ("float16", "bfloat16"):
        return dtype
    if dtype.name == "float32":
        return None
    check_has_range(dtype, f"{given!r}, given to autocast or a region of it,")
    raise ValueError(
        f"autocast computes in float16, bfloat16 or float32; {given!r} asks for {dtype.name}. It only ever "
        "lowers float32 operations: float64 code stays as it is."
    )


def is_marker(scope: str) -> bool:
    """Returns whether a scope of a name stack is a marker, and not a name that the user gave."""
    return _MARKER.fullmatch(scope) is not None or is_staying(scope)


class Regions:
    """Resolver of an operation's region from the names of its scopes, by markers and rules.

    Args:
      half: half dtype outside of markers and rules.
      recipe: float8 recipe outside of markers and rules.
      rules: `(path glob, word for region)`. A glob matches a scope with any scopes around it, and governs
        everything inside, unless something inside is matched or marked itself.
      anchored: rules whose globs are matched against the whole path.
    """

    def __init__(
        self,
        half: np.dtype | None,
        rules: Sequence[tuple[str, str]] = (),
        anchored: Sequence[tuple[str, str]] = (),
        recipe: str | None = None,
    ):
        self.outermost = Region(half, recipe=recipe)
        self._rules = [(f"**/{glob.strip('/')}", word, glob) for glob, word in rules]
        self._rules += [(glob, word, glob) for glob, word in anchored]
        self._known: dict[Any, Region] = {}
        self.paths: set[str] = set()
        self.matched: set[str] = set()

    def enter(self, region: Region, scopes: Sequence[str]) -> Region:
        """Returns the region of an operation that is in these scopes, inside the code of another region."""
        if not scopes:
            return region
        key = (region, *scopes)
        if key not in self._known:
            self._known[key] = functools.reduce(self._enter_scope, scopes, region)
        return self._known[key]

    def _enter_scope(self, region: Region, scope: str) -> Region:
        marker = _MARKER.fullmatch(scope)
        if marker:
            return self._with_precision(region, marker.group(1), f"region({marker.group(1)!r})")
        if not self._rules or is_staying(scope):
            # Without rules the path decides nothing, and equal parts of a model share one plan.
            return region
        return functools.reduce(self._enter_name, scope.split("/"), region)

    def _enter_name(self, region: Region, name: str) -> Region:
        region = region._replace(path=(*region.path, name))
        path = "/".join(region.path)
        self.paths.add(path)
        hits = [(word, shown) for glob, word, shown in self._rules if matches(glob, path, None)]
        self.matched.update(shown for _, shown in hits)
        return self._with_precision(region, *hits[0]) if hits else region

    @staticmethod
    def _with_precision(region: Region, word: str, why: str) -> Region:
        if word == "off":
            return region._replace(half=None, lower=False, why=why)
        if word == "lower":
            return region._replace(lower=region.half is not None, why=why)
        dtype, _, recipe = word.partition(":")
        half = np.dtype(parse_dtype(dtype, "of a region"))
        return region._replace(half=half, lower=False, why=why, recipe=recipe or None)
