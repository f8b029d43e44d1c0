"""Save and reload pruned models.

``pruned``: safetensors in the pruned shape with a self-contained modeling file, so that
``AutoModelFor….from_pretrained(directory, trust_remote_code=True)`` works where this project is not installed.
``masked``: the dense shape with zeroed heads, which stock Transformers loads with no extra code.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto import modeling_auto

from gates import pruned
from gates.attach import HeadGates
from gates.errors import GateError
from gates.masks import save_mask
from gates.sites import find_attention
from gates.surgery import remove_heads_, zero_heads_

Form = Literal["pruned", "masked"]
MODELING_FILE = "modeling_pruned.py"
TOLERANCE = 1e-4
"""Largest difference between saved and reloaded outputs, relative to the largest output; float rounding only."""


@dataclass(frozen=True)
class ModelCard:
    """What a saved model's README says beside what is known from the model itself.

    Args:
        base_model: hub name or description of the dense model.
        method: how the mask was found.
        metrics: results to state, by name.
        versions: package versions, by name.
    """

    base_model: str = ""
    method: str = ""
    metrics: Mapping[str, float | int | str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


def save_pruned(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    mask: Tensor,
    *,
    values: Tensor | None = None,
    form: Form = "pruned",
    tokenizer: PreTrainedTokenizerBase | None = None,
    card: ModelCard | None = None,
    check_batch: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write ``model`` without the heads that ``mask`` drops; the model itself is not changed.

    The directory is first written under a temporary name, reloaded and, with ``check_batch``, compared with the
    gated model in memory; only then is it renamed into place, so a directory of that name is always complete.

    Args:
        model: dense model without attached gates.
        directory: to create; must not exist or be empty.
        mask: 0/1 per head, ``[heads]``.
        values: gate values to fold into the output projection, ``[heads]``.
        form: ``pruned`` or ``masked``.
        tokenizer: saved beside the model.
        card: for the README.
        check_batch: model inputs for the comparison.

    Raises:
        GateError: if the directory is taken, the model's class is not a stock one, or the comparison fails.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise GateError(f"{str(directory)!r} exists already; give a new directory or remove it first")
    sites = find_attention(model)
    cut = (remove_heads_ if form == "pruned" else zero_heads_)(copy.deepcopy(model).eval(), mask, values=values)
    with _written_whole(directory) as partial:
        if form == "pruned":
            cut.config.auto_map = _write_modeling_file(cut, partial / MODELING_FILE)
        cut.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        save_mask(partial / "mask.json", mask.cpu(), sites, method=card.method if card else "")
        (partial / "README.md").write_text(_card_text(model, cut, mask, form, card or ModelCard()), encoding="utf-8")
        reloaded = load_pruned(partial, model_class=type(model))
        if check_batch is not None:
            gates = HeadGates(model)
            with gates.attached(), gates.use((mask if values is None else mask * values).to(model.device)):
                _compare(model, torch.nn.Module.to(reloaded, model.device), check_batch)
    return directory


def load_pruned(directory: str | os.PathLike[str], *, model_class: type[PreTrainedModel] | None = None) -> PreTrainedModel:
    """Load a directory that :func:`save_pruned` wrote, in either form, without running code from it.

    Args:
        directory: as given to :func:`save_pruned`.
        model_class: stock class to load it as; by default the one it was saved from.

    Raises:
        GateError: if the directory is not a saved model.
    """
    directory = Path(directory)
    try:
        config = AutoConfig.from_pretrained(directory)
        name = config.architectures[0].removeprefix("Pruned")
    except (OSError, ValueError, TypeError, IndexError) as error:
        raise GateError(
            f"{str(directory)!r} is not a saved model: its config.json cannot be read ({_first_line(error)})"
        ) from error
    stock = model_class or getattr(transformers, name, None)
    if not (inspect.isclass(stock) and issubclass(stock, PreTrainedModel)):
        raise GateError(f"{str(directory)!r} was saved from {name!r}, a class that Transformers does not have")
    if hasattr(config, "pruned_attention"):
        stock = pruned.pruned_class(stock)
    try:
        return stock.from_pretrained(directory, config=config)
    except Exception as error:  # safetensors and Transformers raise many kinds for damaged files
        raise GateError(f"the weights in {str(directory)!r} cannot be loaded: {_first_line(error)}") from error


def auto_classes(model: PreTrainedModel) -> dict[str, type[PreTrainedModel]]:
    """Every Auto class that has a model class for this model's config, such as ``AutoModel``: ``BertModel``."""
    found: dict[str, type[PreTrainedModel]] = {}
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        if name.startswith("AutoModel") and mapping is not None and type(model.config) in mapping:
            stock = mapping[type(model.config)]
            if inspect.isclass(stock) and issubclass(stock, PreTrainedModel) and stock.__module__.startswith("transformers."):
                found[name] = stock
    return found


