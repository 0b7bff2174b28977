"""A graph network: messages along edges, summed at each node by `segment_sum`.

Battaglia et al., Relational inductive biases, deep learning, and graph networks, 2018.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models._model import Model, cross_entropy


class Step(nn.Module):
    """One round of messages; nodes `[N, D]` and edges `[E, D]` are normalised and added."""

    @nn.compact
    def __call__(self, nodes, edges, senders, receivers):
        width = nodes.shape[-1]
        both = jnp.concatenate([edges, nodes[senders], nodes[receivers]], axis=-1)
        edges = edges + nn.LayerNorm()(nn.Dense(width)(nn.relu(nn.Dense(width)(both))))
        received = jax.ops.segment_sum(edges, receivers, nodes.shape[0])
        both = jnp.concatenate([nodes, received], axis=-1)
        return nodes + nn.LayerNorm()(nn.Dense(width)(nn.relu(nn.Dense(width)(both)))), edges


class GraphNetwork(nn.Module):
    """Nodes `[N, F]`, edges `[E, F]` and their ends `[E]` to logits of the nodes' classes."""

    width: int = 128
    rounds: int = 10
    classes: int = 40

    @nn.compact
    def __call__(self, nodes, edges, senders, receivers):
        nodes, edges = nn.Dense(self.width)(nodes), nn.Dense(self.width)(edges)
        for i in range(self.rounds):
            nodes, edges = Step(name=f"round_{i}")(nodes, edges, senders, receivers)
        return nn.Dense(self.classes)(nodes)


def make(size: str) -> Model:
    """Graphs of 16, 128 or 8192 nodes, with four times as many edges, which have any ends."""
    module, nodes = {
        "tiny": (GraphNetwork(16, 2, 5), 16),
        "small": (GraphNetwork(64, 4, 10), 128),
        "full": (GraphNetwork(), 8192),
    }[size]

    def draw(key: jax.Array):
        keys = jax.random.split(key, 4)
        ends = jax.random.randint(keys[2], (2, 4 * nodes), 0, nodes)
        inputs = jax.random.normal(keys[0], (nodes, 16)), jax.random.normal(keys[1], (4 * nodes, 4)), *ends
        return inputs, jax.random.randint(keys[3], (nodes,), 0, module.classes)

    return Model(module, draw, cross_entropy)
