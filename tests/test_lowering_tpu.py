"""Lowering reports for TPUs: names and shapes of slices, the reading of their programs, live compilations."""

import importlib.metadata
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jmp_policy._src.core.targets import GPUS, TARGETS, TPUS, find_target, target_of_device
from jmp_policy._src.report.lowering import compiler, lowering
from jmp_policy._src.report.lowering.compile_process import Compiled
from jmp_policy._src.report.lowering.compiler import LoweringUnavailableError, exported, is_installed
from jmp_policy._src.report.lowering.hlo import executed, parse
from jmp_policy._src.report.lowering.kernels import gains, kernels_of
from jmp_policy._src.report.lowering.lowered import verdict_of
from jmp_policy._src.report.lowering.lowering import lowering_report

V5E = TPUS["v5e"]
live = pytest.mark.skipif(not is_installed("tpu"), reason="needs the extra tpu-lowering")


@pytest.mark.parametrize(
    ("name", "devices", "slice_", "bounds"),
    [
        ("v5e", 1, "v5e:1x1", [1, 1, 1]),
        ("v5e", 2, "v5e:2x1", [2, 1, 1]),
        ("v6e", 8, "v6e:2x4", [2, 2, 1]),
        ("v5e", 32, "v5e:4x8", [2, 2, 1]),
        ("v5p", 4, "v5p:2x2x1", [2, 2, 1]),
        ("V5P", 16, "v5p:2x2x4", [2, 2, 1]),
        ("v4:2x2x2", 8, "v4:2x2x2", [2, 2, 1]),
        ("v5e:1x4", 4, "v5e:1x4", [1, 2, 1]),
        # A chip is two devices.
        ("v7x", 1, "tpu7x:1x1x1", [1, 1, 1]),
        ("v7x:2x2x1", 8, "tpu7x:2x2x1", [2, 2, 1]),
    ],
)
def test_slices_have_the_devices_of_the_program(name, devices, slice_, bounds):
    found = find_target(name).topology(devices)
    assert (found["topology_name"], found["chips_per_host_bounds"]) == (slice_, bounds)
    assert found.get("chip_config_name") == ("megacore" if name.startswith("v4") else None)


def test_a_slice_that_the_program_does_not_fill_is_an_error():
    with pytest.raises(ValueError, match=r"v5e:2x4 has 8 devices, and the program is for 1\. .* Named"):
        find_target("v5e:2x4").topology(1)
    with pytest.raises(ValueError, match=r"no usual slice for 6 devices\. Name its topology: 'v5e:2x2'"):
        V5E.topology(6)
    assert find_target("v5e:2x3").topology(6)["topology_name"] == "v5e:2x3"


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("v5e:2x2x2", "Unknown topology '2x2x2' of a slice of v5e: its chips lie in 2 dimensions"),
        ("v5p:8", "as in 'v5p:2x2x2'"),
        ("v5e:0x4", "Unknown topology '0x4'"),
        ("v5x", "Unknown target 'v5x'. Did you mean 'v"),
        ("v5e:", "Unknown target"),
        ("H10O", "Did you mean 'H100'"),
    ],
)
def test_unknown_slices(name, match):
    with pytest.raises(ValueError, match=match):
        lowering_report(jnp.sin, jnp.ones(3), target=name)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v5e", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU v4", "v4"),
        ("TPU7x", "v7x"),
        ("v5e:2x4", "v5e:2x4"),
        ("TPU v9", None),
    ],
)
def test_kinds_of_devices(kind, name):
    found = target_of_device(kind)
    assert (found and found.name) == name


