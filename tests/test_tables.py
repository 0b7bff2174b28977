"""Tables of reports: 100 columns, whole names, equal layers as one row, and at most 40 lines."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jmp_policy as jmpp
from jmp_policy._src.core.tables import Folded, Sum, Table, folded

PARTS = {"norm": "LayerNorm", "attn": "MultiHeadDotProductAttention", "attn/query": "DenseGeneral"}


def rows_of(layers=16, path="layer_{}"):
    return [
        (f"{path.format(i)}/{part}", kind, "net.py:12", "float32 island", Sum(100 + i), f"{i}e-05")
        for i in range(layers)
        for part, kind in PARTS.items()
    ]


def table(rows, columns=("module", "type", "line", "rule", "numbers ", "error "), **options):
    return Table(columns, rows, **options)


@pytest.mark.parametrize("path", ["layer_{}", "transformer/decoder/layers/{}/residual_branch", "h_{}"])
@pytest.mark.parametrize("width", [90, 100, 200])
@pytest.mark.parametrize("full", [False, True])
def test_names_are_whole_in_every_width(path, width, full):
    lines = table(rows_of(path=path)).as_text(full, width)
    assert max(map(len, lines)) <= width
    words = {word for line in lines for word in re.split(r"[ /_]+", line)}
    assert words >= {"LayerNorm", "attn", "norm", "query", "net.py:12", "island"}
    if full:
        assert "MultiHeadDotProductAttention" in words
    else:
        assert words & {"MultiHead…Attention", "MultiHeadDotProductAttention"}
        assert "(16 x)" in " ".join(lines)


def test_all_rows_have_whole_names_where_there_is_room():
    rows = [(f"Layer_{i}/MultiHeadDotProductAttention_0/query", "f16", "1") for i in range(3)]
    whole, short = (table(rows, ("module", "in", "size ")).as_text(True, width) for width in (60, 40))
    assert whole[2].split() == [rows[0][0], "f16", "1"]
    assert [line.split()[0] for line in short[2:4]] == ["Layer_0/", "MultiHead…Attention_0/query"]
    assert max(map(len, short)) <= 40


def test_a_wide_table_has_a_line_for_each_row():
    lines = table(rows_of(3)).as_text(True, 120)
    assert len(lines) == 2 + 9 + 1
    assert "layer_1/attn        MultiHeadDotProductAttention  net.py:12  float32 island" in lines[6]


def test_figures_are_broken_between_the_two_of_a_range_only():
    rows = [("a" * 30, "x y z " * 8, f"{i} %") for i in range(3)] + [("b", "", "0.25 ... 12.5 %")]
    lines = table(rows, ("module", "why", "share ")).as_text(True, 50)
    assert max(map(len, lines)) <= 50
    assert [line.split()[-2:] for line in lines if "12.5" in line or "0.25" in line] in (
        [["0.25", "..."], ["12.5", "%"]],
        [["12.5", "%"]],
    )


def test_what_adds_up_is_added_up_and_other_figures_are_a_range():
    first, *_ = shown = folded(("module", "type", "line", "rule", "numbers ", "error "), rows_of())
    assert len(shown) == 3
    assert isinstance(first, Folded)
    assert len(first.rows) == 16
    assert [*map(str, first)] == [
        "layer_0 ... layer_15/norm (16 x)",
        "LayerNorm",
        "net.py:12",
        "float32 island",
        str(sum(range(100, 116))),
        "0e-05 ... 15e-05",
    ]
    text = "\n".join(table(rows_of()).as_text(False, 100))
    assert text.endswith("(n x): equal layers, numbers added up: print(report.table(full=True))\n")


def test_a_layer_with_most_of_a_sum_is_a_row_of_its_own():
    rows = [(f"net/{i}/norm_{i % 2}", Sum(0.9 if i == 7 else 0.01, "{:.3g}".format)) for i in range(8)]
    rows = [("net/in", Sum(0.05, str)), *((path.replace("_0", "").replace("_1", ""), s) for path, s in rows)]
    shown = table(rows, ("module", "share "), largest_first=True).as_text(False, 100)
    assert [line.split() for line in shown[2:5]] == [
        ["net/7/norm", "0.9"],
        ["net/0", "...", "6/norm", "(7", "x)", "0.07"],
        ["net/in", "0.05"],
    ]


def test_the_ends_of_a_row_are_names_that_there_are():
    rows = [(f"wi{number}/norm", "LayerNorm") for number in ("00", "01", "10", "11")]
    (row,) = folded(("module", "type"), rows)
    assert row[0] == "wi00 ... wi11/norm (4 x)"


def test_the_number_of_a_layer_is_not_that_of_a_part():
    rows = [(f"blocks/{i}/{part}", "1") for i in range(4) for part in ("ln1", "ln2", "proj_3")]
    assert [row[0] for row in folded(("module", "size "), rows)] == [
        "blocks/0 ... 3/ln1 (4 x)",
        "blocks/0 ... 3/ln2 (4 x)",
        "blocks/0 ... 3/proj_3 (4 x)",
    ]
    lines = [(f"net (a.py:{i})", "1") for i in range(4)]
    assert folded(("place", "size "), lines) == lines


def test_tables_are_cut_by_lines():
    rows = [(f"module_{'abcdefgh'[i]}/" + "part/" * 20, "1") for i in range(8)]
    shown = table(rows, ("module", "size "), most=6).as_text(False, 60)
    assert shown[-2] == "  ... and 6 more rows: print(report.table(full=True))"
    assert len([line for line in shown if "module_" in line]) == 2
    assert sum("module_" in line for line in table(rows, ("module", "size "), most=6).as_text(True, 60)) == 8
    assert table(rows, ("module", "size "), most=6).is_cut


def test_folded_rows_open_in_html():
    html = table(rows_of()).as_html()
    assert html.count("<details>") == 3
    start = html.index("<details><summary>layer_0 ... layer_15/norm (16 x)</summary><table>")
    inside = html[start : html.index("</details>")]
    assert "<th>module</th><th>numbers</th><th>error</th>" in inside
    assert inside.count("<tr>") == 17
    assert '<td style="text-align:left">layer_7/norm</td><td style="text-align:right">107</td>' in inside
    assert "<p>(n x): equal layers, numbers added up</p>" in html


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(2, name="attn")(nn.LayerNorm(name="ln1")(x))
        hidden = nn.gelu(nn.Dense(32, name="up")(nn.LayerNorm(name="ln2")(x)))
        return x + nn.Dense(16, name="down")(hidden)


class Gpt(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 16, name="emb")(tokens)
        for i in range(6):
            x = Block(name=f"layer_{i}")(x)
        return nn.Dense(32, name="head")(nn.LayerNorm(name="ln_f")(x))


TOKENS = jnp.arange(16).reshape(2, 8)


def loss_of(model):
    def loss_fn(params, tokens):
        logits = model.apply({"params": params}, tokens).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    return loss_fn


HALF, WIDE = loss_of(jmpp.wrap(Gpt(), "mixed_float16")), loss_of(Gpt())
REPORTS = {
    "summary": lambda params: jmpp.summary(Gpt(), "mixed_float16", TOKENS),
    "audit": lambda params: jmpp.audit(HALF, params, TOKENS, grad=True),
    "spectrum": lambda params: jmpp.gradient_spectrum(WIDE, params, TOKENS),
    "drift": lambda params: jmpp.drift(HALF, params, TOKENS),
    "sensitivity": lambda params: jmpp.sensitivity(WIDE, params, TOKENS),
    "memory": lambda params: jmpp.memory_report(jax.value_and_grad(HALF), params, TOKENS),
}


@pytest.fixture(scope="module")
def params():
    return Gpt().init(jax.random.key(0), TOKENS)["params"]


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORTS)
def test_a_report_on_equal_layers_takes_a_screen(name, params):
    found = REPORTS[name](params)
    lines = str(found).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    words = " ".join(" ".join(lines).split())
    assert words.endswith(" ".join(found.verdict.split()))
    whole, html = found.table(full=True), found._repr_html_()
    if name != "memory":
        assert words.startswith(" ".join(found.verdict.split()))
        assert "layer_0 ... layer_5" in words
        assert all(f"layer_{i}/" in whole for i in range(6))
        assert re.search(r"<details><summary>[^<]*layer_0 \.\.\. layer_5", html)
        assert "layer_4/" in html
    assert max(map(len, whole.splitlines())) <= 100


def test_equal_layers_of_a_spectrum_are_counted_together():
    params = {f"layer_{i}": {"kernel": jnp.full(8, 2.0**i), "bias": jnp.ones(2)} for i in range(8)}

    def loss_fn(params):
        return sum(2.0**-20 * (p["kernel"] ** 2).sum() + 2.0**-30 * p["bias"].sum() for p in params.values())

    found = jmpp.gradient_spectrum(loss_fn, params)
    lines = found.table().splitlines()
    (bias,) = (line for line in lines if "/bias (8 x)" in line)
    assert " ".join(bias.split()[:-1]) == "layer_0 ... layer_7/bias (8 x) 16 0 9.31e-10 100 % 0"
    (kernel,) = (line for line in lines if "/kernel (8 x)" in line)
    # The largest of all, and the share that is subnormal in all of them.
    assert kernel.split()[5:11] == ["64", "0", "0.000244", "0", "62.5", "%"]
