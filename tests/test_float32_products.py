"""Half precision that silently isn't: a product with an uncast parameter is warned of, once, and no other."""

import functools
import inspect
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import products
from jax import lax
from nnx_helpers import stored

import jmp_policy as jmpp

X = jnp.linspace(-1, 1, 24).reshape(3, 8)
W = jnp.linspace(-1, 1, 64).reshape(8, 8)
MIXED = "mixed_float16"
HALF = {("dot_general", "float16", "float16")}


def silent(f, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return jax.make_jaxpr(f)(*args)


def warned(f, *args, path, times=1):
    """Traces a function anew several times, and checks the one warning that it draws."""
    with pytest.warns(UserWarning, match=f"{re.escape(repr(path))}.* is used there as it is stored") as found:
        [jax.make_jaxpr(lambda *args: f(*args))(*args) for _ in range(times)]
    (one,) = found
    line = re.search(r"The product at test_float32_products.py:(\d+) ", str(one.message))
    assert (one.filename, one.lineno) == (__file__, int(line.group(1)))
    return one


# Linen


class Product(nn.Module):
    @nn.compact
    def __call__(self, w):
        return w @ w


class Net(nn.Module):
    """Makes a parameter, and reads it again in another way."""

    read: object

    @nn.compact
    def __call__(self, x):
        if self.is_initializing():
            assert "kernel" not in self.variables.get("params", {})  # Looking is free.
        self.param("kernel", nn.initializers.lecun_normal(), (8, 8))
        child = nn.Dense(8, name="child", use_bias=False)
        return x @ self.read(self, child, child(x))


def net(read, policy=MIXED):
    model = jmpp.wrap(Net(read), policy)
    return model, model.init(jax.random.key(0), X)


GOVERNED = {
    "get_variable": lambda self, child, h: self.get_variable("params", "kernel"),
    "apply": lambda self, child, h: nn.Dense(8, use_bias=False).apply(
        {"params": {"kernel": child.variables["params"]["kernel"].T}}, h.T[:, :3] @ h[:3]
    ),
    "other collections": lambda self, child, h: (h.T @ h) * (1 + ("cache" in self.variables)),
    "by name": lambda self, child, h: h.T @ h * len(self.variables.get("batch_stats", ())),
    "cast": lambda self, child, h: self.variables["params"]["kernel"].astype(h.dtype),
    "cast after moves": lambda self, child, h: self.variables["params"]["kernel"].T[::-1].astype(h.dtype),
}


@pytest.mark.parametrize("read", GOVERNED.values(), ids=GOVERNED)
def test_products_that_are_half_draw_no_warning(read):
    model, variables = net(read)
    assert set(products(model.apply, variables, X)) == HALF
    silent(model.apply, variables, X)


class Tied(nn.Module):
    """A head that runs a layer on a table, as those of language models do."""

    @nn.compact
    def __call__(self, h, table):
        return nn.Dense(8, use_bias=False).apply({"params": {"kernel": table}}, h)


class Reads(nn.Module):
    """Reads all parameters, for something that is no product of data with them."""

    use: object

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(8, name="body")(x)
        return h if self.is_initializing() else self.use(self, h)


def decay(module):
    return sum((p**2).sum() for p in jax.tree.leaves(module.variables["params"]))


def gram(module):
    kernel = module.variables["params"]["body"]["kernel"]
    return jnp.sum((0.5 * kernel.T @ kernel - jnp.eye(8)) ** 2)


HARMLESS = {
    "counted": lambda m, h: h / sum(p.size for p in jax.tree.leaves(m.variables["params"])),
    "decay": lambda m, h: (h, decay(m)),
    "another module": lambda m, h: (h, Product(name="product")(m.variables["params"]["body"]["kernel"])),
    "sown decay": lambda m, h: (m.sow("losses", "decay", decay(m)), h)[1],
    "orthogonality": lambda m, h: (h, gram(m)),
    "bias of a later layer": lambda m, h: nn.Dense(8)(h + m.variables["params"]["body"]["bias"]),
    "checkpointed head": lambda m, h: nn.remat(Tied)()(h, m.variables["params"]["body"]["kernel"]),
    "transposed": lambda m, h: Tied()(h, m.variables["params"]["body"]["kernel"].T),
    "float32 on purpose": lambda m, h: h.astype(jnp.float32) @ m.variables["params"]["body"]["kernel"],
}


@pytest.mark.parametrize("use", HARMLESS.values(), ids=HARMLESS)
def test_float32_values_of_which_no_product_of_data_comes_draw_no_warning(use):
    model = jmpp.wrap(Reads(use), MIXED)
    variables = jmpp.wrap(Reads(lambda m, h: nn.Dense(8)(h)), MIXED).init(jax.random.key(0), X)
    variables = {"params": {"Dense_0": variables["params"]["body"], **variables["params"]}}
    silent(lambda v: model.apply(v, X, mutable=["losses"]), variables)


LOSING = {
    "scope": ("kernel", lambda self, child, h: self.scope.get_variable("params", "kernel")),
    "child's scope": ("child/kernel", lambda self, child, h: child.scope.get_variable("params", "kernel")),
    "own": ("kernel", lambda self, child, h: self.variables["params"]["kernel"]),
    "child's": ("child/kernel", lambda self, child, h: child.variables["params"]["kernel"]),
    "moved": ("kernel", lambda self, child, h: self.variables["params"]["kernel"].T[::-1].reshape(8, 8)),
    "scaled": ("kernel", lambda self, child, h: 0.5 * self.variables["params"]["kernel"] / jnp.sqrt(2.0)),
    "masked": ("kernel", lambda self, child, h: jnp.where(W > 0, self.variables["params"]["kernel"], 0.0)),
}


@pytest.mark.parametrize(("path", "read"), LOSING.values(), ids=LOSING)
def test_products_with_uncast_parameters_draw_one_warning(path, read):
    model, variables = net(read)
    found = warned(model.apply, variables, X, path=path, times=2)
    assert "get_variable" in str(found.message)
    model, variables = net(read, "float32")
    assert set(products(model.apply, variables, X)) == {("dot_general", "float32", "float32")}
    model, variables = net(read, jmpp.PolicyMap(MIXED, {Net: "float32"}))
    silent(model.apply, variables, X)


class Experts(nn.Module):
    """A layer of experts that own arrays multiply, of the tokens that a one-hot mask sends to each."""

    cast: object = staticmethod(lambda tokens, like: tokens)

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (2, 8, 16))
        scale = self.param("scale", nn.initializers.ones, (16,))
        mask = jax.nn.one_hot(jnp.arange(3) % 2, 2)[..., None]  # float32
        tokens = jnp.einsum("tec,td->ecd", mask * jnp.ones(4), x)
        return jnp.einsum("ecd,edf->ecf", self.cast(tokens, kernel), kernel * scale).sum()


