"""Compiles the programs of `test_lowering.py` and keeps the text: `python tests/data/record.py`.

Run it in an environment with the extra `gpu-lowering`, once per version of JAX. Nothing that names the
machine is kept, nor what the reports do not read.
"""

import gzip
import os
import re
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

FLOAT16 = jnp.float16


class Net(nn.Module):
    """Two layers in float16 and a head, whose dtype and size are where faults are planted."""

    classes: int = 128
    head_dtype: object = FLOAT16

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.relu(nn.Dense(256, dtype=FLOAT16)(x))
        return nn.Dense(self.classes, dtype=self.head_dtype, name="head")(x)


class Images(nn.Module):
    """Convolutions in float16."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(32, (3, 3), dtype=FLOAT16)(x))
        x = nn.relu(nn.Conv(64, (3, 3), dtype=FLOAT16)(x))
        return nn.Dense(16, dtype=FLOAT16)(x.mean((1, 2)))


class Block(nn.Module):
    """What `Stack` repeats."""

    @nn.compact
    def __call__(self, x, _):
        return nn.relu(nn.Dense(256, dtype=FLOAT16)(x)), None


class Stack(nn.Module):
    """Six layers as one scan."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=6)
        return layers(name="layers")(x.astype(FLOAT16), None)[0]


def step_of(model):
    """A step of gradient descent."""

    def step(params, x):
        def loss_fn(params):
            return jnp.square(model.apply(params, x).astype(jnp.float32)).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def program(name):
    """A function and its arguments: types of arrays, on eight devices for "devices"."""
    models = {
        "mlp": Net(),
        "volta": Net(classes=1001),
        "float32_head": Net(head_dtype=jnp.float32),
        "vocabulary": Net(classes=1001),
        "conv": Images(),
        "scan": Stack(),
        "devices": Net(),
    }
    model = models[name]
    x = jax.ShapeDtypeStruct((64, 16, 16, 8) if name == "conv" else (512, 256), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    if name == "devices":
        mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("batch",))
        params = jax.tree.map(lambda a: a.update(sharding=NamedSharding(mesh, PartitionSpec())), params)
        x = x.update(sharding=NamedSharding(mesh, PartitionSpec("batch")))
    return step_of(model), (params, x)


#: The card that a program is compiled for, where it is not the H100: Triton knows no V100.
TARGETS = {"volta": "V100"}
NAMES = ("volta", "mlp", "float32_head", "vocabulary", "conv", "scan", "devices")


def main():
    from jmp_policy._src.core.targets import find_target
    from jmp_policy._src.report.function import as_function
    from jmp_policy._src.report.lowering.compiler import compiled, exported

    here = Path(__file__).parent
    for name in NAMES:
        fn, args = program(name)
        function = as_function(fn, args, {}, "record")
        card = find_target(TARGETS.get(name, "H100"))
        text = compiled([exported(function.call, function.arrays)], card)[0].text
        text = re.sub(r'"/[^"]*?/(site-packages/[^"]+|[^"/]+)"\n', r'"\1"\n', text)
        text = re.sub(r", (?:frontend_attributes|sharding)=\{[^{}]*\}", "", text)
        path = here / f"{name}.jax-{jax.__version__}.hlo.gz"
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()
