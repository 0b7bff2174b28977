"""The examples of README, pages and docstrings run, and what the pages say of files and names is so."""

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
import xml.etree.ElementTree
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jmp_policy
from jmp_policy import linen, nnx, report
from jmp_policy.compat import jmp

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
RESULTS = sorted(DOCS.glob("results/*.md"))
#: Pages of references.
WITHOUT_CODE = (*(path.name for path in DOCS.glob("api*.md")), "conformance.md")
NAMES = ["jmp_policy", *(m.name for m in pkgutil.walk_packages(jmp_policy.__path__, "jmp_policy."))]
BLOCK = re.compile(r'^```python(?: title="(\w+)")?\n(.*?)^```$', flags=re.S | re.M)


def page_name(path):
    return path.name


def imported(name):
    """A module, with the names that it loads when they are asked for."""
    module = importlib.import_module(name)
    dir(module)
    return module


def public_names(module):
    return {n: v for n in dir(module) if n[0] != "_" and not inspect.ismodule(v := getattr(module, n))}


#: All of them first: only then is each object in the module that it says it is from, where doctest looks.
MODULES = {name: imported(name) for name in NAMES}
WITH_EXAMPLES = [n for n, m in MODULES.items() if any(t.examples for t in doctest.DocTestFinder().find(m))]


@pytest.mark.once
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_docstrings(name):
    module = MODULES[name]
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.testmod(module, extraglobs={"jnp": jnp, "jax": jax}, optionflags=flags)
    assert result.failed == 0


def test_no_example_of_a_docstring_is_left_out():
    """Doctest looks where `__module__` says that an object is from, which is not the file that it is in."""
    found = [test for module in MODULES.values() for test in doctest.DocTestFinder().find(module)]
    texts = [Path(module.__file__).read_text() for module in MODULES.values()]
    written = [re.findall(r"^ *>>> ", text, flags=re.M) for text in texts]
    assert sum(len(test.examples) for test in found) == sum(map(len, written))


#: Rows of reports and records that a function returns: that function's docstring shows them.
RECORDS = {
    "Operation", "HalfOperation", "Product", "Upcast", "Operand", "Zero", "Format", "Formats",
    "Kernel", "Advice", "Change", "Estimate", "LostConstant", "MemoryRow", "ModuleRow", "Magnitudes", "Share",
    "Drift", "DriftRow", "ResultDrift", "SensitivityRow", "RecommendationRow", "Tried",
}  # fmt: skip


@pytest.mark.parametrize("module", [jmp_policy, linen, nnx, report, jmp], ids=lambda m: m.__name__)
def test_what_an_editor_shows_of_public_names(module):
    """The first sentence, in one line or two, and an example."""
    public = {n: v for n, v in public_names(module).items() if callable(v)}
    texts = {name: inspect.getdoc(value) or "" for name, value in public.items()}
    assert {n for n, text in texts.items() if ">>>" not in text} <= RECORDS
    sentences = {n: text.partition("\n\n")[0] for n, text in texts.items()}
    assert not {n: s for n, s in sentences.items() if not s.endswith(".") or len(s) > 200}


def run(path):
    """Runs all Python blocks of a page, in order, as one program; returns what it has defined.

    A block whose title is a package is that package's side of a comparison: without it the block is compiled
    and not run.
    """
    blocks = BLOCK.findall(path.read_text())
    # A block with another info string would never run.
    assert len(blocks) == path.read_text().count("```python")
    namespace = {"__name__": path.stem}
    for package, block in blocks:
        code = compile(block, path.name, "exec")
        if not package or importlib.util.find_spec(package) is not None:
            exec(code, namespace)
    return namespace


@pytest.mark.slow
def test_readme():
    namespace = run(ROOT / "README.md")
    for losses in (namespace["losses"], namespace["nnx_losses"]):
        assert losses[-1] < 0.5 * losses[0]


@pytest.mark.once
@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_docs_pages(path):
    namespace = run(path)
    assert len(namespace) > 1 or path.name in WITHOUT_CODE