def _has_sites(stock: type[PreTrainedModel], model: PreTrainedModel) -> bool:
    """Whether a class for the same config has every module that was pruned (an encoder-decoder's causal LM does not)."""
    if stock.__name__ == type(model).__name__.removeprefix("Pruned"):
        return True
    config = copy.deepcopy(model.config)
    try:
        with torch.device("meta"):
            names = {name for name, _ in stock(config).base_model.named_modules()}
    except Exception:  # a class that cannot be built from this config is not offered
        return False
    return names.issuperset(config.pruned_attention)


def _write_modeling_file(model: PreTrainedModel, path: Path) -> dict[str, str]:
    """Write the self-contained modeling file; returns the config's ``auto_map``.

    The file is :mod:`gates.pruned` and one subclass per Auto class. No text but class names of Transformers itself
    goes into it.
    """
    stock_classes = {auto: stock for auto, stock in auto_classes(model).items() if _has_sites(stock, model)}
    own = type(model).__name__.removeprefix("Pruned")
    if own not in {stock.__name__ for stock in stock_classes.values()}:
        raise GateError(
            f"{own} is not a class that an Auto class of Transformers loads, so it cannot be exported in pruned form; "
            "use form='masked' or one of " + ", ".join(sorted({stock.__name__ for stock in stock_classes.values()}))
        )
    lines = [Path(inspect.getfile(pruned)).read_text(encoding="utf-8")]
    for stock in sorted(set(stock_classes.values()), key=lambda stock: stock.__name__):
        assert stock.__name__.isidentifier()
        assert hasattr(importlib.import_module(stock.__module__), stock.__name__)
        lines += [
            "",
            "",
            f"class Pruned{stock.__name__}(transformers.{stock.__name__}):",
            "    def __init__(self, config, *args, **kwargs):",
            "        super().__init__(config, *args, **kwargs)",
            "        reshape_(self, config.pruned_attention)",
        ]
    text = "\n".join(lines).replace("import torch\nfrom torch", "import torch\nimport transformers\nfrom torch", 1)
    path.write_text(text + "\n", encoding="utf-8")
    return {name: f"{path.stem}.Pruned{stock.__name__}" for name, stock in stock_classes.items()}


@contextmanager
def _written_whole(directory: Path) -> Iterator[Path]:
    """A temporary directory beside ``directory`` that takes its name on success and vanishes on failure."""
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if directory.exists():
            directory.rmdir()
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@torch.no_grad()
def _compare(saved: PreTrainedModel, reloaded: PreTrainedModel, batch: Mapping[str, Tensor]) -> None:
    inputs = {name: tensor.to(saved.device) for name, tensor in batch.items()}
    was_training = saved.training
    try:
        expected, found = saved.eval()(**inputs)[0].float(), reloaded.eval()(**inputs)[0].float()
    finally:
        saved.train(was_training)
    difference = float((expected - found).abs().max() / expected.abs().max().clamp(min=1.0))
    if not difference <= TOLERANCE:
        raise GateError(f"the reloaded model differs from the saved one by {difference:.2g} (relative); nothing was kept")


def _card_text(dense: PreTrainedModel, cut: PreTrainedModel, mask: Tensor, form: Form, card: ModelCard) -> str:
    sizes = {site.label: site.heads for site in find_attention(dense)}
    kept = [int(part.sum()) for part in mask.split(list(sizes.values()))]
    auto = next((name for name, stock in auto_classes(dense).items() if stock.__name__ == type(dense).__name__), "AutoModel")
    remote = ", trust_remote_code=True" if form == "pruned" else ""
    dense_parameters, parameters = (sum(p.numel() for p in model.parameters()) for model in (dense, cut))
    base = " ".join(card.base_model.split()) or type(dense).__name__
    lines = [
        "---",
        "library_name: transformers",
        "tags: [attention-head-pruning]",
        *([f"base_model: {json.dumps(base)}"] if "/" in base else []),  # a hub name
        "---",
        "",
        f"# {type(dense).__name__} with {int(mask.sum())} of {len(mask)} attention heads",
        "",
        f"- Base model: `{base}`",
        f"- Mask found by: {card.method or 'not stated'} (the heads kept are in `mask.json`)",
        f"- Parameters: {parameters:,} (dense: {dense_parameters:,})",
        f"- Form: {form}"
        + (": the heads are physically gone" if form == "pruned" else ": dense shape, dropped heads are zero"),
        "",
        "```python",
        f"from transformers import {auto}",
        "",
        f'model = {auto}.from_pretrained("path/to/this/directory"{remote})',
        "```",
        "",
        "| site | heads | kept |",
        "| --- | --: | --: |",
        *(f"| {label} | {heads} | {count} |" for (label, heads), count in zip(sizes.items(), kept, strict=True)),
    ]
    for title, table in (("metric", card.metrics), ("package", card.versions)):
        if table:
            lines += ["", f"| {title} | |", "| --- | --: |"]
            lines += [
                f"| {name} | {value:.4g} |" if isinstance(value, float) else f"| {name} | {value} |"
                for name, value in table.items()
            ]
    return "\n".join(lines) + "\n"


def _first_line(error: Any) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
