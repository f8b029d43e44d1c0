"""The modeling file that travels with pruned weights, so that they load where this project is not installed."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from gates.errors import GateError
from gates.surgery import pruned

MODELING_FILE = "modeling_pruned.py"


def save_pruned_shape(model: PreTrainedModel, directory: str | os.PathLike[str], **more: Any) -> None:
    """What ``save_pretrained`` is on a pruned model: the weights and the modeling file they load with.

    Without that file a stock class would find a layer's weights missing and draw new ones.

    Args:
        model: model after :func:`gates.surgery.remove.remove_heads_`.
        directory, more: arguments of ``PreTrainedModel.save_pretrained``.
    """
    Path(directory).mkdir(parents=True, exist_ok=True)
    stock = type(model)
    model.config.auto_map = _write_modeling_file(model, Path(directory) / MODELING_FILE)
    try:
        # Transformers renames no weights of custom classes when they load, so none when they are saved.
        model.__class__ = pruned.pruned_class(stock)
        PreTrainedModel.save_pretrained(model, directory, **more)
    finally:
        model.__class__ = stock
        del model.config.auto_map


def auto_classes(model: PreTrainedModel) -> dict[str, type[PreTrainedModel]]:
    """Every Auto class that has a model class for this model's config, such as ``AutoModel``: ``BertModel``."""
    found: dict[str, type[PreTrainedModel]] = {}
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        if name.startswith("AutoModel") and mapping is not None and type(model.config) in mapping:
            stock = mapping[type(model.config)]
            stock = stock[0] if isinstance(stock, tuple) else stock
            if inspect.isclass(stock) and issubclass(stock, PreTrainedModel) and stock.__module__.startswith("transformers."):
                found[name] = stock
    return found


def _has_sites(stock: type[PreTrainedModel], model: PreTrainedModel) -> bool:
    """Whether a class for the same config has every module that was pruned (an encoder-decoder's causal LM does not)."""
    if stock.__name__ == type(model).__name__:
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

    The file is :mod:`gates.surgery.pruned` and one subclass per Auto class. No text but class names of Transformers itself
    goes into it.
    """
    stock_classes = {auto: stock for auto, stock in auto_classes(model).items() if _has_sites(stock, model)}
    own = type(model).__name__
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
            f'if hasattr(transformers, "{stock.__name__}"):  # not in every version',
            "",
            f"    class {stock.__name__}(transformers.{stock.__name__}):",
            "        def __init__(self, config, *args, **kwargs):",
            "            super().__init__(config, *args, **kwargs)",
            "            reshape_(self, config.pruned_attention)",
        ]
    text = "\n".join(lines).replace("import torch\nfrom torch", "import torch\nimport transformers\nfrom torch", 1)
    path.write_text(text + "\n", encoding="utf-8")
    return {name: f"{path.stem}.{stock.__name__}" for name, stock in stock_classes.items()}
