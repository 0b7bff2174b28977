"""What must hold of the source as a whole."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "jmp_policy"

#: Lowest first: a file imports only files listed before it.
ORDER = [
    "_types", "_words", "_after_import", "_loaded", "_pytree", "_dtypes", "_cast", "_by_devices",
    "_finite_reduction", "_finite", "_policy", "_border", "_attention", "_treatment", "_rules", "_scope",
    "_loss_scale", "_adaptive_scale", "_loss_scales", "_state", "_grad", "_microbatches", "_accumulate",
    "_metrics", "_logger", "_monitor", "_losses", "_transformation", "optim", "_restore",
    "_rounding", "_master_weights", "_stochastic_rounding", "_kahan_summation",
    "_cpu_products", "_cpu_convolutions",
    "_cpu_bfloat16", "_regions", "_report", "_taps", "_jax", "_again", "_flat", "_autocast",
    "_autocast._ops", "_autocast._bind",
    "_weights", "_weights._mark", "_weights._products", "_weights._run", "_weights._function",
    "linen._attention", "linen._layers", "linen._intercept", "linen._taps", "linen._wrap", "linen",
    "_autocast._values", "_autocast._plan",
    "_autocast._run", "_autocast._products", "_autocast._operations", "_autocast._calls", "_autocast._loops",
    "_autocast._interpreter", "_autocast._explain",
    "report._function", "report._walk", "report._float32", "report._products", "report._findings",
    "report._audit", "report._histogram", "report._spectrum_plot", "report._magnitudes", "report._scale",
    "report._spectrum", "report._trail", "report._diagnosis", "report._diagnose", "report._buffers",
    "report._recipe", "report._memory", "report._targets", "report._hlo", "report._hlo_products",
    "report._kernels", "report._roofline", "report._gpu_compiler", "report._lowered", "report._lowering",
    "report._summary", "report._formats", "report",
    "linen._summary", "_check",
    "nnx._graph", "nnx._states", "nnx._attention", "nnx._layers", "nnx._face", "nnx._governed", "nnx._plan",
    "nnx._wrap", "nnx._train", "nnx._accumulate", "nnx._named", "nnx._pure", "nnx._summary", "nnx._spectrum",
    "nnx._autocast", "nnx",
    "_wrap", "compat.jmp", "compat", "", "__main__",
]  # fmt: skip


def _modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield name, path


MODULES = list(_modules())


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jmp_policy"):
            base = node.module.removeprefix("jmp_policy").lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                yield inner if inner in ORDER else base
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix("jmp_policy.") for a in node.names if "jmp_policy" in a.name)


@pytest.mark.parametrize(("name", "path"), MODULES, ids=lambda x: x if isinstance(x, str) else "")
def test_imports_point_down(name, path):
    assert name in ORDER, f"{name} has no place in the order of layers"
    for imported in imports(path):
        assert ORDER.index(imported) < ORDER.index(name), f"{name} imports {imported}"


@pytest.mark.parametrize(("name", "path"), MODULES, ids=lambda x: x if isinstance(x, str) else "")
def test_public_definitions_have_docstrings_and_no_private_jax(name, path):
    text = path.read_text()
    assert not re.search(r"jax\._src|flax\.[\w.]+ import _", text)
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{name}.{node.name}"


@pytest.mark.parametrize("path", sorted((ROOT / "tests").glob("test_*.py")), ids=lambda p: p.name)
def test_every_raises_has_a_match(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("pytest.raises", "pytest.warns"):
            assert any(k.arg == "match" for k in node.keywords), f"{path.name}:{node.lineno}"


def test_no_absolute_paths_or_registries():
    for pattern in ("*.py", "*.toml", "*.md", "*.json", "Makefile", "run"):
        for path in ROOT.rglob(pattern):
            if any(part.startswith((".venv", "build", "dist")) for part in path.relative_to(ROOT).parts):
                continue
            text = path.read_text()
            assert not re.search(r"/(?:root|home)/\w|(?:index|extra-index)-url\s*=", text), path
