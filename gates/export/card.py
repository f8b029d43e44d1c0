"""The README of an exported model: what it is, a prediction with it, its results, which heads it kept and what it costs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import huggingface_hub
from huggingface_hub import ModelCardData, metadata_load
from torch import Tensor
from transformers import PreTrainedModel
from yaml import YAMLError

from gates.export.cost import Cost, count_parameters, milliseconds
from gates.export.evaluation import MetricTypes, evaluation_block
from gates.export.usage import PATH, PIPELINE_TAGS, onnx_usage, prediction, stock_loader, torch_usage
from gates.files import replacing
from gates.head_gates import HeadGates
from gates.sites import find_attention
from gates.surgery.labels import site_labels

CardForm = Literal["pruned", "stock", "masked", "onnx"]
FORMS: dict[str, str] = {
    "pruned": "pruned (the heads are physically gone; the shape is in `config.json` and `modeling_pruned.py`)",
    "stock": "stock (the heads are physically gone; a stock class with a config of its own)",
    "masked": "masked (dense shape, dropped heads are zero)",
    "onnx": "ONNX (the heads are physically gone)",
}
RESULTS, END = "<!-- results -->", "<!-- end of results -->"
Metrics = Mapping[str, float | int | str]


@dataclass(frozen=True)
class ModelCard:
    """What a saved model's README says beside what is known from the model itself.

    Args:
        base_model: hub name or description of the dense model; by default where it was loaded from.
        method: name of the method that chose the mask.
        metrics: results of the export, by name (``{"accuracy": 0.91}``).
        dense_metrics: results of the model with all its heads, by name.
        metric_types: what metrics are to Hugging Face's ``evaluate``, by name (``{"f1": {"type": "f1", "args": {"average":
            "macro"}}}``); the Hub's evaluation block has others under their own names.
        dataset: hub name or description of the data that they are results on, on which the Hub's evaluation block depends.
        subset: its configuration.
        split: its split.
        more_splits: names of further ones, whose metrics have these names before their own, as ``mismatched_accuracy``.
        versions: package versions, by name.
        cost: parameters, FLOPs and latency, if they were measured already.

    >>> card = ModelCard(base_model="bert-base-uncased", metrics={"accuracy": 0.91}, dense_metrics={"accuracy": 0.92})
    >>> card.split
    'test'
    """

    base_model: str = ""
    method: str = ""
    metrics: Metrics = field(default_factory=dict)
    dense_metrics: Metrics = field(default_factory=dict)
    metric_types: MetricTypes = field(default_factory=dict)
    dataset: str = ""
    subset: str = ""
    split: str = "test"
    more_splits: Sequence[str] = ()
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
    has_tokenizer: bool,
    files: Sequence[str] = (),
    zero_heads: int = 0,
    unpadded: int | None = None,
) -> str:
    """The text of the README.

    Args:
        dense: the model before pruning.
        mask: 0/1 per head, ``[heads]``.
        form: form of the export.
        card: what the text states.
        auto: the Auto class that loads the export.
        parameters: number of parameters of the export.
        has_tokenizer: whether a tokenizer lies beside the export.
        files: the ONNX graphs in it.
        zero_heads: heads of zeros that it was padded with.
        unpadded: number of parameters of the export without them; None if it was not padded.
    """
    sites = find_attention(dense)
    sizes = [site.heads for site in sites]
    kept = [int(part.sum()) for part in mask.split(sizes)]
    source = dense.name_or_path or ""
    base_model = card.base_model or (Path(source).name if Path(source).is_dir() else source)
    shown, hub_name = stated_base_model(base_model, default=type(dense).__name__)
    title = f"{type(dense).__name__} with {int(mask.sum())} of {len(mask)} attention heads"
    if form == "onnx":
        usage = onnx_usage(dense, auto, files, has_tokenizer=has_tokenizer)
    else:
        usage = torch_usage(dense, auto, remote_code=form == "pruned", has_tokenizer=has_tokenizer)
    header = _header(
        card, form=form, auto=auto, base_model=hub_name, license=known_license(source) or known_license(base_model), title=title
    )
    lines = [
        *header,
        f"# {title}",
        "",
        f"- Base model: `{shown}`",
        f"- Mask found by: {' '.join(card.method.split()) or 'not stated'} (the heads kept are in `mask.json`)",
        f"- Parameters: {parameters:,} (dense: {count_parameters(dense):,})",
        f"- Form: {FORMS[form]}",
        *(_padded(zero_heads, parameters, unpadded) if unpadded is not None else ()),
        "",
        "```python",
        *usage,
        "```",
    ]
    if form == "pruned":
        lines += [
            "",
            "Where head-gates is installed, `import gates; gates.register()` comes first, and the model loads without "
            "`trust_remote_code`, so that no code of this folder runs.",
        ]
    if card.metrics:
        lines += ["", *_results(card.metrics, card.dense_metrics)]
    lines += [
        "",
        "| site | heads | kept |",
        "| --- | --: | --: |",
        *(f"| {label} | {of} | {count} |" for label, of, count in zip(site_labels(sites), sizes, kept, strict=True)),
    ]
    if card.cost is not None:
        lines += ["", *_cost_table(card.cost)]
    if card.versions:
        lines += ["", "| package | |", "| --- | --: |", *(f"| {name} | {value} |" for name, value in card.versions.items())]
    return "\n".join(lines) + "\n"


def _padded(zero_heads: int, parameters: int, unpadded: int) -> list[str]:
    """What heads of zeros cost."""
    if not zero_heads:
        return ["- Padded: with no head, since all layers of a stack keep equally many"]
    share = parameters / unpadded - 1
    return [
        f"- Padded: {zero_heads} heads of zeros (`--pad_heads`) beside those kept make all layers of a stack equally large. "
        f"They change no output, and they cost {parameters - unpadded:,} parameters ({share:.1%} of {unpadded:,} without them)"
    ]


def update_results(readme: Path, metrics: Metrics, dense_metrics: Metrics) -> None:
    """Put the dense model's results beside the export's in a README of :func:`card_text`; another README stays as it is.

    Args:
        readme: path of the README.
        metrics: results of the export, by name.
        dense_metrics: results of the model with all its heads, by name.
    """
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    if RESULTS not in text or END not in text:
        return
    before, _, rest = text.partition(RESULTS)
    after = rest.partition(END)[2]
    with replacing(readme) as partial:
        partial.write_text(before + "\n".join(_results(metrics, dense_metrics)) + after, encoding="utf-8")


def gate_card(gates: HeadGates, model: PreTrainedModel, open_heads: dict[str, list[int]], *, base_model: str, auto: str) -> str:
    """The text of the model card of gates alone.

    Args:
        gates: gates of the model.
        model: the model that they are on.
        open_heads: open heads of each kind, by layer.
        base_model: name of the model as a user wrote it.
        auto: the Auto class that loads the model.
    """
    shown, hub_name = stated_base_model(base_model, default="not stated")
    loader = stock_loader(model, auto)
    heads = {kind: [site.heads for site in gates.sites if site.kind == kind] for kind in open_heads}
    count, total = (sum(map(sum, table.values())) for table in (open_heads, heads))
    lines = [
        *_front_matter(tags=["head-gates"], base_model=hub_name, license=known_license(base_model)),
        f"# Gates of {total} attention heads, {count} open",
        "",
        f"- Base model: `{shown}` (not included)",
        f"- One gate per {'query head' if gates.unit == 'head' else 'key/value head with its query heads'}: {gates.size} gates",
        "",
        "```python",
        "import torch",
        f"from transformers import {loader}",
        "",
        "from gates import GatedModel",
        "",
        f'base_model = {loader}.from_pretrained("path/to/base/model")  # with the weights that the gates were trained with',
        PATH,
        "model = GatedModel.from_pretrained(base_model, path).prune_and_unload().eval()",
        *prediction(model, auto),
        "```",
        "",
        "| site | heads | open |",
        "| --- | --: | --: |",
    ]
    named = list(zip(gates.sites, site_labels(gates.sites), strict=True))
    for kind, counts in open_heads.items():
        labels = [label for site, label in named if site.kind == kind]
        lines += [f"| {label} | {of} | {n} |" for label, of, n in zip(labels, heads[kind], counts, strict=True)]
    return "\n".join(lines) + "\n"


def stated_base_model(name: str, *, default: str) -> tuple[str, str | None]:
    """A base model's name as a card can show it, and as its metadata can link to it: not at all unless it is a hub name."""
    shown = re.sub(r"[`\s]+", " ", name).strip() or default
    is_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", shown) and not Path(shown).exists()
    return shown, shown if is_hub_name else None


