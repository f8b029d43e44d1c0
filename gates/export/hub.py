"""Upload exports to the Hugging Face Hub, and register pruned models with Transformers' Auto classes."""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path
from typing import Any

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
    """Upload an exported directory of any form, or saved gates, under the user's token, and return the commit's address.

    A missing repository is created. The directory does not change.

    Args:
        directory: The directory that :func:`gates.save_pruned` or :meth:`gates.GatedModel.save_pretrained` wrote.
        repository: The repository on the Hub, ``user/name``.
        private: Whether a new repository is private. Default: the setting of the account.

    Raises:
        GateError: If the directory or the token is missing, the name is invalid, or the Hub refuses or cannot be reached.

    >>> push_to_hub("no/such/folder", "someone/smaller")
    Traceback (most recent call last):
    gates.errors.GateError: 'no/such/folder' is not a directory with an export; write one first
    """
    directory = Path(directory)
    if not directory.is_dir() or not any(directory.iterdir()):
        raise GateError(f"{str(directory)!r} is not a directory with an export; write one first")
    check_can_push(repository)
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        done = api.upload_folder(repo_id=repository, folder_path=directory, commit_message="Upload pruned model")
    except Exception as error:  # from the Hub, the network, or the token
        raise GateError(
            f"{str(directory)!r} could not be uploaded to {repository!r}: {first_line(error)}; the directory is complete, so "
            f"call gates.push_to_hub(directory, repository) again"
        ) from error
    return str(done)


def check_can_push(repository: str) -> None:
    """Raise an error for an invalid repository name or a missing token, without using the network."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise GateError(f"{repository!r} is not a repository name on the Hub; expected user/name") from error
    if repository.count("/") != 1:
        raise GateError(f"{repository!r} has no user or organisation; expected user/name")
    if huggingface_hub.get_token() is None:
        raise GateError(f"there is no token for an upload to {repository!r}; log in with hf auth login, or set HF_TOKEN")
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise GateError(f"nothing can be uploaded to {repository!r} while HF_HUB_OFFLINE is set; unset it")


def register() -> None:
    """Make every Auto class of Transformers load pruned models without ``trust_remote_code``, until the process ends.

    Afterwards ``AutoModelFor….from_pretrained(directory)`` builds a model whose config has ``pruned_attention`` from a class of
    this package. No code of the directory runs, the config is checked, and only safetensors are read. Other models,
    ``trust_remote_code=True`` and other registered classes are not affected. Importing :mod:`gates` does not call this
    function.

    >>> import gates
    >>> gates.register()  # doctest: +SKIP
    >>> model = AutoModelForCausalLM.from_pretrained("smaller")  # doctest: +SKIP
    """
    classes: list[Any] = [known for known in vars(modeling_auto).values() if inspect.isclass(known)]
    autos = [auto for auto in classes if getattr(auto, "_model_mapping", None) is not None]
    if not autos:
        raise GateError(
            "the Auto classes of the installed Transformers have no table of models; use gates.load_pruned(directory)"
        )
    for auto in autos:
        if not hasattr(auto._model_mapping, "gives_both"):
            auto._model_mapping = _aware_of_pruned(auto._model_mapping)


def _aware_of_pruned(mapping: Any) -> Any:
    """Return a table of models that shares everything with ``mapping``, but returns classes that load both kinds of models."""

    def get(self: Any, key: type) -> Any:
        found = type(mapping).__getitem__(self, key)
        return tuple(map(loading_both, found)) if isinstance(found, (tuple, list)) else loading_both(found)

    aware: Any = type(type(mapping).__name__, (type(mapping),), {"__getitem__": get, "gives_both": True})
    table = aware.__new__(aware)
    vars(table).update(vars(mapping))
    return table


@functools.cache
def loading_both(stock: Any) -> Any:
    """Return a subclass of a stock class that loads dense and pruned models, by their config.

    It keeps the name and the module of the stock class, because Transformers recognises its own classes by them. Anything but
    a model class of Transformers itself is returned unchanged.
    """
    is_model = inspect.isclass(stock) and issubclass(stock, PreTrainedModel)
    if not is_model or not stock.__module__.startswith("transformers.models."):
        return stock

    def from_pretrained(cls: type, directory: str | os.PathLike[str], *args: Any, config: Any = None, **more: Any) -> Any:
        if not _is_pruned(config):
            return stock.from_pretrained(directory, *args, config=config, **more)
        check_pruned_config(config)
        if Path(directory).is_dir():
            verify_checksums(directory)
        loaded = pruned_class(stock).from_pretrained(directory, *args, config=config, **{"use_safetensors": True, **more})
        saves_pruned_shape_(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    def from_config(cls: type, config: Any, **more: Any) -> Any:
        if not _is_pruned(config):
            return stock._from_config(config, **more)
        check_pruned_config(config)
        return saves_pruned_shape_(pruned_class(stock)._from_config(config, **more))

    methods = {"from_pretrained": classmethod(from_pretrained), "_from_config": classmethod(from_config)}
    return type(stock.__name__, (stock,), {"__module__": stock.__module__, **methods})


def _is_pruned(config: Any) -> bool:
    return getattr(config, "pruned_attention", None) is not None