def test_half_parameters_that_meet_float32_data_draw_one_warning():
    """The mask makes the tokens float32, and they the product with the kernel."""
    for policy in (MIXED, "bfloat16"):
        model = jmpp.wrap(Experts(), policy)
        variables = model.init(jax.random.key(0), X)
        with pytest.warns(
            UserWarning, match=r"'kernel' is half there and meets float32 values\. Cast those"
        ) as w:
            jax.make_jaxpr(jax.grad(model.apply))(variables, X)
        assert len(w) == 1
    for cast in (
        lambda tokens, like: tokens.astype(like.dtype),
        lambda tokens, like: tokens.astype("float16"),
    ):
        silent(jmpp.wrap(Experts(cast), MIXED).apply, variables, X)
    silent(jmpp.wrap(Experts(), jmpp.PolicyMap("float32")).apply, variables, X)


class OnPurpose(nn.Module):
    """A router, a norm and a basis that meet a half parameter in float32 since the code says so."""

    compute: object

    @nn.compact
    def __call__(self, x):
        return self.compute(x, self.param("kernel", nn.initializers.lecun_normal(), (8, 8)))


ON_PURPOSE = {
    "data": lambda x, w: x.astype(jnp.float32) @ w,
    "parameter": lambda x, w: x @ w.astype(jnp.float32),
    "norm": lambda x, w: (lambda h: h / jnp.sqrt(jnp.mean(h**2, -1, keepdims=True)))(x.astype("float32")) @ w,
    "few terms": lambda x, w: jax.random.normal(jax.random.key(0), (3, 4)) @ w[:4],
    "no data": lambda x, w: (x @ w, jnp.sum((w.T @ w - jnp.eye(8)) ** 2)),
    "later half": lambda x, w: (jnp.ones(8) * x).astype(w.dtype) @ w,
    "bias": lambda x, w: jnp.ones((3, 8)) + w[0],
}


