"""All scores of all heads in one table."""

from __future__ import annotations

import pandas as pd

from gates.attach import HeadGates
from gates.importance import normalise_by_layer
from training.compare import Comparison


def score_table(gates: HeadGates, result: Comparison) -> pd.DataFrame:
    """One row per head: where it is, its raw scores, what each ranking made of them, and which masks keep it."""
    columns: dict[str, object] = {
        "kind": [site.kind for site in gates.sites for _ in range(site.heads)],
        "layer": [site.layer for site in gates.sites for _ in range(site.heads)],
        "head": [head for site in gates.sites for head in range(site.heads)],
    }
    if result.scores is not None:
        importance = result.scores.importance
        columns |= {
            "his": importance.his.numpy(),
            "his_standard_error": importance.standard_error.numpy(),
            "his_by_layer": normalise_by_layer(importance.his, gates.layer_index().cpu()).numpy(),
            "signed_importance": importance.signed.numpy(),
            "fisher": importance.fisher.numpy(),
            "entropy": result.scores.entropy.numpy(),
        }
    columns |= {f"ranking:{name}": keep.numpy() for name, keep in result.keep.items()}
    columns |= {f"kept:{name}": mask.int().numpy() for name, mask in result.masks.items()}
    return pd.DataFrame(columns)
