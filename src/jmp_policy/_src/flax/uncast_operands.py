"""Finds the float32 products of a program that nobody asked for, and warns of them.

    origin = {variable: path, for each array that is stored for a half-precision module}
    for each operation, and those inside calls, loops and branches:
        a float32 product of such a value and data: note it, unless the data is float32 on purpose
        a float32 product of half data and float32 data: the same, if such products have 5 % of the FLOPs
        what moves, scales or casts such a value: the result has the same origin

Data is float32 on purpose if code of the user, or a module under a float32 rule, cast it from half, and if it
was computed from an array that is stored for a module under a float32 rule. Where the value was read in half,
it is the data that makes the product float32: a one-hot mask, random numbers.
"""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from jmp_policy._src.core.dtypes import is_half, is_wide
from jmp_policy._src.jaxpr import calls, compat, source_lines
from jmp_policy._src.jaxpr.ir import dtype_of
from jmp_policy._src.jaxpr.matrix_products import size_of
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.products.small_products import gains_nothing

_PRODUCTS = HAVING[Trait.PRODUCT]
_MOVES = HAVING[Trait.MOVES] | HAVING[Trait.KEEPS_WEIGHT] | HAVING[Trait.VIEW]
_ELEMENTWISE = HAVING[Trait.ELEMENTWISE] | HAVING[Trait.BROADCASTS]

#: Equations, each with the atoms that it takes.
Rows: TypeAlias = Iterable[tuple[Any, Sequence[Any]]]

#: Share of the FLOPs from which on products of data are warned of: masks may be counted in float32.
_WORTH = 0.05

#: What was shown already, as Python remembers it for its filters of warnings.
_SHOWN: dict[Any, Any] = {}


def products(program: Any, rows: Rows, stored: Iterable[tuple[str | None, Any]]) -> dict[str | None, Any]:
    """The first float32 product of each stored array, with whether it was read in half, by the array's path.

    Where there is none, that of data alone by None, with the operation that made a half value float32.

    Args:
      program: as `compat.program_being_traced` gives it.
      rows: those of its operations that are looked at.
      stored: the arrays that are stored for half-precision modules, with their paths; for others with None.
    """
    known = [(path, array) for path, array in stored if is_wide(array.dtype) or is_half(array.dtype)]
    traced = ((path, compat.traced_by(array)) for path, array in known)
    arguments = {found[0].val: _stored(path, found[0].val) for path, found in traced if found}
    look = _Look({id(array): path for path, array in known})
    look.follow(rows, arguments | look.constants(compat.recorded_constants(program).items()))
    return look.found or (look.of_data if look.flops_of_data >= _WORTH * look.flops else {})


def warn(found: dict[str | None, Any], repair: str) -> None:
    """Warns of the first of these products, and says how its operands are half.

    Args:
      found: as `products` gives it.
      repair: how a stored array is read in half.
    """
    (path, (eqn, met)), *others = found.items()
    more = f" (and {len(others)} more)" if others else ""
    where = source_lines.source_line(eqn) or "an unknown line"
    if path is None:
        line = source_lines.source_line(met) if met is not None else ""
        cause = f"half values meet float32 values{f' at {line}' if line not in ('', where) else ' there'}"
    else:
        how = "half there and meets float32 values" if met else "used there as it is stored"
        cause = f"{path!r}{more} is {how}"
    if path is None or met:
        repair = "Cast those to half (.astype(x.dtype); NumPy numbers, as np.sqrt(2), by float)."
    warnings.warn_explicit(
        f"The product at {where} runs in float32, although the policy says half precision: {cause}. "
        f"{repair} A float32 rule for its module says that float32 is meant.",
        UserWarning,
        *source_lines.users_line(eqn),
        registry=_SHOWN,
    )


class _Origin(NamedTuple):
    """Why a value is float32.

    Args:
      path: of the stored array that it is, or was computed with; None if there is none.
      upcast: the operation that cast it, or what it was computed from, from half.
      on_purpose: whether it is to be float32: stored for a module under a float32 rule, or cast by name and
        not because it met another float32 value.
      is_weight: whether it was computed from stored arrays and numbers alone (a weight times its scale).
      in_half: whether the stored array was read in half.
    """

    path: str | None = None
    upcast: Any = None
    is_weight: bool = False
    in_half: bool = False
    on_purpose: bool = False


