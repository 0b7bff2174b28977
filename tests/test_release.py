"""What is needed to release: the workflow, the versions, what sdist and wheel hold."""

import ast
import datetime
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
import yaml

import jmp_policy

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CI, RELEASE = (ROOT / ".github" / "workflows" / f"{name}.yml" for name in ("ci", "release"))
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), flags=re.M))


@pytest.fixture(scope="module")
def distributions():
    path = ROOT / "tools" / "check_distributions.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


#: What uploads to a package index.
PUBLISH = "pypa/gh-action-pypi-publish@release/v1"


def workflow(path):
    parsed = yaml.safe_load(path.read_text())
    parsed["on"] = parsed.pop(True)  # YAML 1.1 reads `on` as a boolean; GitHub does not.
    return parsed


@pytest.mark.parametrize(
    ("path", "targets"),
    [
        (CI, {"lint", "types", "test", "test-all", "test-fast", "docs", "site-test", "wheel"}),
        (RELEASE, {"wheel"}),
    ],
    ids=lambda p: getattr(p, "name", ""),
)
def test_workflows_call_make_with_targets_that_exist(path, targets):
    parsed = workflow(path)
    assert parsed["permissions"] == {"contents": "read"}
    called = set()
    for job in parsed["jobs"].values():
        assert job["runs-on"]
        assert job["timeout-minutes"] <= 90
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) or step["uses"] == PUBLISH
                continue
            program, *arguments = step["run"].split()
            assert program == "make"
            called |= {a for a in arguments if "=" not in a}
    assert called == targets <= TARGETS


def test_ci_runs_for_every_change_and_releases_are_made_by_hand():
    assert {"push", "pull_request"} <= set(workflow(CI)["on"])
    release = workflow(RELEASE)
    assert set(release["on"]) == {"workflow_dispatch"}
    assert release["on"]["workflow_dispatch"]["inputs"]["publish"]["default"] is False
    build, publish = release["jobs"]["build"], release["jobs"]["publish"]
    # Trusted publishing: only the job that uploads may ask for a token, and no password is stored.
    assert "permissions" not in build
    assert publish["permissions"] == {"id-token": "write"}
    assert (publish["needs"], publish["if"]) == ("build", "${{ inputs.publish }}")
    assert publish["steps"][-1] == {"uses": PUBLISH}
    assert "secrets." not in RELEASE.read_text()
    # What was built is what is uploaded.
    for step in (build["steps"][-1], publish["steps"][0]):
        assert (step["with"]["name"], step["with"]["path"]) == ("dist", "dist")


def test_the_matrix_has_the_oldest_the_newest_and_tonights():
    jobs = workflow(CI)["jobs"]
    matrix = {entry["name"]: entry for entry in jobs["test"]["strategy"]["matrix"]["include"]}
    assert set(matrix) == {"oldest", "newest", "nightly"}
    assert f">={matrix['oldest']['python']}" == PROJECT["project"]["requires-python"]
    assert matrix["newest"]["python"] > matrix["oldest"]["python"]
    pythons = {entry["python"] for entry in matrix.values()} | set(
        jobs["types"]["strategy"]["matrix"]["python"]
    )
    pythons.add(jobs["fast"]["steps"][1]["with"]["python-version"])
    known = {c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if re.search(r"3\.\d+$", c)}
    assert pythons == known
    # The one that may fail is the one of pre-releases.
    assert jobs["test"]["continue-on-error"] == "${{ matrix.name == 'nightly' }}"
    assert [name for name, entry in matrix.items() if "pre" in entry] == ["nightly"]
    assert (ROOT / matrix["oldest"]["constraint"]).exists()
    extras = {extra for entry in matrix.values() for extra in entry["extras"].split(",")}
    assert extras <= set(PROJECT["project"]["optional-dependencies"])


def test_the_oldest_versions_are_the_lower_bounds():
    lines = (ROOT / ".github" / "lower-bounds.txt").read_text().splitlines()
    pins = {line.replace("==", ">=") for line in lines if not line.startswith("#")}
    assert pins == set(PROJECT["project"]["dependencies"])


def test_the_version_is_set_in_one_place():
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "src/jmp_policy/__init__.py"
    setting = re.compile(rf"=\s*[\"']{re.escape(jmp_policy.__version__)}[\"']")
    found = [
        p for p in [ROOT / "pyproject.toml", *(ROOT / "src").rglob("*.py")] if setting.search(p.read_text())
    ]
    assert found == [ROOT / "src" / "jmp_policy" / "__init__.py"]


