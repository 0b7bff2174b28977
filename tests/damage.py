"""Damaged training states, configs and patterns: each is refused with its place named, or does no harm."""

import copy
import dataclasses
import fnmatch
import functools
import itertools
import json
import math
import random
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import fault_steps as steps
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jmp_policy as jmpp


@dataclasses.dataclass
class Row:
    """Runs with one fault: what was not as expected, and how many were refused."""

    fault: str
    expected: str
    runs: int = 0
    refused: int = 0
    unexpected: list[str] = dataclasses.field(default_factory=list)

    def count(self, run: str, held: dict[str, bool], refused: bool = False) -> None:
        """Adds a run; what does not hold is named."""
        self.runs += 1
        self.refused += refused
        self.unexpected += [f"{run}: {name}" for name, holds in held.items() if not holds]


PARAMS = {"w": jnp.full((8, 4), 0.5), "b": jnp.arange(4.0)}
GRADS = {"w": jnp.arange(32.0).reshape(8, 4), "b": jnp.ones(4)}
SCALES = {
    "dynamic": jmpp.DynamicLossScale(2.0**8),
    "static": jmpp.StaticLossScale(2.0**8),
    "statistic": jmpp.StatisticLossScale(2.0**8),
    "pid": jmpp.PIDLossScale(2.0**8),
}
ABSENT = object()
#: Names of what `loss_scaled` and `master_weights` add: where it was not saved, the template's is right.
OURS = {"loss_scale", "grads_finite", "skipped", "consecutive_skips", "steps", "gradients", "masters"}


def _optimizers() -> dict[str, Any]:
    adam, dynamic = optax.adamw(0.1), SCALES["dynamic"]
    return {
        **{name: jmpp.loss_scaled(adam, scale) for name, scale in SCALES.items()},
        "monitor": jmpp.loss_scaled(adam, dynamic, monitor=True),
        "several losses": jmpp.loss_scaled(adam, {"a": dynamic, "b": SCALES["static"]}),
        "masters": jmpp.loss_scaled(jmpp.master_weights(adam), dynamic),
        "half moments": jmpp.loss_scaled(jmpp.half_moments(adam), dynamic),
        "MultiSteps": optax.MultiSteps(jmpp.loss_scaled(adam, dynamic), 2),
        "clipped": jmpp.loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), adam), dynamic),
    }


STATES = (*_optimizers(), "NNX")


def _saved(name: str) -> tuple[Any, Any]:
    """A fresh state, and the state after two steps as nested dicts of NumPy arrays."""
    if name == "NNX":
        tx = jmpp.loss_scaled(optax.adamw(0.1), SCALES["dynamic"])
        optimizer = nnx.Optimizer(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)
        template = nnx.state(optimizer)
        return template, _plain(nnx.to_pure_dict(template))
    tx = _optimizers()[name]
    params = jmpp.get_policy("bfloat16").cast_to_param(PARAMS) if name == "masters" else PARAMS
    grads = {"a": GRADS, "b": GRADS} if name == "several losses" else GRADS
    template = {"params": params, "opt_state": tx.init(params), "step": jnp.int32(0)}
    state = template["opt_state"]
    for _ in range(2):
        with warnings.catch_warnings():  # That these gradients are of no scaled loss.
            warnings.simplefilter("ignore")
            state = tx.update(grads, state, params)[1]
    saved = {"params": params, "opt_state": state, "step": jnp.int32(2)}
    return template, _plain(flax.serialization.to_state_dict(saved))


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {str(name): _plain(child) for name, child in tree.items()}
    return None if tree is None else np.asarray(tree)


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every node and leaf below the root, with the keys that lead to it."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield (*path, key), child
        yield from _places(child, (*path, key))


