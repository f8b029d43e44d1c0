"""How many heads are open, by kind and layer."""

from __future__ import annotations

from gates.head_gates import HeadGates
from gates.sites import KINDS


def open_heads_by_layer(gates: HeadGates) -> dict[str, list[int]]:
    """Heads whose gate is above 0 in evaluation mode: for each kind, their number in each of its layers.

    Args:
        gates: of a model.
    """
    parts = gates.to_heads(gates.open()).split([site.heads for site in gates.sites])
    counts = [(site.kind, int(part.sum())) for site, part in zip(gates.sites, parts, strict=True)]
    return {kind: [n for own, n in counts if own == kind] for kind in KINDS if kind in dict(counts)}


def open_heads_as_text(gates: HeadGates) -> str:
    """How many heads are open, in total and by kind and layer, in lines.

    Args:
        gates: of a model.
    """
    table = open_heads_by_layer(gates)
    count, total = sum(map(sum, table.values())), gates.heads
    lines = [f"open heads: {count} of {total} ({count / total:.1%})"]
    for kind, counts in table.items():
        of = sum(site.heads for site in gates.sites if site.kind == kind)
        lines.append(f"  {kind}: {sum(counts)} of {of}, by layer {' '.join(map(str, counts))}")
    return "\n".join(lines)