class _Look:
    """One look at a program.

    Args:
      path_of: paths of the stored arrays, by identity.

    Attributes:
      found: as `products` gives it.
      of_data: the same, of data alone.
      flops, flops_of_data: of all products, and of those of data that are not half.
    """

    def __init__(self, path_of: dict[int, str | None]):
        self._path_of = path_of
        self.found: dict[str | None, Any] = {}
        self.of_data: dict[str | None, Any] = {}
        self.flops, self.flops_of_data, self._times = 0, 0, 1

    def constants(self, values: Iterable[tuple[Any, Any]]) -> dict[Any, _Origin]:
        """The stored arrays that a program has closed over, by their variables."""
        known = ((var, id(value)) for var, value in values if id(value) in self._path_of)
        return {var: _stored(self._path_of[key], var) for var, key in known}

    def follow(self, rows: Rows, origins: dict[Any, _Origin]) -> None:
        """Notes the products of stored arrays, and adds the origins of what operations give."""
        for eqn, atoms in rows:
            operands = [_origin(origins, atom) for atom in atoms]
            self.flops += self._flops(eqn)
            if eqn.primitive.name in calls.KINDS:
                results = self._called(eqn, operands)
            elif _is_upcast(eqn, atoms):
                origin = operands[0] or _Origin()
                on_purpose = origin.on_purpose or not source_lines.is_promotion(eqn)
                results = [origin._replace(upcast=eqn, on_purpose=on_purpose)]
            elif any(operands) or eqn.primitive.name in _PRODUCTS:
                results = self._results(eqn, atoms, operands)
            else:
                continue
            for var, origin in zip(eqn.outvars, results, strict=True):
                if origin is not None and is_wide(dtype_of(var)):
                    origins[var] = origin
                elif origin is not None and _is_stored(origin) and is_half(dtype_of(var)):
                    on_purpose = origin.path is None
                    origins[var] = origin._replace(upcast=None, in_half=True, on_purpose=on_purpose)

    def _called(self, eqn: Any, operands: Sequence[_Origin | None]) -> Sequence[_Origin | None]:
        """What a call, loop or branch gives.

        The last operands are the arguments of the program inside, for calls and scans, branches of a `cond`
        and the body of a while loop alike; and its results are those of the operation.
        """
        results: Sequence[_Origin | None] = [None] * len(eqn.outvars)
        around, self._times = self._times, self._times * eqn.params.get("length", 1)
        for closed in calls.inner_jaxprs(eqn):
            jaxpr = compat.open_jaxpr(closed)
            given = zip(reversed(jaxpr.invars), reversed(operands), strict=False)
            origins = {var: origin for var, origin in given if origin is not None}
            origins |= self.constants(zip(jaxpr.constvars, compat.constants(closed), strict=False))
            self.follow([(inner, inner.invars) for inner in jaxpr.eqns], origins)
            if len(jaxpr.outvars) == len(results):  # Else it is the condition of a while loop.
                pairs = zip(results, jaxpr.outvars, strict=True)
                results = [known or _origin(origins, atom) for known, atom in pairs]
        self._times = around
        return results

    def _flops(self, eqn: Any) -> int:
        """The FLOPs of a product; 0 for other operations, and where sizes are symbols."""
        flops = size_of(eqn).flops if eqn.primitive.name in _PRODUCTS else 0
        return self._times * flops if isinstance(flops, int) else 0

    def _results(
        self, eqn: Any, atoms: Sequence[Any], operands: Sequence[_Origin | None]
    ) -> Sequence[_Origin | None]:
        name = eqn.primitive.name
        if name in _MOVES:
            moved = operands if len(atoms) == len(eqn.outvars) else [operands[0]] * len(eqn.outvars)
            # Rows of a table are data: there are as many as tokens.
            return [x and x._replace(is_weight=x.is_weight and name != "gather") for x in moved]
        if name in _PRODUCTS:
            atoms, operands = atoms[:2], operands[:2]  # After them come the scales of float8 products.
        known = [origin for origin in operands if origin is not None]
        # What is stored in float32 is the cause, beside what is half.
        path, in_half = min(
            ((x.path, x.in_half) for x in known if x.path), key=lambda x: x[1], default=(None, False)
        )
        upcast = next((origin.upcast for origin in known if origin.upcast is not None), None)
        are_weights = all(origin is not None and origin.is_weight for origin in operands)
        on_purpose = any(origin.on_purpose for origin in known)
        if not (are_weights or on_purpose):
            if name in _PRODUCTS and any(is_wide(dtype_of(x)) for x in atoms) and not gains_nothing(eqn):
                if path:
                    self.found.setdefault(path, (eqn, in_half))
                elif upcast is not None or any(is_half(dtype_of(x)) for x in atoms):
                    self.of_data.setdefault(None, (eqn, upcast))
                    self.flops_of_data += self._flops(eqn)
            # Other float32 data would make the result float32 in any case.
            others = (x for x, origin in zip(atoms, operands, strict=True) if origin is None)
            if in_half or name not in _ELEMENTWISE or any(is_wide(dtype_of(x)) for x in others):
                path = None
        path = None if on_purpose and not are_weights else path
        is_known = path or upcast is not None or are_weights or on_purpose
        origin = _Origin(path, upcast, are_weights, in_half, on_purpose) if is_known else None
        return [origin] * len(eqn.outvars)


def _stored(path: str | None, variable: Any) -> _Origin:
    return _Origin(path, is_weight=True, in_half=is_half(dtype_of(variable)), on_purpose=path is None)


def _is_stored(origin: _Origin) -> bool:
    """Whether a value is a stored array, moved, scaled or cast."""
    return origin.is_weight and (origin.path is not None or origin.on_purpose)


def _origin(origins: dict[Any, _Origin], atom: Any) -> _Origin | None:
    return _Origin(is_weight=True) if isinstance(atom, compat.Literal) else origins.get(atom)


def _is_upcast(eqn: Any, atoms: Sequence[Any]) -> bool:
    return eqn.primitive.name == "convert_element_type" and is_half(dtype_of(atoms[0]))
