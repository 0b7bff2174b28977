"""Compiles a program for a GPU or TPU and reports its kernels, their precision and estimated time."""

import dataclasses
import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jmp_policy._src.autocast.api import autocast
from jmp_policy._src.core.report_base import joined
from jmp_policy._src.core.targets import GPUS, TARGETS, Target, find_target, target_of_device
from jmp_policy._src.jaxpr import control_flow, ir
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.float32_replay import replay_in_float32
from jmp_policy._src.jaxpr.interpreter import Interpreter
from jmp_policy._src.jaxpr.ir import flattened
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.jaxpr.walk import Walk
from jmp_policy._src.products.fp8.eligibility import operand_dtypes, recipe_of
from jmp_policy._src.report import progress
from jmp_policy._src.report.function import Function, as_function, donated_arguments
from jmp_policy._src.report.lowering.compile_process import Compiled
from jmp_policy._src.report.lowering.compiler import Exported, compile_here, compiled, exported
from jmp_policy._src.report.lowering.kernels import Gain, Kernel, estimates, gains, kernels_of, partitions
from jmp_policy._src.report.lowering.lowered import HALVES, RUNS, WITHOUT_RECIPE, LoweringReport, verdict_of
from jmp_policy._src.report.lowering.products import FEW_BITS, few_bits

#: By precision the name of a program, and the program.
Variants = dict[str, tuple[str, Callable[[Sequence[Any]], Any]]]


@progress.showing("lowering_report")
def lowering_report(
    fn: Callable[..., Any],
    *args: Any,
    target: str | None = "H100",
    require: str | None = None,
    **kwargs: Any,
) -> LoweringReport:
    """Reports the kernels that XLA's compiler for a GPU or TPU makes of a function, with or without a device.

    Compiles in a separate process, for a device that need not be there: the extras `gpu-lowering` and
    `tpu-lowering` install the compilers, and nothing runs. Use it before a job is sent to a cluster, and in
    tests: the table shows each product with its module, its dtype and whether it is on Tensor Cores.

    On a card XLA decides by timing which library computes a product; here it is the compiler's first choice.
    The times are estimates: for each kernel the time of its arithmetic or of its memory traffic at the
    device's peak rates, whichever is longer, and the launches.

    TPUs multiply float32 at JAX's default precision as bfloat16, in one pass, so that half precision saves
    them memory and its traffic, and no arithmetic. `peak_bytes` is the number for memory: `temp_bytes` is
    often 0. What a TPU computes in a kernel of Pallas is not known, nor how well its copies overlap with
    arithmetic.

    Args:
      fn: any function that `jax.jit` could trace, or one of NNX modules; a whole training step for the
        backward pass and the optimizer.
      args, kwargs: its arguments; `jax.ShapeDtypeStruct`s will do for a named target. Those that are not
        arrays are static. With `NamedSharding`s on a mesh of several devices (virtual ones of the CPU will
        do) the program is that of one of these devices, with its collectives.
      target: V100, T4, A100, L4, H100, H200 or B200; v4, v5e, v5p, v6e or v7x, whose slices have as many
        devices as the program, or the shape that is named: "v5e:2x4", "v5p:2x2x2". None for the device of
        this machine, where the program is also run, on the given arrays, and timed.
      require: "float8" to make sure, in a test say, that the products which the program has in float8 are
        compiled to float8 kernels, and not to ones of 16 bits.

    Returns:
      A `LoweringReport`; `print` shows it, `.plot()` draws the roofline.

    Raises:
      LoweringUnavailableError: when the compiler is not installed in the version of JAX.
      AssertionError: when what is required does not hold; the message names the products.
      ValueError: for an unknown target or requirement; for a slice of TPUs of another size than the program's
        mesh; for None on a machine without a GPU or TPU; for a program that calls back to the host.
      RuntimeError: when the program does not compile, with the compiler's last lines.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> half = jax.ShapeDtypeStruct((1024, 1024), jnp.float16)
      >>> report = lowering_report(jnp.dot, half, half, target="A100")  # doctest: +SKIP
      >>> [kernel.tensor_cores for kernel in report.kernels if kernel.flops]  # doctest: +SKIP
      [True]
    """
    if require not in (None, "float8"):
        raise ValueError(f"lowering_report can require 'float8' and nothing else; got require={require!r}.")
    card = find_target(target) if target is not None else _device()
    function = as_function(fn, args, kwargs, "lowering_report")
    jaxpr = function.jaxpr()
    precisions, variants = _variants(function, jaxpr)
    calls, measured = [call for _, call in variants.values()], None
    if target is None:
        (given, *answers), measured = _compile_here(calls, function)
        devices = partitions(given.text)
    else:
        _check_exportable(jaxpr, function.name)
        is_jitted = hasattr(fn, "trace") and not function.has_state
        donated = donated_arguments(jaxpr) if is_jitted else ()
        (given, *answers), devices = _compile_elsewhere(calls, function, card, donated)
    if given.error:
        raise RuntimeError(f"XLA's compiler does not take {function.name} for {card.name}:\n{given.error}")
    kernels = kernels_of(given.text, card)
    if require is not None:
        check_float8(jaxpr, kernels, f"{function.name} for {card.name}")
    notes = _unknown(kernels, card)
    known: dict[str, tuple[str, Sequence[Kernel]]] = dict.fromkeys(precisions, ("as given", kernels))
    for (precision, (program, _)), made in zip(variants.items(), answers, strict=True):
        if made.error:
            notes.append(f"Not estimated in {precision}: {made.error.splitlines()[-1]:.200}")
        else:
            known[precision] = program, kernels_of(made.text, card)
    known = {p: known[p] for p in ("float32", *HALVES, *FEW_BITS) if p in known}
    found = estimates(known, card)
    plain = [kernels for program, kernels in known.values() if program == WITHOUT_RECIPE]
    by_recipe = gains(plain[0], kernels, _product_paths(jaxpr)[0], card) if plain else ()
    # Variants begin with float32, unless the program is that.
    wide = given if "float32" in precisions else answers[0]
    return LoweringReport(
        function=function.name,
        target=card.name,
        devices=devices,
        kernels=kernels,
        argument_bytes=given.argument_bytes,
        output_bytes=given.output_bytes,
        temp_bytes=given.temp_bytes,
        estimates=found,
        measured_seconds=measured,
        notes=tuple(notes),
        verdict=verdict_of(kernels, found, card, by_recipe),
        peak_bytes=given.peak_bytes,
        float32_temp_bytes=None if wide.error else wide.temp_bytes,
        float32_peak_bytes=None if wide.error else wide.peak_bytes,
        layers=_layers(known, card),
        recipes=by_recipe,
    )


