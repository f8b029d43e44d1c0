"""What else in an attention module has an axis of heads, beside its projections: sinks, norms, tables of positions, biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from gates.sites import AttentionSite
from gates.surgery.pruned import Selected, is_of

BY_HEAD = (
    *((name, 0) for name in ("logit_scale", "r_w_bias", "r_r_bias", "r_s_bias")),
    *((name, 1) for name in ("r_kernel", "seg_embed")),
    *((name, 1) for name in ("relative_position_bias_table", "relative_position_bias.relative_position_bias_table")),
)
"""Parameters with an axis of heads, and which axis it is: Swin's and BEiT's position biases, Funnel's."""
BY_FEATURE: dict[str, Literal["query", "key"]] = {"q_bias": "query", "v_bias": "key"}
"""Parameters with the features of all heads beside projections that have them too, and whose heads they follow: DeBERTa's."""


@dataclass(frozen=True)
class PerHead:
    """A parameter, or a list of modules, with an axis of heads beside the projections.

    Args:
        path: path of the parameter, or of the module.
        follows: ``query`` or ``key``, the projection whose heads it belongs to.
        form: ``rows``: its ``axis`` counts heads; ``features``: it has the features of all heads; ``packed``: its first
            axis has query, key and value of all heads; ``modules``: one module per head; ``spanning``: a norm over the features
            of all heads together, which has to go on seeing them.
        before: path of the projection before a spanning norm.
        axis: which axis of it counts heads.
    """

    path: str
    follows: Literal["query", "key"]
    form: Literal["rows", "features", "packed", "modules", "spanning"]
    before: str = ""
    axis: int = 0


def per_head_parts(site: AttentionSite) -> list[PerHead]:
    """GPT-OSS's sinks, Cohere's and StableLM's norms per head, OLMo2's norms over all heads; norms shared by heads stay."""
    found: list[PerHead] = []
    if site.layout.packed:
        names = [f"{site.layout.packed}_{end}" for end in ("weight", "bias")]
        return [PerHead(name, "query", "packed") for name in names if getattr(site.core, name, None) is not None]
    for path, follows, heads in (
        ("sinks", "query", site.heads),
        ("pos_bias_u", "query", site.heads),
        ("pos_bias_v", "query", site.heads),
        ("bias_u", "query", site.heads),
        ("bias_v", "query", site.heads),
        ("q_norm", "query", site.heads),
        ("k_norm", "key", site.kv_heads),
        ("q_layernorm", "query", site.heads),
        ("k_layernorm", "key", site.kv_heads),
    ):
        part = getattr(site.core, path, None)
        if isinstance(part, nn.Parameter):
            found.append(PerHead(path, follows, "rows"))  # type: ignore[arg-type]
        elif isinstance(getattr(part, "norms", None), nn.ModuleList):
            found.append(PerHead(f"{path}.norms", follows, "modules"))  # type: ignore[arg-type]
        elif isinstance(weight := getattr(getattr(part, "norm", part), "weight", None), Tensor):
            if tuple(weight.shape) == (heads, site.head_dim):
                found.append(PerHead(f"{path}.weight", follows, "rows"))  # type: ignore[arg-type]
            elif weight.numel() != site.head_dim or is_of(type(part), Selected):
                before = site.layout.query if follows == "query" else site.layout.key
                found.append(PerHead(path, follows, "spanning", before))  # type: ignore[arg-type]
    prefix = f"{site.layout.core}." if site.layout.core else ""
    parameters = dict(site.core.named_parameters())
    for path, axis in BY_HEAD:
        if path in parameters and parameters[path].shape[axis] == site.heads:
            found.append(PerHead(prefix + path, "query", "rows", axis=axis))
    for path, side in BY_FEATURE.items():
        if path in parameters and parameters[path].shape == (site.heads * site.head_dim,):
            found.append(PerHead(prefix + path, side, "features"))
    return found
