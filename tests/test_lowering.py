"""Lowering reports: the reading of recorded GPU programs of two versions of JAX, and live compilations."""

import dataclasses
import gzip
import importlib.metadata
import inspect
import json
import os
import pickle
import re
import shutil
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from data import record
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jmp_policy as jmpp
from jmp_policy._src.core.targets import GPUS, LAUNCH_SECONDS, TARGETS, find_target, target_of_device
from jmp_policy._src.flax.linen import interceptor
from jmp_policy._src.jaxpr import ir
from jmp_policy._src.report.function import as_function
from jmp_policy._src.report.lowering import compiler as xla_compiler
from jmp_policy._src.report.lowering import lowering
from jmp_policy._src.report.lowering.compile_process import Compiled
from jmp_policy._src.report.lowering.compiler import (
    Exported,
    LoweringUnavailableError,
    exported,
    is_installed,
)
from jmp_policy._src.report.lowering.hlo import (
    Instruction,
    Sources,
    executed,
    parse,
    result_bytes,
    shape_bytes,
)
from jmp_policy._src.report.lowering.kernels import Estimate, estimates, kernels_of, module_path
from jmp_policy._src.report.lowering.lowered import verdict_of
from jmp_policy._src.report.lowering.lowering import lowering_report

DATA = Path(__file__).parent / "data"
VERSIONS = ("0.10.2", "0.12.0.1")
live = pytest.mark.skipif(not is_installed(), reason="needs the extra gpu-lowering")


def recorded(name, version, target="H100"):
    text = gzip.decompress((DATA / f"{name}.jax-{version}.hlo.gz").read_bytes()).decode()
    return kernels_of(text, find_target(target))


def products(kernels):
    return [kernel for kernel in kernels if kernel.flops]


def flops(kernels):
    return sum(kernel.times * kernel.flops for kernel in kernels)


@pytest.fixture(params=VERSIONS)
def version(request):
    return request.param


def test_a_float16_step_is_on_tensor_cores_module_by_module(version):
    found = products(recorded("mlp", version))
    assert len(found) == 8
    for kernel in found:
        assert (kernel.operands, kernel.accumulation) == ("float16 x float16", "float32")
        assert (kernel.arithmetic, kernel.tensor_cores, kernel.alignment) == ("float16", True, "aligned")
        assert kernel.kind == "triton"
        assert kernel.line.startswith("record.py:")
    places = sorted((kernel.path, kernel.backward) for kernel in found)
    # The first layer needs no gradient of its input.
    assert places == sorted(
        [("Net/Dense_0", False), ("Net/Dense_1", False), ("Net/head", False), ("Net/Dense_0", True)]
        + 2 * [("Net/Dense_1", True), ("Net/head", True)]
    )
    assert flops(found) == 2 * 512 * 256 * (2 * 256 + 3 * 256 + 3 * 128)
    assert verdict_of(found, ()) == "8 of 8 matrix kernels on Tensor Cores in float16."


def test_a_float32_product_among_float16_ones_is_named(version):
    kernels = recorded("float32_head", version)
    wide = [kernel for kernel in products(kernels) if kernel.arithmetic == "tf32"]
    assert {kernel.path for kernel in wide} == {"Net/head"}
    assert {kernel.operands for kernel in wide} == {"float32 x float32"}
    assert len(wide) == 3
    said = verdict_of(kernels, ())
    assert "8 of 8 matrix kernels on Tensor Cores (5 in float16, 3 in tf32)" in said
    assert "left in float32: Net/head (record.py:" in said


def test_an_unaligned_vocabulary_is_named(version):
    found = products(recorded("vocabulary", version))
    odd = [kernel for kernel in found if kernel.alignment != "aligned"]
    assert {kernel.path for kernel in odd} == {"Net/head"}
    assert any(kernel.alignment == "unaligned" and "x1001x" in kernel.size for kernel in odd)
    assert "unaligned: Net/head" in verdict_of(found, ())


