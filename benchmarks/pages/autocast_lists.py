"""autocast's choices beside PyTorch's, by operation on its lists: what docs/results/autocast_lists.md shows.

PyTorch's lists are those of its wheel (torch_lists.py). Ours is what `explain` says of the same computation
in JAX, between two products, so that what it is given and what reads it is half.
"""

import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import jmp_policy as jmpp
from benchmarks.pages.markdown import folded
from benchmarks.table import load
from jmp_policy._src.jaxpr.op_table import HAVING, Trait

#: PyTorch's list -> names of its operations; the last are examples of those on none.
TORCH = {row["list"]: row["operations"] for row in load("torch_lists")["rows"]} | {
    "none": """cat stack where maximum add sub mul div square embedding sqrt sin cos atan erfc lgamma digamma
        argmax sort topk fft""",
}

#: What the lists do, in words of the table; those on none are computed in the dtype that they are given.
WORDS = {
    "half": "half",
    "float32": "float32",
    "refused": "an error",
    "widest": "widest operand's",
    "none": "as given",
}


class Group(NamedTuple):
    """Operations of PyTorch that are treated alike.

    Args:
      names: of one list.
      function: what they compute in JAX, of two half matrices and a float32 argument of the same shape.
      reason: why it is as it is here.
      note: what is special about the row, in words.
    """

    names: str
    function: Callable[[Any, Any, Any], Any]
    reason: str
    note: str = ""


def _convolved(x: Any, y: Any, p: Any) -> Any:
    return lax.conv(x.reshape(1, 16, 16), y.reshape(16, 16, 1), (1,), "SAME").reshape(16, 16)


