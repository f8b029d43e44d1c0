"""Exports on the Hugging Face Hub: the folder as it is, with its model card, under the user's own token."""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path
from typing import Any, cast

import huggingface_hub
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from gates.errors import GateError, first_line
from gates.export.safe_load import check_pruned_config, verify_checksums
from gates.modeling_pruned import pruned_class
from gates.surgery.modeling_file import saves_pruned_shape_


def push_to_hub(directory: str | os.PathLike[str], repository: str, *, private: bool | None = None) -> str:
    """Upload a directory that an export wrote, of any form, or gates; returns the address of the commit.

    The repository is made if it is not there. Nothing in the directory changes.

    Args:
        directory: what :func:`gates.save_pruned` or :meth:`gates.GatedModel.save_pretrained` wrote.
        repository: its name on the Hub, ``user/name``.
        private: whether a new repository is private; by default as the account has it. One that exists stays as it is.

    Raises:
        GateError: if there is no such directory, the name is none, there is no token, or the Hub refuses or cannot be reached.

    >>> push_to_hub("no/such/folder", "someone/smaller")
    Traceback (most recent call last):
    gates.errors.GateError: 'no/such/folder' is no directory with an export; write one first
    """
    directory = Path(directory)
    if not directory.is_dir() or not any(directory.iterdir()):
        raise GateError(f"{str(directory)!r} is no directory with an export; write one first")
    check_can_push(repository)
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        done = api.upload_folder(repo_id=repository, folder_path=directory, commit_message="Upload pruned model")
    except Exception as error:  # of the Hub, of the network, or of the token
        raise GateError(
            f"{str(directory)!r} could not be uploaded to {repository!r}: {first_line(error)}; it is complete on this machine, "
            f"and gates.push_to_hub(directory, repository) tries again"
        ) from error
    return str(done)


def check_can_push(repository: str) -> None:
    """Whether a name can be one on the Hub, and whether there is a token; nothing is asked of the network."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise GateError(f"{repository!r} is no name of a repository on the Hub; expected user/name") from error
    if repository.count("/") != 1:
        raise GateError(f"{repository!r} names no user or organisation; expected user/name")
    if huggingface_hub.get_token() is None:
        raise GateError(f"there is no token to upload to {repository!r} with; log in with hf auth login, or set HF_TOKEN")
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise GateError(f"nothing can be uploaded to {repository!r} while HF_HUB_OFFLINE is set; unset it")


# Pruned models through Transformers' Auto classes by the code of this package, where it is installed.

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