@pytest.mark.parametrize("card", ["T4", "V100"])
def test_a_card_without_bfloat16_tensor_cores_is_recommended_float16(card):
    kernels, target = recorded("volta", VERSIONS[0], "V100"), TARGETS[card]
    float32 = Estimate("float32", "as given", 1.0, 1.0, "compute")
    float16 = Estimate("float16", "under autocast", 0.5, 2.0, "compute")
    bfloat16 = Estimate("bfloat16", "under autocast", 0.4, 2.5, "compute")
    said = verdict_of(kernels, (float32, float16, bfloat16), target)
    assert "estimated 2.00x the speed of float32 in float16 under autocast" in said
    assert "bfloat16" not in said
    found = (float32, Estimate("bfloat16", "as given", 1.0, 1.0, "compute"))
    assert f"{card} has no Tensor Cores for bfloat16: use float16" in verdict_of(kernels, found, target)
    assert "has no Tensor Cores" not in verdict_of(kernels, found, TARGETS["H100"])
    assert "in bfloat16 under autocast" in verdict_of(kernels, (float32, float16, bfloat16), TARGETS["H100"])


def test_cublaslt_on_a_v100(version):
    kernels = recorded("volta", version, "V100")
    found = products(kernels)
    assert {kernel.kind for kernel in found} == {"cublaslt"}
    assert all(kernel.tensor_cores and kernel.arithmetic == "float16" for kernel in found)
    assert {kernel.alignment for kernel in found} == {"aligned"}
    first = next(k for k in found if k.path == "Net/Dense_0" and not k.backward)
    # The kernel's scratch memory is no traffic; the bias is.
    assert (first.bytes_read, first.bytes_written) == (2 * (512 * 256 + 256 * 256 + 256), 2 * 512 * 256)


def test_convolutions_are_the_products_that_they_amount_to(version):
    found = [kernel for kernel in products(recorded("conv", version)) if kernel.kind == "cudnn"]
    assert [(kernel.path, kernel.backward, kernel.size) for kernel in found] == [
        ("Images/Conv_0", False, "16384x32x72"),
        ("Images/Conv_1", False, "16384x64x288"),
        ("Images/Conv_1", True, "288x64x16384"),
        ("Images/Conv_1", True, "16384x288x64"),
        ("Images/Conv_0", True, "72x32x16384"),
    ]
    assert all(kernel.operands == "float16 x float16" and kernel.tensor_cores for kernel in found)


def test_a_scan_multiplies_and_slices_count_as_slices(version):
    kernels = recorded("scan", version)
    assert {kernel.times for kernel in products(kernels)} == {6}
    assert all(kernel.counted for kernel in kernels)
    assert flops(kernels) == 3 * 6 * 2 * 512 * 256 * 256
    assert {kernel.path for kernel in products(kernels)} == {"Stack/layers/Dense_0"}
    # Every layer reads its own float32 weight, not the six of the stack.
    converted = [k for k in kernels if k.times == 6 and k.name.startswith("loop_convert_fusion")]
    assert {kernel.bytes_read for kernel in converted} == {256 * 256 * 4 + 4}


def test_collectives_with_dtype_size_and_devices(version):
    found = [kernel for kernel in recorded("devices", version) if kernel.collective]
    assert {(kernel.collective, kernel.group) for kernel in found} == {("all-reduce", 8)}
    sizes = {kernel.operands: kernel.bytes_read for kernel in found}
    parameters = 2 * (256 * 256 + 256) + 256 * 128 + 128
    assert sizes == {"float16": 2 * parameters, "float32": 4}


@pytest.mark.parametrize(
    ("op_name", "path", "backward"),
    [
        ("jit(step)/transpose(jvp(Net))/Dense_0/dot_general", "Net/Dense_0", True),
        ("jit(call)/call_exported/jit(step)/jvp(Net)/while/body/closed_call/b/dot_general", "Net/b", False),
        ("jit(f)/vmap(transpose(jvp(Net)))/checkpoint/rematted_computation/a/mul", "Net/a", True),
        ("jit(f)/jvp(Net)/jit(relu)/max", "Net", False),
        ("jit(f)/dot_general", "", False),
        ("", "", False),
    ],
)
def test_module_paths_of_operation_names(op_name, path, backward):
    assert module_path(op_name) == (path, backward)


