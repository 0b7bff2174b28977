"""Private parts of JAX and Flax are checked at first use, and a user's file is never taken for theirs."""

import functools
import importlib.util
import inspect
import types
from typing import NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax._src import source_info_util
from jax.interpreters import mlir
from jax.sharding import AxisType

import jmp_policy as jmpp
from jmp_policy._src.flax import compat as flax_compat
from jmp_policy._src.jaxpr import compat

JAX = rf"jax 0\.10\.2 and 0\.12\.0 have it, and jax {jax.__version__}, which is installed.*[Ii]nstall"
FLAX = rf"flax 0\.12\.8 and 0\.12\.12 have it, and flax {flax.__version__}, which is installed.*[Ii]nstall"


@pytest.fixture(autouse=True)
def unchecked():
    """No part has been checked yet, nor is what a test has found kept."""

    def forget():
        for module in (compat, flax_compat):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()

    forget()
    yield
    forget()


class Frame(NamedTuple):
    """What could take the place of a scope in name stacks."""

    label: str

    def wrap(self, stack):
        stack.append(self.label)


def test_scopes_of_another_kind_are_no_silent_loss_of_markers(monkeypatch):
    def marked(x):
        with jmpp.region("off"):
            return x @ x

    monkeypatch.setattr(source_info_util, "Scope", Frame)
    with pytest.raises(RuntimeError, match=f"scopes and transforms.* name stack.*{JAX}"):
        jmpp.autocast(marked, "float16")(jnp.ones((2, 2)))


def test_transposition_that_leaves_no_name(monkeypatch):
    equations = jax.make_jaxpr(jax.grad(lambda x: jnp.sin(x) * x))(1.0).eqns
    assert any(map(compat.is_transposed, equations))
    assert not all(map(compat.is_transposed, equations))
    compat.checked.cache_clear()
    monkeypatch.setattr(source_info_util, "Transform", source_info_util.Scope)
    with pytest.raises(RuntimeError, match=f"name stack.*{JAX}"):
        compat.is_transposed(equations[-1])


def test_names_that_look_like_transforms_are_scopes():
    def f(x):
        with jax.named_scope("transpose(jvp(a))"), jax.named_scope("b"):
            return jnp.sin(x)

    (eqn,) = jax.make_jaxpr(f)(1.0).eqns
    assert compat.scopes(eqn) == ["transpose(jvp(a))", "b"]
    assert not compat.is_transposed(eqn)


@pytest.mark.parametrize("params", [{}, {"ft_in": None}, {"num_consts": 2, "num_carry": 1}])
def test_a_scan_whose_sizes_are_elsewhere(monkeypatch, params):
    f = lambda x: lax.scan(lambda c, _: (c * x[0], c), x, length=2)  # noqa: E731
    eqn = jax.make_jaxpr(f)(jnp.ones(2)).eqns[-1]
    assert compat.scan_sizes(eqn.params) == (1, 1)
    compat.checked.cache_clear()
    monkeypatch.setattr(compat, "_equation", lambda *_: types.SimpleNamespace(params=params))
    with pytest.raises(RuntimeError, match=f"`num_consts` or `ft_in`.*{JAX}"):
        compat.scan_sizes(eqn.params)


def test_checks_run_under_any_configuration_and_inside_other_traces():
    scan = jax.make_jaxpr(lambda x: lax.scan(lambda c, _: (c * 2, c), x, length=2))(1.0).eqns[-1]

    def inside(x):
        compat.checked.cache_clear()
        assert compat.scan_sizes(scan.params) == (0, 1)
        assert not compat.scopes(scan)
        assert len(compat._stack_entries()) == 2
        compat.program_being_traced()
        flax_compat.is_traced_by_loop(lambda frame: False)
        return x

    for run in (jax.jit, jax.grad, jax.vmap, jax.checkpoint, lambda f: lambda x: lax.map(f, x)):
        run(inside)(1.0 if run is jax.grad else jnp.ones(2))
    with jax.disable_jit(), jax.numpy_dtype_promotion("strict"), jax.debug_nans(True), jax.enable_x64(True):
        inside(1.0)


def test_a_program_whose_operations_are_elsewhere(monkeypatch):
    assert compat.program_being_traced() is None
    seen = []
    jax.jit(lambda x: (seen.append(compat.program_being_traced()), x * x)[1])(1.0)
    assert seen[0] is not None
    compat.checked.cache_clear()
    monkeypatch.setattr(compat, "recorded", lambda *_: [])
    with pytest.raises(RuntimeError, match=rf"`frame\.tracing_eqns`.*{JAX}"):
        compat.program_being_traced()


def test_axes_that_an_array_varies_over(monkeypatch):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    seen = []

    def local(x):
        seen.append((compat.varying(jax.typeof(x)), compat.varying(jax.eval_shape(jnp.sin, x))))
        return x

    jax.shard_map(local, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))(jnp.ones(2))
    assert seen[0] == (frozenset("d"), frozenset("d"))
    assert compat.varying(jax.typeof(jnp.ones(2))) == frozenset()
    monkeypatch.setattr(jax.core, "ShapedArray", types.SimpleNamespace)
    with pytest.raises(RuntimeError, match=rf"`manual_axis_type\.varying`.*{JAX}"):
        compat.varying(types.SimpleNamespace())


