"""The notebooks are stored without outputs, and run from top to bottom."""

import ast
import json
import re
from pathlib import Path

import matplotlib
import pytest

pytestmark = pytest.mark.once
NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def cells(path, kind):
    return [
        "".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind
    ]


def run_cell(source, name, namespace):
    """Runs a cell, and shows its last expression as a notebook does, unless it ends in a semicolon."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    if last is None:
        return
    shown = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    if shown is not None and not source.rstrip().endswith(";"):
        assert isinstance(shown._repr_html_() if hasattr(shown, "_repr_html_") else repr(shown), str)


def test_there_are_notebooks():
    assert [path.name[:3] for path in NOTEBOOKS] == ["01_", "02_", "03_", "04_", "05_"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_form(path):
    notebook = json.loads(path.read_text())
    assert set(notebook) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert notebook["nbformat"] == 4
    assert notebook["nbformat_minor"] >= 5
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        keys = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            keys |= {"execution_count", "outputs"}
            assert cell["execution_count"] is None
            assert cell["outputs"] == []
        assert set(cell) == keys
        assert cell["metadata"] == {}
        assert "".join(cell["source"]).strip()
    assert cells(path, "markdown")[0].startswith("# ")
    # Neither paths of somebody's machine nor downloads.
    text = path.read_text()
    assert not re.search(r"(?<![\w.])/(home|Users|root|tmp|work|usr|opt|mnt|data)/|[A-Z]:\\\\", text)
    assert not re.search(r"urllib|requests|fetch_|wget|curl ", text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_section_asserts(path):
    """An example that cannot fail is no test; a picture of which nothing is asserted may show anything."""
    code = cells(path, "code")
    plain = [source for source in code if not re.search(r"^\s*assert ", source, flags=re.M)]
    assert len(plain) <= 0.4 * len(code)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path, monkeypatch, tmp_path):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    monkeypatch.chdir(tmp_path)
    namespace, figures = {"__name__": "__main__"}, 0
    try:
        for i, source in enumerate(cells(path, "code")):
            run_cell(source, f"{path.stem} [{i}]", namespace)
            for number in pyplot.get_fignums():
                figure = pyplot.figure(number)
                figure.canvas.draw()
                drawn = [axes for axes in figure.axes if axes.has_data()]
                assert drawn
                # Axes that share their scale are labelled once.
                assert any(axes.get_xlabel() for axes in drawn)
                figures += 1
            pyplot.close("all")
    finally:
        pyplot.close("all")
    assert figures
    assert not list(tmp_path.iterdir())