@pytest.mark.parametrize("compute", ON_PURPOSE.values(), ids=ON_PURPOSE)
def test_half_parameters_that_are_meant_to_meet_float32_draw_no_warning(compute):
    model = jmpp.wrap(OnPurpose(compute), MIXED)
    silent(model.apply, model.init(jax.random.key(0), X), X)


class NNXData(nnx.Module):
    def __init__(self, compute):
        self.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.island = nnx.Linear(8, 8, rngs=nnx.Rngs(1))
        self.compute = compute

    def __call__(self, x):
        return self.compute(self.layer(x), self.island)


class Data(nn.Module):
    """Multiplies what a layer returns with other data."""

    compute: object

    @nn.compact
    def __call__(self, x):
        island = nn.Dense(8, name="island")
        island(x)
        return self.compute(nn.Dense(8, name="layer")(x), island)


def outer_sums(h, island):
    sums, _ = lax.scan(lambda c, row: (c + row[:, None] * row, None), jnp.zeros((8, 8)), h)
    return h @ sums


DATA = {
    "made there": lambda h, island: h @ jnp.ones((8, 8)),
    "scaled by NumPy": lambda h, island: (h * (1 / np.sqrt(8))) @ h.T,
    "a noise": lambda h, island: (h + jax.random.normal(jax.random.key(0), h.shape)) @ jnp.tanh(h).T,
    "two dtypes": lambda h, island: lax.dot_general(h, jnp.ones((8, 4)), (((1,), (0,)), ((), ()))),
    "a carry": outer_sums,
    "later": lambda h, island: jax.nn.softmax(2 * (h * np.float32(2))) @ h.T,
}
MEANT = {
    "cast by name": lambda h, island: h.astype(jnp.float32) @ jnp.ones((8, 8)),
    "of a float32 module": lambda h, island: h @ jnp.tanh(island(h)).T,
    "of a float32 module alone": lambda h, island: island(jnp.ones((8, 8))) @ island(h).T,
    "no half value": lambda h, island: (h, jnp.ones((8, 8)) @ jnp.eye(8)),
    "half again": lambda h, island: (h * np.float32(2)).astype(h.dtype) @ h.T,
    "few terms": lambda h, island: (h * np.float32(2))[:, :4] @ h[:, :4].T,
    "a number": lambda h, island: (h * float(1 / np.sqrt(8)) * 2) @ h.T,
    "few of the FLOPs": lambda h, island: (h, (h * np.float32(2))[:1] @ jnp.ones((8, 1))),
    "the next layer casts": lambda h, island: island(h * np.float32(2)),
}


def in_linen(compute, policy):
    model = jmpp.wrap(Data(compute), policy)
    return functools.partial(model.apply, model.init(jax.random.key(0), X))


def in_nnx(compute, policy):
    return jmpp.wrap(NNXData(compute), policy)


@pytest.mark.parametrize("model", [in_linen, in_nnx])
@pytest.mark.parametrize("compute", DATA.values(), ids=DATA)
def test_half_data_that_meets_float32_data_draws_one_warning(compute, model):
    call = model(compute, jmpp.PolicyMap(MIXED, {"island": "float32"}))
    with pytest.warns(UserWarning, match="although the policy says half.*half values meet float32") as found:
        [jax.make_jaxpr(lambda x: call(x))(X) for _ in range(2)]
    (one,) = found
    assert one.filename == __file__
    assert "NumPy numbers, as np.sqrt(2), by float" in str(one.message)
    silent(model(compute, "float32"), X)


