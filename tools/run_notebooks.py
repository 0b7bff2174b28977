"""Runs the notebooks and writes their outputs into them: `python tools/run_notebooks.py [start of a name]`.

No Jupyter is needed, and what it would add of this machine (paths, times, versions) stays out. The notebook
that compiles for GPUs is left as it is where the compiler, the extra `gpu-lowering`, is not installed.
"""

import ast
import base64
import contextlib
import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
#: A picture of 8 inches is as wide as a page.
DPI = 80


def has_compiler() -> bool:
    """Whether programs can be compiled for GPUs here."""
    plugins = importlib.util.find_spec("jax_plugins")
    return plugins is not None and importlib.util.find_spec("jax_plugins.xla_cuda12") is not None


def run_cell(source: str, name: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs a cell and returns what it prints and shows, as a notebook stores it; figures are left open.

    Its last expression is shown unless it ends in a semicolon.
    """
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, name, "exec"), namespace)
        shown = eval(compile(ast.Expression(last.value), name, "eval"), namespace) if last else None
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
    if shown is not None and not source.rstrip().endswith(";") and not hasattr(shown, "savefig"):
        data = {"text/plain": _lines(repr(shown))}
        if hasattr(shown, "_repr_html_"):
            data["text/html"] = _lines(shown._repr_html_())
        outputs.append({"data": data, "metadata": {}, "output_type": "execute_result"})
    return outputs


def take_figures() -> list[dict[str, Any]]:
    """Returns the open figures as outputs, and closes them."""
    from matplotlib import pyplot
    from PIL import Image

    outputs: list[dict[str, Any]] = []
    for number in pyplot.get_fignums():
        drawn, file = io.BytesIO(), io.BytesIO()
        pyplot.figure(number).savefig(drawn, format="png", dpi=DPI)
        # 128 colours are enough, and take a third of the bytes.
        Image.open(drawn).convert("RGB").quantize(128).save(file, format="png", optimize=True)
        data = {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": ["<Figure>"]}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    pyplot.close("all")
    return outputs


def run(path: Path) -> None:
    """Runs one notebook from top to bottom, and writes its outputs into it."""
    notebook = json.loads(path.read_text())
    namespace: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        outputs = run_cell("".join(cell["source"]), f"{path.stem} [{count}]", namespace) + take_figures()
        count += 1
        for output in outputs:
            if output["output_type"] == "execute_result":
                output["execution_count"] = count
        cell.update(execution_count=count, outputs=outputs)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main(names: list[str]) -> int:
    """Runs all notebooks, or those whose names begin so."""
    matplotlib.use("Agg")
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if names and not path.name.startswith(tuple(names)):
            continue
        if "lowering_report" in path.read_text() and not has_compiler():
            print(f"{path.name}: left as it is, since it needs the extra gpu-lowering")
            continue
        run(path)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
