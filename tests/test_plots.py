"""The figures of the documentation show what the results say, and so does the table of the cards."""

import importlib
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

ROOT = Path(__file__).parent.parent
NAMES = ("zoo_steps", "zoo_cards")


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


def plots():
    return importlib.import_module("benchmarks.pages.plots")


def result(name):
    source, _ = plots().FIGURES[name]
    return json.loads((ROOT / "benchmarks" / "results" / f"{source}.json").read_text())


def drawn(name, content, folder):
    return plots().save(name, content, folder)


def marks(path):
    """Id -> coordinates of all that stands for a number."""
    svg = "{http://www.w3.org/2000/svg}"
    found = {}
    for group in ElementTree.parse(path).iter(f"{svg}g"):
        name = group.get("id", "")
        if not re.match(r"gigabytes|added|over", name):
            continue
        used = [float(use.get(axis)) for use in group.iter(f"{svg}use") for axis in "xy"]
        lines = " ".join(path.get("d") for path in group.findall(f"{svg}path"))
        found[name] = used or [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", lines)]
        assert found[name], name
    return found


def texts(path):
    """All texts, which Matplotlib draws as outlines with the text itself in a comment."""
    return re.findall(r"<!-- (.*?) -->", path.read_text())


def width(mark):
    return max(mark[::2]) - min(mark[::2])


def test_all_figures_are_tested():
    assert tuple(plots().FIGURES) == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_figures_are_those_of_the_results(name, tmp_path):
    plots().main(images=tmp_path)
    kept, new = ROOT / "docs" / "images" / f"{name}.svg", tmp_path / f"{name}.svg"
    # The outlines of letters may differ between versions of Matplotlib.
    assert texts(kept) == texts(new)
    before, after = marks(kept), marks(new)
    assert before.keys() == after.keys()
    for mark, places in after.items():
        assert places == pytest.approx(before[mark], abs=0.01), mark


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_same_results_give_the_same_bytes(name, tmp_path):
    first = drawn(name, result(name), tmp_path).read_bytes()
    assert drawn(name, result(name), tmp_path).read_bytes() == first
    assert b"<dc:date>" not in first


def _least(rows, column, **where):
    """The row with the least number in a column, which does not decide where the axis ends."""
    chosen = [row for row in rows if column in row and all(row[k] == v for k, v in where.items())]
    return min(chosen, key=lambda row: row[column])


def _change(name, content):
    """Changes one number, and says what stands for it."""
    gid = plots()._gid
    if name == "zoo_steps":
        row = next(row for row in content["rows"] if row["variant"] == "wrapped, loss_scaled")
        row["added_bytes"] = "+0.30%"
        return {gid("added_bytes", row["model"], "jmp_policy")}
    row = _least(content["rows"], "over_float32", precision="float16")
    row["over_float32"] *= 1.2
    return {gid("over_float32", row["model"], row["card"])}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_changed_number_changes_what_stands_for_it_alone(name, tmp_path):
    content = result(name)
    before = marks(drawn(name, content, tmp_path))
    changed = _change(name, content)
    after = marks(drawn(name, content, tmp_path))
    assert {mark for mark in before if before[mark] != after[mark]} == changed


@pytest.mark.slow
def test_bars_are_as_long_as_their_numbers(tmp_path):
    content = result("zoo_steps")
    found = marks(drawn("zoo_steps", content, tmp_path))
    rows = {(row["model"], row["variant"]): row for row in content["rows"] if row["jax"] == "0.10"}
    scaled = {"by hand": "by hand, scaling by hand", "jmp_policy": "wrapped, loss_scaled"}
    lengths = {
        plots()._gid("added_bytes", model, label): abs(float(rows[model, variant]["added_bytes"].rstrip("%")))
        for model in dict.fromkeys(model for model, _ in rows)
        for label, variant in scaled.items()
    }
    longest = max(lengths, key=lambda name: lengths[name])
    for name, length in lengths.items():
        share = length / lengths[longest]
        assert width(found[name]) / width(found[longest]) == pytest.approx(share, abs=1e-3)
    assert len(found) == 2 * len(lengths)


def test_each_speed_up_has_a_bar_and_its_number(tmp_path):
    content = result("zoo_cards")
    path = drawn("zoo_cards", content, tmp_path)
    halves = [row for row in content["rows"] if row["precision"] == "float16" and "error" not in row]
    expected = {
        plots()._gid(column, row["model"], row["card"])
        for row in halves
        for column in ("over_float32", "over_tf32")
        if column in row
    }
    assert marks(path).keys() == expected
    written = [f"{row['over_float32']:.1f}" for row in halves]
    assert not Counter(written) - Counter(texts(path))


def shown(picture):
    """All texts of a figure but the labels of ticks beyond the ends of an axis, which are not drawn."""
    beyond = set()
    for axes in picture.axes:
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            labels = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
            beyond |= {label for place, label in labels if not min(limits) <= place <= max(limits)}
    texts = picture.findobj(matplotlib.text.Text)
    return [text for text in texts if text not in beyond and text.get_visible() and text.get_text().strip()]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_text_lies_on_another_or_off_the_figure(name):
    with matplotlib.rc_context(plots().STYLE):
        picture = plots().FIGURES[name][1](result(name))
        canvas = FigureCanvasAgg(picture)
        canvas.draw()
        renderer = canvas.get_renderer()
        boxes = {text: text.get_window_extent(renderer) for text in shown(picture)}
    assert len(boxes) > 25
    right, top = canvas.get_width_height()
    words = {text: text.get_text() for text in boxes}
    outside = [
        words[text] for text, box in boxes.items() if min(box.min) < 0 or box.x1 > right or box.y1 > top
    ]
    assert outside == []
    pairs = itertools.combinations(boxes, 2)
    assert [(words[a], words[b]) for a, b in pairs if boxes[a].overlaps(boxes[b])] == []


def test_models_that_lack_a_number_have_no_bar(tmp_path):
    content = result("zoo_cards")
    halves = [row for row in content["rows"] if row["precision"] == "float16"]
    model, card = halves[0]["model"], halves[0]["card"]
    content["rows"] = [
        {"model": model, "card": card, "precision": "float16", "error": "no"},
        *(row for row in halves[1:] if row["model"] != model),
        {"model": "Another", "card": card, "precision": "float16", "over_float32": 2.5},
    ]
    path = drawn("zoo_cards", content, tmp_path)
    found = marks(path)
    assert plots()._gid("over_float32", model, card) not in found
    assert plots()._gid("over_float32", "Another", card) in found
    assert {model, "Another", "2.5"} <= set(texts(path))


def _page(rows):
    page = importlib.import_module("benchmarks.pages.zoo")
    return page.cards(result("zoo_cards") | {"cards": ["V100", "A100"], "rows": rows})


def test_the_table_of_cards_has_dashes_and_failures():
    row = {"model": "Net", "card": "A100", "precision": "float16", "over_float32": 3.0, "over_tf32": 1.5}
    old = {"model": "Net", "card": "V100", "precision": "float16", "over_float32": 4.0}
    lines = _page([old, row, {"model": "Net", "card": "A100", "precision": "bfloat16", "error": "no"}])
    found = [line for line in lines.splitlines() if line.startswith("| Net")]
    numbers = ["4.00 | 3.00", "- | failed", *["- | -"] * 2]
    assert found == [f"| Net | {cells} |" for cells in numbers]
    assert lines.endswith("- Net in bfloat16 does not compile for A100: `no`")


def test_the_tables_of_tpus_name_what_fails_once():
    page = importlib.import_module("benchmarks.pages.zoo")
    done = {"gigabytes": 2.0, "peak_gigabytes": 1.0, "products": {"bfloat16": 3, "float32": 1}}
    failed = {
        v: f"INTERNAL: `check` {'x' * 140} of Instruction{{this=0x{v}}}" for v in ("by hand", "wrapped")
    }
    rows = [
        {"model": "GPT-2", "target": "v6e", "variant": "float32", **done},
        *({"model": "GPT-2", "target": "v6e", "variant": v, "error": error} for v, error in failed.items()),
        {"model": "GPT-2", "target": "v6e", "variant": "autocast", "error": "too large"},
    ]
    text = page.tpus(page.load("zoo_tpu") | {"rows": rows}).replace("\n", " ")
    assert "| GPT-2 | 2.0 | failed | failed | failed |" in text
    assert "| GPT-2 | 1.0 | failed | failed | failed |" in text
    assert "GPT-2 (by hand, wrapped) does not compile for v6e: `INTERNAL: 'check' " in text
    assert "GPT-2 (autocast) does not compile for v6e: `too large`." in text
    assert text.count("does not compile") == 2
    assert "0x" not in text


def test_the_table_of_loss_scaling_has_differences_and_dashes(monkeypatch):
    target = importlib.import_module("benchmarks.gpu_target")
    page = importlib.import_module("benchmarks.pages.zoo")
    counts = {"wrapped, no scaling": (100, 2 * 10**9), "wrapped, loss_scaled": (103, 203 * 10**7)}
    found = {name: target.Report(n, n, moved, 10**9, 0, {}) for name, (n, moved) in counts.items()}
    rows = target.table_rows(found, {"wrapped, loss_scaled": "wrapped, no scaling"})
    saved = page.load("zoo_gpu") | {"rows": [{"model": "Net", "jax": "0.12", **row} for row in rows]}
    monkeypatch.setattr(page, "load", lambda name: saved)
    lines = [line for line in page.loss_scaling().splitlines() if line.startswith("| Net")]
    assert lines == ["| Net | - | - | - | +3.0% |", "| Net | - | - | - | +1.50% |"]


def test_the_table_of_cards_has_all_models():
    rows = result("zoo_cards")["rows"]
    page = importlib.import_module("benchmarks.pages.zoo").cards()
    models = [f"| {model}" for model in dict.fromkeys(row["model"] for row in rows)]
    assert [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")] == 4 * [
        "|",
        *models,
    ]


@pytest.mark.parametrize(
    ("card", "expected"),
    [("V100", ["float32", "float16"]), ("A100", ["float32", "float16", "bfloat16"])],
)
def test_cards_are_asked_for_what_they_have(card, expected, monkeypatch):
    cards = importlib.import_module("benchmarks.counts.zoo_cards")
    made = {precision: precision for precision in ("float32", "float16", "bfloat16")}
    asked = []

    def compiled(programs, config):
        asked.extend(programs)
        return [cards.Compiled(error=f"many lines\nof {program}") for program in programs]

    monkeypatch.setattr(cards, "compiled", compiled)
    rows = cards.rows(made, cards.TARGETS[card])
    assert asked == expected
    assert rows == [{"precision": p, "error": f"of {p}"} for p in expected]


def test_a_compiler_that_dies_is_a_row_for_each_program(monkeypatch):
    cards = importlib.import_module("benchmarks.counts.zoo_cards")

    def compiled(programs, config):
        raise RuntimeError("killed")

    monkeypatch.setattr(cards, "compiled", compiled)
    rows = cards.rows({"float32": 1, "float16": 2}, cards.TARGETS["V100"])
    assert rows == [{"precision": p, "error": "killed"} for p in ("float32", "float16")]