@pytest.mark.parametrize("model", [in_linen, in_nnx])
@pytest.mark.parametrize("compute", MEANT.values(), ids=MEANT)
def test_data_that_is_meant_to_be_float32_draws_no_warning(compute, model):
    silent(model(compute, jmpp.PolicyMap(MIXED, {"island": "float32"})), X)


def test_the_line_where_half_data_became_float32():
    class Late(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(8)(x)
            scaled = h * np.float32(2)
            return jnp.tanh(scaled) @ h.T

    start = inspect.getsourcelines(Late.__call__)[1]
    model = jmpp.wrap(Late(), MIXED)
    variables = model.init(jax.random.key(0), X)
    where = rf":{start + 4} \(.*meet float32 values at test_float32_products.py:{start + 3} "
    with pytest.warns(UserWarning, match=where):
        jax.make_jaxpr(model.apply)(variables, X)


def loss(apply):
    return lambda v, x: apply(v, x).sum()


def in_scan(apply):
    return lambda v, x: lax.scan(lambda total, x: (total + apply(v, x).sum(), None), 0.0, x[None])[0]


TRANSFORMS = {
    "grad": lambda apply: jax.grad(loss(apply)),
    "jit": jax.jit,
    "jit of grad": lambda apply: jax.jit(jax.grad(loss(apply))),
    "hessian-vector": lambda apply: lambda v, x: jax.jvp(lambda v: jax.grad(loss(apply))(v, x), [v], [v]),
    "scan": in_scan,
    "grad of scan": lambda apply: jax.grad(in_scan(apply)),
    "cond": lambda apply: lambda v, x: lax.cond(x.sum() > 0, apply, lambda v, x: x, v, x),
    "while": lambda apply: lambda v, x: lax.fori_loop(0, 3, lambda _, x: apply(v, x), x),
    "remat": jax.checkpoint,
    "grad of remat": lambda apply: jax.grad(loss(jax.checkpoint(apply))),
    "vmap": lambda apply: lambda v, x: jax.vmap(apply, (None, 0))(v, x[None]),
    "vmap over parameters": lambda apply: (
        lambda v, x: jax.vmap(apply, (0, None))(jax.tree.map(lambda p: p[None], v), x)
    ),
    "closed over": lambda apply: lambda v, x: jax.jit(lambda x: apply(v, x))(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_models_under_transforms(transform):
    model, variables = net(LOSING["own"][1])
    warned(transform(model.apply), variables, X, path="kernel")
    model, variables = net(GOVERNED["get_variable"])
    silent(transform(model.apply), variables, X)


def test_parameters_that_are_constants_of_the_program():
    model, variables = net(LOSING["own"][1])
    warned(lambda x: model.apply(variables, x), X, path="kernel")


class Lifted(nn.Module):
    """Runs a module under a transform of Flax, which multiplies with an uncast parameter."""

    make: object

    @nn.compact
    def __call__(self, x):
        return self.make(LOSING["own"][1])(x)


class Loop(nn.Module):
    read: object

    @nn.compact
    def __call__(self, x):
        body = Net(self.read, name="net")
        if self.is_initializing():
            return body(x)
        return nn.scan(lambda body, x, _: (body(x), None), variable_broadcast="params", length=2)(
            body, x, None
        )[0]


LIFTS = {
    "plain": ("net/kernel", lambda read: Net(read, name="net")),
    "remat": ("net/kernel", lambda read: nn.remat(Net)(read, name="net")),
    "jit": ("net/kernel", lambda read: nn.jit(Net)(read, name="net")),
    "scan": ("loop/net/kernel", lambda read: Loop(read, name="loop")),
    "wrapped": ("net/kernel", lambda read: jmpp.wrap(Net(read, name="net"), MIXED)),
}


@pytest.mark.parametrize(("path", "make"), LIFTS.values(), ids=LIFTS)
def test_modules_inside_of_a_model(path, make):
    model = jmpp.wrap(Lifted(make), "mixed_bfloat16")
    variables = model.init(jax.random.key(0), X)
    warned(jax.grad(loss(model.apply)), variables, X, path=path)


def test_other_ways_into_a_policy():
    bare = Net(LOSING["own"][1])
    variables = bare.init(jax.random.key(0), X)
    with jmpp.linen.intercept(MIXED):
        warned(lambda v, x: bare.apply(v, x), variables, X, path="kernel")
    model, _ = net(LOSING["own"][1])
    warned(lambda v, x: model.bind(v)(x), variables, X, path="kernel")
    silent(lambda v, x: bare.apply(v, x), variables, X)
    weights = jmpp.wrap(bare, "params=float32, compute=float16, output=float32, grad=float32")
    warned(jax.grad(loss(weights.apply)), variables, X, path="kernel")


def test_collections_that_are_no_parameters():
    class Frozen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.variable("frozen", "kernel", lambda: W).value

    model = jmpp.wrap(Frozen(), MIXED)
    variables = model.init(jax.random.key(0), X)
    found = warned(model.apply, variables, X, path="kernel of frozen")
    assert "cast anything else" in str(found.message)


class Siblings(nn.Module):
    """A head that multiplies with the table of the embedding next to it."""

    def setup(self):
        self.embed, self.head = nn.Embed(8, 8), Product2()

    def __call__(self, x):
        h = self.embed(jnp.zeros(3, int))
        return self.head(h, self.embed.variables["params"]["embedding"])


class Product2(nn.Module):
    def __call__(self, h, table):
        return h @ table.T


def test_float32_rules_and_wishes_say_that_it_is_meant():
    rules = jmpp.PolicyMap(MIXED, {"head": "float32"})
    model = jmpp.wrap(Siblings(), rules)
    variables = model.init(jax.random.key(0), X)
    silent(model.apply, variables, X)
    silent(jmpp.wrap(Siblings(), jmpp.PolicyMap(MIXED, {"embed": "float32"})).apply, variables, X)

    class Wish(Net):
        dtype: object = jnp.float32

    read = LOSING["own"][1]
    keeps = jmpp.PolicyMap(MIXED, keep_module_dtypes=True)
    model = jmpp.wrap(Wish(read), keeps)
    silent(model.apply, model.init(jax.random.key(0), X), X)


def test_variables_are_those_of_the_bare_module():
    found = []

    class Looks(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8)(x)
            found.append(self.variables)
            return x

    model = jmpp.wrap(Looks(), MIXED)
    variables = model.init(jax.random.key(0), X)
    model.apply(variables, X)
    assert jax.tree.map(lambda a, b: a is b, found[-1], variables) == jax.tree.map(lambda _: True, variables)


# NNX


def call(model, x):
    return model(x)


class Model(nnx.Module):
    def __init__(self, *blocks):
        self.blocks = nnx.List(blocks)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Array(nnx.Module):
    def __init__(self):
        self.w, self.table, self.key = jnp.ones((8, 8)), jnp.arange(8), jax.random.key(0)

    def __call__(self, x):
        assert (self.table.dtype, self.key.shape) == (jnp.int32, ())
        return x @ self.w


class Arrays(nnx.Module):
    def __init__(self):
        self.w = nnx.List([jnp.ones((8, 8))])

    def __call__(self, x):
        return x @ self.w[0]


class Dictionary(nnx.Module):
    def __init__(self):
        self.w = nnx.data({"a": [jnp.ones((8, 8))]})

    def __call__(self, x):
        return x @ self.w["a"][0]


class Param(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((8, 8)))


class Vars(Param):
    def __call__(self, x):
        return x @ vars(self)["w"]


class State(Param):
    def __call__(self, x):
        return x @ nnx.state(self)["w"][...]


class Graph(Param):
    def __call__(self, x):
        for _, value in nnx.iter_graph(self):
            x = x @ value if isinstance(value, nnx.Param) else x
        return x


def stored_value():
    """Takes the parameter of the module that calls, as libraries do that intercept products."""
    module = inspect.currentframe().f_back.f_locals["self"]
    return module.w.get_raw_value()


class Stored(Param):
    def __call__(self, x):
        return x @ stored_value()


class Constant(nnx.Module):
    """A weight that is not trained."""

    def __init__(self):
        self.w = nnx.Variable(jnp.ones((8, 8)))

    def __call__(self, x):
        return x @ self.w


class Head(nnx.Module):
    """Multiplies with the table of the embedding that the model has, too."""

    def __init__(self, embed):
        self.embed = embed

    def __call__(self, h):
        return h @ self.embed.embedding[:].T


class Language(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(8, 8, rngs=nnx.Rngs(0))
        self.head = Head(self.embed)

    def __call__(self, x):
        return self.head(self.embed(jnp.zeros(x.shape[0], int)))


class Rows(Language):
    """Looks rows up past the layer; the product that they get into is with a half weight."""

    def __init__(self):
        super().__init__()
        self.out = nnx.Param(jnp.ones((8, 8)))

    def __call__(self, x):
        return self.embed.embedding[jnp.zeros(x.shape[0], int)] @ self.out


class Shifted(Constant):
    def __call__(self, x):
        return (x.astype(jnp.float16) + self.w[0]) @ jnp.ones((8, 8), jnp.float16)


UNCAST = {
    "array": ("w", Array),
    "arrays": ("w/0", Arrays),
    "arrays in a dict": ("w/a/0", Dictionary),
    "vars": ("w", Vars),
    "state": ("w", State),
    "graph": ("w", Graph),
    "stored value": ("w", Stored),
    "variable": ("w", Constant),
    "another module": ("embed/embedding", Language),
    "rows": ("embed/embedding", Rows),
    "added": ("w", Shifted),
}


@pytest.mark.parametrize(("path", "make"), UNCAST.values(), ids=UNCAST)
def test_weights_that_are_used_as_they_are_stored(path, make):
    model = jmpp.wrap(Model(make(), make()), MIXED)
    split = nnx.split(model)
    warned(lambda state, x: nnx.merge(split[0], state)(x), split[1], X, path=f"blocks/0/{path}")
    for policy in ("float32", jmpp.PolicyMap(MIXED, {"blocks/*": "float32"})):
        graph, state = nnx.split(jmpp.wrap(Model(make()), policy))
        silent(lambda state, x, graph=graph: nnx.merge(graph, state)(x), state, X)


class Harmless(nnx.Module):
    def __init__(self):
        self.w, self.table = nnx.Param(jnp.ones((8, 8))), jnp.ones(8)
        self.linear, self.norm = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(0))
        self.embed, self.constant = nnx.Embed(8, 8, rngs=nnx.Rngs(0)), nnx.Variable(jnp.ones((8, 8)))

    def __call__(self, x):
        assert len([v for v in vars(self).values() if isinstance(v, nnx.Module)]) == 3
        assert len(jax.tree.leaves(nnx.state(self, nnx.Param))) == 6
        x = nnx.remat(lambda self, x: self.norm(self.linear(x)))(self, x)
        x = self.linear(x + self.table) + x @ self.embed.embedding[...].T.astype(x.dtype)
        x = x.astype(jnp.float32) @ self.constant  # A product that is float32 on purpose.
        return ((x.astype(jnp.float16) @ self.w).astype(jnp.float32) * self.table).astype(jnp.float16)


@pytest.mark.slow
def test_reads_that_do_no_harm():
    model = jmpp.wrap(Harmless(), MIXED)
    assert model(X).dtype == jnp.float32
    silent(nnx.jit(call), model, X)


class Body(nnx.Module):
    def __init__(self):
        self.linear, self.w = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Param(jnp.ones((8, 8)))
        self.more = nnx.List([])

    def __call__(self, x):
        x = self.linear(x)
        for module in self.more:
            x = module(x)
        return x @ self.w


def adapter():
    return nnx.LoRALinear(8, 8, lora_rank=2, rngs=nnx.Rngs(0))


def adapted(lhs, kernel, *args, **kwargs):
    """What a library puts in place of the product of an `nnx.Linear` that it has put parameters into."""
    frame = inspect.currentframe()
    while not isinstance(module := frame.f_locals.get("self"), nnx.Linear):
        frame = frame.f_back
    return lhs @ kernel + lhs @ (module.kernel_a[...] @ module.kernel_b[...])


def put_in(linear):
    linear.dot_general = adapted
    linear.kernel_a, linear.kernel_b = nnx.LoRAParam(jnp.ones((8, 2))), nnx.LoRAParam(jnp.ones((2, 8)))


CHANGES = {
    "adapter": (lambda m: setattr(m, "linear", adapter()), "linear/kernel"),
    "module in a list": (lambda m: m.more.append(Body()), "more/0/linear/kernel"),
    "layer in a list": (lambda m: m.more.append(nnx.Linear(8, 8, rngs=nnx.Rngs(0))), "more/0/kernel"),
    "parameters": (lambda m: put_in(m.linear), "linear/kernel_a"),
}


@pytest.mark.parametrize(("change", "path"), CHANGES.values(), ids=CHANGES)
def test_what_is_put_in_after_wrap(change, path):
    model = jmpp.wrap(Model(Body()), MIXED)
    change(model.blocks[0])
    found = warned(nnx.jit(call), model, X, path=f"blocks/0/{path}")
    assert "when the model is wrapped again" in str(found.message)
    again = jmpp.wrap(model, MIXED)
    assert set(products(nnx.jit(call), again, X)) == HALF
    assert again.blocks[0].linear.kernel is model.blocks[0].linear.kernel
    assert stored(again) == {"float32"}


def loss_of(model, x):
    return model(x).sum()


def scan_over(model, x):
    return nnx.scan(lambda x, model: model(x), in_axes=(nnx.Carry, None), out_axes=nnx.Carry, length=2)(
        x, model
    )


NNX_TRANSFORMS = {
    "jit": nnx.jit(call),
    "grad": nnx.grad(loss_of),
    "jit of grad": nnx.jit(nnx.grad(loss_of)),
    "remat": nnx.remat(call),
    "grad of remat": nnx.grad(lambda model, x: nnx.remat(call)(model, x).sum()),
    "scan": scan_over,
    "vmap": nnx.vmap(call, in_axes=(None, 0)),
    "scaled gradient": lambda model, x: jmpp.nnx.scaled_value_and_grad(loss_of)(
        jmpp.NoOpLossScale(), model, x
    ),
}


@pytest.mark.parametrize("transform", NNX_TRANSFORMS.values(), ids=NNX_TRANSFORMS)
@pytest.mark.parametrize("policy", [MIXED, "params=float32, compute=float16, output=float32, grad=float32"])
def test_nnx_models_under_transforms(transform, policy):
    warned(transform, jmpp.wrap(Model(Constant()), policy), X, path="blocks/0/w")
    silent(transform, jmpp.wrap(Model(Body()), policy), X)


def test_wrapped_models_inside_of_others():
    inner = jmpp.wrap(Constant(), "mixed_bfloat16")
    warned(nnx.jit(call), Model(inner), X, path="w")


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="head")(nn.Dense(8, dtype=jnp.float32)(x))


class Bridge(nnx.Module):
    """Keeps a Linen module and its variables, which it collects in a way of its own."""

    def __init__(self, module, *args):
        self.linen = module
        variables = module.init(jax.random.key(0), *args)["params"]
        self.params = nnx.data(jax.tree.map(nnx.Param, variables))

    def __call__(self, *args):
        is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
        params = vars(self)["params"]
        params = jax.tree.map(lambda x: x.get_raw_value(), params, is_leaf=is_variable)
        return self.linen.apply({"params": params}, *args)


@pytest.mark.slow
def test_linen_modules_in_bridges_of_other_libraries():
    bare, both = Model(Bridge(Inner(), X)), HALF | {("dot_general", "float32", "float32")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(products(nnx.jit(call), jmpp.wrap(bare, MIXED), X)) == HALF
        rules = jmpp.PolicyMap(MIXED, {"**/head": "float32"})
        assert set(products(nnx.jit(call), jmpp.wrap(bare, rules), X)) == both
    assert set(products(nnx.jit(call), bare, X)) == both - HALF


class Untrained(Constant):
    def __init__(self, rngs):
        super().__init__()


def test_bridges_draw_one_warning():
    model = jmpp.wrap(Model(Bridge(Net(LOSING["own"][1]), X)), MIXED)
    warned(nnx.jit(call), model, X, path="kernel")
    model = jmpp.wrap(nnx.bridge.ToLinen(Untrained), MIXED)
    variables = model.init(jax.random.key(0), X)
    warned(model.apply, variables, X, path="w")
