"""The option with which two versions of Python share the cases of slow tests."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest

SLOW = {f"tests/test_a.py::test_slow[{case}-{dtype}]" for case in range(40) for dtype in ("f16", "bf16")}
SLOW |= {"tests/test_a.py::test_one_case"}
WHOLE = {
    "tests/test_a.py::test_fast[0]": (),
    "tests/test_a.py::test_fast[1]": (),
    "tests/test_a.py::test_on_one_version[0]": ("slow", "once"),
    "tests/test_a.py::test_on_one_version[1]": ("slow", "once"),
    "tests/test_a.py::test_skipped_on_one[0]": ("slow", "skipif"),
    "tests/test_a.py::test_skipped_on_one[1]": ("slow", "skipif"),
}


class Item(SimpleNamespace):
    """A collected test: its name and marks."""

    nodeid: str
    marks: tuple[str, ...]

    def iter_markers(self) -> list[Any]:
        return [SimpleNamespace(name=mark) for mark in self.marks]

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]


def _taken(half: str | None) -> tuple[set[str], set[str]]:
    """Returns the tests that are run, and those that are reported as left out."""
    items = [Item(nodeid=name, marks=marks) for name, marks in WHOLE.items()]
    items += [Item(nodeid=name, marks=("slow",)) for name in sorted(SLOW)]
    left_out: list[Item] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    conftest.pytest_collection_modifyitems(SimpleNamespace(getoption=lambda _: half, hook=hook), items)
    return {item.nodeid for item in items}, {item.nodeid for item in left_out}


def test_without_the_option_all_run():
    assert _taken(None) == (SLOW | WHOLE.keys(), set())


@pytest.mark.parametrize("half", ["0", "1"])
def test_only_cases_of_slow_tests_are_left_out(half):
    taken, left_out = _taken(half)
    assert taken >= WHOLE.keys()
    assert taken | left_out == SLOW | WHOLE.keys()
    assert not taken & left_out


def test_each_case_runs_on_one_version_and_each_dtype_on_both():
    halves = [_taken(half)[0] - WHOLE.keys() for half in "01"]
    assert halves[0] | halves[1] == SLOW
    assert not halves[0] & halves[1]
    for half in halves:
        assert 5 < sum("-f16" in name for name in half) < 35
        assert 5 < sum("-bf16" in name for name in half) < 35
        # Both dtypes of some cases, one of others: not the same dtype of every case.
        pairs = [name for name in half if "-f16" in name and name.replace("-f16", "-bf16") in half]
        assert 3 < len(pairs) < 37
