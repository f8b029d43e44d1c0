"""What a report says of roles: which heads have them, and which of them survive."""

from __future__ import annotations

import numpy as np
from scipy import stats

from gates.roles.roles import RULES
from training.report.contents import Contents
from training.report.picture import Picture
from training.report.role_plots import role_map, survivors
from training.report.role_table import NONE, role_counts, roles_of_gates
from training.stats.numbers import counted, listed
from training.stats.odds import cross_table, pooled_odds


def pictures_of_roles(contents: Contents) -> list[Picture]:
    """The map of all heads with their roles first, then the roles of the heads that methods keep.

    Raises:
        GateError: if the roles are those of another model.
    """
    table = contents.roles
    if table is None:
        return []
    shown = [rule.name for rule in RULES if _measured(contents, rule.name)]
    alt = f"Map of {len(table)} heads, layers (rows) by heads (columns), in a colour for each role; several divide a head."
    found = [Picture("roles", "roles", role_map(table, shown), _map_caption(contents, shown), alt, wide=True)]
    if contents.masks:
        found.append(_survivors(contents))
    return found


def _measured(contents: Contents, role: str) -> bool:
    table = contents.roles
    assert table is not None
    return bool(table[f"{role}_has"].any() or (f"{role}_strength" in table and table[f"{role}_strength"].notna().any()))


def _map_caption(contents: Contents, shown: list[str]) -> str:
    table = contents.roles
    assert table is not None
    total, special = len(table), int(table["specialised"].sum())
    low, high = stats.binomtest(special, total).proportion_ci(method="exact")
    roles = [f"{int(table[f'{name}_has'].sum())} {name}" for name in shown]
    several = int((table[[f"{name}_has" for name in shown]].sum(axis=1) > 1).sum()) if shown else 0
    none = int((table["roles"] == NONE).sum())
    return (
        f"What each head does: {special} of {total} heads ({special / total:.0%}, 95 % interval {low:.0%} to {high:.0%}) are "
        f"specialised, {none} have no role at all and {several} have more than one, side by side in their square. "
        f"{listed(roles).capitalize() if roles else 'No role was measured'}."
    )


def _survivors(contents: Contents) -> Picture:
    """Of the first methods the heads of every role that are kept at each budget."""
    table = contents.roles
    assert table is not None
    sites = next(iter(contents.masks.values()))[0]
    of_gates = roles_of_gates(table, [(site.label, site.gates) for site in sites], f"the masks in {str(contents.path)!r}")
    masks = {key: dict(enumerate(own)) for key, (_, own) in contents.masks.items()}
    alt = f"Bars of the {contents.unit}s that methods keep at each budget, in a colour for each role; leftmost the dense model."
    figure = survivors(of_gates, role_counts(of_gates, masks))
    special = of_gates["specialised"].to_numpy(dtype=bool)
    return Picture("roles_survival", "roles", figure, _survival_caption(contents, special), alt, wide=True)


def _survival_caption(contents: Contents, special: np.ndarray) -> str:
    """At the middle budget the specialised and the other heads that each of the first methods keeps, with odds ratios."""
    methods = [method for method, budget in contents.masks if budget == contents.focus]
    parts = []
    for method in [name for name in ("learned", "his", "random") if name in methods] or methods[:3]:
        masks = contents.masks[method, contents.focus or 0][1]
        kept = [(masks > 0)[:, group].mean() if group.any() else np.nan for group in (special, ~special)]
        odds = pooled_odds([cross_table(mask, special) for mask in masks])
        if not np.isfinite(kept).all():
            continue
        sure = f", 95 % interval {odds.low:.2f} to {odds.high:.2f}" if np.isfinite(odds.low) else ""
        ratio = f" (odds ratio {odds.ratio:.2f}{sure})" if np.isfinite(odds.ratio) else ""
        parts.append(f"{method} keeps {kept[0]:.0%} of the specialised {contents.unit}s and {kept[1]:.0%} of the others{ratio}")
    caption = f"Roles of the {contents.unit}s that are kept, means over seeds; one with several roles counts in each."
    if not parts or contents.focus is None:
        return caption
    seeds = max(len(masks) for (_, budget), (_, masks) in contents.masks.items() if budget == contents.focus)
    return f"{caption} At {contents.label(contents.focus)}, {counted(seeds, 'seed')}: {'; '.join(parts)}."
