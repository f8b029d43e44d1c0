"""All scores of all heads in one table."""

from __future__ import annotations

from typing import Any

import pandas as pd
from torch import Tensor

from gates.head_gates import HeadGates
from gates.scores.importance import normalise_by_layer
from training.comparison.run_comparison import Comparison


def score_table(gates: HeadGates, result: Comparison) -> pd.DataFrame:
    """One row per head: where it is, its raw scores, what each ranking made of them, and which masks keep it.

    Heads that share a gate have its scores.
    """

    def of_heads(values: Tensor) -> Any:
        return gates.to_heads(values).numpy()

    columns: dict[str, object] = {
        "kind": [site.kind for site in gates.sites for _ in range(site.heads)],
        "layer": [site.layer for site in gates.sites for _ in range(site.heads)],
        "head": [head for site in gates.sites for head in range(site.heads)],
    }
    if result.scores is not None:
        importance = result.scores.importance
        by_layer = normalise_by_layer(importance.his, gates.layer_index().cpu())
        columns |= {
            "his": of_heads(importance.his),
            "his_standard_error": of_heads(importance.standard_error),
            "his_by_layer": of_heads(by_layer),
            "signed_importance": of_heads(importance.signed),
            "fisher": of_heads(importance.fisher),
            "entropy": of_heads(result.scores.entropy),
        }
    columns |= {f"ranking:{name}": of_heads(keep) for name, keep in result.keep.items()}
    columns |= {f"kept:{name}": of_heads(mask.int()) for name, mask in result.masks.items()}
    return pd.DataFrame(columns)