def test_a_page_that_fails_fails(tmp_path):
    page = tmp_path / "page.md"
    page.write_text('```python\nx = 1\n```\n\n```python title="no_such_package"\nx = 2\n```\n')
    assert run(page)["x"] == 1
    page.write_text('```python\nx = 1\n```\n\n```python title="jmp_policy"\nassert x == 2\n```\n')
    with pytest.raises(AssertionError, match=r"^$|assert"):
        run(page)


def shown(row):
    """Pairs of a file and the test in it that a row of the conformance page names."""
    return re.findall(r"\[`(\w+)(?:\.py)?`\]\(\.\./(tests/test_\w+\.py)\)", row)


def test_the_tests_that_the_conformance_page_names_are_there():
    rows = [line for line in (DOCS / "conformance.md").read_text().splitlines() if line.startswith("| ")]
    rows = [line for line in rows if not line.startswith("| what |")]
    assert len(rows) > 30
    assert not [row for row in rows if not shown(row)]
    for name, path in {pair for row in rows for pair in shown(row)}:
        source = (ROOT / path).read_text()
        # A whole file stands for all of its tests.
        assert Path(path).stem == name or re.search(rf"^def {name}\(", source, flags=re.M), (name, path)


def headings(path):
    """The anchors that a page's headings get."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.S | re.M)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("path", [ROOT / "README.md", *PAGES, *RESULTS], ids=page_name)
def test_links_lead_somewhere(path):
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.S | re.M)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith("https://"):
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            assert target.exists(), link
            assert not anchor or anchor in headings(target), link


def test_every_page_is_in_the_navigation_under_its_title():
    text = (ROOT / "mkdocs.yml").read_text()
    titles = {page: title for title, page in re.findall(r'^ *- "?(.+?)"?: (\w+\.md)$', text, flags=re.M)}
    # Two are files of the repository, which docs/site/linked_files.py makes pages.
    others = {"changelog.md": "CHANGELOG.md", "examples.md": "examples/README.md"}
    files = {page: ROOT / others.get(page, f"docs/{page}") for page in titles}
    assert {page: path.read_text().partition("\n")[0] for page, path in files.items()} == {
        page: f"# {title}" for page, title in titles.items()
    }
    left_out = re.findall(r"^  (\w+\.md)$", text.partition("\nnot_in_nav: |\n")[2], flags=re.M)
    assert sorted([*titles, *left_out]) == sorted([p.name for p in PAGES] + [*others])


#: What newcomers search for, and the page that answers; tests/test_site.py types it in.
FOUND_FIRST = {
    "GradScaler": "migrating.md",
    "TrainState": "index.md",
    "fp16": "choosing.md",
    "bf16": "choosing.md",
    "NaN": "debugging.md",
}


@pytest.mark.parametrize("word", FOUND_FIRST)
def test_a_heading_of_the_page_that_answers_has_the_word(word):
    """The search counts a word in a heading a thousand times."""
    pages = [path.name for path in PAGES if re.search(rf"^#+ .*\b{word}\b", path.read_text(), flags=re.M)]
    assert pages == [FOUND_FIRST[word]]


def test_every_page_that_is_not_in_the_navigation_is_linked_to():
    texts = {path: path.read_text() for path in PAGES}
    for path in (DOCS / "conformance.md", DOCS / "internals.md", *RESULTS):
        name = path.relative_to(DOCS).as_posix()
        assert any(re.search(rf"\]\({name}[)#]", text) for page, text in texts.items() if page != path), name


@pytest.mark.parametrize("module", [jmp_policy, linen, nnx, report], ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_api_reference(module):
    text = "\n".join(path.read_text() for path in DOCS.glob("api*.md"))
    listed = re.findall(rf"^::: {module.__name__}\.(\w+)$", text, flags=re.M)
    public = set(public_names(module))
    listed = [name for name in listed if not inspect.ismodule(getattr(module, name))]
    assert len(listed) == len(set(listed))
    # What a report's rows are is public there, and the reports themselves are listed once, as jmp_policy's.
    assert set(listed) == (public - set(dir(jmp_policy)) if module is report else public)


@pytest.mark.once
def test_the_picture_of_the_rooms_is_that_of_the_imports(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    rooms = importlib.import_module("rooms")
    imports, picture = rooms.read_imports(), (DOCS / "images" / "rooms.svg").read_text()
    assert rooms.drawn(imports) == picture, "python docs/rooms.py draws it again"
    assert xml.etree.ElementTree.fromstring(picture).tag.endswith("svg")
    room, below = next((room, min(below)) for room, below in rooms.reduced(imports).items() if below)
    assert rooms.drawn({**imports, room: imports[room] - {below}}) != picture


def test_the_diagrams_are_drawn_and_shown(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    diagrams = importlib.import_module("diagrams")
    texts = "".join(path.read_text() for path in PAGES)
    for name in diagrams.DIAGRAMS:
        picture = (DOCS / "images" / f"diagram_{name}.svg").read_text()
        assert diagrams.drawn(name) == picture, "python docs/diagrams.py draws it again"
        assert xml.etree.ElementTree.fromstring(picture).tag.endswith("svg")
        assert f"(images/diagram_{name}.svg)" in texts


def test_the_diagram_of_autocast_says_what_autocast_does(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    floors = [box for (box,) in importlib.import_module("diagrams").AUTOCAST]
    namespace = {}
    exec(BLOCK.findall((DOCS / "autocast.md").read_text())[0][1], namespace)
    args = [namespace[name] for name in ("params", "x", "y")]
    rows = jmp_policy.explain(namespace["loss_fn"], "float16")(*args)
    found = [rows.of(name)[place] for name, place in (("dot_general", 0), ("tanh", 0), ("dot_general", 1))]
    assert [row.operands for row in found] == [box.dtype for box in floors[:3]] == ["float16"] * 3
    assert "only float32 operations use it" in found[2].why
    assert {row.chosen for row in (*rows.of("exp"), *rows.of("log"))} == {floors[3].dtype}


def test_the_files_that_internals_names_are_there():
    rooms = [path.name for path in (ROOT / "src/jmp_policy/_src").iterdir() if path.is_dir()]
    text = (DOCS / "internals.md").read_text()
    files = re.findall(rf"`((?:{'|'.join(rooms)})/[\w/]+(?:\.py)?)`", text)
    assert set(re.findall(r"^### (\w+)$", text, flags=re.M)) == {name for name in rooms if name[0] != "_"}
    assert len(files) > 30
    assert not [name for name in files if not (ROOT / "src/jmp_policy/_src" / name).exists()]


@pytest.mark.once
def test_the_figure_is_there_and_is_drawn_the_same_again(tmp_path, monkeypatch):
    drawn = (DOCS / "images" / "gradient_spectrum.svg").read_text()
    assert xml.etree.ElementTree.fromstring(drawn).tag.endswith("svg")
    monkeypatch.syspath_prepend(DOCS)
    figures = importlib.import_module("figures")
    spectrum = jmp_policy.gradient_spectrum(figures.digits_loss, *figures.trained(steps=20))
    paths = [tmp_path / name for name in ("first.svg", "second.svg")]
    for path in paths:
        figures.draw(spectrum, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    # What the page says of it: most gradients of activations are zero, and some of the others become so.
    gradients = spectrum.overall("activation gradient")
    assert gradients.zeros > 0.5 * gradients.size
    assert gradients.float16.zero > spectrum.overall().float16.zero


def test_numbers_of_pages_are_the_measured_ones(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    pages = importlib.import_module("benchmarks.pages.files")
    for name, numbers in pages.FILES.items():
        text = (ROOT / name).read_text()
        assert pages.written(text, numbers) == text
        lines = text.partition(pages.BEGIN)[2].partition(pages.END)[0].splitlines()
        assert sum(line.startswith("| ") for line in lines) > 3


def test_every_operation_on_pytorchs_lists_is_compared(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    lists = importlib.import_module("benchmarks.pages.autocast_lists")
    compared = {name for group in lists.GROUPS for name in group.names.split()}
    assert compared == {name for names in lists.TORCH.values() for name in names.split()}


def test_readme_shows_its_first_example_early_and_stays_short():
    text = (ROOT / "README.md").read_text()
    lines = text.splitlines()
    assert len(text.split()) <= 900
    assert lines.index("```python") < 35