#: From libtpu 0.0.42 for a v5e: attributes that are not read are left out.
CONVOLUTIONS = """
ENTRY %main (a: bf16[1]) -> bf16[1] {
  %x = bf16[8,32,32,64]{3,0,2,1:T(8,128)(2,1)} parameter(0)
  %k = bf16[3,3,64,128]{3,2,1,0:T(8,128)(2,1)} parameter(1)
  %d = bf16[8,16,16,128]{3,0,2,1:T(8,128)(2,1)S(1)} parameter(2)
  %forward = bf16[8,16,16,128]{3,0,2,1} convolution(%x, %k), window={size=3x3 stride=2x2 pad=0_1x0_1}, dim_labels=b01f_01io->b01f
  %input = bf16[8,32,32,64]{3,0,2,1} convolution(%d, %k), window={size=3x3 pad=2_1x2_1 lhs_dilate=2x2 rhs_reversal=1x1}, dim_labels=b01f_01oi->b01f
  %filter = bf16[3,3,64,128]{3,2,1,0} convolution(%x, %d), window={size=16x16 pad=0_1x0_1 rhs_dilate=2x2}, dim_labels=f01b_i01o->01bf
  %q = bf16[4,8,128,64]{3,2,1,0} parameter(3)
  %r = bf16[4,8,256,64]{3,2,1,0} parameter(4)
  %batched = bf16[4,8,128,256]{3,2,1,0} convolution(%q, %r), window={size=4x8 stride=3x7 lhs_dilate=4x8}, dim_labels=01bf_01oi->01bf
  %s = f32[512,256]{1,0} parameter(5)
  %t = f32[256,384]{1,0} parameter(6)
  %exact = f32[512,384]{1,0} convolution(%s, %t), dim_labels=bf_io->bf, operand_precision={highest,highest}
  %three = f32[512,384]{1,0} convolution(%s, %t), dim_labels=bf_io->bf, operand_precision={high,high}
  %one = f32[512,384]{1,0:S(1)} convolution(%s, %t), dim_labels=bf_io->bf
  %deep = bf16[8,32,32,64]{3,0,2,1} convolution(%x, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f, feature_group_count=64
}
"""  # noqa: E501


def pairs_by_hand(size, result, window, stride=1, low=0, lhs_dilate=1, rhs_dilate=1):
    """Counts the elements of the input that a window meets, one by one."""
    places = [o * stride + p * rhs_dilate - low for o in range(result) for p in range(window)]
    return sum(0 <= at <= (size - 1) * lhs_dilate and at % lhs_dilate == 0 for at in places)


def test_convolutions_are_products_of_which_padding_is_no_part():
    found = {kernel.name: kernel for kernel in kernels_of(CONVOLUTIONS, V5E)}
    by_hand = {
        "forward": 2 * 8 * 64 * 128 * pairs_by_hand(32, 16, 3, stride=2) ** 2,
        "input": 2 * 8 * 64 * 128 * pairs_by_hand(16, 32, 3, low=2, lhs_dilate=2) ** 2,
        "filter": 2 * 8 * 64 * 128 * pairs_by_hand(32, 3, 16, rhs_dilate=2) ** 2,
    }
    for name, flops in by_hand.items():
        # The sum of a product is that of the average position, a whole number.
        assert 0.98 * flops < found[name].flops <= flops, name
    # What the compiler counted of these three, with what is not a product.
    assert sum(by_hand.values()) == pytest.approx(869400576, rel=0.01)
    assert found["batched"].size == "32*128x256x64"
    assert found["batched"].flops == 134217728
    assert found["exact"].size == "512x384x256"


def test_passes_follow_the_precision_of_the_product():
    found = {kernel.name: kernel for kernel in kernels_of(CONVOLUTIONS, V5E)}
    arithmetic = {name: found[name].arithmetic for name in ("one", "three", "exact", "batched")}
    assert arithmetic == {
        "one": "bfloat16", "three": "bfloat16_x3", "exact": "float32", "batched": "bfloat16",
    }  # fmt: skip
    assert all(kernel.tensor_cores for kernel in found.values())
    assert V5E.rate("bfloat16") == 3 * V5E.rate("bfloat16_x3") == 6 * V5E.rate("float32")
    assert (found["batched"].alignment, found["one"].alignment) == ("unaligned", "aligned")
    said = verdict_of(list(found.values()), (), V5E)
    assert "8 of 8 matrix kernels on the matrix units (6 in bfloat16, 1 in float32, 1 in bfloat16_x3)" in said
    assert "left in float32: " in said
    float8 = CONVOLUTIONS.replace("f32[512,2", "f8e4m3fn[512,2").replace("f32[256,3", "f8e4m3fn[256,3")
    assert {k.name: k.arithmetic for k in kernels_of(float8, V5E)}["one"] == "bfloat16"
    assert {k.name: k.arithmetic for k in kernels_of(float8, TPUS["v7x"])}["one"] == "float8"


