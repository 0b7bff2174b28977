"""Types of public names: complete, as pyright counts them, and light to import.

What a type checker makes of them stands in tests/typed_use.py, which `make types` reads.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: Subclasses of Flax's classes: pyright's report does not look into other packages' sources.
UNKNOWN = {"TrainState", "Optimizer"}


def pyright(*arguments):
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", *arguments]
    # Pyright looks for the package's types on the path, and not where an editable install points to.
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    return json.loads(result.stdout)


@pytest.mark.once
def test_types_of_public_names_are_complete():
    found = pyright("--verifytypes", "jmp_policy", "--ignoreexternal")["typeCompleteness"]
    assert Path(found["packageRootDirectory"]) == ROOT / "src" / "jmp_policy"
    assert Path(found["pyTypedPath"]).name == "py.typed"
    unknown = {s["name"].rpartition(".")[2] for s in found["symbols"] if not s["isTypeKnown"]}
    assert unknown <= UNKNOWN
    assert found["completenessScore"] > 0.98
    assert found["missingFunctionDocStringCount"] == found["missingClassDocStringCount"] == 0


@pytest.mark.once
def test_types_cost_no_import():
    source = "import sys, jmp_policy; print({'flax.linen', 'flax.nnx', 'matplotlib'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