def known_license(base_model: str) -> str | None:
    """The licence that the card of a base model states, if it lies in its folder or in the Hub's cache."""
    try:
        folder = Path(base_model)
        cached = folder / "README.md" if folder.is_dir() else huggingface_hub.try_to_load_from_cache(base_model, "README.md")
        if not isinstance(cached, (str, Path)):
            return None
        stated = (metadata_load(cached) or {}).get("license")
    except (OSError, ValueError, AttributeError, YAMLError):  # no such card, no name of a repository, or other metadata
        return None
    return stated if isinstance(stated, str) else None


def _header(
    card: ModelCard, *, form: CardForm, auto: str, base_model: str | None, license: str | None, title: str
) -> list[str]:
    """Return the YAML header that the hub reads."""
    pipeline_tag = PIPELINE_TAGS.get(auto)
    results = evaluation_block(
        card.metrics,
        card.metric_types,
        task=pipeline_tag or "other",
        dataset=card.dataset,
        subset=card.subset,
        split=card.split,
        more_splits=card.more_splits,
    )
    return _front_matter(
        tags=["attention-head-pruning"],
        library_name="onnx" if form == "onnx" else "transformers",
        pipeline_tag=pipeline_tag,
        base_model=base_model,
        license=license,
        model_name=title,
        eval_results=results or None,
    )