def test_float16_is_no_type_of_a_tpu():
    kernels = kernels_of(CONVOLUTIONS.replace("bf16", "f16"), V5E)
    assert "v5e has no arithmetic for float16: use bfloat16" in verdict_of(kernels, (), V5E)
    assert "8 bits of the significand" in "".join(lowering._unknown(kernels, V5E))
    assert not lowering._unknown(kernels, GPUS["H100"])


LOOP = """
%fused (p: bf16[6,512,512], q: s32[]) -> bf16[512,512] {
  %p = bf16[6,512,512]{2,1,0} parameter(0)
  %q = s32[] parameter(1)
  %zero = s32[] constant(0)
  %layer = bf16[1,512,512]{2,1,0} dynamic-slice(%p, %q, %zero, %zero), dynamic_slice_sizes={1,512,512}
  ROOT %w = bf16[512,512]{1,0} bitcast(%layer)
}

%body (s: (s32[], bf16[512,512], bf16[6,512,512], s32[])) -> (s32[], bf16[512,512], bf16[6,512,512], s32[]) {
  %s = (s32[]{:T(128)}, bf16[512,512]{1,0:T(8,128)(2,1)S(1)}, bf16[6,512,512]{2,1,0:T(8,128)(2,1)}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  %x = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%s), index=1
  %ws = bf16[6,512,512]{2,1,0:T(8,128)(2,1)} get-tuple-element(%s), index=2
  %step = s32[]{:T(128)} get-tuple-element(%s), index=3
  %held = s32[]{:T(128)} copy(%i)
  %next = s32[]{:T(128)} add(%held, %step)
  %w = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} fusion(%ws, %i), kind=kLoop, calls=%fused
  %y = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} convolution(%x, %w), dim_labels=bf_io->bf
  ROOT %t = (s32[], bf16[512,512]{1,0:S(1)}, bf16[6,512,512], s32[]) tuple(%next, %y, %ws, %step)
}

%condition (c: (s32[], bf16[512,512], bf16[6,512,512], s32[])) -> pred[] {
  %last = s32[]{:T(128)} constant(6)
  %c = (s32[]{:T(128)}, bf16[512,512]{1,0:T(8,128)(2,1)S(1)}, bf16[6,512,512]{2,1,0}, s32[]{:T(128)}) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %lt = pred[]{:T(512)} compare(%at, %last), direction=LT
}

ENTRY %main (x: bf16[512,512], w: bf16[6,512,512]) -> bf16[512,512] {
  %begin = s32[]{:T(128)} constant(0)
  %by = s32[]{:T(128)} constant(STEP)
  %x = bf16[512,512]{1,0:T(8,128)(2,1)} parameter(0)
  %w = bf16[6,512,512]{2,1,0:T(8,128)(2,1)} parameter(1)
  %copied = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} copy(%x)
  %counter = s32[]{:T(128)} copy(%begin)
  %state = (s32[]{:T(128)}, bf16[512,512]{1,0:T(8,128)(2,1)S(1)}, bf16[6,512,512]{2,1,0}, s32[]) tuple(%counter, %copied, %w, %by)
  %while = (s32[]{:T(128)}, bf16[512,512]{1,0:T(8,128)(2,1)S(1)}, bf16[6,512,512]{2,1,0}, s32[]) while(%state), condition=%condition, body=%body
  %result = bf16[512,512]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%while), index=1
  %part = ((bf16[512,512]{1,0:T(8,128)(2,1)}), bf16[128,512]{1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)}) slice-start(%x), slice={[0:128], [0:512]}
  %start = (bf16[512,512]{1,0:T(8,128)(2,1)}, bf16[512,512]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) copy-start(%result)
  ROOT %done = bf16[512,512]{1,0:T(8,128)(2,1)} copy-done(%start)
}
"""  # noqa: E501


