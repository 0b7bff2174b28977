"""Programs as they are lowered for one GPU, run on the CPU."""

import jax
import numpy as np


def lowered_for_gpu(function, *args):
    """Lowers a function of pytrees for CUDA; returns its text, and a function that runs it here."""
    leaves, tree = jax.tree.flatten(args)
    flat = jax.jit(lambda *leaves: jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves))))
    export = jax.export.export(
        flat, platforms=["cuda"], disabled_checks=[jax.export.DisabledSafetyCheck.platform()]
    )
    made = export(*leaves)
    out = jax.tree.structure(jax.eval_shape(function, *args))
    call = jax.jit(made.call)
    return made.mlir_module(), lambda *args: jax.tree.unflatten(out, call(*jax.tree.leaves(args)))


def bits(tree):
    """The dtype and bytes of each leaf, by path."""
    return {
        jax.tree_util.keystr(path): (x.dtype, np.asarray(x).tobytes())
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
