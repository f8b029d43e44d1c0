"""Write the modeling file that pruned weights need where this project is not installed."""

from __future__ import annotations

import importlib
import inspect
import os
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from gates import modeling_pruned as pruned
from gates.errors import GateError

MODELING_FILE = "modeling_pruned.py"
Model = TypeVar("Model", bound=PreTrainedModel)


def save_pruned_shape(model: PreTrainedModel, directory: str | os.PathLike[str], **more: Any) -> None:
    """Write the weights of a pruned model and their modeling file. Without this file, a stock class would miss the weights of
    a layer and draw random ones."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    model.config.auto_map = _write_modeling_file(model, Path(directory) / MODELING_FILE)
    try:
        PreTrainedModel.save_pretrained(model, directory, **more)
    finally:
        del model.config.auto_map


def saves_pruned_shape_(model: Model) -> Model:
    """Make a pruned model's ``save_pretrained`` also write the modeling file; return the model."""
    model.save_pretrained = partial(save_pruned_shape, model)  # type: ignore[method-assign]
    return model


def auto_classes(model: PreTrainedModel) -> dict[str, type[PreTrainedModel]]:
    """Return the model class of every Auto class that knows the model's config, such as ``AutoModel``: ``BertModel``.

    If an Auto class has several model classes, the model's own class is used, or else the first, as Transformers does.
    """
    found: dict[str, type[PreTrainedModel]] = {}
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        if name.startswith("Auto") and mapping is not None and type(model.config) in mapping:
            try:
                stock = mapping[type(model.config)]
            except ValueError:  # Transformers lists a class that it does not export (VoxtralRealtimeTextModel)
                continue
            choice = stock if isinstance(stock, tuple) else (stock,)
            stock = next((known for known in choice if known.__name__ == type(model).__name__), choice[0])
            if inspect.isclass(stock) and issubclass(stock, PreTrainedModel) and stock.__module__.startswith("transformers."):
                found[name] = stock
    return found


def _write_modeling_file(model: PreTrainedModel, path: Path) -> dict[str, str]:
    """Write the self-contained modeling file, and return the config's ``auto_map``.

    The file is :mod:`gates.modeling_pruned` with one subclass per Auto class. The only inserted text is class names of
    Transformers itself.
    """
    stock_classes = auto_classes(model)
    own = type(model).__name__
    if not stock_classes and getattr(transformers, own, None) in type(model).__mro__:
        stock_classes = {"AutoModel": getattr(transformers, own)}  # a part of another model, which no Auto class knows
    if not stock_classes:
        raise GateError(f"{own} is not exported by Transformers, so it cannot be saved in pruned form; use form='masked'")
    known = {stock.__name__ for stock in stock_classes.values()}
    if own not in known and (base := next((kind.__name__ for kind in type(model).__mro__ if kind.__name__ in known), None)):
        raise GateError(
            f"{own} is your own subclass, which save_pretrained cannot write in pruned form; call "
            f"gates.save_pruned(model, directory), which writes it as {base} if it computes the same"
        )
    if own not in known:
        raise GateError(
            f"{own} is not a class that an Auto class of Transformers loads, so it cannot be saved in pruned form; "
            "use form='masked' or one of " + ", ".join(sorted(known))
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
            f"    class {stock.__name__}(Pruned, transformers.{stock.__name__}):",
            "        pass",
        ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {name: f"{path.stem}.{stock.__name__}" for name, stock in stock_classes.items()}