@pytest.mark.parametrize(("step", "trips"), [("1", 6), ("2", 3), ("4", 2), ("0", None), ("x", None)])
def test_the_trips_of_a_loop_follow_from_its_counter(step, trips):
    runs = executed(*parse(LOOP.replace("STEP", step)))
    assert (runs["body"].times, runs["body"].counted) == (trips or 1, trips is not None)


def test_what_stays_on_the_chip_is_no_traffic():
    found = {kernel.name: kernel for kernel in kernels_of(LOOP.replace("STEP", "1"), V5E)}
    size = 2 * 512 * 512
    traffic = {name: (k.bytes_read, k.bytes_written) for name, k in found.items()}
    assert traffic["copied"] == (size, 0)
    # One layer of the stack, into the chip; the product is all on the chip.
    assert traffic["w"] == (size + 4, 0)
    assert traffic["y"] == (0, 0)
    assert traffic["part"] == (size // 4, 0)
    assert traffic["start"] == (0, size)
    assert (found["part"].kind, found["y"].times) == ("copy", 6)


COLLECTIVES = """
%begun (p: bf16[64]) -> (bf16[64], bf16[256]) {
  %p = bf16[64]{0:S(1)} parameter(0)
  %g = bf16[256] all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %start = (bf16[64], bf16[256], u32[]) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.2 (p: bf16[64], q: bf16[256]) -> bf16[8,8] {
  %x = bf16[8,8] parameter(1)
  %y = bf16[8,8] convolution(%x, %x), dim_labels=bf_io->bf
  %p = bf16[64] parameter(0)
  %g = bf16[256] all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %t = (bf16[8,8], bf16[256]) tuple(%y, %g)
}

%all-reduce-scatter (p: bf16[256]) -> bf16[64] {
  %p = bf16[256] parameter(0)
  %r = bf16[256] all-reduce(%p), replica_groups={{0,1},{2,3}}
  %zero = u32[] constant(0)
  ROOT %s = bf16[64] dynamic-slice(%r, %zero), dynamic_slice_sizes={64}
}

ENTRY %main (a: bf16[64], b: bf16[8,8]) -> bf16[64] {
  %a = bf16[64]{0:S(1)} parameter(0)
  %b = bf16[8,8] parameter(1)
  %first = (bf16[64], bf16[256], u32[]) fusion(%a), kind=kCustom, calls=%begun
  %second = (bf16[8,8], bf16[256]) fusion(%a, %b), kind=kCustom, calls=%async_collective_fusion.2
  %whole = bf16[256] get-tuple-element(%second), index=1
  ROOT %third = bf16[64] fusion(%whole), kind=kCustom, calls=%all-reduce-scatter
}
"""


def test_collectives_within_fusions_count_once():
    first, second, third = kernels_of(COLLECTIVES, V5E)
    assert (first.collective, first.operands, first.bytes_read, first.group) == (
        "all-gather",
        "bfloat16",
        128,
        4,
    )
    assert (second.collective, second.size) == ("", "8x8x8")
    assert (third.collective, third.group, third.bytes_read) == ("reduce-scatter", 2, 512)


def test_layers_that_gain_and_lose():
    text = CONVOLUTIONS.replace("dim_labels", 'metadata={op_name="jit(f)/Net/layer/dot"}, dim_labels')
    half = kernels_of(text, V5E)
    wide = [k for k in half if k.name != "batched"]
    (row,) = gains(wide, half, "bfloat16", V5E)
    assert (row.path, row.precision) == ("Net/layer", "bfloat16")
    assert row.seconds > row.before_seconds
    assert row.speedup == row.before_seconds / row.seconds < 1
    assert not gains(wide, [], "bfloat16", V5E)


@pytest.fixture
def answers(monkeypatch):
    """Answers for whatever is compiled, with one program for bfloat16 and another for float32."""

    def compiled(programs, target):
        assert target.platform == "tpu"
        found = [Compiled(CONVOLUTIONS, 10, 20, 30, 5, 100), Compiled(CONVOLUTIONS, 20, 40, 60, 10, 200)]
        return [found[min(i, 1)] for i, _ in enumerate(programs)]

    monkeypatch.setattr(lowering, "compiled", compiled)


def test_the_report_says_what_it_knows_of_memory_and_what_not(answers):
    pytest.importorskip("flatbuffers")
    x = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    report = lowering_report(lambda a: a @ a, x, target="v5e:1x1")
    assert report.target == "v5e:1x1"
    assert (report.temp_bytes, report.float32_temp_bytes) == (30, 60)
    assert (report.peak_bytes, report.float32_peak_bytes) == (100, 200)
    assert [e.precision for e in report.estimates] == ["float32", "float16", "bfloat16"]
    # Nothing is launched.
    assert report.estimates[0].seconds < 1e-3
    text = " ".join(str(report).split())
    assert "temporary 30 B (60 B in float32), at most in use 100 B (200 B in float32)" in text
    assert "A TPU multiplies float32 as bfloat16, in one pass" in text
    assert "Not known: " in text


@pytest.mark.parametrize("installed", [None, "0.0.1"])
def test_libtpu_that_is_missing_or_of_another_version(monkeypatch, installed):
    real = importlib.metadata.version

    def version(name):
        if name != "libtpu":
            return real(name)
        if installed:
            return installed
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(LoweringUnavailableError, match=r"TPU needs libtpu .* pip install libtpu==0\.0\.\d+"):
        compiler.compiled([], V5E)


def test_a_slice_of_another_size_is_told_before_anything_is_installed(monkeypatch):
    pytest.importorskip("flatbuffers")
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    x = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("d")))
    program = exported(lambda arrays: arrays[0] + 1, [x], platform="tpu")
    with pytest.raises(ValueError, match="v5e:2x4 has 8 devices, and the program is for 4"):
        compiler.compiled([program], find_target("v5e:2x4"))


