"""`DynamicLossScale` against a plain Python model of it, over random sequences of overflows.

Each configuration drawn is compiled, since it is static; its sequences run together, `vmap` over `scan`.
"""

import math
import random
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jmp_policy as jmpp


class After(NamedTuple):
    """What a loss scale holds after a step."""

    scale: Any
    clean: Any
    tolerated: Any
    stuck: Any


def plain(overflows: Iterable[bool], start: float, config: dict[str, Any]) -> list[After]:
    """The rule in plain Python: the states after each step."""
    low, high, hysteresis = config["min_loss_scale"], config["max_loss_scale"], config["hysteresis"]
    scale, clean, tolerated, out = start, 0, hysteresis, []
    for overflow in overflows:
        stuck = False
        if not overflow:
            clean += 1
            if clean == config["growth_interval"]:
                scale = min(_float32(scale * config["growth_factor"]), high)
                clean, tolerated = 0, hysteresis
        else:
            clean, tolerated = 0, max(tolerated - 1, 0)
            if tolerated == 0:
                stuck = scale == low
                scale = max(_float32(scale * config["backoff_factor"]), low)
        out.append(After(scale, clean, tolerated, stuck))
    return out


def _float32(x: float) -> float:
    return math.inf if x > 3.4e38 else float(np.float32(x))


def draw(rng: random.Random) -> tuple[float, dict[str, Any]]:
    """An initial scale and a configuration; the extremes are as likely as what is usual."""
    low, high = sorted(rng.choice((-126, -14, -3, 0, 10, 16, 24, 100, 126)) for _ in range(2))
    start = 2.0 ** rng.randint(low, high)
    if rng.random() < 0.5:  # No power of two.
        start = float(np.clip(np.float32(start * rng.uniform(1, 2)), 2.0**low, 2.0**high))
    return start, {
        "growth_interval": rng.choice((1, 2, 3, 5, 10, 20, 60)),
        # Not 1.1: three of a hundred products with it lie within 1e-9 of the middle of two float32 numbers,
        # where the library takes the one neighbour and double precision the other.
        "growth_factor": rng.choice((2.0, 4.0, 1.5, 1.25, 3.7, 2.0**40)),
        "backoff_factor": rng.choice((0.5, 0.25, 0.8, 0.9, 0.999, 1 / 3, 2.0**-40)),
        "min_loss_scale": 2.0**low,
        "max_loss_scale": 2.0**high,
        "hysteresis": rng.choice((1, 2, 3, 10)),
    }


@jax.jit
def run(scale: jmpp.DynamicLossScale, overflows: jax.Array) -> After:
    """The states after each step, of one row of overflows after another."""

    def step(scale: Any, overflow: jax.Array) -> tuple[Any, After]:
        scale = scale.adjust(~overflow)
        seen = After(scale.loss_scale, scale.growth_tracker, scale.hysteresis_tracker, scale.stuck)
        return scale, seen

    return jax.vmap(lambda row: jax.lax.scan(step, scale, row)[1])(overflows)


def compare(sequences: int, steps: int = 50, per_configuration: int = 2000, seed: int = 0) -> dict[str, int]:
    """Counts sequences, their steps, and the sequences in which anything differs from the plain model."""
    rng = random.Random(seed)
    differ = overflowed = 0
    for _ in range(sequences // per_configuration):
        start, config = draw(rng)
        shares = np.array([rng.choice((0.0, 0.02, 0.1, 0.5, 0.9, 1.0)) for _ in range(per_configuration)])
        overflows = np.random.default_rng(rng.randrange(2**32)).random((per_configuration, steps))
        overflows = overflows < shares[:, None]
        got = run(jmpp.DynamicLossScale(start, **config), jnp.asarray(overflows))
        rows = [plain(row, start, config) for row in overflows.tolist()]
        want = [np.array(column) for column in np.moveaxis(np.array(rows), -1, 0)]
        wrong = np.zeros((per_configuration, steps), bool)
        for g, w in zip(got, want, strict=True):
            wrong |= ~(np.asarray(g, np.float64) == w)  # NaN is wrong, too.
        differ += int(wrong.any(axis=1).sum())
        overflowed += int(overflows.sum())
    counted = {"sequences": sequences, "steps": sequences * steps}
    return {**counted, "overflows": overflowed, "different": differ}