def released():
    """Version -> (date, sections) of the changelog, as Keep a Changelog has it."""
    text = (ROOT / "CHANGELOG.md").read_text()
    title, *entries = re.split(r"^## ", text, flags=re.M)
    assert title.startswith("# Changelog\n")
    assert entries[0].startswith("[Unreleased]\n")
    versions = {}
    for entry in entries[1:]:
        heading, _, body = entry.partition("\n")
        version, date = re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)", heading).groups()
        between, *sections = re.split(r"^### (.*)\n", body, flags=re.M)
        assert not between.strip()
        versions[version] = (
            datetime.date.fromisoformat(date),
            dict(zip(sections[::2], sections[1::2], strict=True)),
        )
    return versions


def test_changelog():
    versions = released()
    ordered = [tuple(map(int, version.split("."))) for version in versions]
    assert ordered == sorted(ordered, reverse=True)
    _, sections = versions[jmp_policy.__version__]
    upgrade = [sections.pop(name) for name in list(sections) if name.startswith("Upgrade from ")]
    assert all(steps.strip().startswith("1. ") for steps in upgrade)
    assert sections
    assert set(sections) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for body in sections.values():
        lines = body.strip().splitlines()
        assert lines[0].startswith("- ")
        assert all(line.startswith(("- ", "  ")) for line in lines)


def test_citation():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
    assert citation["version"] == jmp_policy.__version__
    assert citation["date-released"] == released()[jmp_policy.__version__][0]
    project = PROJECT["project"]
    assert citation["title"] == project["name"]
    assert citation["license"] == project["license"]
    assert citation["abstract"] == project["description"]
    assert [author["name"] for author in citation["authors"]] == [
        author["name"] for author in project["authors"]
    ]


def test_no_address_is_invented():
    assert "urls" not in PROJECT["project"]
    assert "http" not in "".join((p).read_text() for p in (ROOT / "CITATION.cff", CI, RELEASE))


@pytest.fixture
def hook(monkeypatch):
    """hatch_build.py, which imports Hatchling where it is not needed to test it."""
    interface = types.ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = object
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    return runpy.run_path(str(ROOT / "hatch_build.py"))


@pytest.mark.parametrize("home", ["", "https://example.org/some/project"])
def test_an_index_gets_urls_and_a_readme_whose_links_lead_somewhere(hook, distributions, home):
    assert {"readme", "urls"} <= set(PROJECT["project"]["dynamic"])
    text = (ROOT / "README.md").read_text() + "[one](docs/api.md) [other](#here)\n```python\nx[0](y)\n```\n"
    shown = hook["readme"](text, home)
    assert "x[0](y)" in shown
    assert "[other](#here)" in shown
    assert (f"[one]({home}/blob/main/docs/api.md)" if home else "\none [other]") in shown
    urls = hook["project_urls"](home)
    assert set(urls) == (
        {"Repository", "Documentation", "Changelog", "Examples", "Issues"} if home else set()
    )
    paths = [url.partition("/main/")[2] for url in urls.values() if "/main/" in url]
    assert all((ROOT / path).exists() for path in paths)
    head = "Metadata-Version: 2.4\nDescription-Content-Type: text/markdown\n\n"
    assert distributions.metadata_faults(head + shown) == []
    assert "the README of the wheel links to docs/api.md" in distributions.metadata_faults(head + text)
    assert distributions.metadata_faults(head) == ["the wheel lacks the README"]


def test_the_sdist_takes_all_that_tests_and_documentation_need(distributions):
    include = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    # Hatchling adds pyproject.toml by itself.
    expected = distributions.expected_in_sdist() - {"pyproject.toml"}
    assert {"CONTRIBUTING.md", "CITATION.cff", "mkdocs.yml", "tools/check_distributions.py"} <= expected
    assert all((ROOT / name).exists() for name in expected)
    left_out = {
        name for name in expected if f"/{name}" not in include and f"/{name.split('/')[0]}" not in include
    }
    assert not left_out
    assert all((ROOT / name.lstrip("/")).exists() for name in include)


