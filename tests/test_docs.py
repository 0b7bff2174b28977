"""The README's and the docstrings' examples run."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jmp_policy

ROOT = Path(__file__).parent.parent
NAMES = ["jmp_policy", *(m.name for m in pkgutil.walk_packages(jmp_policy.__path__, "jmp_policy."))]


@pytest.mark.parametrize("name", NAMES)
def test_docstrings(name):
    module = importlib.import_module(name)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.testmod(module, extraglobs={"jnp": jnp, "jax": jax}, optionflags=flags)
    assert result.failed == 0


def test_public_functions_have_an_example():
    public = [n for n in vars(jmp_policy) if not n.startswith("_") and callable(getattr(jmp_policy, n))]
    without = [n for n in public if ">>>" not in (getattr(jmp_policy, n).__doc__ or "")]
    # Protocols, plain records and readers of state.
    assert set(without) <= {
        "LossScale", "NoOpLossScale", "LossScaledState", "LossScaleStuckError", "best_half_dtype",
        "get_loss_scale_state", "grads_finite", "metrics", "check", "Explanation", "Operation",
        "Audit", "GradientSpectrum", "SpectrumState", "Diagnosis", "MemoryReport", "Summary",
        "LoweringReport", "LoweringUnavailableError", "lowering_report",
    }  # fmt: skip


def python_blocks(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.S)


def test_readme():
    """All Python blocks, in order, as one program."""
    blocks = python_blocks(ROOT / "README.md")
    assert blocks
    namespace = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    for losses in (namespace["losses"], namespace["nnx_losses"]):
        assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_docs_pages(path):
    namespace = {"__name__": path.stem}
    blocks = python_blocks(path)
    assert blocks
    for block in blocks:
        exec(compile(block, path.name, "exec"), namespace)


def test_readme_numbers_are_the_measured_ones(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    readme = importlib.import_module("benchmarks.readme")
    for name, numbers in readme.FILES.items():
        text = (ROOT / name).read_text()
        assert readme.written(text, numbers) == text
        lines = text.partition(readme.BEGIN)[2].partition(readme.END)[0].splitlines()
        assert sum(line.startswith("| ") for line in lines) > 3


def test_readme_shows_its_first_example_early_and_stays_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 200
    assert lines.index("```python") < 35