MODULE = """
%cond (p: (s32[], f32[4])) -> pred[] {
  ROOT %c = pred[] constant(true)
}

%body (q: (s32[], f32[4])) -> (s32[], f32[4]) {
  %q = (s32[], f32[4]) parameter(0)
  %x = f32[4]{0} get-tuple-element(%q), index=1
  %d = f32[4]{0} dot(%x, %x), operand_precision={highest,highest}
  ROOT %t = (s32[], f32[4]) tuple(%x, %d)
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %w = (s32[], f32[4]) while(%a), condition=%cond, body=%body, backend_config={TRIPS}
  %g = f32[8]{0} all-gather-start(%a), replica_groups=GROUPS, dimensions={0}
  ROOT %r = f32[4]{0} get-tuple-element(%w), index=1
}
"""


def test_loops_of_unknown_length_count_once_and_say_so():
    computations, entry = parse(MODULE)
    runs = executed(computations, entry)
    assert (runs["body"].times, runs["body"].counted) == (1, False)
    known = MODULE.replace("{TRIPS}", '{"known_trip_count":{"n":"7"}}')
    runs = executed(*parse(known))
    assert (runs["body"].times, runs["body"].counted) == (7, True)


@pytest.mark.parametrize(
    ("groups", "size"),
    [("{{0,1,2,3},{4,5,6,7}}", 4), ("[4,2]<=[8]", 2), ("mesh['a'=2,'b'=4] {'b'}", 4), ("{}", 1)],
)
def test_groups_of_collectives(groups, size):
    (found,) = [k for k in kernels_of(MODULE.replace("GROUPS", groups), TARGETS["H100"]) if k.collective]
    assert (found.collective, found.group, found.bytes_read) == ("all-gather", size, 16)


@pytest.mark.parametrize(
    ("shape", "size"),
    [("f32[2,3]{1,0}", 24), ("(bf16[4], pred[], s4[8])", 13), ("f8e4m3fn[5]", 5), ("c64[2]", 16)],
)
def test_bytes_of_shapes(shape, size):
    assert shape_bytes(shape) == size


@pytest.mark.parametrize(
    ("library", "shape", "size"),
    [
        ("__cublas$lt$matmul", "(f16[8,4], s8[4194304])", 64),
        ("__cublas$lt$matmul$f8", "(f16[8,4], f32[], s8[33554432])", 68),
        ("__cudnn$convForward", "(f16[8,4], u8[0])", 64),
        # Statistics of a fused attention are a result as any other.
        ("__cudnn$fmhaSoftmaxTraining", "(f16[8,4], f32[8], u8[512])", 96),
        ("__cublas$lt$matmul", "s8[8,4]", 32),
        ("__gpu$xla.gpu.triton", "(s8[16], s8[16])", 32),
    ],
)
def test_scratch_memory_of_libraries_is_no_traffic(library, shape, size):
    line = f'  %m = {shape} custom-call(%a), custom_call_target="{library}"'
    computations, entry = parse(
        f"ENTRY %main (a: f16[2]) -> f16[8,4] {{\n  %a = f16[2] parameter(0)\n{line}\n}}"
    )
    assert result_bytes(computations[entry][-1]) == size


@pytest.mark.parametrize("batch", ["", "2,"])
def test_products_with_a_scale_per_block_count(batch):
    values = [f"f8e4m3fn[{batch}{rows},1024]" for rows in (256, 512)]
    result = f"(bf16[{batch}256,512], u8[0])"
    text = f"""ENTRY %main (a: {values[0]}, b: {values[1]}) -> {result} {{
  %a = {values[0]} parameter(0)
  %b = {values[1]} parameter(1)
  %s = f8e8m0fnu[{batch}256,32] parameter(2)
  %t = f8e8m0fnu[{batch}512,32] parameter(3)
  ROOT %c = {result} custom-call(%a, %b, %s, %t), custom_call_target="__cudnn$blockScaledDot"
}}"""
    (kernel,) = kernels_of(text, TARGETS["B200"])
    assert kernel.flops == (2 if batch else 1) * 2 * 256 * 512 * 1024
    assert (kernel.kind, kernel.arithmetic, kernel.tensor_cores) == ("cudnn", "float8", True)
    assert kernel.operands == "float8_e4m3fn x float8_e4m3fn"
    assert (
        estimates({"bfloat16": ("as given", (kernel,))}, TARGETS["B200"])[0].seconds >= kernel.flops / 4.5e15
    )