def test_faults_of_distributions_are_found(distributions):
    modules = distributions.modules()
    assert {"jmp_policy/py.typed", "jmp_policy/__init__.py", "jmp_policy/compat/jmp.py"} <= modules
    info = {f"jmp_policy-0.1.0.dist-info/{name}" for name in ("METADATA", "RECORD", "licenses/LICENSE")}
    assert distributions.wheel_faults(modules | info, modules) == []
    without = modules - {"jmp_policy/py.typed"}
    assert distributions.wheel_faults(without | info, modules) == ["the wheel lacks jmp_policy/py.typed"]
    assert distributions.wheel_faults(without | info, without) == ["the wheel lacks jmp_policy/py.typed"]
    tests = {"tests/test_policy.py"}
    assert distributions.wheel_faults(modules | info | tests, modules) == [
        "the wheel has tests/test_policy.py"
    ]
    assert distributions.wheel_faults(modules, modules) == ["the wheel lacks the licence"]
    files = {f"jmp_policy-0.1.0/{name}" for name in ("README.md", "Makefile")}
    assert distributions.sdist_faults(files, {"README.md", "Makefile"}) == []
    assert distributions.sdist_faults(files, {"mkdocs.yml"}) == ["the sdist lacks mkdocs.yml"]


def requirements(extra):
    """The names of the distributions that an extra asks for, through the extras that it names."""
    names = set()
    for requirement in PROJECT["project"]["optional-dependencies"][extra]:
        name, extras = re.fullmatch(r"([\w-]+)(?:\[([\w,-]+)\])?.*", requirement).groups()
        inner = extras.split(",") if name == PROJECT["project"]["name"] else []
        names |= set().union(*map(requirements, inner)) if inner else {name}
    return names


def imported(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    return {n.partition(".")[0] for n in names | {n.module for n in nodes if isinstance(n, ast.ImportFrom)}}


def test_the_demo_installs_what_it_imports_and_no_more():
    used = imported(ROOT / "examples" / "digits.py") | imported(ROOT / "examples" / "_run.py")
    base = {re.match(r"[\w-]+", d)[0] for d in PROJECT["project"]["dependencies"]} | {"jmp_policy", "_run"}
    distributions = {"sklearn": "scikit-learn"}
    asked = requirements("demo")
    assert asked == {distributions.get(n, n) for n in used - base - sys.stdlib_module_names}
    assert asked < requirements("examples") < requirements("test")


def make_dry(target, folder, *stamps):
    """What make would run in a checkout in which the environments of these stamps are there."""
    (folder / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    for name in ("pyproject.toml", "Makefile"):
        (folder / name).write_text((ROOT / name).read_text())
    for name in (".venv/bin/python", *stamps):
        (folder / name).touch()
    # Without the variables of the make that may be running this test.
    env = {n: v for n, v in os.environ.items() if n not in ("MAKEFLAGS", "MAKELEVEL", "EXTRAS", "VENV")}
    command = ["make", "--dry-run", target]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_demo_and_tests_share_an_environment(tmp_path):
    new = make_dry("demo", tmp_path)
    assert '".[demo]"' in new
    assert '".[test]"' not in new
    # After the demo the tests get the rest; after the tests the demo needs nothing.
    assert '".[test]"' in make_dry("test", tmp_path, ".venv/.ready-demo")
    again = make_dry("demo", tmp_path, ".venv/.ready")
    assert "pip install" not in again
    assert "examples/digits.py" in again


def test_contributing_names_what_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    called = set(re.findall(r"\bmake ([a-z-]+)\b", text))
    assert called == TARGETS - {"test-random", "clean"}
    paths = set(re.findall(r"`((?:src|tests|docs|benchmarks|\.github|\.ci)/[\w./-]*\w)`", text))
    assert len(paths) > 20
    assert {path for path in paths if not (ROOT / path).exists()} == set()
    for path, names in NAMED.items():
        assert {name for name in names if name not in text} == set()
        assert {name for name in names if not re.search(rf"\b{name}\b", (ROOT / path).read_text())} == set()


#: File -> names in it that CONTRIBUTING.md speaks of.
NAMED = {
    "tests/helpers.py": ["CASES"],
    "tests/test_structure.py": ["ROOMS"],
    "tests/test_zoo.py": ["NAMES"],
    "benchmarks/models/__init__.py": ["MODELS"],
    "src/jmp_policy/_src/policy/patterns.py": ["_check_pattern", "matches", "show_pattern", "unused_error"],
    "src/jmp_policy/_src/flax/linen/layers.py": ["NORMS", "WEIGHT_NORMS"],
    "src/jmp_policy/_src/flax/nnx/layers.py": ["NORMS", "WEIGHT_NORMS"],
    "src/jmp_policy/_src/jaxpr/op_table.py": ["OPERATIONS", "OpList", "Trait"],
    "src/jmp_policy/_src/core/report_base.py": ["_tables", "_lines", "to_dict", "to_pandas"],
}