def _put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of nested dicts and lists with another value at a place, or without it."""
    key, *rest = path
    new = copy.copy(tree)
    if rest:
        new[key] = _put(tree[key], tuple(rest), value)
    elif value is ABSENT:
        del new[key]
    else:
        new[key] = value
    return new


def _one(leaf: Any, value: Any) -> Any:
    new = np.array(leaf)
    new.reshape(-1)[-1:] = value
    return new


def _is(kind: Any) -> Callable[[Any], bool]:
    return lambda leaf: isinstance(leaf, np.ndarray) and leaf.size > 0 and jnp.issubdtype(leaf.dtype, kind)


_is_number = _is(np.generic)
#: Damage -> what it is done to, and what it puts there.
DAMAGE: dict[str, tuple[Callable[[Any], bool], list[Callable[[Any], Any]]]] = {
    "one NaN, inf or -inf": (
        _is(jnp.floating),
        [functools.partial(_one, value=value) for value in (np.nan, np.inf, -np.inf)],
    ),
    "a negative count": (
        lambda leaf: _is(jnp.signedinteger)(leaf) and leaf.ndim == 0,
        [lambda leaf: np.full_like(leaf, -1), lambda leaf: np.full_like(leaf, np.iinfo(leaf.dtype).min)],
    ),
    "another shape": (
        _is_number,
        [lambda leaf: leaf[None], lambda leaf: np.zeros((*leaf.shape, 0), leaf.dtype)],
    ),
    "another dtype": (
        _is_number,
        [
            lambda leaf: leaf.astype(np.float64),
            lambda leaf: np.zeros(leaf.shape, np.int8 if leaf.dtype == np.bool_ else np.float16),
            lambda leaf: leaf.astype(np.complex64),
        ],
    ),
    "a leaf or node missing or None": (lambda node: True, [lambda node: ABSENT, lambda node: None]),
    "a node that was not there": (
        lambda node: isinstance(node, dict),
        [lambda node: {**node, "other": np.ones(3)}],
    ),
    "text, a dict or a list for a leaf": (
        _is_number,
        [lambda leaf: "1.0", lambda leaf: {"other": leaf}, lambda leaf: [leaf, leaf]],
    ),
    "a number for a node": (lambda node: isinstance(node, dict) and bool(node), [lambda node: np.float32(1)]),
    "2,000 dicts, one in the other": (
        _is_number,
        [lambda leaf: functools.reduce(lambda inner, _: {"a": inner}, range(2000), leaf)],
    ),
}


def states(kinds: Iterable[str] = STATES) -> list[Row]:
    """Every leaf and node of saved states, damaged one at a time, and restored with `check=True`."""
    rows = {name: Row(f"a saved state: {name}", "refused, naming the leaf") for name in DAMAGE}
    for kind in kinds:
        template, saved = _saved(kind)
        whole = jmpp.restore_state(template, saved, check=True)
        for (damage, (applies, changes)), (path, node) in itertools.product(DAMAGE.items(), _places(saved)):
            for number, change in enumerate(changes if applies(node) else ()):
                damaged = _put(saved, path, change(node))
                run = f"{kind}, {'/'.join(path)}, {number}"
                _restore(rows[damage], run, template, damaged, whole, path)
    return [*rows.values(), _let_in()]


def _in_time(begin: float) -> dict[str, bool]:
    return {"within a second": time.perf_counter() - begin < 1}


def _restore(row: Row, run: str, template: Any, damaged: Any, whole: Any, path: tuple[str, ...]) -> None:
    begin = time.perf_counter()
    try:
        restored = jmpp.restore_state(template, damaged, check=True)
    except (TypeError, ValueError) as error:
        held = {"the message names the place": path[-1] in str(error) or path[-2:][0] in str(error)}
        row.count(run, held | _in_time(begin), refused=True)
        return
    held = _in_time(begin)
    different = [
        names
        for names, new, old in zip(
            _names(whole), jax.tree.leaves(restored), jax.tree.leaves(whole), strict=True
        )
        if not steps.same(new, old)
    ]
    fresh = dict(zip(_names(template), jax.tree.leaves(template), strict=True))
    now = dict(zip(_names(whole), jax.tree.leaves(restored), strict=True))
    # Magnitudes of the last gradients are for `metrics`, and replaced in the next step.
    held["only what loss scaling adds is new"] = all(
        "gradients" in names or (OURS & set(names) and steps.same(now[names], fresh[names]))
        for names in different
    )
    row.count(run, held)


def _names(tree: Any) -> list[tuple[str, ...]]:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return [tuple(jax.tree_util.keystr((key,), simple=True) for key in path) for path, _ in paths]


def _let_in() -> Row:
    """A loss scale damaged after it was restored: it recovers, or `check` ends the run."""
    row = Row("a loss scale that became NaN, inf, 0, -8 or 2^100", "recovers, or `check` raises at once")
    for (kind, scale), bad in itertools.product(SCALES.items(), (np.nan, np.inf, 0.0, -8.0, 2.0**100)):
        tx = jmpp.loss_scaled(optax.sgd(0.1), scale)
        step = jax.jit(functools.partial(steps.taken, tx, lambda p: jnp.sum((p - 2) ** 2)))
        leaf = {"log2_scale" if kind == "pid" else "loss_scale": jnp.float32(bad)}
        params, state = jnp.ones(3), tx.init(jnp.ones(3))
        state = state._replace(loss_scale=flax.serialization.from_state_dict(state.loss_scale, leaf))
        try:
            for _ in range(60):
                _, params, state = step(params, state)
                jmpp.check(state)
        except jmpp.LossScaleStuckError as error:
            row.count(f"{kind}, {bad}", {"names the cause": "damaged checkpoint" in str(error)}, refused=True)
        else:
            row.count(f"{kind}, {bad}", {"trained": bool(jnp.abs(params - 2).max() < 1e-3)})
    return row


CONFIGS: list[dict[str, Any]] = [
    {
        "policy": "fp16",
        "rules": [["**/head", "fp32"], ["flax.linen:Embed", {"compute": "bf16", "output": "f32"}]],
        "keep_module_dtypes": False,
        "float32_islands": True,
        "keep_small_inputs": "yes",
        "loss_scale": jmpp.DynamicLossScale(1024.0).to_dict(),
    },
    {"policy": "bf16", "loss_scale": {"a": jmpp.StatisticLossScale().to_dict(), "b": {"type": "none"}}},
    {"policy": {"p": "f32", "c": "bf16", "g": "f32"}, "loss_scale": jmpp.PIDLossScale().to_dict()},
    {"params": "float32", "compute": "bfloat16", "output": "float32", "recipe": "fp8_current"},
    {"policy": "p=f32, c=f16, o=f32", "rules": {"head": "no"}, "loss_scale": 128},
]
DEEP: Any = functools.reduce(lambda inner, _: [inner], range(3000), "float32")
CYCLIC: list[Any] = []
CYCLIC.append(CYCLIC)
ODD: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        0.5,
        2**31,
        10**400,
        10**5000,
        math.nan,
        math.inf,
        "",
        " ",
        "nan",
        "1e400",
    ),
    *("false", "maybe", "f8", "e", ">f2", "fp61", "fp16,output=f32", "mixed_float16,,", "{", "x" * 10_000),
    *(
        [],
        [[]],
        {},
        {"a": 1},
        {"type": "dynamc"},
        b"fp16",
        object(),
        DEEP,
        CYCLIC,
        {1: 2},
        jnp.ones(2),
        "no:such",
    ),
]
_FLAGS = ("keep_module_dtypes", "float32_islands", "keep_small_inputs")
_NO_NUMBER = (bool, dict, list, type(None), bytes)


def configs(most: int | None = None) -> list[Row]:
    """Every value of some configs replaced by odd ones, every key misspelt, every text cut off."""
    values = Row(
        f"a value of a config replaced by one of {len(ODD)} odd ones", "refused, naming key or value"
    )
    keys = Row("a key of a config misspelt", "refused, naming the key")
    cut = Row("a config in JSON that ends too early", "refused")
    chance = random.Random(0)
    found = [(base, path, odd) for base in CONFIGS for path, _ in _places(base) for odd in ODD]
    for base, path, odd in found if most is None else chance.sample(found, most):
        _read(values, _put(base, path, odd), path, odd)
    for base in CONFIGS:
        for path, node in _places(base):
            key = path[-1]
            if isinstance(key, str) and re.fullmatch(r"[a-z_]{4,}", key) and path[:-1] != ("rules",):
                wrong = (*path[:-1], key[:2] + key[3:])
                _read(keys, _put(_put(base, path, ABSENT), wrong, node), wrong[-1:], ABSENT)
        text = json.dumps(base)
        ends = range(1, len(text)) if most is None else chance.sample(range(1, len(text)), 5)
        for end in ends:
            _read(cut, text[:end], (), None)
    return [values, keys, cut]


def _read(row: Row, settings: Any, path: tuple[Any, ...], odd: Any) -> None:
    run = f"{'/'.join(map(str, path))}: {_short(odd)}" if path else _short(settings)
    begin = time.perf_counter()
    try:
        precision = jmpp.from_config(settings)
        again = jmpp.from_config(json.loads(json.dumps(precision.to_dict())))
    except (TypeError, ValueError) as error:
        keys = [str(key) for key in path]
        names = [*keys, *[key.replace("_", " ").rstrip("s") for key in keys], _short(odd)[:12], "dynamc"]
        held = {"names the place": not path or any(name in str(error) for name in names)}
        row.count(run, held | _in_time(begin), refused=True)
        return
    except BaseException as error:  # Of another kind: that is what is looked for.
        row.count(run, {type(error).__name__: False})
        return
    held = _in_time(begin) | {"there and back": again == precision}
    key = path[-1] if path else ""
    if key in _FLAGS:
        held["a flag"] = isinstance(odd, bool) or odd == "false"
    elif isinstance(key, str) and isinstance(odd, _NO_NUMBER) and "loss_scale" in path[:-1] and key != "type":
        held["a number"] = path[-2:-1] == ("loss_scale",) and key in "ab"  # A scale of one of several losses.
    row.count(run, held)


def _short(value: Any) -> str:
    try:
        return repr(value)[:60]
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__}"


def patterns(most: int = 20_000) -> list[Row]:
    """Random globs against random paths, and rules that match nothing."""
    random_ones = Row("a random glob of up to 60 parts and a path", "matches as its definition says")
    chance = random.Random(1)
    parts = [
        "**",
        "**",
        "*",
        "?",
        "a*",
        "*a*a*a*a*a*b",
        "[ab]",
        "[!a]",
        "[",
        "]",
        "!",
        "a",
        "b",
        "ab",
        "\\",
        "é",
        "",
    ]
    names = ["a", "b", "ab", "a" * 40, "[", "é", "layer_0"]
    for _ in range(most):
        glob = "/".join(chance.choices(parts, k=chance.randint(0, 60 if chance.random() < 0.2 else 5)))
        path = "/".join(chance.choices(names, k=chance.randint(0, 30 if chance.random() < 0.2 else 5)))
        begin = time.perf_counter()
        found = jmpp.PolicyMap("float32", {glob: "bfloat16"}).match(path) == 0
        held = _in_time(begin)
        random_ones.count(
            f"{glob!r}, {path!r}", held | {"by definition": found == _by_definition(glob, path)}
        )
    kinds = Row("a pattern that is none (None, 5, bytes, a regular expression, ...)", "refused")
    for odd in (
        None,
        5,
        1.5,
        b"head",
        ["head"],
        re.compile("head"),
        object(),
        lambda path: True,
        lambda: True,
    ):
        try:
            jmpp.PolicyMap("float32", [(odd, "bfloat16")])
        except TypeError as error:
            kinds.count(repr(odd), {"says what a pattern is": "PolicyMap" in str(error)}, refused=True)
        else:
            kinds.count(repr(odd), {"refused": False})
    unused = Row("a rule for a path that is misspelt", "refused, naming the real path")
    for real in ("Dense_0", "BatchNorm_0", "Dense_1"):
        for i in range(len(real) - 2):
            wrong = real[:i] + real[i + 1 :]
            model = jmpp.wrap(steps.LinenNet(), jmpp.PolicyMap("mixed_float16", {wrong: "float32"}))
            try:
                jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, 8)))
            except ValueError as error:
                held = {"names both": repr(wrong) in str(error) and repr(real) in str(error)}
                unused.count(wrong, held, refused=True)
            else:
                unused.count(wrong, {"refused": False})
    return [random_ones, kinds, unused]


def _by_definition(glob: str, path: str) -> bool:
    parts, names = ([name for name in text.split("/") if name] for text in (glob, path))

    @functools.cache
    def fits(at: int, place: int) -> bool:
        if at == len(parts):
            return place == len(names)
        if parts[at] == "**":
            return fits(at + 1, place) or (place < len(names) and fits(at, place + 1))
        return place < len(names) and fnmatch.fnmatchcase(names[place], parts[at]) and fits(at + 1, place + 1)

    return fits(0, 0)