def test_programs_with_custom_calls_of_any_name_are_exported():
    call = jax.ffi.ffi_call("__op$of_mine", jax.ShapeDtypeStruct((8,), jnp.float32))
    program = exported(lambda arrays: call(jnp.sin(arrays[0])), [jax.ShapeDtypeStruct((8,), jnp.float32)])
    assert b"__op$of_mine" in program.data


@live
@pytest.mark.slow
def test_a_b200_multiplies_blocks_with_scales_in_one_kernel():
    values = [jax.ShapeDtypeStruct((1, rows, 1024), jnp.float8_e4m3fn) for rows in (256, 512)]
    scales = [jax.ShapeDtypeStruct((1, rows, 32), jnp.float8_e8m0fnu) for rows in (256, 512)]
    report = lowering_report(jax.nn.scaled_matmul, *values, *scales, target="B200")
    (kernel,) = report.matrix_kernels
    assert (kernel.operands, kernel.flops) == ("float8_e4m3fn x float8_e4m3fn", 2 * 256 * 512 * 1024)


@live
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8"])
def test_products_with_scales_have_the_paths_of_their_layers(recipe):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(256)(nn.relu(nn.Dense(256)(x)))

    x = jnp.ones((256, 256))
    model = jmpp.wrap(Net(), f"p=f32,c=bf16,o=f32,r={recipe}")
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    found = lowering_report(jax.grad(lambda v: model.apply(v, x).sum()), variables, target="H100")
    float8 = [kernel for kernel in found.matrix_kernels if "float8" in kernel.operands]
    assert {kernel.path for kernel in float8} == {"Net/Dense_0", "Net/Dense_1"}
    assert {kernel.backward for kernel in float8} == {False, True}


def test_estimates_are_the_roofline_by_kernel(version):
    card = TARGETS["H100"]
    given = recorded("mlp", version)
    found = {e.precision: e for e in estimates({"float32": ("as given", given)}, card)}
    by_hand = sum(
        k.times * (max(k.flops / 989.4e12, k.bytes / 3352e9) + LAUNCH_SECONDS)
        for k in given
        if not k.collective
    )
    assert found["tf32"].seconds == pytest.approx(by_hand)
    large = [dataclasses.replace(k, flops=10**13, arithmetic="tf32") for k in products(given)]
    found = {e.precision: e for e in estimates({"float32": ("as given", large)}, card)}
    assert found["tf32"].speedup == pytest.approx(494.7 / 66.9, rel=1e-3)
    assert found["tf32"].bound_by == "compute"
    assert not estimates({"float32": ("as given", large)}, dataclasses.replace(card, rates={}))


def test_targets_have_their_numbers():
    assert set(GPUS) == {"V100", "T4", "A100", "L4", "H100", "H200", "B200"}
    for card in GPUS.values():
        assert card.on_tensor_cores <= set(card.rates)
        # Two operations per unit and cycle, at most, on the ordinary units.
        peak = 2 * card.cores * card.units_per_core * card.clock_ghz * 1e9
        assert 0.85 < card.rates["float32"] / peak <= 1.01
        assert f"major: {card.capability[0]} minor: {card.capability[1]}" in card.config()
        # Otherwise XLA takes the libraries for old ones, and computes no float8 product with them.
        config = card.config()
        for key in ("driver_version", "runtime_version", "compile_time_toolkit_version", "dnn_version"):
            assert re.search(rf' {key}: "\d+\.\d+\.\d+"', config.partition("}\nplatform_name")[0])
    assert TARGETS["T4"].rate("bfloat16") == TARGETS["T4"].rate("tf32") == 8.1e12
    assert target_of_device("NVIDIA H100 80GB HBM3").name == "H100"
    assert target_of_device("Tesla V100-SXM2-16GB").name == "V100"
    assert target_of_device("NVIDIA GeForce RTX 4090") is None


@pytest.fixture
def compiler(monkeypatch):
    """Answers with a recorded program for whatever is exported; gives what was asked for."""
    asked = []

    def compiled(programs, target):
        asked.append((programs, target))
        text = gzip.decompress((DATA / "float32_head.jax-0.10.2.hlo.gz").read_bytes()).decode()
        return [Compiled(text, 1000, 2000, 3000)] * len(programs)

    monkeypatch.setattr(lowering, "compiled", compiled)
    return asked


