"""What must hold of the source as a whole: rooms in order, small files, no private parts of JAX or Flax."""

import ast
import functools
import os
import re
from pathlib import Path

import pytest
from jax.extend.core import primitives

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "jmp_policy"
SOURCE = "jmp_policy._src"

#: The rooms of `_src`, lowest first: a room imports only from rooms before it.
ROOMS = [
    "core", "policy", "jaxpr", "products", "loss_scaling", "half_params", "weight_grads", "autocast",
    "flax", "report", "api",
]  # fmt: skip

RAISES = ("pytest.raises", "pytest.warns")


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def tree(path):
    return ast.parse(path.read_text())


def written(node):
    """The source of an expression: of dotted names, as most are, without `ast.unparse`, which takes long."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{written(node.value)}.{node.attr}"
    return ast.unparse(node)


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
        elif isinstance(node, ast.Call) and "import" in written(node.func):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and re.fullmatch(r"jmp_policy(\.\w+)*", str(part.value)):
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
    assert upward(below, 'importlib.import_module("jmp_policy._src.flax.linen.wrapped")')
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
    long = {name: n for name, path in FILES.items() if (n := path.read_text().count("\n")) > 500}
    assert not long


def test_definitions_have_docstrings():
    without = [name for name, path in FILES.items() if not ast.get_docstring(tree(path))]
    for name, path in FILES.items():
        for node in tree(path).body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            public = public and "overload" not in map(ast.unparse, node.decorator_list)
            if public and not ast.get_docstring(node):
                without.append(f"{name}.{node.name}")
    assert not without


#: The files that may hold facts about primitives, and those that may know what is inside a loop or branch.
FACTS = {f"{SOURCE}.jaxpr.op_table", f"{SOURCE}.jaxpr.calls"}
CONTROL_FLOW = {f"{SOURCE}.jaxpr.{name}" for name in ("compat", "control_flow", "ir")}
WORDS_OF_CONTROL_FLOW = ("cond_jaxpr", "body_jaxpr", "scan_sizes", '"branches"', "num_carry")

PRIMITIVES = {p.name for p in vars(primitives).values() if hasattr(p, "name")}


def lists_of_primitives(parsed):
    """Lines of literals that hold three or more names of primitives."""
    for node in ast.walk(parsed):
        elements = node.elts if isinstance(node, ast.Set | ast.Tuple | ast.List) else ()
        elements = node.keys if isinstance(node, ast.Dict) else elements
        if sum(text in PRIMITIVES for text in texts(*filter(None, elements))) >= 3:
            yield node.lineno


def test_facts_about_primitives_stand_in_one_table():
    others = {name: path for name, path in FILES.items() if name not in FACTS}
    assert not {
        name: found for name, path in others.items() if (found := list(lists_of_primitives(tree(path))))
    }
    assert list(lists_of_primitives(ast.parse("a = 1\nb = {'add', 'sub', 'mul'}"))) == [2]
    assert not list(lists_of_primitives(ast.parse("{'add': 1, 'sub': 2, **others}")))


def test_what_is_inside_a_loop_or_branch_is_known_in_one_room():
    found = {n for n, path in FILES.items() if any(w in path.read_text() for w in WORDS_OF_CONTROL_FLOW)}
    assert found == CONTROL_FLOW


def test_every_raises_has_a_match():
    without = []
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        for node in ast.walk(tree(path)):
            is_check = isinstance(node, ast.Call) and written(node.func) in RAISES
            if is_check and not any(k.arg == "match" for k in node.keywords):
                without.append(f"{path.name}:{node.lineno}")
    assert not without


@pytest.mark.once
def test_no_absolute_paths_or_registries():
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith((".venv", "build", "dist"))]
        for path in (Path(folder, name) for name in names):
            if path.suffix in (".py", ".toml", ".md", ".json") or path.name in ("Makefile", "run"):
                text = path.read_text()
                assert not re.search(r"/(?:root|home)/\w|(?:index|extra-index)-url\s*=", text), path


#: The two files that may use private parts of JAX and Flax, and say why.
COMPAT = {f"{SOURCE}.jaxpr.compat", f"{SOURCE}.flax.compat"}

#: Modules of JAX and Flax that their documentation shows, and what of them where it is not all.
DOCUMENTED = {
    **dict.fromkeys(("jax", "jax.core", "jax.numpy", "jax.sharding", "jax.typing", "jax.extend.core"), "*"),
    **dict.fromkeys(("flax", "flax.errors", "flax.linen", "flax.nnx", "flax.serialization"), "*"),
    **dict.fromkeys(("flax.linen.dtypes", "flax.nnx.nn.dtypes", "jax.experimental.xla_metadata"), "*"),
    "jax.ad_checkpoint": {"checkpoint_name"},
    "jax.experimental": {"topologies"},
    "jax.extend": {"core"},
    "jax.flatten_util": {"ravel_pytree"},
    "jax.interpreters": {"ad", "batching", "mlir"},
    "flax.core": {"FrozenDict", "meta"},
    "flax.nnx.nn": {"dtypes"},
    "flax.training": {"train_state"},
}

#: Attributes, and parameters of equations, without an underscore that nobody documents.
UNDOCUMENTED_ATTRIBUTES = {
    *("source_info", "name_stack", "traceback", "ctx", "debug_info", "manual_axis_type", "module_context"),
    *("axis_context", "to_nnx__module", "method_handler_wrapped", "__dataclass_fields__"),
}
UNDOCUMENTED_TEXTS = UNDOCUMENTED_ATTRIBUTES | {
    *("subfuns", "out_trees", "ft_in", "manual_axes", "newly_manual_axes", "num_consts", "num_carry"),
}

#: Public in spite of underscores: Python's data model, named tuples, and what we put on other's objects.
PUBLIC = re.compile(r"__\w+__|_replace|_asdict|_fields|_make|_jmp_policy\w*")
BY_NAME = ("getattr", "hasattr", "setattr", "delattr", "getattr_static", "__setattr__", "__getattribute__")


def is_underscored(name):
    return name.startswith("_") and not PUBLIC.fullmatch(name)


def own_names(parsed):
    """Names that the classes of a file define, by which its objects know each other's insides."""
    names = set()
    for cls in (node for node in ast.walk(parsed) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(cls):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and written(node.value) in ("self", "cls"):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


def imported_parts(node):
    """Pairs of a module that an import names, and what of it."""
    if isinstance(node, ast.Import):
        return [(alias.name, "") for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [(node.module, alias.name) for alias in node.names]
    return []


def is_undocumented(module, part):
    if module.partition(".")[0] not in ("jax", "flax"):
        return False
    known = DOCUMENTED.get(module, set())
    return is_underscored(part) or not (part in known or "*" in known)


def texts(*nodes):
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def names_in_texts(node):
    """Names of attributes, arguments and parameters that stand in a piece of source as texts."""
    if isinstance(node, ast.Call):
        is_access = written(node.func).rpartition(".")[2] in BY_NAME
        return [*(texts(*node.args) if is_access else ()), *(k.arg for k in node.keywords if k.arg)]
    if isinstance(node, ast.Dict):
        return texts(*(key for key in node.keys if key))
    if isinstance(node, ast.Subscript):
        return texts(node.slice)
    return texts(node.left) if isinstance(node, ast.Compare) else []


def private_uses(parsed):
    """What a file uses of JAX, Flax and Python that their documentation does not show."""
    parsed = ast.parse(parsed) if isinstance(parsed, str) else parsed
    own = own_names(parsed)
    for node in ast.walk(parsed):
        yield from (f"{m}.{part}" for m, part in imported_parts(node) if is_undocumented(m, part))
        if isinstance(node, ast.Attribute):
            ours = node.attr in own or written(node.value) in ("self", "cls")
            whole = written(node)
            undocumented = node.attr in UNDOCUMENTED_ATTRIBUTES or whole == "jax.config.values"
            if undocumented or (is_underscored(node.attr) and not ours):
                yield whole
        for name in names_in_texts(node):
            if name in UNDOCUMENTED_TEXTS or (is_underscored(name) and name not in own):
                yield name


def test_private_parts_of_jax_flax_and_python_stand_in_two_files():
    assert set(FILES) > COMPAT
    others = {name: path for name, path in FILES.items() if name not in COMPAT}
    assert not {name: found for name, path in others.items() if (found := list(private_uses(tree(path))))}


def test_each_use_of_a_private_part_says_which():
    for name in sorted(COMPAT):
        parsed = tree(FILES[name])
        assert re.search(r"was read in (JAX|Flax) \d[\d.]+ and \d[\d.]+", ast.get_docstring(parsed))
        public = [
            n for n in parsed.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name[0] != "_"
        ]
        using = [node for node in public if list(private_uses(node))]
        assert len(using) >= 3
        assert not [n.name for n in using if "Private: " not in ast.get_docstring(n)]


PRIVATE = [
    "from jax._src import core",
    "import jax._src.core",
    "from jax.interpreters import partial_eval",
    "from jax.extend import source_info_util",
    "from flax.core import lift",
    "from flax.linen import _module",
    "from flax.linen.transforms import lift_direct_transform",
    "from flax.nnx.tracers import TraceState",
    "variable._raw_value",
    "jax._src.core.Tracer",
    "sys._getframe(1)",
    "mlir._platform_specific_lowerings['cpu']",
    "type(module).__dataclass_fields__",
    "eqn.source_info",
    "jax.config.values['jax_enable_x64']",
    "params['ft_in'].unpack()",
    "'newly_manual_axes' in params",
    "getattr(aval, 'manual_axis_type', None)",
    "object.__setattr__(node, '_trace_state', 1)",
    "namespace = {'_new': new}",
    "jnp.einsum(text, a, b, _dot_general=f)",
    "class A:\n    def _a(self): ...\n    def f(self, other):\n        return other._b",
]
NOT_PRIVATE = [
    "import jax.numpy as jnp\nfrom jax import lax\nfrom jax.extend.core import Primitive",
    "from flax import nnx\nfrom flax.linen.dtypes import promote_dtype\nfrom jmp_policy._src import core",
    "class A:\n    def _a(self): ...\n    def f(self, other):\n        return other._a() + self._c",
    "row._replace(a=1), row._asdict(), row._fields, type(x).__name__, x._jmp_policy_origin",
    "params['length'], getattr(x, 'dtype', None), hasattr(row, '_fields'), jax.config.jax_enable_x64",
]


def test_private_parts_are_told_from_public_ones():
    assert [source for source in PRIVATE if not list(private_uses(source))] == []
    assert [source for source in NOT_PRIVATE if list(private_uses(source))] == []
