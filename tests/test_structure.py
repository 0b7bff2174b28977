"""What must hold of the source as a whole: rooms in order, small files, no private parts of JAX or Flax."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "jmp_policy"
SOURCE = "jmp_policy._src"

#: The rooms of `_src`, lowest first: a room imports only from rooms before it.
ROOMS = [
    "core", "policy", "products", "jaxpr", "loss_scaling", "half_params", "weight_grads", "autocast",
    "report", "flax", "api",
]  # fmt: skip

RAISES = ("pytest.raises", "pytest.warns")


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def tree(path):
    return ast.parse(path.read_text())


def imports(text_or_tree):
    """Modules of the package that a file imports, those named in `import_module("...")` too."""
    parsed = ast.parse(text_or_tree) if isinstance(text_or_tree, str) else text_or_tree
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jmp_policy"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else node.module
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield "a relative import"
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "jmp_policy")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and str(part.value).startswith("jmp_policy._"):
                    yield part.value


def room(module):
    """The place of a module's room in the order; public modules are above all rooms."""
    return ROOMS.index(module.split(".")[2]) if module.startswith(f"{SOURCE}.") else len(ROOMS)


def folder(module):
    return module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]


def test_every_folder_of_the_source_is_a_room():
    found = {path.name for path in (PACKAGE / "_src").iterdir() if path.is_dir() and path.name[0] != "_"}
    assert found == set(ROOMS)
    assert [path.name for path in (PACKAGE / "_src").glob("*.py")] == ["__init__.py"]


def upward(name, parsed):
    return [i for i in imports(parsed) if i not in FILES or room(i) > room(name)]


def test_imports_point_down():
    wrong = {name: found for name, path in FILES.items() if (found := upward(name, tree(path)))}
    assert not wrong
    below = f"{SOURCE}.core.dtypes"
    assert upward(below, "from jmp_policy._src.policy import scope")
    assert upward(below, "def f():\n    from jmp_policy import wrap")
    assert upward(below, 'importlib.import_module("jmp_policy._src.flax.linen.wrap")')
    assert upward(below, "from . import cast")
    assert not upward(below, "from jmp_policy._src.core import suggest")


def floors(edges):
    """The length of the longest chain of imports below each node; raises for a circle."""
    known = {}

    def floor(node, above):
        assert node not in above, f"a circle: {' -> '.join((*above, node))}"
        if node not in known:
            below = [floor(n, (*above, node)) for n in edges.get(node, ()) if n != node]
            known[node] = 1 + max(below, default=0)
        return known[node]

    for node in edges:
        floor(node, ())
    return known


def test_neither_files_nor_folders_import_each_other_in_a_circle():
    by_file, by_folder, by_room = {}, {}, {}
    for name, path in FILES.items():
        if not name.startswith(f"{SOURCE}."):
            continue
        found = set(imports(tree(path)))
        by_file[name] = found
        by_folder.setdefault(folder(name), set()).update(map(folder, found))
        by_room.setdefault(room(name), set()).update(map(room, found))
    floors(by_file)
    floors(by_folder)
    assert max(floors(by_room).values()) <= 9


def test_the_packages_root_has_public_modules_only():
    modules = [path for name, path in FILES.items() if not name.startswith(SOURCE)]
    assert len([path for path in modules if path.parent == PACKAGE]) <= 8
    for path in modules:
        defined = [n.name for n in tree(path).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        assert set(defined) <= {"__getattr__"}, path


def test_files_are_small():
    long = {name: n for name, path in FILES.items() if (n := path.read_text().count("\n")) > 400}
    assert not long


def test_definitions_have_docstrings():
    without = [name for name, path in FILES.items() if not ast.get_docstring(tree(path))]
    for name, path in FILES.items():
        for node in tree(path).body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                without.append(f"{name}.{node.name}")
    assert not without


def test_every_raises_has_a_match():
    without = []
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        for node in ast.walk(tree(path)):
            is_check = isinstance(node, ast.Call) and ast.unparse(node.func) in RAISES
            if is_check and not any(k.arg == "match" for k in node.keywords):
                without.append(f"{path.name}:{node.lineno}")
    assert not without


def test_no_absolute_paths_or_registries():
    for pattern in ("*.py", "*.toml", "*.md", "*.json", "Makefile", "run"):
        for path in ROOT.rglob(pattern):
            if any(part.startswith((".venv", "build", "dist")) for part in path.relative_to(ROOT).parts):
                continue
            text = path.read_text()
            assert not re.search(r"/(?:root|home)/\w|(?:index|extra-index)-url\s*=", text), path
