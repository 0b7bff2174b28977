import importlib.util
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="module")
def digits():
    path = Path(__file__).parent.parent / "examples" / "digits.py"
    spec = importlib.util.spec_from_file_location("example_digits", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fake_rows(digits, **accuracy):
    return [digits.Row(name, value, {}, 0, 0) for name, value in accuracy.items()]


# One test for all that needs a run: pytest-xdist would repeat a shared run in every worker.
def test_it_trains_in_all_precisions_and_saves_the_plot(digits, monkeypatch, tmp_path, capsys):
    # The run is short, so the scale starts where it overflows at once.
    scale = digits.jmpp.DynamicLossScale(2.0**38, growth_interval=20, max_loss_scale=2.0**60)
    monkeypatch.setitem(digits.RUNS, "float16", ("mixed_float16", scale))
    rows, judge, out = {}, digits.judge, tmp_path / "new" / "plot.png"
    monkeypatch.setattr(
        digits, "judge", lambda found: rows.update({r.name: r for r in found}) or judge(found)
    )

    assert digits.main(["--steps", "100", "--out", str(out), "--quiet"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert list(rows) == ["float32", "bfloat16", "float16", "float16 unscaled"]
    printed = capsys.readouterr()
    assert all(name in printed.out for name in rows)
    assert printed.err == ""

    for name in ("float32", "bfloat16", "float16"):
        losses = rows[name].history["loss"]
        assert losses.shape == (100,)
        assert losses[-10:].mean() < 0.1 * losses[0]
        assert rows[name].accuracy > 0.9
    assert rows["float16 unscaled"].accuracy < rows["float16"].accuracy - 0.05

    history = rows["float16"].history
    assert not history["grads_finite"][0]
    assert 1 <= history["skipped_steps"][-1] < 20
    assert (np.diff(history["loss_scale"]) > 0).any()
    assert np.isfinite(history["loss"]).all()

    zeros = {name: row.history["zero_grads"][0] for name, row in rows.items()}
    assert zeros["float32"] < 0.01
    assert zeros["bfloat16"] < 0.01
    assert zeros["float16 unscaled"] > 0.5


def test_it_fails_where_float16_falls_behind(digits, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(digits, "compare", lambda **_: fake_rows(digits, float32=0.98, float16=0.96))
    assert digits.main(["--out", str(tmp_path / "plot.png")]) == 1
    assert "96.0%, more than 1 point behind float32 (98.0%)" in capsys.readouterr().err


@pytest.mark.parametrize("half", [0.97, 0.975, 0.99])
def test_it_accepts_up_to_one_point(digits, half):
    assert digits.judge(fake_rows(digits, float32=0.98, float16=half)) is None


@pytest.mark.parametrize("steps", ["0", "-1", "9"])
def test_it_refuses_too_few_steps(digits, steps, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        digits.main(["--steps", steps])
    assert f"--steps must be at least 10, got {steps}" in capsys.readouterr().err
