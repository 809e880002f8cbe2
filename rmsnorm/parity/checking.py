"""Compares anybody's function or layer with the golden, on the cases of the kit that it can be called with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from rmsnorm.accuracy.signed import SignedErrors
from rmsnorm.identify import identify
from rmsnorm.identify.first import ASKED, first_parameters
from rmsnorm.numpy_impl.all_reduce import Order
from rmsnorm.numpy_impl.arithmetic import add
from rmsnorm.parity import asking, beyond
from rmsnorm.parity.all_reduce import check_all_reduce
from rmsnorm.parity.cases import Array, Data
from rmsnorm.parity.comparison import Comparison, Run, Skip, labelled, version_of
from rmsnorm.parity.declared import declared
from rmsnorm.parity.eps import of_eps
from rmsnorm.parity.fitting import asked, expect_in_groups, fitted, has_gradients, in_batches, missing, together
from rmsnorm.parity.judge import Expected, Outcome, biased, compare, failed, wrong_inverse_rms
from rmsnorm.parity.kernel import Kernel
from rmsnorm.parity.lines import skips
from rmsnorm.parity.quantised import check_quantised
from rmsnorm.parity.refusals import Refusals, facts_of, levels_of
from rmsnorm.parity.report import Report, sentences
from rmsnorm.parity.second import SECOND, of_second
from rmsnorm.specification import dtypes as formats
from rmsnorm.specification import errors
from rmsnorm.specification.quantisation import Quantisation
from rmsnorm.specification.variants import Preset, Variant, get_variant
from rmsnorm.targets import Target, TargetError, open_target
from rmsnorm.targets.calling import with_values
from rmsnorm.targets.limits import Limits, limits_of
from rmsnorm.targets.target import WrongResult, random_state_kept

_DTYPES: Final = ("float16", "bfloat16", "float32")
_GRADIENTS: Final = {"x": "dx", "scale": "dscale", "bias": "dbias", "residual": "dresidual", "gate": "dgate"}


@random_state_kept()
def check(
    function: Any,
    variant: Preset | Variant = "standard",
    *,
    framework: str | None = None,
    gradients: bool = True,
    dtypes: Sequence[str] | str | None = None,
    device: str = "cpu",
    extremes: bool = False,
    compiled: bool = False,
    group_size: int | None = None,
    init: Mapping[str, Any] | None = None,
    edges: bool = False,
    batch_invariant: bool = False,
    exhaustive: bool = False,
    large: bool = False,
    all_cases: bool = False,
    quantities: Sequence[str] | str | None = None,
    accept: Sequence[str] | Mapping[str, str] | str | None = None,
    xfails: str | Path | None = None,
    limits: Limits | Mapping[str, Any] | Literal["auto"] | None = None,
    on_progress: Callable[[Run], None] = lambda run: None,
    quantisation: str | Quantisation | None = None,
    reciprocal_slack: float = 0.0,
    all_reduce: Order | None = None,
    call: str | None = None,
) -> Report:
    """Compare a function or layer with the golden: values, and gradients by its framework's automatic differentiation.

    The cases are those of ``rmsnorm selftest --list`` that it can be called with, along the last axis, with the gain
    and the bias that it takes. Of a mask, a residual and a gate it is called with each that it takes, by the name of
    the argument, alone and together with the others, in every dtype; where no case has one of these, the check fails.
    If it must have a gate, every case has one, and the variant says what is done with it. Calls in which every pair of
    circumstances occurs (rows, widths, axes, dtypes, memory, values, options, gradients, modes, what was called before)
    follow. If it raises in some calls and answers others, the report names the limits that explain it.

    Args:
        function: of x, or of (x, weight), (x, weight, bias) and the like; a layer of PyTorch, Keras, Flax or Equinox;
            its class; ``module:attribute``; an .onnx file.
        variant: what it should be.
        framework: torch, tf, keras, jax, flax or numpy, for a function that does not show whose arrays it takes.
        gradients: whether dx, dscale, dbias, dresidual and dgate count, where the framework differentiates.
        dtypes: of x; None for float16, bfloat16 and float32, or the one that an .onnx file declares.
        device: cpu or cuda.
        extremes: whether to include rows whose squares leave the range of float32, masks with NaN under them, and
            masks of one element for each row: few implementations pass these.
        group_size: how many elements of the last axis are normalised together, as in Mamba-2; None for all of them.
        compiled: whether the function, as the compiler of its framework makes it, must agree as well.
        init: arguments for its constructor, or options for a function.
        edges: whether x of no rows, no columns, one element or very long rows, and one mask for all rows must be taken.
            Else a target may raise an exception, and the report says so; a wrong answer counts always.
        batch_invariant: whether a row must have the same bits, in y and dx, alone and in calls of 2 to 4,096 rows, at
            every place, and dscale the same bits in equal calls.
        exhaustive: whether y and dx of rows in which one element is each of the 65,536 numbers of float16, and of
            bfloat16, count; those whose cubes leave float32 only with ``extremes``.
        all_cases: whether every case counts in every dtype, with gradients, also in JAX, which compiles each operation
            for each shape, in a minute or more. Else, unless ``edges`` or ``extremes`` asks for more, JAX has the cases
            in which the kit's mutants show, most of them in one dtype, and gradients in a few.
        quantities: those that count, such as ("y", "dx"); None for all.
        accept: what may differ, and why, such as "dscale: 16-bit sums"; all else is judged. That reason is confirmed by
            ``identify``, and dscale must still agree in float32; another reason is taken as it is.
        limits: of what x it takes: rank, multiple_of, widths, contiguous, same_dtype, max_rows,
            max_width. Cases get other shapes
            to fit. An exception is a refusal, and the check fails where no limit explains it; "auto" takes those that
            explain what was refused.
        xfails: a file with the known differences, a line for each as a report has it, such as ``'many rows' bf16
            dscale: 16-bit sums``, with ``*`` for any. A line whose comparisons agree is a failure.
        on_progress: called with the run after each case.
        large: whether y of more than 2^31 elements counts, in the first dtype: 16 GB or more, and minutes.
        quantisation: for a function that quantises y: a preset of ``Quantisation``, or another one. It is called as
            f(x, scale, eps=..., residual=..., static_scale=..., global_scale=...), with the options that it takes and
            the quantisation needs, and returns q, the scales unless they are static, g if it computes it, and h if it
            takes a residual. uint8 is codes, one in a byte, or for E2M1 two, the first in the low half. The report is
            a QuantisedReport. Of the other options it takes ``framework``, ``dtypes``, ``device`` and ``init``.
        reciprocal_slack: the relative error of the reciprocal of a scale, where a kernel approximates it.
        all_reduce: for a function that adds the parts of several ranks before it normalises: the order of roundings, as
            for ``numpy_impl.all_reduced``. It is called as f(parts, scale, eps=..., residual=...) with lists of 2, 3
            and 8 arrays, and with and without a residual if it takes one. It returns y, or y and h, whose bits count.
            If the roundings have another order, the report names it. It takes ``variant``, too, and the other options
            that ``quantisation`` takes.
        call: the arguments of a function in their order, such as "out, x, weight, eps", as of ``open_target``.

    Raises:
        ValueError: there is no such function, variant or dtype, its width is not a multiple of ``group_size``, or no
            case can be compared.

    Example:
        >>> import numpy as np
        >>> def norm(x, weight):
        ...     wide = x.astype(np.float64)
        ...     y = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * weight.astype(np.float64)
        ...     return y.astype(x.dtype)
        >>> check(norm, dtypes="float32").passed
        True
        >>> print(check(norm, "gemma", dtypes="float32").text.splitlines()[0].split(":")[1].strip())
        norm is not gemma
    """
    chosen, says = get_variant("check", variant), declared("check", quantities, accept, xfails)
    gradients = gradients and says.has_gradients
    named = _DTYPES if dtypes is None else dtypes if isinstance(dtypes, (list, tuple)) else (dtypes,)
    named = tuple(errors.dtype_named("check", "dtype", entry) for entry in named or (None,))
    how = function, framework, device, init or {}
    unlike = None if chosen.name == "standard" or all_reduce else variant
    _refuse_unused(
        quantisation, all_reduce, variant=unlike, gradients=gradients, extremes=extremes, compiled=compiled,
        group_size=group_size, edges=edges, batch_invariant=batch_invariant, exhaustive=exhaustive, large=large,
        all_cases=all_cases, quantities=quantities, accept=accept, xfails=xfails, limits=limits, call=call,
        reciprocal_slack=reciprocal_slack,
    )  # fmt: skip
    if quantisation is not None:
        return check_quantised(Kernel(*how), quantisation, named, reciprocal_slack)
    if all_reduce is not None:
        return check_all_reduce(Kernel(*how, of_parts=True), chosen, all_reduce, named)
    declared_limits = limits_of("check", None if limits == "auto" else limits)
    opened = open_target(function, framework=framework, init=init, device=device, call=call, op="check")
    target = in_batches(with_values(opened, eps=chosen.eps, offset=chosen.scale_offset))
    target = replace(target, limits=declared_limits, rank=target.rank or declared_limits.rank)
    refusals = Refusals()
    types = (target.dtypes["x"],) if dtypes is None and "x" in target.dtypes else named
    if group_size is not None and (group_size < 1 or (target.resized is None and (target.width or 0) % group_size)):
        want = "a positive divisor of the width" if group_size > 0 else "a positive number"
        raise errors.out_of_domain("check", "group_size", group_size, want, "pass the size that the norm was made with")
    run = Run(target.framework, version=version_of(target.framework), device=device)
    began, elements, signed = time.monotonic(), 0, SignedErrors()
    if gradients and not target.differentiable:
        without = f"{target.framework} has no automatic differentiation"
        run.skipped.append(Skip("gradients", "", without if target.automatic else "it writes its results to arguments"))
    if target.backward:
        run.skipped.append(Skip("y", "", "it is a backward pass alone"))
    quick = target.bridge.compiles and not (all_cases or edges or extremes)
    if quick and gradients and target.differentiable:
        run.skipped.append(Skip("gradients of most cases", "", "only with all_cases=True, or --all"))
    cases = fitted(target, chosen, types, run.skipped, extremes=extremes, group_size=group_size, quick=quick)
    for called, data in cases:
        labels = (chosen.name, data.x.dtype.name, data.case.name)
        differentiated = gradients and called.differentiable and (not quick or has_gradients(data.case.name))
        called.noticed.forget()
        comparisons, refused = _comparisons(
            called, data, group_size, signed, gradients=differentiated, compiled=compiled
        )
        if refused and data.case.edge and not (edges or called.returned):
            detail = next(comparison.detail for comparison in comparisons if comparison.quantity in refused)
            reason = f"x of shape {data.x.shape} is refused: {detail.partition(': ')[2] or detail}"
            run.skipped.append(Skip(data.case.name, data.x.dtype.name, reason, edge=True))
            comparisons = [comparison for comparison in comparisons if comparison.quantity not in refused]
            if not comparisons:
                continue
        if "y" in refused and not (called.returned or data.case.edge):
            refusals.refused(data.case.name, data.x.dtype.name, facts_of(data), levels_of(data), comparisons)
            continue
        refusals.answered(facts_of(data), levels_of(data))
        run.cases, elements = run.cases + 1, elements + data.x.size
        if called.returned:
            came, wanted = " and ".join(sorted(called.returned)), called.bridge.array
            want = f"{wanted.__module__}.{wanted.__qualname__}"
            sentence = f"it returns {came}, expected {want}; return y, or y and x + residual"
            run.records = labelled([failed("y", sentence)], *labels)
            break
        run.records += labelled(comparisons, *labels)
        on_progress(run)
    else:
        differentiated = gradients and target.differentiable
        for circumstance, question, answer in asking.in_circumstances(
            target, chosen, types, gradients=differentiated, group_size=group_size,
            quick=target.bridge.compiles, strength=3 if all_cases and not target.bridge.compiles else 2,
        ):  # fmt: skip
            dtype, name = circumstance["x"], circumstance.name
            if isinstance(answer, str):
                refusals.refused(name, dtype, question.facts, circumstance.levels, [failed("y", answer)])
                continue
            refusals.answered(question.facts, circumstance.levels)
            run.cases, elements = run.cases + 1, elements + question.order.size
            run.records += labelled(answer, chosen.name, dtype, name)
            on_progress(run)
        refusals.conclude(run, chosen.name, accepted=limits == "auto")
        more = beyond.Beyond(target, chosen, group_size, run.skipped, differentiated, compiled)
        answers = [(beyond.BATCHES, types[0], more.batches())] if batch_invariant else []
        for dtype in dict.fromkeys(types) if exhaustive else ():
            if dtype in formats.HALF:
                answers.append((beyond.EVERY.name, dtype, more.every_number(dtype, extremes=extremes)))
            else:
                run.skipped.append(Skip(beyond.EVERY.name, dtype, "it is for x of 16 bits"))
        if large:
            answers.append((beyond.LARGE.name, types[0], more.elements(types[0])))
        for name, dtype, comparisons in answers:
            run.records += labelled(comparisons, chosen.name, dtype, name)
        taken, pairs = together(target.arguments), asked(target, chosen, types, extremes=extremes)
        answers_to = [pair for pair in pairs if pair not in refusals.cases or pair[0] in taken]
        for name, dtype, quantity, sentence in missing(target, run, answers_to):
            run.records += labelled([failed(quantity, sentence)], chosen.name, dtype, name) if elements else []
    if target.is_new and elements and all(comparison.passed for comparison in run.records):
        run.records += labelled(_of_new(target, chosen), chosen.name, ASKED, "first parameters")
    if elements and not target.backward:
        run.records += labelled(of_eps(target, chosen, types, group_size), chosen.name, types[0], "eps")
    if differentiated and elements and "float32" in types and _all_held(run, "y", "dx"):
        run.records += labelled(of_second(target, chosen, group_size, run.skipped), chosen.name, "float32", SECOND)
    biased(run, signed, chosen)
    says.apply(run, chosen.name, lambda: identify(target).defects)
    run.seconds = time.monotonic() - began
    run.conclude()
    if not elements and not run.failures:
        raise errors.nothing_compared("check", target.name, dict.fromkeys(reason for *_, reason in skips(run)))
    if run.failures:
        run.message = "; ".join(sentences(run, chosen))
    if run.failures and not run.message:
        try:
            run.identity = identify(target)
        except Exception as error:  # a failure of identify must not hide the differences
            run.message = f"identify failed: {type(error).__name__}: {error}"
        else:
            run.message = "; ".join(sentences(run, chosen))
    return Report(target.name, chosen, run, tuple(together(target.arguments)))


def _refuse_unused(quantisation: Any, all_reduce: Any, **others: Any) -> None:
    """Raises for an option that a check of a quantised norm, or of one over ranks, does not use."""
    slack = others.pop("reciprocal_slack")
    if slack and quantisation is None:
        raise errors.out_of_domain("check", "reciprocal_slack", slack, "it only beside quantisation", "drop it")
    named = {"all_reduce": all_reduce, "quantisation": quantisation}
    kinds = [name for name, value in named.items() if value]
    if len(kinds) > 1:
        raise errors.out_of_domain("check", *_of(named, kinds[1:]), f"none beside {kinds[0]}", "call check for each")
    unused = [name for name, value in others.items() if bool(value) != (name == "gradients")] if kinds else []
    if unused:
        raise errors.out_of_domain(
            "check", *_of(others, unused), f"none beside {kinds[0]}", "drop it: it has no effect"
        )


def _of(options: Mapping[str, Any], names: Sequence[str]) -> tuple[str, Any]:
    return names[0], options[names[0]]


def _all_held(run: Run, *quantities: str) -> bool:
    return all(record.passed for record in run.records if record.quantity in quantities)


def _of_new(target: Target, variant: Variant) -> list[Comparison]:
    """What is wrong with y of a layer that has the parameters that it was made with; nothing where it takes no rows."""
    x = (8 * np.random.default_rng(23).normal(size=(4, target.width or 64))).astype(ASKED)
    own = {name: value for name, value in (("scale", 1 - variant.scale_offset), ("bias", 0.0))
           if name in target.arguments}  # fmt: skip
    gate = {"gate": np.full_like(x, 2.0)} if "gate" in target.arguments else {}
    if not own:
        return []
    try:
        one = {name: np.full(target.shape_of(name, x.shape), value, ASKED) for name, value in own.items()}
        with target.evaluating():
            y = target.forward(x, **gate), target.forward(-x, **gate), target.forward(x, **one, **gate)
    except TargetError:
        return []
    there, back, unit = (array.astype(np.float64) for array in y)
    _, sentences = first_parameters(there, back, unit, variant.scale_offset)
    return [failed("y", sentence) for sentence in sentences]


def _comparisons(
    target: Target, data: Data, group_size: int | None, signed: SignedErrors, *, gradients: bool, compiled: bool
) -> tuple[list[Comparison], set[str]]:
    """A comparison of each quantity, and those quantities for which the target raised and gave no wrong answer.

    It is that on the first way to call the target in which it differs, else raises, else on the first way.
    """
    counted = ("y",) * (not target.backward) + tuple(_GRADIENTS.values()) * gradients
    expected = expect_in_groups(data, counted, group_size)
    comparisons: dict[str, Comparison] = {}
    refused: set[str] = set()
    first: dict[str, Array] = {}
    for way, called, view, scope, differentiated in _ways(target, data, compiled=compiled):
        with scope:
            results, wrong, refusals = _results(called, view, gradients=gradients and differentiated)
        judged = [failed(name, sentence) for name, sentence in (refusals | wrong).items()]
        names = results if refusals or wrong else expected if gradients and differentiated else ("y",)
        same = {name for name, y in results.items() if name in first and _same(first[name], y)}
        wanted = {name: want for name, want in expected.items() if name in names and name not in same}
        for comparison in [*judged, *compare(Outcome({name: [y] for name, y in results.items()}), wanted)]:
            name, before = comparison.quantity, comparisons.get(comparison.quantity)
            answers = name not in refusals or name in results
            if before is None or (not comparison.passed and (before.passed or (name in refused and answers))):
                detail = f"{way}: {comparison.detail}" if way and comparison.detail else comparison.detail
                comparisons[name] = replace(comparison, detail=detail)
                refused = refused - {name} if answers else refused | {name}
        if not way and data.case.data == "rows" and not data.case.is_large:  # else rows err alike
            for name, got, want in _signed(target, data, results, expected):
                signed.add(name, got, want)
        first = first or results
    if target.touched:
        touched = ", ".join(sorted(target.touched))
        comparisons, refused = {name: failed(name, f"inputs written to: {touched}") for name in comparisons}, set()
    return list(comparisons.values()), refused


def _signed(
    target: Target, data: Data, results: Mapping[str, Array], expected: Mapping[str, Expected]
) -> Iterator[tuple[str, Array, Array]]:
    """What a call returned, and what is expected: y, and the sum with a residual."""
    if "y" in results:
        yield "y", results["y"], expected["y"].value
    if target.second is not None:
        yield "x + residual", target.second, add(data.x, data.residual, data.call.sum)


def _same(one: Array, other: Array) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and one.tobytes() == other.tobytes()


def _ways(
    target: Target, data: Data, *, compiled: bool
) -> Iterator[tuple[str, Target, Data, contextlib.AbstractContextManager[Any], bool]]:
    """The ways to call a target that must not change what it computes: name, target, data, context, differentiated.

    The first one has no name. All other circumstances of a call are those of ``circumstances.py``.
    """
    same = contextlib.nullcontext()
    yield "", target, data, same, True
    if compiled:
        yield "compiled", target.compiled, data, same, True


def _results(target: Target, data: Data, *, gradients: bool) -> tuple[dict[str, Array], dict[str, str], dict[str, str]]:
    """The quantities by their names, a sentence for what was returned instead, and one for what raised."""
    primals = (data.x, data.scale, data.bias)
    try:
        results = {"y": target.forward(*primals, **data.arrays)}
        results = {} if target.backward else results
    except TargetError as error:
        sentence = {"y": str(error)}
        return ({}, sentence, {}) if isinstance(error, WrongResult) else ({}, {}, sentence)
    wrong = {} if target.second is None else _wrong_sum(target.second, data)
    wrong |= wrong_inverse_rms(target.noticed.inverse_rms, data)
    if not gradients:
        return results, wrong, {}
    try:
        inputs = {**dict(zip(("x", "scale", "bias"), primals, strict=True)), **data.arrays}
        derivatives = target.all_gradients(data.dy, **{name: a for name, a in inputs.items() if a is not None})
    except TargetError as error:
        return results, wrong, {"dx": str(error)}
    results |= {d: g for name, d in _GRADIENTS.items() if (g := derivatives.get(name)) is not None}
    return results, wrong, {}


def _wrong_sum(got: Array, data: Data) -> dict[str, str]:
    """A sentence on the second result where that is not x + residual, rounded once to its dtype."""
    want = add(data.x, data.residual, data.call.sum)
    if got.shape == want.shape and got.dtype == want.dtype and np.array_equal(got, want, equal_nan=True):
        return {}
    came, wanted = (errors.describe(a.shape, a.dtype.name) for a in (got, want))
    return {"y": f"the second result is another {came}, expected x + residual, {wanted}"}