def test_the_face_of_a_report(compiler):
    pytest.importorskip("flatbuffers")
    fn, args = record.program("float32_head")
    report = lowering_report(fn, *args, target="a100")
    ((programs, card),) = compiler
    # As it is (which is float16 too), in float32, and under autocast in bfloat16.
    assert len(programs) == 3
    assert card.name == "A100"
    assert report.target == "A100"
    assert [(e.precision, e.program) for e in report.estimates] == [
        ("float32", "in float32"),
        ("tf32", "in float32"),
        ("float16", "as given"),
        ("bfloat16", "under autocast"),
    ]
    assert (report.argument_bytes, report.output_bytes, report.temp_bytes) == (1000, 2000, 3000)
    assert len(report.matrix_kernels) == 8
    text = str(report)
    assert "Net/head" in text
    assert "roofline, not measured" in text
    assert text.replace("\n", " ").endswith(report.verdict)
    assert "<table>" in report._repr_html_()
    assert json.loads(json.dumps(report.to_dict()))["kernels"][0]["times"] == 1
    assert report.measured_seconds is None


def test_programs_to_compare_with_multiply_as_the_program_would():
    """In float32 TF32 may be chosen, and under autocast products are in half, those in loops too."""

    def program(w, x):
        half = w.astype(jnp.float16)
        carry, _ = jax.lax.scan(lambda x, _: (x @ half, None), x.astype(jnp.float16), length=2)
        return (carry @ half).astype(jnp.float32)

    function = as_function(program, (jnp.ones((16, 16)), jnp.ones((8, 16))), {}, "lowering_report")
    _, variants = lowering._variants(function, function.jaxpr())
    assert list(variants) == ["float32", "bfloat16"]
    for dtype, (_, variant) in variants.items():
        eqns = list(ir.equations(jax.make_jaxpr(variant)(function.arrays)))
        products = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
        assert len(products) == 2
        for eqn in products:
            assert eqn.params["precision"] is None
            assert {str(ir.dtype_of(atom)) for atom in eqn.invars} == {dtype}


@pytest.mark.slow
def test_the_plot(compiler):
    pytest.importorskip("flatbuffers")
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    fn, args = record.program("float32_head")
    figure = lowering_report(fn, *args).plot()
    (axes,) = figure.axes
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert "FLOP/B" in axes.get_xlabel()
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert "5 matrix kernels in float16" in labels
    assert "float16, bfloat16: 989.4 TFLOP/s" in labels
    matplotlib.pyplot.close(figure)


def test_on_a_gpu_the_executable_is_read_and_timed(monkeypatch):
    # No GPU here: the executable is the CPU's, whose kernels mean little, but the way to it is the same.
    monkeypatch.setattr(
        lowering, "_device", lambda: dataclasses.replace(TARGETS["H100"], name="NVIDIA H100 PCIe")
    )
    report = lowering_report(lambda a, b: a @ b, jnp.ones((64, 64)), jnp.ones((64, 64)), target=None)
    assert report.measured_seconds > 0
    assert "Measured: " in str(report)
    assert report.kernel_count >= 1
    shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    assert lowering_report(lambda a: a @ a, shapes, target=None).measured_seconds is None


@pytest.mark.slow
def test_a_program_that_does_not_compile_is_an_error_and_a_variant_a_note(monkeypatch):
    pytest.importorskip("flatbuffers")
    fn, args = record.program("mlp")
    text = gzip.decompress((DATA / "mlp.jax-0.10.2.hlo.gz").read_bytes()).decode()
    answers = [Compiled(text), Compiled(error="ptxas: too many registers"), Compiled(text)]
    monkeypatch.setattr(lowering, "compiled", lambda programs, target: answers)
    report = lowering_report(fn, *args)
    assert report.notes == ("Not estimated in float32: ptxas: too many registers",)
    assert {e.precision for e in report.estimates} == {"float16", "bfloat16"}
    answers[0] = Compiled(error="ptxas: out of luck")
    with pytest.raises(RuntimeError, match="does not take step for H100:\nptxas: out of luck"):
        lowering_report(fn, *args)


def test_donation_and_meshes_are_handed_over(compiler):
    pytest.importorskip("flatbuffers")
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    lowering_report(jax.jit(lambda a, b: a @ b, donate_argnums=1), x, x)
    assert compiler[-1][0][0].donated == (1,)
    fn, args = record.program("devices")
    lowering_report(fn, *args)
    program = compiler[-1][0][0]
    assert (program.devices, program.mesh) == (8, (("batch", 8, "Auto"),))