def _front_matter(**known: object) -> list[str]:
    return ["---", ModelCardData(**known).to_yaml(), "---", ""]  # type: ignore[arg-type]


def _results(metrics: Metrics, dense_metrics: Metrics) -> list[str]:
    """The table of results between its two marks."""
    columns = {"dense": dense_metrics, "pruned": metrics} if dense_metrics else {"pruned": metrics}
    rows = [
        f"| {name} | {' | '.join(_number(column[name]) if name in column else '' for column in columns.values())} |"
        for name in metrics
    ]
    return [RESULTS, f"| metric | {' | '.join(columns)} |", f"| --- |{' --: |' * len(columns)}", *rows, END]


def _number(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cost_table(cost: Cost) -> list[str]:
    shapes = ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in cost.shapes.items())
    rows = [
        ("parameters", f"{cost.dense_parameters:,}", f"{cost.pruned_parameters:,}", cost.parameter_ratio),
        ("FLOPs of one example", f"{cost.dense_flops:,}", f"{cost.pruned_flops:,}", cost.flop_ratio),
        *_cache_row(cost),
        *(
            (f"ms at batch size {row.batch_size}", milliseconds(row.dense_ms), milliseconds(row.pruned_ms), row.ratio)
            for row in cost.latency
        ),
    ]
    versions = ", ".join(f"{name} {version}" for name, version in cost.versions.items())
    measured = (
        f" Times are medians of one forward pass in PyTorch on {cost.hardware}; {versions}. Dense and pruned took turns, and "
        "their ratio is the median of the turns' ratios, which other work on the machine disturbs less than the times."
        if cost.latency
        else ""
    )
    return [
        "| | dense | pruned | dense / pruned |",
        "| --- | --: | --: | --: |",
        *(f"| {title} | {dense} | {pruned} | {ratio:.2f} |" for title, dense, pruned, ratio in rows),
        "",
        f"One example: {shapes}.{measured}",
    ]


def _cache_row(cost: Cost) -> list[tuple[str, str, str, float]]:
    """What generation keeps of every token; nothing for models that do not generate."""
    if not cost.dense_cache:
        return []
    ratio = cost.dense_cache / cost.pruned_cache if cost.pruned_cache else math.inf
    return [("bytes of KV cache per token", f"{cost.dense_cache:,}", f"{cost.pruned_cache:,}", ratio)]
