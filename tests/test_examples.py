import importlib
import io
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

pytestmark = pytest.mark.once
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def load():
    """Imports an example by its name, with the others on the path, as Python has them for a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module


@pytest.fixture(scope="module")
def digits(load):
    return load("digits")


ALL = sorted(path.stem for path in EXAMPLES.glob("[!_]*.py"))


@pytest.fixture(scope="module")
def transformer(load):
    return load("nnx_transformer")


def keep_rows(example, monkeypatch):
    """A dictionary that gets the rows that the example's main judges."""
    rows, judge = {}, example.judge
    monkeypatch.setattr(
        example, "judge", lambda found: rows.update({r.name: r for r in found}) or judge(found)
    )
    return rows


def fake_rows(digits, **accuracy):
    return [digits.Row(name, value, {}, 0, 0) for name, value in accuracy.items()]


# One test for all that needs a run: pytest-xdist would repeat a shared run in every worker.
@pytest.mark.parametrize("name", ["digits", "nnx_digits"])
def test_digits_trains_in_all_precisions_and_saves_the_plot(
    name, load, digits, monkeypatch, tmp_path, capsys
):
    # The run is short, so the scale starts where it overflows at once.
    scale = digits.jmpp.DynamicLossScale(2.0**38, growth_interval=20, max_loss_scale=2.0**60)
    monkeypatch.setitem(digits.RUNS, "float16", ("mixed_float16", scale))
    rows, out = keep_rows(digits, monkeypatch), tmp_path / "new" / "plot.png"

    example = load(name)
    monkeypatch.setattr(example, "BATCH_SIZE", 64)
    assert digits.main(["--steps", "100", "--out", str(out), "--quiet"], train=example.train) == 0
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


