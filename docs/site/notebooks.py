"""A hook of MkDocs: the notebooks are pages of the site, with what their cells print, show and draw."""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

NOTEBOOKS = Path(__file__).parent.parent.parent / "notebooks"


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for each notebook."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        content = "\n\n".join(map(_cell, cells))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Points links to notebooks to their pages."""
    return re.sub(r"\]\(\.\./notebooks/(\w+)\.ipynb\)", r"](notebooks/\1.md)", markdown)


def _cell(cell: dict[str, Any]) -> str:
    """A cell in Markdown."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    return "\n\n".join([f"```python\n{source}\n```", *map(_output, cell["outputs"])])


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return _text(output["text"])
    data = output["data"]
    if "image/png" in data:
        return f'<img alt="" src="data:image/png;base64,{data["image/png"]}">'
    if "text/html" in data:
        # Markdown ends at an empty line what it leaves as it is.
        return re.sub(r"\n\s*\n", "\n", "".join(data["text/html"]))
    return _text(data["text/plain"])


def _text(lines: list[str]) -> str:
    return f"```text\n{''.join(lines)}\n```"
