"""The README of an exported model: what it is, how to load it, which heads it kept and what it costs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor
from transformers import PreTrainedModel

from gates.export.cost import Cost, count_parameters
from gates.sites import find_attention

CardForm = Literal["pruned", "stock", "masked", "onnx"]
FORMS: dict[str, str] = {
    "pruned": "pruned (the heads are physically gone; the shape is in `config.json` and `modeling_pruned.py`)",
    "stock": "stock (the heads are physically gone; a stock class with a config of its own)",
    "masked": "masked (dense shape, dropped heads are zero)",
    "onnx": "ONNX (the heads are physically gone)",
}


@dataclass(frozen=True)
class ModelCard:
    """What a saved model's README says beside what is known from the model itself.

    Args:
        base_model: hub name or description of the dense model.
        method: name of the method that chose the mask.
        metrics: results to state, by name.
        versions: package versions, by name.
        cost: parameters, FLOPs and latency, if they were measured already.
    """

    base_model: str = ""
    method: str = ""
    metrics: Mapping[str, float | int | str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    cost: Cost | None = None


def card_text(
    dense: PreTrainedModel,
    mask: Tensor,
    form: CardForm,
    card: ModelCard,
    *,
    auto: str,
    parameters: int,
    files: Sequence[str] = (),
) -> str:
    """The text of the README.

    Args:
        dense: the model before pruning.
        mask: 0/1 per head, ``[heads]``.
        form: form of the export.
        card: what the text states.
        auto: the Auto class that loads the export.
        parameters: number of parameters of the export.
        files: the ONNX graphs in it.
    """
    sizes = {site.label: site.heads for site in find_attention(dense)}
    kept = [int(part.sum()) for part in mask.split(list(sizes.values()))]
    base, front_matter = stated_base_model(card.base_model, default=type(dense).__name__)
    lines = [
        "---",
        f"library_name: {'onnx' if form == 'onnx' else 'transformers'}",
        "tags: [attention-head-pruning]",
        *front_matter,
        "---",
        "",
        f"# {type(dense).__name__} with {int(mask.sum())} of {len(mask)} attention heads",
        "",
        f"- Base model: `{base}`",
        f"- Mask found by: {' '.join(card.method.split()) or 'not stated'} (the heads kept are in `mask.json`)",
        f"- Parameters: {parameters:,} (dense: {count_parameters(dense):,})",
        f"- Form: {FORMS[form]}",
        "",
        "```python",
        *_usage(form, auto, files),
        "```",
        "",
        "| site | heads | kept |",
        "| --- | --: | --: |",
        *(f"| {label} | {heads} | {count} |" for (label, heads), count in zip(sizes.items(), kept, strict=True)),
    ]
    if card.cost is not None:
        lines += ["", *_cost_table(card.cost)]
    for title, table in (("metric", card.metrics), ("package", card.versions)):
        if table:
            lines += ["", f"| {title} | |", "| --- | --: |"]
            lines += [
                f"| {name} | {value:.4g} |" if isinstance(value, float) else f"| {name} | {value} |"
                for name, value in table.items()
            ]
    return "\n".join(lines) + "\n"


def stated_base_model(name: str, *, default: str) -> tuple[str, list[str]]:
    """A base model's name as a card can show it, and the card's metadata about it: none unless it is a hub name."""
    shown = re.sub(r"[`\s]+", " ", name).strip() or default
    is_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", shown) and not Path(shown).exists()
    return shown, [f"base_model: {json.dumps(shown)}"] if is_hub_name else []


def _usage(form: CardForm, auto: str, files: Sequence[str]) -> list[str]:
    if form == "onnx":
        sessions = ((Path(file).stem, f'onnxruntime.InferenceSession("path/to/this/directory/{file}")') for file in files)
        return ["import onnxruntime", "", *(f"{name} = {session}" for name, session in sessions)]
    remote = ", trust_remote_code=True" if form == "pruned" else ""
    return [f"from transformers import {auto}", "", f'model = {auto}.from_pretrained("path/to/this/directory"{remote})']


def _cost_table(cost: Cost) -> list[str]:
    shapes = ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in cost.shapes.items())
    rows = [
        ("parameters", f"{cost.dense_parameters:,}", f"{cost.pruned_parameters:,}", cost.parameter_ratio),
        ("FLOPs of one example", f"{cost.dense_flops:,}", f"{cost.pruned_flops:,}", cost.flop_ratio),
        *(
            (f"ms at batch size {row.batch_size}", f"{row.dense_ms:.3g}", f"{row.pruned_ms:.3g}", row.ratio)
            for row in cost.latency
        ),
    ]
    versions = ", ".join(f"{name} {version}" for name, version in cost.versions.items())
    measured = f" Median times of one forward pass in PyTorch on {cost.hardware}; {versions}." if cost.latency else ""
    return [
        "| | dense | pruned | dense / pruned |",
        "| --- | --: | --: | --: |",
        *(f"| {title} | {dense} | {pruned} | {ratio:.2f} |" for title, dense, pruned, ratio in rows),
        "",
        f"One example: {shapes}.{measured}",
    ]