def test_what_a_lowering_rule_is_told(monkeypatch):
    monkeypatch.delattr(mlir, "ShardingContext")
    with pytest.raises(RuntimeError, match=rf"number of devices.*ShardingContext.*{JAX}"):
        jax.jit(jmpp.all_finite).lower({"w": jnp.ones(3)})


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (lambda: compat.manual_axes({}), "`newly_manual_axes` or `manual_axes`"),
        (lambda: compat.name_of(types.SimpleNamespace(params={"call_jaxpr": NAMELESS})), "func_name"),
    ],
)
def test_parameters_of_equations_that_are_gone(read, what):
    with pytest.raises(RuntimeError, match=f"{what}.*{JAX}"):
        read()


NAMELESS = types.SimpleNamespace(debug_info=None)


def wrap_new_class():
    """Wraps a class that no other test has wrapped: what `wrap` makes is kept."""
    return jmpp.wrap(type("New", (nn.Dense,), {})(2), "float16")


@pytest.mark.parametrize(
    ("owner", "name", "instead", "use", "what"),
    [
        (nn, "compact", lambda f: f, lambda: flax_compat.is_compact(print), "`compact`"),
        (nn.Dense, "__call__", print, wrap_new_class, "method_handler_wrapped"),
        (nnx.Variable, "__slots__", ("_value",), lambda: flax_compat.view_class(nnx.Param, {}), "_raw_value"),
        (inspect, "currentframe", lambda: None, lambda: flax_compat.is_traced_by_loop(print), "a loop"),
    ],
    ids=["compact", "managed", "slots", "frames"],
)
def test_marks_of_flax_that_are_gone(monkeypatch, owner, name, instead, use, what):
    monkeypatch.setattr(owner, name, instead)
    versions = JAX if owner is inspect else FLAX
    with pytest.raises(RuntimeError, match=f"{what}.*{versions}"):
        use()


def test_attributes_of_flax_that_are_gone():
    with pytest.raises(RuntimeError, match=f"_pytree__is_pytree.*{FLAX}"):
        flax_compat.register_node_class(type("Other", (), {}))


LOOPS = {
    "scan": lambda f, x: lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
    "while": lambda f, x: lax.while_loop(lambda x: x[0] < 0, f, x),
    "fori": lambda f, x: lax.fori_loop(0, 2, lambda _, x: f(x), x),
    "map": lambda f, x: lax.map(f, x),
    "nnx.scan": lambda f, x: nnx.scan(f, in_axes=nnx.Carry, out_axes=nnx.Carry, length=2)(x),
}
OTHERS = {
    "none": lambda f, x: f(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "cond": lambda f, x: lax.cond(x[0] > 0, f, f, x),
    "vmap": lambda f, x: jax.vmap(f)(x),
    "nnx.jit": lambda f, x: nnx.jit(f)(x),
}


@pytest.mark.parametrize(
    ("run", "expected"), [(f, f in LOOPS.values()) for f in (LOOPS | OTHERS).values()], ids=LOOPS | OTHERS
)
def test_loops_are_told_from_other_transforms(run, expected):
    found = []

    def body(x):
        found.append(flax_compat.is_traced_by_loop(lambda frame: frame.f_code is marker))
        return x

    marker = test_loops_are_told_from_other_transforms.__code__
    jax.jit(functools.partial(run, body))(jnp.ones(2))
    assert set(found) == {expected}


USERS_LOOPS = """
import jax.numpy as jnp
from flax import nnx

class Head(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.full((8, 8), 0.3))

    def __call__(self, x):
        return x @ self.w

class Net(nnx.Module):
    def __init__(self):
        self.head = Head()

    def __call__(self, x):
        out = nnx.jit(lambda head, x: head(x))(self.head, x)
        self.seen = out.dtype.name
        return out
"""


@pytest.mark.parametrize("name", ["loops", "other"])
def test_a_users_file_called_loops_is_no_loop(tmp_path, name):
    path = tmp_path / "jax" / "_src" / "lax" / "control_flow" / f"{name}.py"
    path.parent.mkdir(parents=True)
    path.write_text(USERS_LOOPS)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    net = jmpp.wrap(module.Net(), jmpp.PolicyMap("float32", {"head": "p=f32, c=f32, o=f16"}))
    net(np.ones((2, 8), np.float32))
    assert net.seen == "float16"


def test_a_class_with_a_setattr_of_its_own_keeps_the_originals():
    """What it makes of views is stored as the Variables themselves, in the dtype they have."""

    class Net(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(3))

        def __setattr__(self, name, value):
            if name == "parts":
                super().__setattr__("kept", nnx.data({"w": value}))
            super().__setattr__(name, nnx.Param(value) if isinstance(value, jax.Array) else value)

        def __call__(self, x):
            self.parts = self.w
            self.w = self.w[...] * 2
            return x * self.w

    model = jmpp.wrap(Net(), "mixed_float16")
    before = model.w
    model(jnp.ones(3))
    assert model.parts is before
    assert model.kept["w"] is before
    assert type(model.w) is nnx.Param
    assert (model.w.dtype, float(model.w[0])) == (jnp.float32, 2.0)
