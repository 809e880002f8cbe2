"""The gains of two checkpoints, norm by norm: the same, one more, or something else."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from rmsnorm.identify.gains import Array, read_gains
from rmsnorm.specification import dtypes, errors

EXPECTED: Final = {"same": "same", "plus-one": "B = A + 1", "minus-one": "B = A - 1"}
_ADDED: Final = {0.0: "same", 1.0: "B = A + 1", -1.0: "B = A - 1", 2.0: "B = A + 2", -2.0: "B = A - 2"}
_NAMES: Final = 8  # of a sentence
_BLOCK: Final = re.compile(r"(?:^|[._/])(?:layers|blk|blocks|h|layer)[._/](\d+)[._/](.+)$")
_END: Final = re.compile(r"([._/](weight|scale|value|gamma)|_weight|/vars/0)$")
_DRAFT: Final = re.compile(r"mtp|nextn|draft|eagle|medusa", re.IGNORECASE)
_ROLES: Final[Mapping[str, str]] = {  # the last part of a name, in Hugging Face and MLX, GGUF, NeMo and Megatron
    **dict.fromkeys(("input_layernorm", "attn_norm", "attention_norm", "linear_qkv.layer_norm", "ln_1"), "attention"),
    **dict.fromkeys(("ffn_norm", "linear_fc1.layer_norm", "pre_mlp_layernorm", "pre_feedforward_layernorm", "ln_2"),
                    "feed-forward"),
    **dict.fromkeys(("post_attention_norm", "linear_proj.post_layernorm", "post_self_attn_layernorm"),
                    "after attention"),
    **dict.fromkeys(("post_feedforward_layernorm", "post_ffw_norm", "linear_fc2.post_layernorm", "post_mlp_layernorm"),
                    "after feed-forward"),
    **dict.fromkeys(("q_norm", "attn_q_norm", "q_layernorm", "query_norm"), "queries"),
    **dict.fromkeys(("k_norm", "attn_k_norm", "k_layernorm", "key_norm"), "keys"),
    **dict.fromkeys(("linear_attn.norm", "ssm_norm"), "linear attention"),
    **dict.fromkeys(("norm", "output_norm", "final_layernorm", "final_norm", "ln_f"), "last"),
}  # fmt: skip


@dataclass(frozen=True)
class NormPair:
    """One norm: its names in both files, how B is made of A, whether B has fewer bits, and the largest difference."""

    a: str
    b: str
    relation: str
    rounded: bool
    difference: float


@dataclass(frozen=True)
class GainPairs:
    """The norms of two checkpoints.

    Attributes:
        norms: those that both have.
        only_a, only_b: the names of the others.
        agrees: whether all have one relation, the one that was asked for if there was one, and none is left over.
        text: the same in sentences.
    """

    norms: tuple[NormPair, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    agrees: bool
    text: str

    @property
    def json(self) -> dict[str, Any]:
        return asdict(self)


def compare_gains(a: str | os.PathLike[str], b: str | os.PathLike[str], expect: str | None = None) -> GainPairs:
    """Compare the gains of two checkpoints, norm by norm: are those of B the same, or is 1 added to each?

    Norms are found by equal names, or by what Hugging Face, MLX, GGUF, NeMo and Megatron call the same norm of a block.
    Numbers are the same if they differ by no more than one rounding to the dtype of either file.

    Args:
        a, b: as of ``identify_checkpoint``.
        expect: same, plus-one or minus-one: what B must be; None for any one of them.

    Raises:
        FileNotFoundError, ValueError: as of ``identify_checkpoint``; or the files have no norm in common.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(f"{folder}/a.npz", **{"layers.0.input_layernorm.weight": np.zeros(8, np.float32)})
        ...     np.savez(f"{folder}/b.npz", **{"blk.0.attn_norm.weight": np.ones(8, np.float32)})
        ...     print(compare_gains(f"{folder}/a.npz", f"{folder}/b.npz").text)
        B = A + 1 in 1 of 1 norms
    """
    if expect is not None and expect not in EXPECTED:
        raise errors.not_a_choice("gains", "expect", expect, EXPECTED)
    (first, _), (second, _) = read_gains(a), read_gains(b)
    names = _matched(first, second)
    if not names:
        raise errors.InputValueError(
            f"gains: {a} and {b} have no norm in common, expected two forms of one model; their names are "
            f"{', '.join([*list(first)[:2], *list(second)[:2]])}"
        )
    norms = tuple(_related(name, other, first[name], second[other]) for name, other in names.items())
    only_a = tuple(name for name in first if name not in names)
    only_b = tuple(name for name in second if name not in names.values())
    counts = Counter(norm.relation for norm in norms)
    wanted = EXPECTED[expect] if expect else counts.most_common(1)[0][0]
    agrees = counts[wanted] == len(norms) and wanted in _ADDED.values() and not (only_a or only_b)
    return GainPairs(norms, only_a, only_b, agrees, "\n".join(_said(norms, only_a, only_b, wanted)))


def _matched(first: Mapping[str, Array], second: Mapping[str, Array]) -> dict[str, str]:
    """The norms that both have, by the names in each."""
    matched = {name: name for name in first if name in second}
    roles = [_roles(names) for names in (first, second)]
    others = {role: name for name, role in roles[1].items() if name not in matched}
    for name, role in roles[0].items():
        if name not in matched and role in others and first[name].shape == second[others[role]].shape:
            matched[name] = others.pop(role)
    return matched


def _roles(names: Mapping[str, Any]) -> dict[str, tuple[str, str, str]]:
    """Whether a norm is of a draft head, its block, and what it is in that block, by its name."""
    has_both = any("pre_feedforward_layernorm" in name for name in names)
    found = {}
    for name in names:
        block = _BLOCK.search(name)
        number, rest = block.groups() if block else ("", name)
        tail = _END.sub("", rest)
        role = next((role for end, role in _ROLES.items() if re.search(rf"(^|[./]){re.escape(end)}$", tail)), tail)
        if tail.endswith("post_attention_layernorm"):  # Gemma's are four in a block, LLaMA's two
            role = "after attention" if has_both else "feed-forward"
        found[name] = ("draft" if _DRAFT.search(name) else "", number, role)
    return found


def _related(name: str, other: str, a: Array, b: Array) -> NormPair:
    """How B is made of A: with one rounding to the dtype of each at most."""
    if a.shape != b.shape:
        return NormPair(name, other, f"shapes {a.shape} and {b.shape}", False, np.inf)
    first, second = a.astype(np.float64), b.astype(np.float64)
    units = [dtypes.unit_roundoff(array.dtype.name) for array in (a, b)]
    for added, relation in _ADDED.items():
        off = np.abs(second - (first + added))
        if np.all(off <= units[0] * np.abs(first) + units[1] * np.abs(second)):
            is_rounded = bool(off.any()) and bool({a.dtype.name, b.dtype.name} & {*dtypes.HALF})
            return NormPair(name, other, relation, is_rounded, float(off.max(initial=0.0)))
    apart = float(np.abs(second - first).max(initial=0.0))
    return NormPair(name, other, "another", False, apart)


def _said(norms: tuple[NormPair, ...], only_a: tuple[str, ...], only_b: tuple[str, ...], wanted: str) -> list[str]:
    held = [norm for norm in norms if norm.relation == wanted]
    others = [norm for norm in norms if norm.relation != wanted]
    lines = [f"{wanted} in {len(held)} of {len(norms)} norms"]
    if others:
        lines[0] += f": not {_listed([norm.b for norm in others])}"
        lines += [f"  {norm.b}: {norm.relation}{f', up to {norm.difference:.3g} apart' if norm.difference else ''}"
                  for norm in others[:_NAMES]]  # fmt: skip
    if rounded := [norm for norm in held if norm.rounded]:
        lines.append(f"{len(rounded)} of them are rounded to 16 bits in one of the files")
    lines += [f"only in A: {_listed(only_a)}"] * bool(only_a) + [f"only in B: {_listed(only_b)}"] * bool(only_b)
    return lines


def _listed(names: Any) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return f"{', '.join(names[:_NAMES])}{more}"
