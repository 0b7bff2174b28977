"""`python -m jmp_policy`, `formats`, and what all reports share."""

import dataclasses
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jmp_policy._src.api.command_line import _array_type, main
from jmp_policy._src.core import report_base
from jmp_policy._src.report.lowering.compiler import LoweringUnavailableError
from jmp_policy.report import Format, audit, formats

# A module of functions to look at.

EXAMPLE = """
import jax, jax.numpy as jnp

def apply(w, x):
    return jnp.tanh(x @ w)

def loss(w, x):
    return jnp.square(x @ w).mean()

def net(x):
    with jax.named_scope("net"):
        return jnp.tanh(x) @ jnp.ones((8, 4))

def example():
    return loss, jnp.ones((8, 8)), jnp.ones((4, 8), jnp.float32)

def listed():
    return [apply, jax.ShapeDtypeStruct((8, 16), jnp.bfloat16), jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)]

@jax.jit
def nothing():
    return 3

def broken(x):
    assert x.sum is None, "no sum"

def deep_loss(params, x):
    with jax.named_scope("first"):
        x = jnp.tanh(x @ params["first"])
    with jax.named_scope("last"):
        return jnp.log(jnp.square(x @ params["last"]).mean())

def failing():
    params = {"first": jnp.ones((8, 8)), "last": jnp.zeros((8, 2))}
    return deep_loss, params, jnp.ones((4, 8))

def fine():
    params = {"first": jnp.eye(8) * 0.5, "last": jnp.ones((8, 2))}
    return deep_loss, params, jnp.linspace(-1, 1, 32).reshape(4, 8)

def numbers(x, n, flag):
    return jnp.where(flag, x, n)

class Holder:
    @staticmethod
    def method(x):
        return x @ x

number = 3
_hidden = apply
"""


