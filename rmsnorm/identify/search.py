"""identify: the fit of eps, then the candidates, then the judge, whose failures are the defects."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from rmsnorm.identify.asking import Probe, open_probe
from rmsnorm.identify.beside import solve_beside
from rmsnorm.identify.findings import Findings, NotRms
from rmsnorm.identify.form import kind_of, solve_form
from rmsnorm.identify.gradients import solve_gradients
from rmsnorm.identify.groups import grouped
from rmsnorm.identify.identity import Gate, Identity
from rmsnorm.identify.judged import judge
from rmsnorm.identify.layout import ROWS, Layout, parameters
from rmsnorm.identify.names import named
from rmsnorm.identify.rounding import solve_roundings
from rmsnorm.parity.first import ASKED, first_parameters
from rmsnorm.targets.open import WIDTH, open_target
from rmsnorm.targets.target import Target, TargetError, random_state_kept

TIME_LIMIT: Final = 60.0
_WIDTHS: Final = (128, 256, 512, 1024, 2048, 4096)  # that a kernel may be written for, and for no other one


@random_state_kept()
def identify(
    target: Any,
    *,
    framework: str | None = None,
    width: int | None = None,
    init: Mapping[str, Any] | None = None,
    gradients: bool = True,
    device: str = "cpu",
    time_limit: float = TIME_LIMIT,
    shape: Sequence[int] | None = None,
    axis: int | Sequence[int] = -1,
    call: str | None = None,
) -> Identity:
    """Find out which normalisation a callable computes, as a black box, with the evidence.

    Args:
        target: a function, a layer, its class, ``module:attribute``, ``file.py:attribute`` or an .onnx file, as
            open_target takes it.
        framework: as of open_target, for a function that does not show whose arrays it takes.
        width: size of the normalised axis; None for 64, or the only size that the target takes.
        init: arguments for its constructor, or options for a function.
        gradients: whether to ask for dx, dscale and dbias, too.
        device: cpu or cuda.
        time_limit: in seconds, checked between questions; only the command line can end a target that hangs.
        shape, axis, call: the shape of x, the axes of its parameters, and the order of its arguments, as of
            open_target.

    Returns:
        The identity. A target that raises, returns another shape or takes too long has kind ``none`` and a sentence
        among its defects.

    Raises:
        ValueError: there is no such target or framework, or ``init`` cannot build it.

    Example:
        >>> import numpy as np
        >>> def norm(x, weight):
        ...     return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
        >>> identity = identify(norm)
        >>> identity.kind, identity.variant.eps, identity.variant.eps_position
        ('rmsnorm', 1e-05, 'inside')
    """
    opened = open_target(
        target, framework=framework, width=width, init=init, device=device, shape=shape, axis=axis, call=call
    )
    return identify_opened(opened, width=width, gradients=gradients, time_limit=time_limit)


def identify_opened(
    target: Target,
    *,
    width: int | None = None,
    gradients: bool = True,
    time_limit: float = TIME_LIMIT,
    layout: Layout | None = None,
) -> Identity:
    """Identify a target that is open, with this layout of its rows where the caller knows it, and judges it himself."""
    start, findings = time.monotonic(), Findings()
    target.touched.clear()  # by calls that another caller made
    if target.notes:
        findings.add("assumed", "; ".join(target.notes), "needed to call it")
    identity = Identity(target.name, target.framework)
    try:
        with target.evaluating():
            probe = open_probe(target, width or target.width or WIDTH, start + time_limit, time_limit, findings, layout)
            identity = _found(probe, gradients=gradients, judged=layout is None)
    except NotRms as reason:
        findings.withdraw_defects()  # they rest on a form that is not the target's
        findings.add("kind", "none", str(reason))
    except TargetError as error:
        is_late = time.monotonic() > start + time_limit
        findings.defect(f"{error}{'' if findings.answers or is_late else _hint_of_width(target)}")
    seconds = time.monotonic() - start
    return replace(identity, findings=findings.answers, defects=findings.defects, seconds=seconds)


def _hint_of_width(target: Target) -> str:
    """What to name where a target takes rows of one width alone, as kernels do; empty where it takes no usual one."""
    for width in _WIDTHS if target.width is None else ():
        x = np.ones((4, width), "float32")
        with contextlib.suppress(TargetError):
            target.forward(x, **parameters(target, x, scale=np.ones, bias=np.ones))
            return f"; it takes rows of {width} elements, so name that width: --width {width}"
    return ""


def _found(probe: Probe, *, gradients: bool, judged: bool) -> Identity:
    """Search, and judge what was candidate.

    Raises:
        NotRms, TargetError: it is no norm that a candidate describes, or it does not answer.
    """
    findings = probe.findings
    _ask_twice(probe)
    probe, candidate = solve_form(grouped(probe))
    candidate, confirmed = solve_roundings(probe, candidate)
    gated = None
    if not any("no known way" in defect for defect in findings.defects):
        if gradients and not any("cut off" in defect for defect in findings.defects):  # whose gradient is 0 there
            solve_gradients(probe, candidate)
        candidate, gated = solve_beside(probe, candidate)
    if probe.target.is_new and ASKED in probe.accepts:
        rows = ROWS if probe.target.bridge.compiles else 4  # a shape that is compiled already
        wrong = first_parameters(probe.target, candidate.variant, probe.layout.shape(rows))
        findings.defect(*(comparison.detail for comparison in wrong))
    kind = kind_of(candidate)
    if judged and confirmed and kind == "rmsnorm" and not findings.defects:  # else what is wrong is said already
        judge(probe, gated or candidate, gradients=gradients)
    if touched := probe.target.touched:
        findings.defect(f"it writes to its arguments: {', '.join(sorted(touched))}")
    layout, of_gate = probe.layout, gated or candidate
    gate = None
    if of_gate.activation is not None:
        gate = Gate(of_gate.activation, of_gate.variant.gate_position, of_gate.vector)
    values = {finding.name: finding.value for finding in findings.answers}
    recognised = confirmed and kind == "rmsnorm" and not findings.defects
    return Identity(
        probe.target.name,
        probe.target.framework,
        kind=kind,
        variant=None if kind == "layernorm" else named(candidate.variant, values, probe.target.library),
        recognised=recognised,
        plain=recognised and candidate.is_plain and candidate.activation is None and not layout.group,
        gate=gate,
        last_axes=layout.last,
        axes=layout.axes,
        rank=len(layout.sizes),
        library=probe.target.library,
    )


def _ask_twice(probe: Probe) -> None:
    """Does the same x give the same y? Else nothing can be concluded from y."""
    arrays = probe.sent(probe.random(21, probe.wide))
    y = probe.target.forward(**arrays)
    kept = y.copy()
    probe.target.forward(**{**arrays, "x": -arrays["x"]})
    if y.tobytes() != kept.tobytes():
        probe.findings.defect("the next call writes to the memory of y: y of an earlier call changes")
    if probe.target.forward(**arrays).tobytes() != kept.tobytes():
        raise NotRms("two calls with the same x give different y: it is random, or it keeps something between calls")
