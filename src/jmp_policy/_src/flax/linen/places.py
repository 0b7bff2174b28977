"""Finds where a Linen module is in the whole model, also where modules run each other by `apply`.

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


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a module is whose method runs.

    Args:
      path: names of the modules that lead to it from the outermost one.
      start: path of the module whose `apply` runs, from which Flax counts paths.
      roots: identities of Flax's root scopes in this run of `apply`: lifted transforms make more of them.
        They live as long as the modules in them run.
      name, kind: the module's name and class.
      rule: index of the rule that governs it.
    """

    path: tuple[str, ...]
    start: tuple[str, ...]
    roots: frozenset[int]
    name: str | None
    kind: type[nn.Module]
    rule: int | None = None

    def is_of(self, other: "Place") -> bool:
        """Returns whether two places are of one module, or of clones of it that lifted transforms make."""
        return self.path == other.path and self.kind is other.kind


def place_of(module: nn.Module, running: Place | None) -> Place:
    """Returns where a bound module is that is called by the module that is running, if there is one."""
    assert module.scope is not None
    root = id(module.scope.root)
    top = _top(module)
    if running is None:
        start, roots = (), frozenset([root])
    elif root in running.roots or _is_lifted_in_run(top, running):
        start, roots = running.start, running.roots | {root}
    else:
        start, roots = (*running.path, top.name or type(top).__name__), frozenset([root])
    return Place((*start, *module.path), start, roots, module.name, type(module))


def _top(module: nn.Module) -> nn.Module:
    while isinstance(module.parent, nn.Module) and module.parent.scope is not None:
        module = module.parent
    return module


def _is_lifted_in_run(top: nn.Module, running: Place) -> bool:
    """Returns whether a transform made a module's root scope, and not a call of `apply`.

    A transform keeps paths. Where the path is empty, it can only be the root module that is running, whose
    name and class the copy has, or a base class: `nn.remat(Net)` runs a Net.
    """
    if top.path:
        return True
    related = issubclass(running.kind, type(top)) or issubclass(type(top), running.kind)
    return running.path == running.start and running.name == top.name and related