def _layers(known: Mapping[str, tuple[str, Sequence[Kernel]]], card: Target) -> tuple[Gain, ...]:
    """The gains of the half type that is given, or else of one that the device has."""
    halves = [half for half in HALVES if half in known]
    given = [half for half in halves if known[half][0] in ("as given", WITHOUT_RECIPE)]
    chosen = given or [half for half in halves if half in card.on_tensor_cores]
    if not chosen or "float32" not in known:
        return ()
    return gains(known["float32"][1], known[chosen[0]][1], chosen[0], card)


def _unknown(kernels: Sequence[Kernel], card: Target) -> list[str]:
    """What a report for a TPU cannot know."""
    notes = [
        "A TPU multiplies float32 as bfloat16, in one pass, unless jax_default_matmul_precision says "
        "otherwise. Not known: arithmetic of Pallas kernels, and how well copies hide behind arithmetic."
    ]
    if any("float16" in kernel.operands.split(" x ") for kernel in kernels):
        notes.append("It multiplies float16 as bfloat16 too: 8 bits of the significand count, not 11.")
    return notes if card.platform == "tpu" else []


def _variants(function: Function, jaxpr: Any) -> tuple[list[str], Variants]:
    """The precisions that a program has, and what to compile beside it for the others."""
    products = [eqn for eqn in ir.equations(jaxpr) if eqn.primitive.name in _PRODUCTS]
    dtypes = {dtype for eqn in products for dtype in operand_dtypes(eqn)}
    few = [kind for kind in FEW_BITS if kind in map(few_bits, dtypes)]
    precisions = few[-1:] or [half for half in HALVES if half in dtypes] or ["float32"]
    float32 = function.call if precisions == ["float32"] else replay_in_float32(function.call)
    variants: Variants = {"float32": ("in float32", float32)}
    # What operands of float8 products by recipes had before they were rounded.
    recipe_halves = {str(ir.dtype_of(eqn.invars[0])) for eqn in ir.equations(jaxpr) if recipe_of(eqn)}
    for half in HALVES:
        if half in recipe_halves:
            variants[half] = WITHOUT_RECIPE, products_in_half(function.call)
        else:
            variants[half] = "under autocast", autocast(float32, half)
    return precisions, {p: variant for p, variant in variants.items() if p not in precisions}


_PRODUCTS = HAVING[Trait.PRODUCT]


class _InHalf(Interpreter):
    """Runs a program with its float8 products computed from half operands, as without its recipe."""

    def enters(self, eqn: Any, kind: Kind, values: Sequence[Any]) -> bool:
        return kind is not Kind.WHILE or control_flow.ends_at_once(eqn)

    def operation(self, eqn: Any, values: Sequence[Any], where: Any) -> Sequence[Any]:
        # Scales are computed by nobody: XLA leaves out what nothing uses.
        changed = {"formats": (None, None)} if "formats" in eqn.params else {}
        return self.bind(eqn, *values, **changed)


