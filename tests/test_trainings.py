"""The example trainings: they learn, go on after an interruption bit for bit, and read their settings."""

import importlib
import json
import pathlib
import re

import numpy as np
import pytest

pytestmark = pytest.mark.once
EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
GPT = ["--layers=1", "--features=16", "--heads=2", "--context=16", "--batch=8", "--micro_batches=2"]
GPT += ["--steps=40", "--learning_rate=0.02", "--quiet"]


@pytest.fixture(scope="module")
def load():
    """Imports an example by its name, with the others on the path, as Python has them for a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module


def log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_gpt_goes_on_bit_for_bit_after_it_was_interrupted(load, tmp_path, monkeypatch, capsys):
    gpt, training = load("gpt"), load("_train")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert gpt.main([*GPT, "--out", str(whole)]) == 0

    class Stops:
        """Ends the program in the middle of a run, as a signal would."""

        def add_scalar(self, name, value, step):
            if step == 21:
                raise KeyboardInterrupt("stop")

        def close(self):
            raise AssertionError("the run was to be interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(gpt, "tensorboard", lambda options: Stops())
        with pytest.raises(KeyboardInterrupt, match="stop"):
            gpt.main([*GPT, "--out", str(parts)])
    assert 0 < len(log(parts)) < 40
    restored = []
    train = training.ocp.CheckpointManager.restore
    monkeypatch.setattr(
        training.ocp.CheckpointManager, "restore", lambda *a, **k: restored.append(a[1]) or train(*a, **k)
    )
    assert gpt.main([*GPT, "--out", str(parts)]) == 0
    assert restored == [16]
    assert log(parts) == log(whole)
    assert (parts / "plot.png").read_bytes().startswith(b"\x89PNG")
    first, second = re.findall(r"([\d.]+) nats per character", capsys.readouterr().out)
    assert first == second


def test_tensorboard_gets_every_scalar_of_every_step(load, tmp_path, monkeypatch):
    gpt, seen = load("gpt"), []

    class Writer:
        def add_scalar(self, name, value, step):
            seen.append((name, step))

        def close(self):
            seen.append("closed")

    monkeypatch.setattr(gpt, "tensorboard", lambda options: Writer())
    monkeypatch.setattr(gpt, "judged", lambda options, fall: None)
    args = [*GPT, "--steps", "10", "--out", str(tmp_path)]
    assert gpt.main(args) == 0
    names = {"loss", "loss_scale", "skipped_steps", "grads_finite"}
    assert {(name, step) for name in names for step in range(10)} <= set(seen[:-1])
    assert seen[-1] == "closed"


def test_the_classifier_reads_a_config_and_shards_over_eight_devices(load, tmp_path, capsys, monkeypatch):
    config = tmp_path / "config.yaml"
    config.write_text("precision: {policy: fp16, rules: [[head, fp32]], loss_scale: 1.0e+30}\nsteps: 30\n")
    args = [
        "--config",
        str(config),
        "--width",
        "8",
        "--learning_rate",
        "0.01",
        "--out",
        str(tmp_path),
        "--quiet",
    ]
    classifier = load("image_classifier")
    # A scale that overflows always: every step is skipped, and the example says so.
    assert classifier.main([*args, "--steps", "10"]) == 1
    assert "the loss went from" in capsys.readouterr().err
    skipped = log(tmp_path)
    assert [row["skipped_steps"] for row in skipped] == list(range(1, 11))
    assert skipped[0]["loss_scale"] == pytest.approx(1e30)
    # The command line wins over the file.
    monkeypatch.setattr(classifier, "LEAST_ACCURACY", 0.3)  # So short a run is not trained well.
    assert classifier.main([*args, "--precision", "fp16", "--fresh"]) == 0
    assert "of the test images are right" in capsys.readouterr().out
    assert len(log(tmp_path)) == 30


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("precision: fp61", "fp61"),
        ("stepz: 3", "unknown settings.*stepz.*known"),
        ("- 1", "no mapping"),
        ("steps: x", "steps must be of type int, got 'x'"),
    ],
)
def test_a_wrong_config_is_told_and_nothing_runs(load, tmp_path, capsys, text, words):
    config = tmp_path / "config.yaml"
    config.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        load("gpt").main(["--config", str(config), "--out", str(tmp_path / "out")])
    assert re.search(words, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_inputs_in_half_show_in_diffusion_and_mixed_precision_does_not(load, tmp_path, capsys):
    diffusion = load("diffusion")
    args = ["--steps", "80", "--features", "32", "--layers", "1", "--out", str(tmp_path), "--quiet"]
    assert diffusion.main(args) == 0
    rows = dict(re.findall(r"^(float32|all in half|mixed) +([\d.]+)", capsys.readouterr().out, re.M))
    assert float(rows["all in half"]) > float(rows["float32"]) + 0.02
    assert float(rows["mixed"]) == pytest.approx(float(rows["float32"]), abs=0.01)
    # In float32 there is no difference to show, and the example says so.
    row = diffusion.Row("x", dict.fromkeys(diffusion.NOISE_LEVELS, 1.0), np.zeros((1, 2)))
    assert "no more than float32" in diffusion.judge([row] * 3)
    worse = row._replace(losses=dict.fromkeys(diffusion.NOISE_LEVELS, 1.1))
    assert diffusion.judge([row, worse, row]) is None
    assert "in mixed precision" in diffusion.judge([row, worse, worse])


def test_lora_trains_a_published_model_with_frozen_half_weights(load, tmp_path, capsys):
    pytest.importorskip("transformers.models.gpt2.modeling_flax_gpt2", exc_type=ImportError)
    args = ["--steps", "60", "--features", "32", "--layers", "1", "--heads", "2", "--out", str(tmp_path)]
    assert load("finetune_lora").main([*args, "--quiet"]) == 0
    assert "as many trained numbers" in capsys.readouterr().out


def test_adapters_change_nothing_to_begin_with(load):
    lora = load("finetune_lora")
    kernel = np.ones((6, 4), np.float16)
    params = {"h": {"c_attn": {"kernel": kernel, "bias": kernel[0]}, "other": {"kernel": kernel}}}
    pairs = lora.adapters(params, 2, lora.jax.random.key(0))
    assert {path: (pair["a"].shape, pair["b"].shape) for path, pair in pairs.items()} == {
        "h/c_attn/kernel": ((6, 2), (2, 4))
    }
    new = lora.adapted(params, pairs)
    assert (np.asarray(new["h"]["c_attn"]["kernel"]) == kernel).all()
    assert new["h"]["c_attn"]["kernel"].dtype == np.float16
    pairs["h/c_attn/kernel"]["b"] += 1
    assert (np.asarray(lora.adapted(params, pairs)["h"]["c_attn"]["kernel"]) != kernel).any()


def test_without_its_package_lora_says_what_to_install(load, monkeypatch, capsys):
    lora = load("finetune_lora")

    def missing(options):
        raise ImportError("No module named 'transformers'")

    monkeypatch.setattr(lora, "run", missing)
    assert lora.main([]) == 1
    assert "pip install 'transformers<5'" in capsys.readouterr().err