def test_digits_fails_where_float16_falls_behind(digits, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(digits, "compare", lambda **_: fake_rows(digits, float32=0.98, float16=0.96))
    assert digits.main(["--out", str(tmp_path / "plot.png")]) == 1
    assert "96.0%, more than 1 point behind float32 (98.0%)" in capsys.readouterr().err


@pytest.mark.parametrize("half", [0.97, 0.975, 0.99])
def test_digits_accepts_up_to_one_point(digits, half):
    assert digits.judge(fake_rows(digits, float32=0.98, float16=half)) is None


# A small context and a single layer: most of the time is XLA's, and the context is the length of the sample.
# Bfloat16 is tried in digits, haiku_lstm and autocast_inference.
def test_transformer_trains_in_float16_and_writes(transformer, monkeypatch, capsys):
    scale = transformer.jmpp.DynamicLossScale(2.0**24, growth_interval=20, max_loss_scale=2.0**60)
    policy, _ = transformer.RUNS["float16"]
    monkeypatch.setitem(transformer.RUNS, "float16", (policy, scale))
    monkeypatch.delitem(transformer.RUNS, "bfloat16")
    monkeypatch.setattr(transformer, "CONTEXT", 48)
    monkeypatch.setattr(transformer, "LAYERS", 1)
    monkeypatch.setattr(transformer, "FEATURES", 32)
    monkeypatch.setattr(transformer, "BATCH_SIZE", 8)
    monkeypatch.setattr(transformer, "MARGIN", 0.5)  # The first skips are a good part of so few steps.
    rows = keep_rows(transformer, monkeypatch)

    assert transformer.main(["--steps", "80", "--quiet"]) == 0
    assert list(rows) == ["float32", "float16"]
    printed = capsys.readouterr()
    assert all(name in printed.out for name in rows)
    assert printed.err == ""

    vocabulary = transformer.load().vocabulary
    for row in rows.values():
        losses = row.history["loss"]
        assert losses.shape == (80,)
        assert np.isfinite(losses).all()
        assert losses[-10:].mean() < 0.75 * losses[0]
        assert row.valid_loss < 0.75 * losses[0]
        assert len(row.sample) == 48
        assert row.sample.startswith(transformer.PROMPT)
        assert set(row.sample) <= set(vocabulary)

    history = rows["float16"].history
    assert 1 <= history["skipped_steps"][-1] < 20
    assert history["grads_finite"][-10:].any()
    assert (np.diff(history["loss_scale"]) > 0).any()


def test_transformer_writes_what_it_finds_likeliest(transformer):
    length = 24
    model = transformer.Transformer(11, nnx.Rngs(0))
    model.eval()
    prompt = jnp.array([3, 1, 4])
    written = transformer.generate(model, prompt, length, 1e-6, jax.random.key(0))
    assert written.shape == (length,)
    assert written[:3].tolist() == [3, 1, 4]
    # The oracle sees the whole text at once, under a causal mask, and no cache.
    likeliest = model(written[None], jnp.arange(length))[0].argmax(axis=-1)
    assert written[3:].tolist() == likeliest[2:-1].tolist()


def test_transformer_learns_from_one_part_of_the_text_and_is_judged_on_the_other(transformer):
    data = transformer.load()
    assert len(data.train) > 8 * len(data.valid) > 8 * 10_000
    assert set(transformer.PROMPT) <= set(data.vocabulary)
    assert data.vocabulary.isascii()
    text = "".join(data.vocabulary[token] for token in data.train)
    assert "statement is used" in text


def transformer_rows(transformer, **valid_loss):
    return [transformer.Row(name, value, "", {}) for name, value in valid_loss.items()]


@pytest.mark.parametrize("half", [1.5, 1.79, math.nextafter(1.75 + 0.05, 0)])
def test_transformer_accepts_what_keeps_up(transformer, half):
    rows = transformer_rows(transformer, float32=1.75, bfloat16=1.76, float16=half)
    assert transformer.judge(rows) is None


@pytest.mark.parametrize("behind", ["bfloat16", "float16"])
@pytest.mark.parametrize("loss", [1.81, math.nan, math.inf])
def test_transformer_fails_where_a_half_precision_falls_behind(
    transformer, behind, loss, monkeypatch, capsys
):
    losses = {"float32": 1.75, "bfloat16": 1.75, "float16": 1.75} | {behind: loss}
    monkeypatch.setattr(transformer, "compare", lambda **_: transformer_rows(transformer, **losses))
    assert transformer.main([]) == 1
    message = f"validation loss of {behind} ({loss:.3f}) is more than 0.05 above that of float32 (1.750)"
    assert message in capsys.readouterr().err


def test_the_gan_trains_with_a_scale_for_each_loss_and_saves_its_images(load, monkeypatch, tmp_path, capsys):
    gan = load("gan_digits")
    # The run is short: two losses overflow at once, and the third is far from it.
    scale = gan.jmpp.DynamicLossScale(2.0**24, growth_interval=20, max_loss_scale=2.0**60)
    _, _, inner = gan.RUNS["float16"]
    monkeypatch.setitem(gan.RUNS, "float16", ("mixed_float16", scale, inner))
    monkeypatch.setattr(gan, "MARGIN", 2.0)  # The first skips are a good part of so few steps.
    rows, out = keep_rows(gan, monkeypatch), tmp_path / "new" / "images.png"

    assert gan.main(["--steps", "100", "--out", str(out), "--quiet"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert printed.err == ""
    assert list(rows) == ["float32", "float16"]
    for name, row in rows.items():
        assert name in printed.out
        assert row.images.shape == (2000, 64)
        assert 0 <= row.images.min() < row.images.max() <= 1
        assert row.distance < 8  # It begins at 13.
        assert all(np.isfinite(row.history[f"{loss} loss"]).all() for loss in ("images", "penalty"))
    history = rows["float16"].history
    scales = {name: history[f"{name}"][-1] for name in history if "loss_scale" in name}
    assert set(scales) == {"generator/loss_scale", "critic/loss_scale/images", "critic/loss_scale/penalty"}
    assert len(set(scales.values())) > 1
    assert history["critic/nonfinite_steps/images"][-1] > 0
    assert 1 <= history["critic/skipped_steps"][-1] < 40


def test_the_distance_between_samples_of_known_normal_distributions(load):
    distance = load("gan_digits").frechet_distance
    a = np.random.default_rng(0).normal(size=(5000, 4)) * [1.0, 2.0, 3.0, 4.0]
    assert abs(distance(a, a)) < 1e-9
    np.testing.assert_allclose(distance(a, a + 3.0), 4 * 9.0)
    np.testing.assert_allclose(distance(a, 2 * a), np.trace(np.cov(a.T)) + np.sum(a.mean(axis=0) ** 2))
    assert math.isnan(distance(a, np.full((10, 4), np.nan)))


@pytest.mark.parametrize(
    ("half", "message"),
    [
        (0.05, None),
        (0.17, None),
        (0.19, "of float16 are 0.19 away from real ones, more than 0.1 further than those of float32 (0.08)"),
        (math.nan, "of float16 are nan away"),
    ],
)
def test_the_gan_fails_where_float16_falls_behind(load, monkeypatch, capsys, half, message):
    gan = load("gan_digits")
    rows = [gan.Row("float32", 0.08, None, {}), gan.Row("float16", half, None, {})]
    monkeypatch.setattr(gan, "compare", lambda **_: rows)
    assert gan.main([]) == (0 if message is None else 1)
    printed = capsys.readouterr().err
    assert printed == "" if message is None else message in printed


# Examples of `autocast`; the scale of their float16 runs starts where the first steps overflow.


def overflowing_at_once(jmpp):
    return jmpp.DynamicLossScale(2.0**40, growth_interval=20, max_loss_scale=2.0**60)


def test_equinox_digits_trains_in_float16_with_a_float32_head(load, monkeypatch, capsys):
    mixer = load("equinox_digits")
    monkeypatch.setitem(mixer.RUNS, "float16", overflowing_at_once(mixer.jmpp))
    monkeypatch.delitem(mixer.RUNS, "bfloat16")
    monkeypatch.setattr(mixer, "MARGIN", 0.1)  # The first skips are a good part of so few steps.
    monkeypatch.setattr(mixer, "BLOCKS", 1)
    monkeypatch.setattr(mixer, "BATCH_SIZE", 64)
    rows = keep_rows(mixer, monkeypatch)

    assert mixer.main(["--steps", "100", "--quiet"]) == 0
    assert list(rows) == ["float32", "float16"]
    for name, row in rows.items():
        losses = row.history["loss"]
        assert losses.shape == (100,)
        assert np.isfinite(losses).all()
        assert losses[-10:].mean() < 0.3 * losses[0]
        assert row.accuracy > 0.8
        assert row.products == ({name: 6} if name == "float32" else {name: 4, "float32": 2})
    assert 5 <= rows["float16"].history["skipped_steps"][-1] < 30
    printed = capsys.readouterr()
    assert "products of the float16 run: 2 in float32 and 4 in float16 (patches" in printed.out
    assert printed.err == ""


def test_haiku_lstm_learns_in_all_precisions_with_a_float32_head(load, monkeypatch, capsys):
    lstm = load("haiku_lstm")
    monkeypatch.setitem(lstm.RUNS, "float16", overflowing_at_once(lstm.jmpp))
    monkeypatch.setattr(lstm, "MARGIN", 0.1)
    rows = keep_rows(lstm, monkeypatch)

    assert lstm.main(["--steps", "60", "--quiet"]) == 0
    assert list(rows) == ["float32", "bfloat16", "float16"]
    for name, row in rows.items():
        assert row.error < 0.5  # 7/6 for an answer of 0
        assert row.products == {("memory/linear", name): 1, ("head", "float32"): 1}
    assert 1 <= rows["float16"].skipped_steps < 40
    assert rows["bfloat16"].skipped_steps == 0
    printed = capsys.readouterr()
    assert "products of the float16 run: memory/linear in float16, head in float32" in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(
    ("name", "steps", "least"),
    [
        ("optax_lookahead", 100, 0.8),
        ("vit_config_loop", 60, 0.3),
        ("nnx_lora", 30, -3.3),
        ("tunix_lora", 60, -3),
    ],
)
def test_scripts_as_others_write_them_learn_the_same_in_half(load, monkeypatch, name, steps, least):
    if name == "tunix_lora":
        pytest.importorskip("tunix")
    example = load(name)
    if name == "nnx_lora":
        monkeypatch.setattr(load("nnx_transformer"), "LAYERS", 1)
        monkeypatch.setattr(example, "PUBLISHED_STEPS", 40)
    if name == "vit_config_loop":
        config = example.get_config

        def small(*args):
            found = config(*args)
            found.model.update(width=32, depth=1)
            return found

        monkeypatch.setattr(example, "get_config", small)
    full, half = (example.train(word, steps, 0) for word in ("no", "fp16"))
    assert least < half
    assert abs(half - full) < 0.1
    with pytest.raises(ValueError, match="fp61"):
        example.train("fp61", steps, 0)


@pytest.mark.parametrize("half", [1.0, 0.95, 0.8, math.nan])
@pytest.mark.parametrize("name", ["optax_lookahead", "vit_config_loop", "nnx_lora", "tunix_lora"])
def test_scripts_as_others_write_them_fail_where_half_falls_behind(load, monkeypatch, capsys, name, half):
    example = load(name)
    monkeypatch.setattr(
        example, "train", lambda word, steps, seed: {"no": 0.95, "bf16": half, "fp16": 0.96}[word]
    )
    assert example.main([]) == (0 if half >= 0.95 else 1)
    printed = capsys.readouterr()
    assert 'precision="fp16": 0.9600' in printed.out
    assert printed.err.startswith("" if half >= 0.95 else "bf16 more than ")


def test_without_its_package_tunix_lora_says_what_to_install(load, monkeypatch, capsys):
    example = load("tunix_lora")

    def missing(word, steps, seed):
        raise ImportError("No module named 'tunix'")

    monkeypatch.setattr(example, "train", missing)
    assert example.main([]) == 1
    assert "pip install google-tunix" in capsys.readouterr().err


def test_autocast_inference_says_the_same_in_all_precisions(load, monkeypatch, capsys):
    inference = load("autocast_inference")
    monkeypatch.setattr(inference, "TEXTS", 16)
    monkeypatch.setattr(inference, "LENGTH", 16)
    monkeypatch.setattr(inference, "FEATURES", 32)
    rows = keep_rows(inference, monkeypatch)
    assert inference.main(["--steps", "40", "--quiet"]) == 0
    assert list(rows) == list(inference.RUNS)
    for name, row in rows.items():
        assert row.products == {name: 7}
        assert row.tokens.shape == (inference.TEXTS, inference.LENGTH)
        assert (row.logit_error > 0) == (name != "float32")
    printed = capsys.readouterr()
    assert all(f"7 in {name}" in printed.out for name in rows)
    assert printed.err == ""


def inference_row(inference, name, logits):
    return inference.Row("Linen", name, np.float32(logits), 0, 0, 1.0)


# One test for all that needs a run, as above.
def test_inference_says_the_same_in_half_and_notices_where_it_does_not(load, monkeypatch, capsys):
    inference, digits = load("inference"), load("digits")
    monkeypatch.setattr(inference, "CALLS", 2)
    rows, judge = {}, inference.judge
    monkeypatch.setattr(
        inference, "judge", lambda found: rows.update({r[:2]: r for r in found}) or judge(found)
    )
    assert inference.main(["--steps", "40", "--quiet"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert list(rows) == [(library, name) for library in ("Linen", "NNX") for name in inference.POLICIES]

    weights, norms = 9 * 16 + 9 * 16 * 32 + 128 * 10 + 10, 4 * (16 + 32)  # with their statistics
    labels = digits.load(np.random.default_rng(0)).test_labels
    for (library, name), row in rows.items():
        full = rows[library, "float32"]
        assert f"{library}, {name}" in printed.out
        assert row.param_bytes == weights * (4 if name == "float32" else 2) + norms * 4
        assert row.temp_bytes > 0
        assert row.logits.dtype == np.float32
        assert np.mean(row.logits.argmax(axis=-1) == labels) > 0.9
        assert (row.logits != full.logits).any() == (name != "float32")

    # bfloat16 in the place of float16: of another precision, with the same classes.
    for library in ("Linen", "NNX"):
        swapped = rows | {(library, "float16"): rows[library, "bfloat16"]._replace(name="float16")}
        assert f"the largest logit error of {library} in float16 is" in judge(list(swapped.values()))


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ([[8.0, 7.9], [1.0, 8.0]], None),
        ([[7.985, 7.995], [1.0, 8.0]], "Linen in float16 changes the class of 1 images that are clear"),
        ([[8.0, 7.9], [8.0, 7.9]], "Linen in float16 changes the class of 1 images that are clear"),
        ([[8.0, 7.98], [1.0, 8.0]], "logit error of Linen in float16 is 8.00e-02, more than 1.56e-02"),
        ([[8.0, 7.9], [math.nan, 8.0]], "Linen in float16 changes the class of 1 images that are clear"),
        ([[8.0, math.nan], [1.0, 8.0]], "Linen in float16 changes the class of 1 images that are clear"),
        ([[8.0, 7.9], [1.0, math.nan]], "the largest logit error of Linen in float16 is nan"),
    ],
)
def test_inference_fails_where_half_says_something_else(load, monkeypatch, capsys, logits, message):
    inference = load("inference")
    full = inference_row(inference, "float32", [[8.0, 7.9], [1.0, 8.0]])
    rows = [full, inference_row(inference, "float16", logits)]
    monkeypatch.setattr(inference, "compare", lambda **_: rows)
    assert inference.main([]) == (0 if message is None else 1)
    printed = capsys.readouterr().err
    assert printed == "" if message is None else message in printed


def test_inference_lets_what_is_close_change_places(load):
    """float16 may be off by 2 eps of the largest logit, which is 8 / 512: two logits within 1/32 may meet."""
    inference = load("inference")
    full = inference_row(inference, "float32", [[8 - 1 / 33, 8.0], [8 - 1 / 31, 8.0]])
    half = inference_row(inference, "float16", [[8 - 1 / 65, 8 - 1 / 64.5], [8 - 1 / 31, 8.0]])
    assert inference.same_class(half, full).tolist() == [False, True]
    assert inference.clear(half, full).tolist() == [False, True]
    assert inference.judge([full, half]) is None


def test_autocast_inference_goes_on_as_without_a_cache(load):
    """Whole texts in, the logits of each token are those of a decoder that sees all tokens before it."""
    inference = load("autocast_inference")
    params = inference.init(jax.random.key(0))
    tokens = inference.texts(np.random.default_rng(0))[:4]
    decode = jax.jit(inference.decode)
    same, logits = decode(params, tokens)
    np.testing.assert_array_equal(same, tokens)
    # What comes later doesn't matter, and where nothing is given the likeliest token stands.
    written, others = decode(params, np.where(np.arange(inference.LENGTH) < 10, tokens, -1))
    np.testing.assert_array_equal(written[:, :10], tokens[:, :10])
    np.testing.assert_allclose(others[:, :10], logits[:, :10], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(written[:, 10:], others[:, 9:-1].argmax(axis=-1))


AUTOCAST_ROWS = {
    "equinox_digits": lambda example, value: example.Row("", value, {}, {}),
    "haiku_lstm": lambda example, value: example.Row("", value, {}, 0),
}


@pytest.mark.parametrize("behind", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("name", "full", "half", "message"),
    [
        ("equinox_digits", 0.98, 0.97, None),
        ("equinox_digits", 0.98, 0.96, None),
        ("equinox_digits", 0.98, 0.955, "is more than 2% below that of float32 (98.0%)"),
        ("haiku_lstm", 0.002, 0.011, None),
        ("haiku_lstm", 0.002, 0.013, "is more than 0.01 above that of float32 (0.0020)"),
        ("haiku_lstm", 0.002, math.nan, "is more than 0.01 above that of float32 (0.0020)"),
    ],
)
def test_training_with_autocast_fails_where_a_half_precision_falls_behind(
    load, monkeypatch, capsys, name, full, half, message, behind
):
    example = load(name)
    values = {"float32": full, "bfloat16": full, "float16": full} | {behind: half}
    rows = [AUTOCAST_ROWS[name](example, value)._replace(name=run) for run, value in values.items()]
    monkeypatch.setattr(example, "compare", lambda **_: rows)
    assert example.main([]) == (0 if message is None else 1)
    printed = capsys.readouterr().err
    assert printed == "" if message is None else (message in printed and behind in printed)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (1, 0.001, None),
        (20, 0.001, "float16 agrees with float32 on 96.1% of the tokens, less than 98%"),
        (0, 0.004, "the largest logit error of float16 is 4.00e-03, more than 3.91e-03"),
        (0, math.nan, "the largest logit error of float16 is nan"),
    ],
)
def test_autocast_inference_fails_where_a_half_precision_says_something_else(
    load, monkeypatch, capsys, wrong, error, message
):
    inference = load("autocast_inference")
    tokens = np.zeros((32, 24), int)
    other = tokens.copy()
    other[:wrong, -1] = 1
    rows = [
        inference.Row(name, text, None, lost, {}, 0)
        for name, text, lost in (("float32", tokens, 0.0), ("float16", other, error))
    ]
    monkeypatch.setattr(inference, "compare", lambda **_: rows)
    assert inference.main([]) == (0 if message is None else 1)
    printed = capsys.readouterr().err
    assert printed == "" if message is None else message in printed


@pytest.mark.parametrize("name", sorted({*ALL} - {"nnx_digits"}))  # which has main from digits
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 10, got 0"),
        (["--steps", "-1"], "--steps must be at least 10, got -1"),
        (["--steps", "9"], "--steps must be at least 10, got 9"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--seed", "-1"], "--seed must be at least 0 and below 2**32, got -1"),
        (["--seed", "4294967296"], "--seed must be at least 0 and below 2**32, got 4294967296"),
    ],
)
def test_they_refuse_bad_arguments(load, name, arguments, message, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        load(name).main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ALL)
def test_they_explain_themselves_as_scripts(load, name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert all(f" {option} " in printed for option in ("--steps", "--seed", "--quiet"))


def test_the_index_names_each_example_once():
    index = (EXAMPLES / "README.md").read_text()
    assert sorted(re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\) \|", index, flags=re.M)) == ALL


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_shown_to_somebody_who_looks(load, terminal, quiet):
    console = Console(file=io.StringIO(), force_terminal=terminal)
    with load("_run").progress_bar(console, quiet) as progress:
        assert list(progress.track(range(3), description="steps")) == [0, 1, 2]
    assert ("steps" in console.file.getvalue()) == (terminal and not quiet)


def test_nnx_digits_runs_as_a_script():
    command = [sys.executable, str(EXAMPLES / "nnx_digits.py"), "--steps", "9"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "nnx_digits.py: error: --steps must be at least 10, got 9" in result.stderr


def test_data_parallel_learns_the_same_on_eight_devices_as_on_one(load, monkeypatch, capsys):
    parallel = load("data_parallel")
    monkeypatch.delitem(parallel.RUNS, "float32")
    monkeypatch.setattr(parallel, "GROWTH_INTERVAL", 10)
    rows = keep_rows(parallel, monkeypatch)
    assert parallel.main(["--steps", "60", "--quiet"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    many, half, one = (rows[name] for name in ("float16", "float16 sums", "float16, alone"))
    for row in (many, half, one):
        assert row.name in printed.out
        assert row.accuracy > 0.95
        assert not row.history["grads_finite"][0]
        assert np.isfinite(row.history["loss"]).all()
    assert [row.devices for row in (many, half, one)] == [8, 8, 1]
    assert one.sent == {}

    # All matrices but the last layer's bias and 10 columns are sharded; what is sent is sent once.
    weights = 64 * 256 + 256 * 256 + 256 * 10
    assert many.param_bytes < one.param_bytes / 7
    assert many.sent["all-gather", "f16"] == 2 * weights
    assert 4 * weights < many.sent["all-reduce", "f32"] < 4.2 * weights
    assert ("all-reduce", "f16") not in many.sent
    assert half.sent["all-reduce", "f16"] >= 2 * weights
    assert many.history["skipped_steps"][-1] <= half.history["skipped_steps"][-1]


@pytest.mark.parametrize(
    ("many", "message"),
    [
        (0.97, None),
        (0.99, None),
        (0.9699, "float16 on 8 devices reached 97.0%, and one device 98.0%"),
        (math.nan, "float16 on 8 devices reached nan%"),
    ],
)
def test_data_parallel_fails_where_devices_learn_something_else(load, monkeypatch, capsys, many, message):
    parallel = load("data_parallel")
    found = {"float16": (8, many), "float16, alone": (1, 0.98)}
    rows = [parallel.Row(name, *values, {}, 0, {}) for name, values in found.items()]
    monkeypatch.setattr(parallel, "compare", lambda *_: rows)
    assert parallel.main([]) == (0 if message is None else 1)
    printed = capsys.readouterr().err
    assert printed == "" if message is None else message in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "0"], "--devices must divide the batch of 128, got 0"),
        (["--devices", "3"], "--devices must divide the batch of 128, got 3"),
        (["--devices", "16"], "XLA_FLAGS has the CPU show itself as 8"),
    ],
)
def test_data_parallel_refuses_bad_arguments(load, capsys, arguments, message):
    with pytest.raises(SystemExit, match=r"^2$"):
        load("data_parallel").main(arguments)
    assert message in capsys.readouterr().err


def test_rl_policy_parity_counts_more_tokens_under_the_recommended_policy(load, monkeypatch, capsys):
    example = load("rl_policy_parity")
    rows = keep_rows(example, monkeypatch)
    # One layer of a narrow model: what takes long is the compiler.
    monkeypatch.setattr(example, "WIDTH", 16)
    monkeypatch.setattr(example, "LAYERS", 1)
    monkeypatch.setattr(example, "BUDGET", 1e-3)  # It loses less.
    assert example.main(["--steps", "10", "--quiet"]) == 0
    assert 0 < rows["bfloat16"].same < rows["float16"].same < rows["recommended"].same <= 1
    assert "% of tokens" in capsys.readouterr().out


def test_rl_policy_parity_fails_where_the_recommended_policy_mends_nothing(load):
    example = load("rl_policy_parity")
    rows = [example.Row(name, same, 1.0) for name, same in (("bfloat16", 0.5), ("float16", 0.7))]
    assert example.judge([*rows, example.Row("recommended", 0.9, 1.0)]) is None
    assert "most as recommended" in example.judge([*rows, example.Row("recommended", 0.7, 1.0)])
