"""The operation table as autocast reads it: which list a primitive is on, and the user's changes."""

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from jmp_policy._src.core.suggest import did_you_mean
from jmp_policy._src.jaxpr.op_table import OPERATIONS, OpList, Trait, having

#: Primitive's name -> (list, reason), of those on a list.
TABLE: Mapping[str, tuple[OpList, str]] = {
    name: (op_list, reason) for name, (op_list, reason, _) in OPERATIONS.items() if op_list is not None
}

#: Primitive's name -> why it runs as traced, of those that are known and on no list.
NOT_LISTED: Mapping[str, str] = {
    name: f"as traced: {reason}" for name, (op_list, reason, _) in OPERATIONS.items() if op_list is None
}

#: Products that are linear in each floating operand, which are those that take half operands.
LOWERED = frozenset(name for name, (op_list, _) in TABLE.items() if op_list == "lower")

BROADCASTING, MOVES, SUMMED = map(having, (Trait.BROADCASTS, Trait.MOVES, Trait.SUMMED))

#: Reason of an entry that the caller has made.
ASKED = "as the caller asked"


def changed_table(
    ops: Mapping[str, OpList] | None = None,
    **lists: Iterable[str] | str,
) -> Mapping[str, tuple[OpList, str]]:
    """Returns the table with the user's changes.

    Args:
      ops: primitive's name -> list.
      lists: `lower=`, `full=`, `follow=`: names of primitives to put on that list.

    Raises:
      ValueError: for a list that there is not, for a name on two lists, and for a name that is empty.
      TypeError: for something that is no name, such as a function.
    """
    changes: dict[str, Any] = {}
    given = [*dict(ops or {}).items()]
    for op_list, names in lists.items():
        given += [(name, op_list) for name in ([names] if isinstance(names, str) else names)]
    for name, op_list in given:
        if not isinstance(name, str):
            raise TypeError(
                "The op lists of autocast hold names of primitives, as a jaxpr shows them ('dot_general'); "
                f"got {name!r} of type {type(name).__name__}."
            )
        if op_list not in get_args(OpList):
            raise ValueError(
                f"Unknown op list {op_list!r} for {name!r}. Known: {', '.join(get_args(OpList))}."
            )
        if changes.setdefault(name, op_list) != op_list:
            raise ValueError(
                f"The primitive {name!r} is on two lists, {changes[name]!r} and {op_list!r}; leave one."
            )
    return {**TABLE, **{name: (op_list, ASKED) for name, op_list in changes.items()}}


def unknown_names(names: Iterable[str], seen: Iterable[str]) -> list[str]:
    """Returns names on the caller's lists that are in no table and were not met, each with a suggestion."""
    seen = set(seen)
    known = {*TABLE, *seen}
    return [f"{name!r}.{did_you_mean(name, known)}" for name in names if name not in known]
