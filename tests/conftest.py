"""Shared settings: tests run on the CPU unless told otherwise, which shows itself as eight devices."""

import gc
import hashlib
import importlib.metadata
import os
import shutil
import tempfile
import threading

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# Most of the time of these tests is compiling. The programs of operations and buffers stay the same; less is
# done for the speed of the machine code. In jaxlib 0.10 XLA's older emitters can be chosen, which compile in
# half the time; 0.12 has one kind, and XLA ends the process at a flag that it does not know.
os.environ["XLA_FLAGS"] += {
    "0.10.": " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
    "0.12.": " --xla_cpu_parallel_codegen_split_count=1",
}.get(importlib.metadata.version("jaxlib")[:5], "")

import hypothesis
import jax
import pytest

# The same examples on every run; `make test-random` takes others each time, and prints how to repeat them.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("random", deadline=None, derandomize=False, print_blob=True)
hypothesis.settings.load_profile("same")

if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_disable_most_optimizations", True)


def reused(make, most=10):
    """Gives each thread the same MLIR context so many times, as JAX 0.12 does by itself.

    JAX 0.10 makes one for every program: a ninth of the time of these tests, and 1.3 GB of two files' 2.1.
    """
    own = threading.local()

    def reuse():
        own.context, own.uses = (
            (own.context, own.uses + 1) if getattr(own, "uses", most) < most else (make(), 1)
        )
        return own.context

    return reuse


if jax.__version__.startswith("0.10."):
    from jax._src.interpreters import mlir

    mlir.make_ir_context = reused(mlir.make_ir_context)

# Jaxprs are many small objects, and nearly all of them live on in JAX's caches. With Python's own thresholds
# the collector goes through them again and again: 6 % of the time of three files, and 1 % with these.
gc.set_threshold(20_000, 20, 50)


def pytest_collection_finish():
    """Lets the garbage collector pass over the modules and tests that were loaded."""
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption(
        "--part-of-slow-cases",
        metavar="K/N",
        help="of the cases of slow tests and of whole programs run the Kth of N parts (K counts on beyond N)",
    )


#: What users read and copy runs on every commit.
NEVER_LEFT_OUT = {"test_docs.py", "test_notebooks.py"}


def pytest_collection_modifyitems(config, items):
    """Leaves out the other parts of the slow cases, if asked to."""
    asked = config.getoption("--part-of-slow-cases")
    if asked is None:
        return
    part, parts = (int(number) for number in asked.split("/"))

    def is_left_out(item):
        marks = {mark.name for mark in item.iter_markers()}
        if not marks & {"slow", "once"} or item.path.name in NEVER_LEFT_OUT:
            return False
        # Not every Nth one: of N dtypes that would be always the same.
        return (int(hashlib.sha256(item.nodeid.encode()).hexdigest(), 16) - part) % parts != 0

    left_out = set(filter(is_left_out, items))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_configure(config):
    """Lets this process compile a program once, however many functions it comes from.

    The folder is the process's own and goes with it: what a run finds out, it finds out afresh, and JAX
    writes entries in place, which another process could read half written.
    """
    if os.environ["JAX_PLATFORMS"] == "cpu":
        folder = tempfile.mkdtemp(prefix="jmp_policy_tests_")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def names_of_operations():
    """For tests of names in compiled programs: with other names it is another program to the cache."""
    before = jax.config.jax_compilation_cache_include_metadata_in_key
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", before)
