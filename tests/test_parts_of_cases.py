"""The option with which commits, and two versions of Python, share the cases of slow tests."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest

SLOW = {f"tests/test_a.py::test_slow[{case}-{dtype}]" for case in range(40) for dtype in ("f16", "bf16")}
ONCE = {f"tests/test_a.py::test_whole_program[{case}]" for case in range(20)}
ALWAYS = {
    "tests/test_a.py::test_fast[0]": (),
    "tests/test_a.py::test_fast[1]": ("gpu",),
    "tests/test_docs.py::test_pages[README.md]": ("once",),
    "tests/test_notebooks.py::test_runs[01_policies]": ("slow", "once"),
}


class Item(SimpleNamespace):
    """A collected test: its name and marks."""

    nodeid: str
    marks: tuple[str, ...]

    @property
    def path(self) -> Path:
        return Path(self.nodeid.partition("::")[0])

    def iter_markers(self) -> list[Any]:
        return [SimpleNamespace(name=mark) for mark in self.marks]

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]


def _taken(part: str | None) -> tuple[set[str], set[str]]:
    """Returns the tests that are run, and those that are reported as left out."""
    items = [Item(nodeid=name, marks=marks) for name, marks in ALWAYS.items()]
    items += [Item(nodeid=name, marks=("slow",)) for name in sorted(SLOW)]
    items += [Item(nodeid=name, marks=("once",)) for name in sorted(ONCE)]
    left_out: list[Item] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    conftest.pytest_collection_modifyitems(SimpleNamespace(getoption=lambda _: part, hook=hook), items)
    return {item.nodeid for item in items}, {item.nodeid for item in left_out}


def test_without_the_option_all_run():
    assert _taken(None) == (SLOW | ONCE | ALWAYS.keys(), set())


@pytest.mark.parametrize("part", ["0/2", "1/2", "1234/5"])
def test_only_slow_cases_and_whole_programs_are_left_out(part):
    taken, left_out = _taken(part)
    assert taken >= ALWAYS.keys()
    assert taken | left_out == SLOW | ONCE | ALWAYS.keys()
    assert not taken & left_out


@pytest.mark.parametrize("first", [0, 1233])
def test_commits_one_after_the_other_run_each_case_once(first):
    taken = [name for part in range(first, first + 5) for name in _taken(f"{part}/5")[0] - ALWAYS.keys()]
    assert sorted(taken) == sorted(SLOW | ONCE)


def test_each_part_has_both_dtypes_but_not_of_the_same_cases():
    for half in (_taken(f"{part}/2")[0] & SLOW for part in range(2)):
        assert 5 < sum("-f16" in name for name in half) < 35
        assert 5 < sum("-bf16" in name for name in half) < 35
        # Both dtypes of some cases, one of others: not the same dtype of every case.
        pairs = [name for name in half if "-f16" in name and name.replace("-f16", "-bf16") in half]
        assert 3 < len(pairs) < 37
