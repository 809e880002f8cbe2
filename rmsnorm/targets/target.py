"""A target: a normalisation that somebody wrote, called with NumPy arrays in any framework."""

from __future__ import annotations

import contextlib
import random
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from rmsnorm.specification import dtypes, errors
from rmsnorm.targets.arguments import IN_PLACE
from rmsnorm.targets.bridges import Array, Bridge, Function
from rmsnorm.targets.limits import Limits
from rmsnorm.targets.results import Results, described, results

Shape = tuple[int, ...]
# what libraries say where there is no GPU, or of arrays that are not on one; other errors may have the same words
_NEEDS_GPU: Final = re.compile(
    r"not compiled with (cuda|xpu)|no (cuda |nvidia |hip )?(gpus?|driver)\b|active drivers|\bis_cuda\b"
    r"|unknown backend:? '?(gpu|cuda|rocm)|cannot be accessed from triton"
    r"|(cuda|gpu|driver) (is )?(not (available|found)|unavailable|insufficient)"
    r"|(needs?|requires?|must be( on)?|expected|works|supports|runs)( only)?( on)? (an? |the )?(cuda|gpu|nvidia)\b",
    re.IGNORECASE,
)
WIDTH: Final = 64  # of x, where nothing says another one

TO_RETURN: Final = f"return y, or say where it is written, as by --call {IN_PLACE!r}"


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Leaves the generators of Python, NumPy and PyTorch, from which a layer may draw, as they were."""
    torch, states = sys.modules.get("torch"), (random.getstate(), np.random.get_state())
    with contextlib.ExitStack() as stack:
        if torch is not None:
            count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
            stack.enter_context(torch.random.fork_rng(devices=range(count)))
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


class NoTarget(errors.InputValueError):
    """There is no such target: the name is wrong, the arguments cannot build it, or it is a whole ``model``."""

    def __init__(self, message: str, model: Any = None) -> None:
        super().__init__(message)
        self.model = model


class TargetError(Exception):
    """A call of the target failed: the message is one sentence that says what happened."""


class WrongResult(TargetError):
    """The target returned something that is no y for its x. That is an answer, and not a refusal of x."""


@dataclass
class Noticed:
    """What calls of a target showed beside y, since the last ``forget``.

    Attributes:
        touched: the arguments whose arrays it wrote to; dy is the gradient of y.
        returned: what it returned that is no array of the library.
    """

    touched: set[str] = field(default_factory=set)
    returned: set[str] = field(default_factory=set)

    def forget(self) -> None:
        """Begin anew, so that what other calls did is not said of the next ones."""
        self.touched.clear()
        self.returned.clear()


@dataclass
class Target:
    """A function of x and of some other arguments, with a bridge to the library that computes it.

    Attributes:
        name, framework, library: as in reports; the library is the package that its class or function is of.
        function: takes the library's arrays by the name of the argument: x, and some of ``arguments``.
        arguments: what the function takes beside x: some of scale, bias, factor, gate, gate_vector, mask and residual.
        optional, required: those that it need not get; and of residual and mask those that it gets in every call, a
            residual of zeros and a mask that counts all where nothing else is asked.
        width, rank, sizes, dtypes: what it takes alone: a size of the normalised axis, a number of axes, a size of each
            axis (None for any), a dtype of each argument by its name.
        named_width: the width that its user named, where it is made for others, too.
        limits: of what x it takes, as its user declared them.
        x_shape: the shape of x to ask with, whose first size counts examples unless it is normalised; None to try some.
        shape_of: shape of an argument (scale, bias, factor or gate_vector) for a shape of x.
        names: a layer's own name of each parameter.
        is_new: whether it was made of its class alone, so that its parameters are the first ones.
        resized: makes the same target for another width, None where that is impossible.
        asks: whether it requires eps, and offset, the number that is added to the gain; empty where these are no
            arguments of it.
        remade: makes the same target that is called with other values of these; ``calling.with_values`` uses it.
        training: for a layer: the context in which it trains (True) or not; None where that is all the same.
        mode: one of ``bridge.modes``, in which it is called; empty for none.
        automatic: whether automatic differentiation goes through it: not where it writes its results to its arguments.
        probe: for a layer of PyTorch: what is called in its place, and what calls may change.
        notes: assumptions that were needed to open it, as sentences.
        noticed: what its calls showed, shared by all that are made of it, as they are the same function.
    """

    name: str
    framework: str
    bridge: Bridge
    function: Function
    arguments: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    width: int | None = None
    rank: int | None = None
    sizes: tuple[int | None, ...] = ()
    dtypes: Mapping[str, str] = field(default_factory=dict)
    named_width: int | None = None
    limits: Limits = field(default_factory=Limits)
    x_shape: Shape | None = None
    shape_of: Callable[[str, Shape], Shape] = lambda argument, shape: shape[-1:]
    names: Mapping[str, str] = field(default_factory=dict)
    is_new: bool = False
    resized: Callable[[int], Target] | None = None
    asks: Mapping[str, bool] = field(default_factory=dict)
    remade: Callable[[Mapping[str, float | None]], Target] | None = None
    training: Callable[[bool], contextlib.AbstractContextManager[Any]] | None = None
    mode: str = ""
    automatic: bool = True
    probe: Any = None
    notes: tuple[str, ...] = ()
    library: str = ""
    noticed: Noticed = field(default_factory=Noticed)

    @property
    def touched(self) -> set[str]:
        return self.noticed.touched

    @property
    def returned(self) -> set[str]:
        return self.noticed.returned

    def in_mode(self, trains: bool) -> contextlib.AbstractContextManager[Any]:
        """The context in which it trains or not, where that makes a difference."""
        return self.training(trains) if self.training else contextlib.nullcontext()

    def evaluating(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which it does not train."""
        return self.in_mode(False)

    @property
    def compiled(self) -> Target:
        """The same, as the compiler of its library makes it."""
        resized = self.resized
        return replace(
            self,
            function=self.bridge.compiled(self.function),
            resized=None if resized is None else lambda width: resized(width).compiled,
        )

    @property
    def differentiable(self) -> bool:
        return self.bridge.differentiable and self.automatic

    def forward(self, x: Array, scale: Array | None = None, bias: Array | None = None, **others: Array | None) -> Array:
        """y for NumPy arrays in any of the four dtypes; a parameter that is None keeps the target's own value.

        Raises:
            TargetError: the target raised.
            WrongResult: it did not return a floating-point array of the shape of x.
        """
        every = {"x": x, "scale": scale, "bias": bias, **others}
        return self.called({name: array for name, array in every.items() if array is not None}).y

    def all_gradients(self, dy: Array, **arrays: Array) -> Mapping[str, Array | None]:
        """The gradient for each of the arrays, by its name, by automatic differentiation; None where there is none.

        Raises:
            TargetError: the target, or its differentiation, raised.
        """
        leaves = [name for name, array in self._completed(arrays).items() if array.dtype.name in dtypes.FLOATS]
        return self.called(arrays, leaves).gradients(dy)

    def called(
        self, arrays: Mapping[str, Array], leaves: Collection[str] = (), sent: Mapping[str, Any] | None = None
    ) -> Called:
        """A call whose results are fetched, and whose gradients for ``leaves`` are asked for, later and often.

        ``sent``: the library's arrays of another call with the same numbers, which are passed once more.

        Raises:
            TargetError: the target raised.
        """
        complete = self._completed(arrays)

        def run() -> Called:
            own = sent or {argument: self.bridge.send(array) for argument, array in complete.items()}
            result, back = self.bridge.linear(self.function, own, leaves) if leaves else (self.function(own), None)
            self._look(own, complete)
            return Called(self, complete, own, result, back)

        called: Called = self._guarded(run, complete)
        return called

    def _look(self, sent: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """Notice which of the library's arrays a call wrote to."""
        for argument, array in arrays.items():
            if not np.array_equal(_bits(self.bridge.fetch(sent[argument])), _bits(array)):
                self.touched.add(argument)

    def _completed(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        x = arrays["x"]
        neutral = {"residual": lambda: np.zeros_like(x), "mask": lambda: np.ones(x.shape, bool)}
        return {**arrays, **{name: neutral[name]() for name in self.required - arrays.keys()}}

    def _fetched(self, result: Any, arrays: Mapping[str, Array]) -> Array:
        """y in NumPy, of an array of the library or of what its reader takes for one."""
        y = result[0] if isinstance(result, (tuple, list)) else result  # (y, x + residual), (y, 1 / rho)
        try:
            if y is None or isinstance(y, (tuple, list, dict)):
                raise TypeError("no array")
            return self.bridge.fetch(y)
        except Exception as error:
            if isinstance(y, self.bridge.array):
                raise
            wanted, x = self.bridge.array, arrays["x"]
            what = described(result) + ("" if y is result else f" whose first entry is {described(y)}")
            raise WrongResult(
                f"{self.name} returned {what} for x {errors.describe(x.shape, x.dtype.name)}"
                f", expected {wanted.__module__}.{wanted.__qualname__}; {TO_RETURN if result is None else 'return y'}"
            ) from error

    def _guarded(self, run: Callable[[], Any], arrays: Mapping[str, Array]) -> Any:
        """The result of ``run`` in the contexts of a call."""
        wide = any(array.dtype == np.float64 for array in arrays.values())
        mode = self.bridge.modes.get(self.mode, contextlib.nullcontext)
        try:
            with self.bridge.scope(wide), mode(), np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a warning of the target is not a finding
                return run()
        except TargetError:
            raise
        except (Exception, SystemExit) as error:  # the target may raise anything, and the report must say it
            raise TargetError(self._sentence(error, arrays)) from error

    def _sentence(self, error: BaseException, arrays: Mapping[str, Array]) -> str:
        lines = str(error).strip().splitlines() or ["without a message"]
        what = f"{type(error).__name__}: {errors.printable(lines[0][:200])}"
        if _NEEDS_GPU.search(str(error)):
            return (
                f"{self.name} needs a GPU, expected one that runs here ({what}); pass device='cuda' where there is one"
            )
        described = ", ".join(f"{argument} {errors.describe(a.shape, a.dtype.name)}" for argument, a in arrays.items())
        return f"{self.name} raised on {described}: {what}"


@dataclass(frozen=True)
class Called:
    """One call of a target: its results, fetched when they are read, and its gradients."""

    target: Target
    arrays: Mapping[str, Array]
    sent: Mapping[str, Any]
    result: Any
    back: Callable[[Sequence[Any]], Mapping[str, Any]] | None

    @property
    def parts(self) -> Results:
        """y and what came with it, in the library's arrays."""
        parts = results(self.result, self.sent, self.target.bridge.array)
        if parts.unknown:
            self.target.returned.add(parts.unknown)
        return parts

    @property
    def y(self) -> Array:
        """y as it is now.

        Raises:
            WrongResult: it is no floating-point array of the shape of x.
        """
        target, x = self.target, self.arrays["x"]
        self.parts  # noqa: B018  (notices what is unknown)
        y: Array = target._guarded(lambda: target._fetched(self.result, self.arrays), self.arrays)
        is_float = y.dtype.name in dtypes.FLOATS
        if not is_float or y.shape != x.shape:
            came, of_x = (errors.describe(a.shape, a.dtype.name) for a in (y, x))
            wanted = "the shape of x" if is_float else f"one of {', '.join(dtypes.FLOATS)}"
            raise WrongResult(f"{target.name} returned {came} for x {of_x}, expected {wanted}")
        return y

    @property
    def sum(self) -> Array | None:
        """x + residual as it came back, None where it did not."""
        return self._fetched(self.parts.total)

    @property
    def inverse_rms(self) -> Array | None:
        """1 / rho as it came back, None where it did not."""
        return self._fetched(self.parts.inverse_rms)

    def _fetched(self, tensor: Any) -> Array | None:
        if tensor is None:
            return None
        fetch = self.target.bridge.fetch
        fetched: Array = self.target._guarded(lambda: fetch(tensor), self.arrays)
        return fetched

    def gradients(self, dy: Array | None, dh: Array | None = None) -> Mapping[str, Array | None]:
        """The gradient for each leaf, None where there is none: of y, of x + residual, or of both.

        Raises:
            TargetError: the differentiation raised.
        """
        target = self.target

        def run() -> Mapping[str, Array | None]:
            cotangents = {name: array for name, array in (("dy", dy), ("dh", dh)) if array is not None}
            sent = {name: target.bridge.send(array) for name, array in cotangents.items()}
            gradients = self.back([sent.get("dy"), sent.get("dh")]) if self.back else {}
            target._look({**self.sent, **sent}, {**self.arrays, **cotangents})
            return {name: None if g is None else target.bridge.fetch(g) for name, g in gradients.items()}

        gradients: Mapping[str, Array | None] = target._guarded(run, self.arrays)
        return gradients


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).view(np.uint8)