def _normalized(x: Any, y: Any, p: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def _cross_entropy(x: Any, y: Any, p: Any) -> Any:
    return x * jnp.mean(-jnp.take_along_axis(jax.nn.log_softmax(x), jnp.arange(16)[:, None], 1))


def _attention(x: Any, y: Any, p: Any) -> Any:
    return jax.nn.softmax(x @ y.T) @ y


def _each(*functions: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y, p: sum(function(x) for function in functions)


_RANGE = "range, digits"
_SUMS = "half stops growing"
_PARTS = "operation by operation"
_ARGUMENT = "has a float32 argument"

GROUPS = (
    Group(
        """_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
        conv_transpose3d convolution""",
        _convolved,
        "Tensor Cores",
    ),
    Group(
        """addmm addmv matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul
        linalg_multi_dot""",
        lambda x, y, p: x @ y,
        "Tensor Cores",
    ),
    Group(
        "matmul einsum linear",
        lambda x, y, p: p[:, :3] @ p[:3],
        "no gain; often positions",
        "of 7 or fewer terms, in float32",
    ),
    Group("addr", lambda x, y, p: jnp.outer(p[0], p[1]), "a multiplication"),
    Group("scaled_dot_product_attention _scaled_dot_product_flash_attention", _attention, _PARTS),
    Group("prelu", lambda x, y, p: jnp.where(x > 0, x, p[0] * x), "follows"),
    Group(
        "_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
        lambda x, y, p: jnp.tanh(x @ y) * jax.nn.sigmoid(x @ y.T),
        "products and bounded functions",
    ),
    Group(
        "acos asin cosh erfinv exp expm1 log log10 log2 log1p rsqrt sinh tan",
        _each(jnp.exp, jnp.log, jnp.log10, lax.rsqrt, jnp.tan, jnp.arccos, lax.erf_inv),
        _RANGE,
    ),
    Group("reciprocal", lambda x, y, p: 1 / x, "range"),
    Group("pow", lambda x, y, p: x**y, _RANGE),
    Group("pow", lambda x, y, p: x**2, "float32 if only summed", "squares"),
    Group("pow", lambda x, y, p: x**3, "range", "other integers"),
    Group("softplus logsumexp", lambda x, y, p: jax.nn.softplus(x), _PARTS),
    Group("layer_norm native_layer_norm group_norm renorm", _normalized, _PARTS),
    Group(
        """norm frobenius_norm nuclear_norm linalg_vector_norm linalg_matrix_norm dist pdist cdist
        cosine_similarity""",
        lambda x, y, p: y * jnp.linalg.norm(x - y),
        _PARTS,
    ),
    Group(
        """poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
        smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
        triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits""",
        _cross_entropy,
        _PARTS,
    ),
    Group(
        """upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
        upsample_nearest3d _upsample_nearest_exact3d""",
        lambda x, y, p: jax.image.resize(x, (32, 32), "nearest")[::2, ::2],
        "its gradient is a sum",
    ),
    Group(
        """upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
        upsample_bicubic2d _upsample_bicubic2d_aa""",
        lambda x, y, p: jax.image.resize(x, (32, 32), "linear")[::2, ::2],
        "JAX asks for full precision",
    ),
    Group("prod cumprod cumsum sum", lambda x, y, p: x * jnp.cumsum(x.sum(-1)), _SUMS),
    Group("softmax log_softmax", lambda x, y, p: jax.nn.softmax(x), _PARTS),
    Group(
        "binary_cross_entropy",
        lambda x, y, p: -y * jnp.log(jax.nn.sigmoid(x)) - (1 - y) * jnp.log1p(-jax.nn.sigmoid(x)),
        "logarithms are float32; of logits it keeps more digits",
    ),
    Group("addcdiv", lambda x, y, p: x + p / y, _ARGUMENT),
    Group("addcmul", lambda x, y, p: x + p * y, _ARGUMENT),
    Group("atan2", lambda x, y, p: jnp.arctan2(x, y), "range"),
    Group("bilinear dot vdot tensordot", lambda x, y, p: jnp.tensordot(x, p, 1), "Tensor Cores"),
    Group("cross", lambda x, y, p: jnp.cross(x[:, :3], p[:, :3]) @ p[:3], _ARGUMENT),
    Group("grid_sampler", lambda x, y, p: x[jnp.floor(p).astype(int)[:, 0]] * (p - jnp.floor(p)), _ARGUMENT),
    Group("index_put scatter_add", lambda x, y, p: x.at[jnp.arange(4)].add(y[:4]), "sums of rows"),
    Group("cat stack", lambda x, y, p: jnp.concatenate([x, p])[:16], _ARGUMENT),
    Group("where maximum", lambda x, y, p: jnp.where(p > 0, jnp.maximum(x, p), p), _ARGUMENT),
    Group("add sub mul div", lambda x, y, p: (x + p) * y, _ARGUMENT),
    Group("add mul", lambda x, y, p: x * p[0] + p[0], "a bias or scale follows", "of a bias"),
    Group("div", lambda x, y, p: x / y, "range of its derivative", "of two half values"),
    Group("square", lambda x, y, p: jnp.square(x), "float32 if only summed"),
    Group("embedding", lambda x, y, p: p[jnp.arange(16)] - 1, "rounded where a product reads"),
    Group("sqrt", _each(jnp.sqrt), "variances"),
    Group("sin cos atan", _each(jnp.sin, jnp.cos, jnp.arctan), "positions"),
    Group("erfc lgamma digamma", _each(lax.erfc, lax.lgamma, lax.digamma), "range, digits"),
    Group("argmax sort topk", lambda x, y, p: x[jnp.argmax(x, 0)] + jnp.sort(x), "half makes ties"),
    Group("fft", lambda x, y, p: jnp.fft.fft(x).real, "JAX has none in half"),
)

#: Operations that compute nothing.
_MOVING = HAVING[Trait.MOVES] | {
    "convert_element_type",
    "concatenate",
    "stack",
    "custom_jvp_call",
    "jit",
    "iota",
}


def here(group: Group, half: str) -> str:
    """Dtypes in which autocast computes what a group does."""

    def between(x: Any, y: Any, w: Any, p: Any) -> Any:
        x, y = x @ w, y @ w
        with jax.named_scope("op"):
            made = group.function(x, y, p)
        return made @ w

    rows = jmpp.explain(between, half)(*[jnp.ones((16, 16))] * 4)
    inside = [row for row in rows if row.path.split("/")[0] == "op"]
    computing = [row for row in inside if row.operation not in _MOVING] or inside
    found = {dtype for row in computing for dtype in row.operands.split(", ") if dtype}
    names = [name for name in ("half", "float32") if (half if name == "half" else name) in found]
    return " and ".join(names) or "float32"


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Operations, PyTorch's choice, autocast's and the reason."""
    lists = {name: of for of, names in TORCH.items() for name in names.split()}
    for group in GROUPS:
        names = group.names.split()
        (of,) = {lists[name] for name in names}
        chosen = {half: here(group, half) for half in ("float16", "bfloat16")}
        ours = " or ".join(dict.fromkeys(chosen.values()))
        if len(set(chosen.values())) > 1:
            ours = ", ".join(f"{dtypes} in {half}" for half, dtypes in chosen.items())
        shown = ", ".join(f"`{name}`" for name in names) + (f" ({group.note})" if group.note else "")
        yield shown, WORDS[of], ours, group.reason


def table() -> str:
    """The whole comparison, as Markdown."""
    torch = load("torch_lists")["torch"]
    words = f"Dtypes between two products, by PyTorch {torch}'s CUDA autocast and by "
    words += "[`autocast`](../autocast.md#how-it-decides). Operations on no list of PyTorch's run as given. "
    words += "Of the reasons, range is that of float16, and digits are those that half precision lacks."
    lines = ["| PyTorch's operations | PyTorch | here | reason |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows()]
    return "\n".join([*textwrap.wrap(words, 110), "", folded("Operations", lines)])