def products_in_half(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that multiplies in half what another one multiplies in float8."""

    def in_half(*args: Any) -> Any:
        jaxpr, arrays, rebuild = flattened(fn, args, {})
        return rebuild(_InHalf().run(jaxpr, arrays))

    return in_half


def _check_exportable(jaxpr: Any, name: str) -> None:
    calls = {p for p in ir.primitives(jaxpr) if p.endswith("_callback") or p == "debug_print"}
    if calls:
        raise ValueError(
            f"{name} calls back to Python on the host ({', '.join(sorted(calls))}; jax.debug.print does so), "
            "which a program for a GPU elsewhere cannot. Take the call out, or use target=None on a GPU."
        )


def _attempted(make: Callable[[Any], Any], calls: Iterable[Any]) -> list[Any]:
    """Makes something of each function, or a `Compiled` with the error; the report shows it as a note."""
    made: list[Any] = []
    for call in calls:
        try:
            with warnings.catch_warnings():
                # Autocast's advice is on a program that the caller did not ask for.
                warnings.simplefilter("ignore")
                made.append(make(call))
        except Exception as error:
            made.append(Compiled(error=f"{type(error).__name__}: {error}"))
    return made


def _compile_elsewhere(
    calls: Iterable[Any], function: Function, card: Target, donated: Sequence[int]
) -> tuple[list[Compiled], int]:
    """The compiled function and others beside it, and the number of devices."""
    export = functools.partial(exported, arrays=function.arrays, donated=donated, platform=card.platform)
    made = [given := export(function.call), *_attempted(export, calls)]
    progress.step(f"compiling {len(made)} programs")
    answers = iter(compiled([one for one in made if isinstance(one, Exported)], card))
    none = Compiled(error="interrupted")
    return [next(answers, none) if isinstance(one, Exported) else one for one in made], given.devices


def _compile_here(calls: Iterable[Any], function: Function) -> tuple[list[Compiled], float | None]:
    """The compiled function and others beside it, and the median time of the function."""
    executable, given = compile_here(function.call, function.arrays)
    answers = [given, *_attempted(lambda call: compile_here(call, function.arrays)[1], calls)]
    concrete = not any(isinstance(array, jax.ShapeDtypeStruct) for array in function.arrays)
    return answers, _measured(executable, function.arrays) if concrete else None


def _measured(executable: Any, arrays: Sequence[Any]) -> float:
    arrays, seconds = jax.device_put(list(arrays)), []
    # The first run is not measured.
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        jax.block_until_ready(executable(*arrays))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _device() -> Target:
    """The GPU or TPU of this machine as a target; one that is not in the table has no rates."""
    backend = jax.default_backend()
    if backend not in ("gpu", "tpu"):
        raise ValueError(
            "target=None reports on the GPU or TPU of this machine, and JAX has none here (its backend is "
            f"{backend!r}). Name a device to compile for: {', '.join(TARGETS)}."
        )
    device = jax.devices()[0]
    if (known := target_of_device(device.device_kind)) is not None:
        return dataclasses.replace(known, name=device.device_kind)
    like: Target = TARGETS["v6e"]
    if backend == "gpu":
        capability = tuple(map(int, str(device.compute_capability).split(".")))
        like = [GPUS["V100"], *(gpu for gpu in GPUS.values() if gpu.capability <= capability)][-1]
    return dataclasses.replace(like, name=device.device_kind, rates={})


def _product_paths(jaxpr: Any) -> tuple[dict[str, str], set[str]]:
    """The paths of float8 products, with their recipe, and of all others."""
    float8, others = dict[str, str](), set[str]()
    for eqn, site, *_ in Walk(jaxpr).operations:
        if eqn.primitive.name in _PRODUCTS:
            if all(map(few_bits, operand_dtypes(eqn))):
                float8.setdefault(site.path, recipe_of(eqn))
            else:
                others.add(site.path)
    return float8, others


def check_float8(jaxpr: Any, kernels: Sequence[Kernel], program: str) -> None:
    """Raises AssertionError where a product that is to be in float8 has a kernel of other operands.

    Kernels are told by the scopes they come from. Where a scope has products of both kinds they cannot be
    told apart, and one float8 kernel there is enough.

    Args:
      jaxpr: the program as it was traced.
      kernels: as it was compiled.
      program: what it is, for the message.
    """
    float8, others = _product_paths(jaxpr)
    if not float8:
        raise AssertionError(
            f"{program} has no float8 product, though require='float8' was given. Give its policy a recipe "
            "('mixed_bfloat16, r=fp8_current'); jmp_policy.audit says why products stay in 16 bits."
        )
    products = [kernel for kernel in kernels if kernel.flops]
    in_float8 = {kernel.path for kernel in products if kernel.arithmetic in FEW_BITS}
    fell_back = [
        kernel
        for kernel in products
        if kernel.path in float8 and kernel.arithmetic not in FEW_BITS
        if kernel.path not in others or kernel.path not in in_float8
    ]
    if fell_back or not in_float8:
        found = dict.fromkeys(f"{kernel.place}: {kernel.operands}" for kernel in fell_back or products)
        raise AssertionError(
            f"The compiler gave up float8 in {program}: {joined(list(found))}. Cards from compute capability "
            "8.9 on (L4, H100, B200) multiply float8. With a scale per block one B200 alone does."
        )
