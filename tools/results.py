"""Judges norms of other packages, and prints their rows for the table of docs/results.md.

python tools/results.py torch.nn:RMSNorm transformers.models.llama.modeling_llama:LlamaRMSNorm
"""

from __future__ import annotations

import sys
from collections import Counter
from datetime import date
from importlib.metadata import packages_distributions, version

from rmsnorm.identify import identify
from rmsnorm.parity import check


def row(target: str) -> str:
    """What identify says of a norm, and how check of that ends."""
    package = packages_distributions()[target.partition(":")[0].partition(".")[0]][0]
    identity = identify(target, time_limit=300)
    said = identity.headline.removeprefix(f"{target} is ").replace(f"{target} ", "it ").removeprefix("RMSNorm: ")
    eps, verdict = identity["eps"], "not asked: no variant describes it"
    if identity.kind == "rmsnorm" and identity.variant is not None and identity.last_axes:
        variant, groups = identity.variant.replace(**identity.of_gate), identity["group_size"]
        run = check(target, variant, dtypes=("float32", "bfloat16"), group_size=groups).run
        parts = Counter(f"{record.quantity} in {record.dtype}" for record in run.failures)
        what = ", ".join(f"{number} of {part}" for part, number in parts.most_common())
        count = f"{len(run.records)} comparisons"
        held, differs = f"agrees in {count}", f"{run.status}: {len(run.failures)} of {count} ({what})"
        verdict = held if run.status == "held" else differs
    computes = "; ".join([said, *identity.other_defects])
    name = f"`{target.rpartition(':')[2]}`"
    cells = (f"{package} {version(package)}, {date.today()}", name, computes, eps, verdict)
    return " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in cells)


if __name__ == "__main__":
    for target in sys.argv[1:]:
        print(f"| {row(target)} |", flush=True)