def test_results_of_any_class_can_be_handed_over(compiler):
    pytest.importorskip("flatbuffers")
    adam = optax.adam(1e-3)
    params = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    state = jax.eval_shape(adam.init, params)
    lowering_report(adam.update, params, state)
    assert len(compiler) == 1


def test_weak_types_stay_weak():
    half = jax.ShapeDtypeStruct((8,), jnp.bfloat16)
    program = exported(lambda arrays: arrays[0] * arrays[1], [half, jnp.asarray(2.0)])
    (out,) = jax.export.deserialize(bytearray(program.data)).out_avals
    assert out.dtype == jnp.bfloat16


def test_a_mesh_within_the_function_is_found(compiler):
    pytest.importorskip("flatbuffers")
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    spec = PartitionSpec("d")
    fn = jax.shard_map(lambda a: jax.lax.psum(a, "d"), mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
    lowering_report(fn, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    assert (compiler[-1][0][0].devices, compiler[-1][0][0].mesh) == (4, (("d", 4, "Auto"),))


def test_two_meshes_are_an_error():
    devices = np.array(jax.devices()[:4])
    meshes = Mesh(devices, ("d",)), Mesh(devices.reshape(2, 2), ("x", "y"))
    args = [
        jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
        for mesh in meshes
    ]
    with pytest.raises(ValueError, match="on different meshes"):
        exported(lambda arrays: arrays[0], args)


@pytest.mark.parametrize(
    ("word", "match"), [("H10O", "Did you mean 'H100'"), ("mi300", "Known: V100, T4, A100")]
)
def test_unknown_targets(word, match):
    with pytest.raises(ValueError, match=match):
        lowering_report(jnp.sin, jnp.ones(3), target=word)


def test_no_gpu_to_report_on():
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="JAX has none here .its backend is 'cpu'"):
        lowering_report(jnp.sin, jnp.ones(3), target=None)


def test_callbacks_cannot_be_exported():
    def fn(x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(ValueError, match=r"calls back to Python on the host \(debug_"):
        lowering_report(fn, jnp.ones(3))


@pytest.mark.parametrize(
    ("installed", "ptxas", "command"),
    [
        ({}, None, "jax-cuda12-plugin=={0} jax-cuda12-pjrt=={0} nvidia-cuda-nvcc-cu12 flatbuffers"),
        ({"jax-cuda12-plugin": "0.0.1"}, None, "jax-cuda12-plugin=={0} jax-cuda12-pjrt=={0} nvidia"),
        (
            {"jax-cuda13-plugin": "0.0.1"},
            None,
            "jax-cuda13-plugin=={0} jax-cuda13-pjrt=={0} nvidia-cuda-nvcc f",
        ),
        (
            {"jax-cuda13-plugin": jax.__version__},
            "/usr/local/cuda/bin/ptxas",
            "jax-cuda13-pjrt=={0} flatbuffers",
        ),
    ],
)
def test_a_compiler_that_is_missing_or_of_another_version(monkeypatch, installed, ptxas, command):
    """The plugin may be for CUDA 12 or 13, and ptxas come with CUDA itself."""

    def version(name):
        if name in installed:
            return installed[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(shutil, "which", lambda name: ptxas)
    with pytest.raises(LoweringUnavailableError, match=f"pip install {command.format(jax.__version__)}"):
        xla_compiler.compiled([], GPUS["H100"])


def test_the_compiler_dying_shows_its_last_lines(monkeypatch, tmp_path):
    script = tmp_path / "dies.py"
    said = "noise\nptxas fatal: Value 'sm_70' is not defined\n"
    script.write_text(f"import sys\nsys.stderr.write({said!r})\nsys.exit(134)\n")
    monkeypatch.setattr(xla_compiler.compile_process, "__file__", str(script))
    monkeypatch.setattr(xla_compiler, "check_installed", lambda platform: None)
    with pytest.raises(RuntimeError, match="status 134. Its last lines:\nnoise\nptxas fatal: Value 'sm_70'"):
        xla_compiler.compiled([Exported(b"", 1, (), ())], GPUS["V100"])


_INTERRUPTS = """
import os, pickle, signal, sys, time
from pathlib import Path
here = Path(__file__).parent
if (made := here / "made").exists():
    Path(sys.argv[1], "answer").write_bytes(made.read_bytes())
(here / "pid").write_text(str(os.getpid()))
os.kill(os.getppid(), signal.SIGINT)
time.sleep(600)
"""


@pytest.fixture
def interruptible():
    """Shells start what runs in the background with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_compiler_and_keeps_the_program_that_is_compiled(monkeypatch, tmp_path):
    pytest.importorskip("flatbuffers")
    script = tmp_path / "interrupts.py"
    script.write_text(_INTERRUPTS)
    monkeypatch.setattr(xla_compiler.compile_process, "__file__", str(script))
    monkeypatch.setattr(xla_compiler, "check_installed", lambda platform: None)
    fn, args = record.program("float32_head")
    with pytest.raises(KeyboardInterrupt, match="^$"):
        lowering_report(fn, *args)
    process = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError, match="No such process"):
        os.kill(process, 0)
    text = gzip.decompress((DATA / "float32_head.jax-0.10.2.hlo.gz").read_bytes()).decode()
    (tmp_path / "made").write_bytes(pickle.dumps([tuple(Compiled(text))]))
    found = lowering_report(fn, *args)
    assert [estimate.program for estimate in found.estimates] == ["as given"]
    assert found.kernels
    assert found.interrupted.endswith("programs to compare with were not compiled.")
    with pytest.raises(KeyboardInterrupt, match="^$"):
        jmpp.memory_report(lambda x: (x.astype("float16") * 2).sum(), jnp.ones(8), target="H100")


def test_the_compilers_process_knows_nothing_of_the_callers_devices(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_dump_to=x")
    environment = xla_compiler._environment()
    assert environment["XLA_FLAGS"] == "--xla_dump_to=x"
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


@live
@pytest.mark.slow
def test_live_a_step_with_a_float32_head_on_the_a100():
    fn, args = record.program("float32_head")
    before = set(sys.modules)
    report = lowering_report(fn, *args, target="A100")
    assert not any("cuda" in name for name in set(sys.modules) - before)
    assert "left in float32: Net/head (record.py:" in report.verdict
    assert flops(report.kernels) == 2 * 512 * 256 * (2 * 256 + 3 * 256 + 3 * 128)
    assert [e.precision for e in report.estimates] == ["float32", "tf32", "float16", "bfloat16"]
    assert not report.notes
    assert report.temp_bytes > 0


@live
@pytest.mark.slow
def test_live_a_float8_product_with_its_scales_is_of_cublaslt(monkeypatch):
    monkeypatch.setattr(type(GPUS["H100"]), "options", {})
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0")

    def fn(a, b, scale):
        a, b = (x.astype(jnp.bfloat16) * scale for x in (a, b))
        return a @ b

    a = jax.ShapeDtypeStruct((256, 256), jnp.float8_e4m3fn)
    report = lowering_report(fn, a, a, jax.ShapeDtypeStruct((), jnp.bfloat16))
    (kernel,) = report.matrix_kernels
    assert (kernel.kind, kernel.arithmetic) == ("cublaslt", "float8")


@live
@pytest.mark.slow
def test_live_eight_devices_reduce_their_gradients():
    fn, args = record.program("devices")
    report = lowering_report(fn, *args)
    assert report.devices == 8
    assert {(k.collective, k.operands, k.group) for k in report.collectives} == {
        ("all-reduce", "float16", 8),
        ("all-reduce", "float32", 8),
    }
    assert flops(report.kernels) == 2 * 64 * 256 * (2 * 256 + 3 * 256 + 3 * 128)


def test_lines_are_the_users_wherever_the_library_lies():
    text = f"""HloModule m

FileNames
1 "/models/mlp.py"
2 "{inspect.getfile(interceptor)}"

FunctionNames
1 "call"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=41 end_line=41 column=1 end_column=2}}
2 {{file_name_id=2 function_name_id=1 line=110 end_line=110 column=1 end_column=2}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}

ENTRY main {{
}}"""
    line = '%dot = f16[8,8] dot(%a, %b), metadata={op_name="jit(f)/dot" stack_frame_id=2}'
    assert Sources(text).line(Instruction("dot", "f16[8,8]", "dot", ("a", "b"), line)) == "mlp.py:41"
