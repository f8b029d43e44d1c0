"""Pruned models through Transformers' Auto classes by the code of this package, where it is installed."""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from gates.errors import GateError
from gates.export.safe_load import check_pruned_config, verify_checksums
from gates.surgery.modeling_file import saves_pruned_shape_
from gates.surgery.pruned import pruned_class

STOCK = "transformers.models."
"""Beginning of the names of modules with Transformers' own models."""


def register() -> None:
    """Have every Auto class of Transformers load pruned models without ``trust_remote_code``, for the rest of this process.

    Afterwards ``AutoModelFor….from_pretrained(directory)`` builds a model whose config has ``pruned_attention`` from a class of
    this package, whatever lies in the directory: no code of it runs, its config is checked, and only safetensors are read. A
    model that was not pruned loads as the stock class, as before, and ``trust_remote_code=True`` means what it meant. What an
    Auto class had registered of others stays. Calling it again changes nothing.

    Importing :mod:`gates` does not do this by itself, since no import has side effects here.

    Raises:
        GateError: if the Auto classes of the installed Transformers have no table of models.

    >>> import gates
    >>> gates.register()  # doctest: +SKIP
    >>> model = AutoModelForCausalLM.from_pretrained("smaller")  # doctest: +SKIP
    """
    classes: list[Any] = [known for known in vars(modeling_auto).values() if inspect.isclass(known)]
    autos = [auto for auto in classes if getattr(auto, "_model_mapping", None) is not None]
    if not autos:
        raise GateError(
            "the Auto classes of the installed Transformers have no table of models to register in; load with "
            "gates.load_pruned(directory)"
        )
    for auto in autos:
        if not hasattr(auto._model_mapping, "gives_both"):
            auto._model_mapping = _aware_of_pruned(auto._model_mapping)


def _aware_of_pruned(mapping: Any) -> Any:
    """A table of models by config class that shares everything with ``mapping``, and gives out classes that load both kinds."""

    def looked_up(self: Any, key: type) -> Any:
        found = type(mapping).__getitem__(self, key)
        return tuple(map(_loading_both, found)) if isinstance(found, (tuple, list)) else _loading_both(found)

    aware: Any = type(type(mapping).__name__, (type(mapping),), {"__getitem__": looked_up, "gives_both": True})
    table = aware.__new__(aware)
    vars(table).update(vars(mapping))
    return table


def _loading_both(found: Any) -> Any:
    """What a table gives out for one of its entries; what is no model class of Transformers itself stays as it is."""
    is_stock = inspect.isclass(found) and issubclass(found, PreTrainedModel) and found.__module__.startswith(STOCK)
    return loading_both(found) if is_stock else found


@functools.cache
def loading_both(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A stock class that loads as itself, or in the shape of a pruned model where the config states one.

    It keeps the name and the module of the stock class, by which Transformers tells its own classes from those of others.
    """

    def from_pretrained(cls: type, directory: str | os.PathLike[str], *args: Any, config: Any = None, **more: Any) -> Any:
        if not _is_pruned(config):
            return stock.from_pretrained(directory, *args, config=config, **more)
        check_pruned_config(config)
        if Path(directory).is_dir():
            verify_checksums(directory)
        loaded = pruned_class(cast(Any, stock)).from_pretrained(
            directory, *args, config=config, **{"use_safetensors": True, **more}
        )
        saves_pruned_shape_(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    def from_config(cls: type, config: Any, **more: Any) -> Any:
        if not _is_pruned(config):
            return stock._from_config(config, **more)
        check_pruned_config(config)
        return saves_pruned_shape_(pruned_class(cast(Any, stock))._from_config(config, **more))

    methods = {"from_pretrained": classmethod(from_pretrained), "_from_config": classmethod(from_config)}
    return type(stock.__name__, (stock,), {"__module__": stock.__module__, **methods})


def _is_pruned(config: Any) -> bool:
    return getattr(config, "pruned_attention", None) is not None