def test_targets_of_both_kinds():
    assert set(TARGETS) == {*GPUS, *TPUS}
    for tpu in TPUS.values():
        # A product of 1024 x 1024 x 1024 takes more memory traffic than arithmetic on none of them.
        assert tpu.rates["bfloat16"] / tpu.bandwidth < 2 * 1024**3 / (3 * 2 * 1024**2) * 2
        assert math.isclose(tpu.rates["float32"] * 6, tpu.rates["bfloat16"])


@live
@pytest.mark.slow
def test_live_a_step_on_eight_tpus():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))

    def sharded(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def loss(w, x):
        def layer(x, w):
            return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

        return jax.lax.scan(layer, x.astype(jnp.bfloat16), w)[0].astype(jnp.float32).sum()

    def step(w, x):
        return w - jax.grad(loss)(w, x)

    args = sharded((3, 512, 512), None, "model"), sharded((1024, 512), ("data", "model"))
    report = lowering_report(jax.jit(step, donate_argnums=0), *args, target="v5e:2x4")
    assert report.devices == 8
    assert all(kernel.operands.startswith("bfloat16") for kernel in report.collectives)
    assert {k.group for k in report.collectives if k.collective == "all-gather"} == {4}
    products = report.matrix_kernels
    assert {(k.operands, k.arithmetic) for k in products} == {("bfloat16 x bfloat16", "bfloat16")}
    # Forward, and backward to inputs and weights; each device has its part of the batch.
    assert sum(k.times * k.flops for k in products) == 3 * 3 * 2 * 128 * 512 * 512
    assert report.peak_bytes > 0