@pytest.fixture(autouse=True)
def example_module(tmp_path, monkeypatch):
    """The example, importable from the working directory alone, under a name of its own."""
    (tmp_path / "jmp_example.py").write_text(EXAMPLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("jmp_example", None)


def run(capsys, *arguments):
    """(status, what was printed, what was said on stderr)."""
    status = main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def data(capsys, *arguments):
    status, out, err = run(capsys, *arguments, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def test_json_is_strict(capsys):
    found = data(capsys, "formats", "inf")
    assert "Infinity" not in json.dumps(found)
    assert found["numbers"] == [None]


def test_audit_prints_what_audit_says(capsys):
    status, out, err = run(capsys, "audit", "jmp_example:apply", "f32[8,16]", "f32[4,8]")
    assert (status, err) == (0, "")
    module = sys.modules["jmp_example"]
    assert out == f"{audit(module.apply, jnp.ones((8, 16)), jnp.ones((4, 8)))}\n"
    assert "1 product in float32" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "products"),
    [
        (("jmp_example:apply", "f32[8,16]", "f32[4,8]"), [("float32", "float32", False)]),
        (("jmp_example:apply", "bf16[8,16]", "bf16[4,8]"), [("bfloat16", "bfloat16", False)]),
        (("jmp_example:apply", "f16[ 8, 16 ]", " float16[4,8]"), [("float16", "float16", False)]),
        (
            ("jmp_example:apply", "f32[8,16]", "f32[4,8]", "--policy", "mixed_float16"),
            [("float16",) * 2 + (False,)],
        ),
        (("jmp_example:listed",), [("bfloat16", "bfloat16", False)]),
        (("jmp_example:example",), [("float32", "float32", False)]),
        (("jmp_example:example", "--grad"), [("float32", "float32", False), ("float32", "float32", True)]),
        (
            ("jmp_example:example", "--grad", "--policy", "p=f32,c=bf16,o=f32"),
            [("bfloat16", "bfloat16", False), ("bfloat16", "bfloat16", True)],
        ),
        (("jmp_example:Holder.method", "f32[4,4]"), [("float32", "float32", False)]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) else "",
)
def test_audit(capsys, arguments, products):
    found = data(capsys, "audit", *arguments)
    assert [(p["lhs"], p["rhs"], p["backward"]) for p in found["products"]] == products


def test_drift(capsys):
    found = data(capsys, "drift", "jmp_example:loss", "f32[8,8]", "f32[4,8]", "--policy", "mixed_bfloat16")
    assert 1e-4 < found["gradient_error"] < 2e-2
    assert {row["direction"] for row in found["rows"]} >= {"outputs", "parameter gradients"}
    status, out, err = run(capsys, "drift", "jmp_example:example", "--no-grad", "--detail", "operation")
    assert (status, err) == (0, "")
    assert "loss: no difference from float32." in out


@pytest.mark.once
def test_reports_that_run_the_function(capsys):
    found = data(capsys, "diagnose", "jmp_example:failing", "--policy", "mixed_float16", "--scale", "1024")
    assert found["operation"] == "log"
    found = data(capsys, "spectrum", "jmp_example:fine", "--scale", "8")
    assert found["loss_scale"] == 8
    found = data(capsys, "sensitivity", "jmp_example:fine")
    assert {"first", "last"} <= {row["path"] for row in found["rows"]}
    found = data(capsys, "recommend", "jmp_example:fine", "--budget", "0.05")
    assert found["budget"] == 0.05
    assert found["policy"] == {"policy": "params=float32,compute=float16,output=float32"}


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("f32[64,784]", (64, 784), "float32"),
        ("bf16[8]", (8,), "bfloat16"),
        ("i32[]", (), "int32"),
        ("s32[2]", (2,), "int32"),
        ("u8[1,2,3]", (1, 2, 3), "uint8"),
        ("pred[2]", (2,), "bool"),
        ("bool[2]", (2,), "bool"),
        ("c64[3]", (3,), "complex64"),
        ("float16[3]", (3,), "float16"),
        ("float8_e4m3fn[3]", (3,), "float8_e4m3fn"),
    ],
)
def test_types_of_arrays(text, shape, dtype):
    found = _array_type(text)
    assert (found.shape, found.dtype.name) == (shape, dtype)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("jmp_example",), "'jmp_example' does not say which function: module:function"),
        (("jmp_example:missing",), "jmp_example has no 'missing'; it has .*apply"),
        (("jmp_example:number",), "jmp_example:number is no function but int"),
        (("jmp_example:nothing",), r"jmp_example:nothing\(\) must return \(function, \*arguments\)"),
        (("jmp_not_there:f",), "No module named 'jmp_not_there'"),
        (("jmp_example:apply", "f32"), "'f32' is no type of arrays; they look like"),
        (("jmp_example:apply", "f32[a]"), "'f32.a.' is no type of arrays"),
        (
            ("jmp_example:apply", "f64[8]"),
            "JAX has 64 bits only with .* JAX_ENABLE_X64",
        ),
        (("jmp_example:apply", "f33[2]"), r"'f33\[2\]': there is no dtype 'float33'"),
        (("jmp_example:apply", "f32[3,4]", "f32[3,4]"), "dot_general|contracting"),
        (("jmp_example:apply", "f32[8,8]", "f32[4,8]", "--policy", "p=f32,c=fp61"), "fp61"),
        (("jmp_example:broken", "f32[2]"), r"AssertionError: no sum \(jmp_example.py:\d+\)"),
        (("jmp_example:apply",), "needs arguments: describe its arrays .*missing a required argument: 'w'"),
        (("jmp_example:nothing", "f32[2]"), "jmp_example:nothing takes no arguments: name the function or"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("command", ["audit", "lowering"])
def test_mistakes(capsys, command, arguments, message):
    status, out, err = run(capsys, command, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"python -m jmp_policy {command}: ")
    assert "Traceback" not in err
    assert re.search(message, err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: command"),
        (("audits",), "invalid choice: 'audits'"),
        (("audit",), "the following arguments are required: function"),
        (("formats", "one"), "invalid float value: 'one'"),
        (("audit", "jmp_example:apply", "--target", "A100"), "unrecognized arguments"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_usage(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(command in out for command in ("audit", "lowering", "formats"))


def test_lowering_of_an_unknown_card(capsys):
    status, _, err = run(capsys, "lowering", "jmp_example:example", "--target", "A1000")
    assert status == 2
    assert "Unknown target 'A1000'" in err


def test_lowering_hands_on_what_it_is_given(capsys, monkeypatch):
    """What the report says is tested with it; here, what it is asked."""
    asked = []

    @dataclasses.dataclass(frozen=True)
    class Fake(report_base.Report):
        target: str

        def _tables(self):
            return ()

        def _lines(self):
            return [f"for {self.target}"]

    def lowering_report(fn, *args, target):
        asked.append((jax.eval_shape(fn, *args), target))
        return Fake(target)

    monkeypatch.setattr("jmp_policy._src.api.reports.lowering_report", lowering_report)
    assert run(capsys, "lowering", "jmp_example:example") == (0, "for H100\n", "")
    assert asked[0][0].shape == ()
    status, out, _ = run(capsys, "lowering", "jmp_example:example", "--grad", "--target", "T4", "--json")
    assert (status, json.loads(out)) == (0, {"target": "T4"})
    value, gradient = asked[1][0]
    assert (value.shape, gradient.shape, asked[1][1]) == ((), (8, 8), "T4")


def test_lowering_that_cannot_be_done_here(capsys, monkeypatch):
    def lowering_report(fn, *args, target):
        raise LoweringUnavailableError("no compiler for GPUs here")

    monkeypatch.setattr("jmp_policy._src.api.reports.lowering_report", lowering_report)
    status, out, err = run(capsys, "lowering", "jmp_example:example")
    assert (status, out) == (2, "")
    assert "no compiler for GPUs here" in err


@pytest.mark.slow
def test_as_a_process(tmp_path):
    code = [sys.executable, "-W", "error", "-m", "jmp_policy"]
    command = [*code, "audit", "jmp_example:apply", "bf16[8,16]", "bf16[4,8]", "--json"]
    places = {"PYTHONPATH": str(pathlib.Path(report_base.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | places, timeout=99
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["products"][0]["lhs"] == "bfloat16"


# formats


def test_formats_on_the_command_line(capsys):
    status, out, err = run(capsys, "formats", "1e-8", "70000", "--", "-65520")
    assert (status, err) == (0, "")
    assert out == f"{formats(1e-8, 70000.0, -65520.0)}\n"
    (half,) = [
        line.split()
        for line in out.splitlines()
        if line.split()[:1] == ["float16"] and len(line.split()) == 4
    ]
    assert half == ["float16", "0", "inf", "-inf"]
    assert data(capsys, "formats") == formats().to_dict()


def test_formats_are_ml_dtypes():
    known = {f.name: f for f in formats().formats}
    assert list(known) == [
        "float64", "float32", "tf32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn",
    ]  # fmt: skip
    for name, found in known.items():
        if name == "tf32":
            continue
        info = ml_dtypes.finfo(name)
        assert found == Format(
            name, info.bits, info.nexp, info.nmant + 1, float(info.max), float(info.smallest_normal),
            float(info.smallest_subnormal), float(info.eps),
        )  # fmt: skip
    tf32 = known["tf32"]
    # Ten bits behind the leading one, eight of exponent.
    assert (tf32.bits, tf32.exponent_bits, tf32.significand_bits) == (32, 8, 11)
    assert tf32.largest == 2.0**127 * (2 - 2.0**-10)
    assert (tf32.smallest_normal, tf32.epsilon) == (2.0**-126, 2.0**-10)


def becomes(number, name):
    (found,) = [f.becomes[0] for f in formats(number).formats if f.name == name]
    return float(found)


HALF = {"float64": np.float64, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
HALF |= {"float8_e5m2": ml_dtypes.float8_e5m2, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}


@pytest.mark.slow
@settings(max_examples=100)
@given(st.floats(allow_nan=False))
@example(65519.0)
@example(65520.0)
@example(-0.0)
@example(2.0**-25)
@example(3.4e38)
@example(math.inf)
def test_what_numbers_become(number):
    found = {f.name: f.becomes[0] for f in formats(number).formats}
    for name, dtype in HALF.items():
        with np.errstate(all="ignore"):
            expected = float(np.float64(number).astype(dtype))
        assert found[name] == f"{expected:.9g}", name


@settings(max_examples=100)
@given(st.floats(width=32, allow_nan=False, allow_subnormal=False))
@example(1 + 2.0**-11)
@example(1 + 3 * 2.0**-11)
@example(2.0**127 * (2 - 2.0**-11))
@example(-1.0000001)
def test_tf32_rounds_to_nearest_even(number):
    mantissa, exponent = math.frexp(number) if math.isfinite(number) else (number, 0)
    try:
        expected = (
            math.ldexp(round(math.ldexp(mantissa, 11)), exponent - 11) if math.isfinite(number) else number
        )
    except OverflowError:
        expected = math.copysign(math.inf, number)
    if abs(expected) >= 2.0**128:
        expected = math.copysign(math.inf, number)
    assert becomes(number, "tf32") == pytest.approx(expected, rel=1e-8)


def test_formats_of_what_is_no_number():
    with pytest.raises((TypeError, ValueError), match="could not convert|must be a string or a real number"):
        formats("many")


# What all reports share.


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    size: int


@dataclasses.dataclass(frozen=True)
class Sample(report_base.Report):
    parts: tuple[Part, ...]
    values: object = None

    _rows = "parts"

    def _tables(self):
        rows = [(p.name, p.size) for p in self.parts]
        return [report_base.Table(("name", "size "), rows, "Parts & <places>")]

    def _lines(self):
        return ["<done> & dusted"]


SAMPLE = Sample((Part("<script>alert(1)</script>", 1), Part("[bold]b[/bold]", 20)))


def test_text_of_a_report():
    assert str(SAMPLE) == textwrap.dedent("""\
        Parts & <places>
          name                       size
         ────────────────────────────────
          <script>alert(1)</script>     1
          [bold]b[/bold]               20

        <done> & dusted""")


def test_html_of_a_report_is_escaped():
    html = SAMPLE._repr_html_()
    assert "<script>" not in html
    assert '<td style="text-align:left">&lt;script&gt;alert(1)&lt;/script&gt;</td>' in html
    assert "<caption>Parts &amp; &lt;places&gt;</caption>" in html
    assert "<p>&lt;done&gt; &amp; dusted</p>" in html
    assert html.count("<tr>") == html.count("</tr>") == 3


VALUES = {
    "numpy": (np.float32(1.5), 1.5),
    "jax": (jnp.asarray([1, 2]), [1, 2]),
    "half": (jnp.bfloat16(2), 2.0),
    "bool": (np.True_, True),
    "none": (None, None),
    "nested": (
        {"a": (1, [2.0, "x"]), 3: Part("p", 1)},
        {"a": [1, [2.0, "x"]], "3": {"name": "p", "size": 1}},
    ),
    "dtype": (np.dtype("float16"), "float16"),
    "class": (Part, str(Part)),
}


@pytest.mark.parametrize("name", VALUES)
def test_data_of_a_report_is_plain(name):
    value, expected = VALUES[name]
    found = dataclasses.replace(SAMPLE, values=value).to_dict()
    assert json.loads(json.dumps(found))["values"] == found["values"] == expected
    assert type(found["values"]) is type(expected)


def test_to_pandas(monkeypatch):
    fake = types.ModuleType("pandas")
    fake.DataFrame = list
    monkeypatch.setitem(sys.modules, "pandas", fake)
    assert SAMPLE.to_pandas() == [{"name": p.name, "size": p.size} for p in SAMPLE.parts]
    rows = formats(1.0).to_pandas()
    assert [row["name"] for row in rows][:2] == ["float64", "float32"]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_pandas needs pandas: pip install pandas"):
        SAMPLE.to_pandas()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1, "1 B"), (999, "999 B"), (1000, "1 kB"), (1499, "1.5 kB"), (999_499, "999 kB"),
        (999_500, "1 MB"), (99_940, "99.9 kB"), (99_960, "100 kB"), (123_456_789, "123 MB"),
        (1e9, "1 GB"), (2.5e12, "2.5 TB"), (5e18, "5000 PB"), (-1500, "-1.5 kB"),
    ],
)  # fmt: skip
def test_bytes(count, text):
    assert report_base.bytes_text(count) == text
    assert report_base.count_text(count) == text.removesuffix("B").strip()


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0"), (1e-9, "< 0.1 %"), (0.001, "0.1 %"), (0.125, "12.5 %"), (0.9999, "> 99.9 %"), (1, "100 %")],
)
def test_percent(share, text):
    assert report_base.percent(share) == text


def test_joined():
    assert report_base.joined(["a", "b"]) == "a, b"
    assert report_base.joined(list("abcdefg")) == "a, b, c and 4 more"
    assert report_base.joined(list("abc"), 2, repr) == "'a', 'b' and 1 more"
    assert report_base.joined([]) == ""


def test_the_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"jmp_policy {sys.modules['jmp_policy'].__version__}"


def test_memory(capsys):
    found = data(
        capsys, "memory", "jmp_example:loss", "f32[8,8]", "f32[4,8]", "--policy", "float16", "--grad"
    )
    assert found["precision"] == "float16"
    assert found["verdict"].startswith("float16 takes ")
    assert {row["category"] for row in found["rows"]} >= {"parameters", "gradients"}
    status, out, _ = run(capsys, "memory", "jmp_example:example")
    assert status == 0
    assert "Memory of loss on cpu" in out


def test_summary(capsys):
    found = data(capsys, "summary", "jmp_example:net", "f32[2,8]", "--policy", "float16")
    assert "net" in {row["path"] for row in found["modules"]}
    assert found["verdict"]


def test_reports_as_json_carry_their_verdict(capsys):
    found = data(capsys, "audit", "jmp_example:loss", "f16[8,8]", "f16[8,8]")
    assert found["half_share"] == 1.0
    assert found["verdict"].startswith("100 % of FLOPs in float16")


def test_a_repl_shows_the_verdict_alone():
    found = audit(jnp.matmul, jnp.ones((8, 8), jnp.float16), jnp.ones((8, 8), jnp.float16))
    assert repr(found) == f"<Audit: {found.verdict}>"
    assert "\n" not in repr(found)
    assert len(str(found)) > len(repr(found))
    assert repr(formats()) == "<Formats: print it to see its rows>"


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e5m2", "float32"])
def test_what_a_format_rounds_to_zero(name):
    (row,) = [row for row in formats().formats if row.name == name]
    least = row.smallest_subnormal / 2

    def becomes(number):
        return next(row.becomes[0] for row in formats(number).formats if row.name == name)

    assert becomes(least) == "0"
    assert float(becomes(1.01 * least)) > 0
    line = next(line for line in str(formats()).splitlines() if line.split()[:1] == [name])
    assert f"{least:.3g}" in line
