"""The notebooks run from top to bottom, and are stored with what they print, show and draw."""

import base64
import collections
import importlib
import json
import re
from pathlib import Path

import jax
import matplotlib
import pytest

from jmp_policy._src.report.lowering.compiler import is_installed

#: Cells of the fourth that show what a compiler made, or did not, where it is not installed.
COMPILED = r"\b(lowered|h100|padded|reports)\b"
NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def cells(path, kind):
    return [
        "".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind
    ]


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(NOTEBOOKS[0].parent.parent / "tools")
    return importlib.import_module("run_notebooks")


def words(outputs):
    """The words that a cell prints and shows, without numbers, in any order: rows are sorted by numbers."""
    texts = []
    for output in outputs:
        data = output.get("data", {"text/plain": output.get("text", [])})
        texts.append(re.sub(r"<[^>]*>", " ", "".join(data.get("text/html", data["text/plain"]))))
    return collections.Counter(re.findall(r"[^\W\d_]\w*", " ".join(texts)))


def test_words_tell_outputs_apart_and_leave_numbers_out(tool):
    one, other = (
        tool.run_cell(f"print('{text}')\n'float16'", "cell", {}) for text in ("96 % half", "97.5 % half")
    )
    assert words(one) == words(other) == {"half": 1, "float16": 1}
    assert words(tool.run_cell("print('96 % float32')\n'float16'", "cell", {})) != words(one)
    assert tool.run_cell("'float16';", "cell", {}) == []


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
            assert not [output for output in cell["outputs"] if output["output_type"] == "error"]
            pictures = [output.get("data", {}).get("image/png", "") for output in cell["outputs"]]
            assert all(len(base64.b64decode(picture)) < 60_000 for picture in pictures)
        assert set(cell) == keys
        assert cell["metadata"] == {}
        assert "".join(cell["source"]).strip()
    assert cells(path, "markdown")[0].startswith("# ")
    # Neither paths of somebody's machine nor downloads.
    text = path.read_text()
    assert not re.search(r"(?<![\w.])/(home|Users|root|tmp|work|usr|opt|mnt|data)/|[A-Z]:\\\\", text)
    assert not re.search(r"urllib|requests|fetch_|wget|curl ", text)
    assert not re.search(r" at 0x[0-9a-f]+>|Warning:|site-packages|ipykernel", text)
    counts = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_section_asserts(path):
    """An example that cannot fail is no test; a picture of which nothing is asserted may show anything."""
    code = cells(path, "code")
    plain = [source for source in code if not re.search(r"^\s*assert ", source, flags=re.M)]
    assert len(plain) <= 0.4 * len(code)


@pytest.fixture
def run(tool, monkeypatch, tmp_path):
    """Runs a notebook: a cell's words are those that are stored, its numbers are the cell's to assert."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    monkeypatch.chdir(tmp_path)

    def run(path, skipped=None):
        namespace, figures, changed = {"__name__": "__main__"}, 0, {}
        stored = [cell["outputs"] for cell in json.loads(path.read_text())["cells"] if "outputs" in cell]
        for i, source in enumerate(cells(path, "code")):
            outputs = tool.run_cell(source, f"{path.stem} [{i}]", namespace)
            for number in pyplot.get_fignums():
                drawn = [axes for axes in pyplot.figure(number).axes if axes.has_data()]
                assert drawn
                # Axes that share their scale are labelled once.
                assert any(axes.get_xlabel() for axes in drawn)
                figures += 1
            outputs += tool.take_figures()
            if skipped is None or not re.search(skipped, source):
                new, old = words(outputs), words(stored[i])
                if new != old:
                    changed[i] = {"new": dict(new - old), "stored": dict(old - new)}
        assert figures
        assert not list(tmp_path.iterdir())
        assert not changed, "python tools/run_notebooks.py stores them again"

    yield run
    pyplot.close("all")


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path, run):
    # What a GPU's kernels are called is for one version of the compiler to say.
    run(path, skipped=COMPILED if path.stem.startswith("04") else None)


@pytest.mark.slow
@pytest.mark.skipif(
    not is_installed() or not jax.__version__.startswith("0.12."),
    reason="its output is that of one version of XLA's GPU compiler",
)
def test_what_is_compiled_for_gpus_is_stored(run):
    run(NOTEBOOKS[3])
