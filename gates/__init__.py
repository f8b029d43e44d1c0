"""Gates, scores, masks and surgery for the attention heads of Hugging Face Transformers.

The public names are imported on first use, so that ``import gates`` alone is fast.
"""

from __future__ import annotations

import importlib

_MODULE_OF = {
    "AttentionConfidence": "gates.scores.attention",
    "AttentionEntropy": "gates.scores.attention",
    "AttentionSite": "gates.attention.sites",
    "Budget": "gates.gating.budget",
    "FisherInformation": "gates.scores.fisher",
    "GateConfig": "gates.artefact",
    "GateError": "gates.errors",
    "GatedModel": "gates.model",
    "GatedTrainer": "gates.trainer",
    "HardConcrete": "gates.gating.hard_concrete",
    "HeadGates": "gates.gating.head_gates",
    "HeadImportance": "gates.scores.importance",
    "ModelCard": "gates.export.card",
    "Stretch": "gates.gating.hard_concrete",
    "budget_mask": "gates.gating.budget",
    "causal_roles": "gates.search.causal_gating",
    "find_attention": "gates.attention.sites",
    "get_gated_model": "gates.model",
    "gradient_times_input": "gates.relevance.heads",
    "head_gradients": "gates.scores.importance",
    "head_relevance": "gates.relevance.heads",
    "hies": "gates.scores.ranking",
    "l0_penalty": "gates.gating.price",
    "load_mask": "gates.surgery.masks",
    "load_pruned": "gates.export.checkpoint",
    "measure_cost": "gates.export.cost",
    "observe_attention": "gates.scores.observe",
    "observe_entropy": "gates.scores.observe",
    "push_to_hub": "gates.export.hub",
    "ranking_scores": "gates.scores.ranking",
    "refine_by_swaps": "gates.search.swaps",
    "refit_": "gates.recovery.refit",
    "register": "gates.export.hub",
    "remove_heads_": "gates.surgery.remove",
    "replicate_": "gates.gating.distributed",
    "rescaled_gates": "gates.recovery.rescale",
    "save_mask": "gates.surgery.masks",
    "save_pruned": "gates.export.checkpoint",
    "top_k_mask": "gates.gating.budget",
    "zero_heads_": "gates.surgery.remove",
}
__all__ = [
    "AttentionConfidence",
    "AttentionEntropy",
    "AttentionSite",
    "Budget",
    "FisherInformation",
    "GateConfig",
    "GateError",
    "GatedModel",
    "GatedTrainer",
    "HardConcrete",
    "HeadGates",
    "HeadImportance",
    "ModelCard",
    "Stretch",
    "budget_mask",
    "causal_roles",
    "find_attention",
    "get_gated_model",
    "gradient_times_input",
    "head_gradients",
    "head_relevance",
    "hies",
    "l0_penalty",
    "load_mask",
    "load_pruned",
    "measure_cost",
    "observe_attention",
    "observe_entropy",
    "push_to_hub",
    "ranking_scores",
    "refine_by_swaps",
    "refit_",
    "register",
    "remove_heads_",
    "replicate_",
    "rescaled_gates",
    "save_mask",
    "save_pruned",
    "top_k_mask",
    "zero_heads_",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
