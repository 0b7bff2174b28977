"""Which policy governs a Linen module that is called, and where the module is in the whole model.

Flax counts the path of a module from the one whose `apply` was called, and a module may call that of another
in the middle of its own method. Language models do, whose head has the weights of the embedding::

    class Head(nn.Module):
        def setup(self):
            self.decoder = nn.Dense(vocabulary, use_bias=False)

        def __call__(self, x, table):
            return self.decoder.apply({"params": {"kernel": table.T}}, x)

To Flax the path of `decoder` is () then. Here it is the path of the head, and "decoder".
"""

import dataclasses

import flax.linen as nn

from jmp_policy._src.flax.linen.layers import IN_FLOAT32, ISLANDS
from jmp_policy._src.flax.linen.unused_rules import is_lifted_in_run, outermost, precision_by_rules
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.scope import Scope


@dataclasses.dataclass(frozen=True)
class Location:
    """Where a module is whose method runs.

    Args:
      path: names of the modules that lead to it from the outermost one.
      start: path of the module whose `apply` runs, from which Flax counts paths.
      roots: identities of Flax's root scopes in this run of `apply`: lifted transforms make more of them.
        They live as long as the modules in them run.
      name, cls: the module's name and class.
      rule: index of the rule that governs it.
    """

    path: tuple[str, ...]
    start: tuple[str, ...]
    roots: frozenset[int]
    name: str | None
    cls: type[nn.Module]
    rule: int | None = None


def locate(module: nn.Module, running: Location | None) -> Location:
    """Where a bound module is that is called by the module that is running, if there is one."""
    assert module.scope is not None
    root = id(module.scope.root)
    start: tuple[str, ...] = ()
    roots = frozenset([root])
    if running is not None and root in running.roots:
        start, roots = running.start, running.roots
    elif running is not None:
        top = outermost(module)
        if is_lifted_in_run(top, running):
            start, roots = running.start, running.roots | roots
        else:
            start = (*running.path, top.name or type(top).__name__)
    return Location((*start, *module.path), start, roots, module.name, type(module))


def module_precision(scope: Scope, module: nn.Module) -> ModulePrecision:
    """What the rules of a scope mean for a module."""
    precision, _ = governed(scope, module)
    return precision.as_island() if IN_FLOAT32 in module.__dict__ else precision


def governed(scope: Scope, module: nn.Module) -> tuple[ModulePrecision, Location]:
    """The precision of a module that is called in a scope, and where it is, with the rule for it."""
    location = locate(module, scope.location)
    rules = scope.rules
    if not rules.overrides and not rules.keep_module_dtypes:
        return rules.default_precision[isinstance(module, ISLANDS)], location
    precision, index = precision_by_rules(scope, module, location.path, location.start)
    return precision, dataclasses.replace(location, rule=index)
