"""Load or make the model of a task, with one sentence for whatever is wrong with it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from gates.errors import GateError, first_line
from gates.export.checkpoint import check_vocabulary
from gates.export.safe_load import check_pruned_config, verify_checksums
from gates.modeling_pruned import pruned_class
from training.config import PrunerOptions, Source
from training.config.data import TOKENIZER_FILES
from training.runs import progress


def read_config(backbone: str, *, trust_remote_code: bool = False) -> Any:
    """Return the config of a hub name or local folder."""
    if Path(backbone).is_dir():
        verify_checksums(backbone)
    try:
        return AutoConfig.from_pretrained(backbone, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise GateError(f"cannot load a model from {backbone!r}: {first_line(error)}") from error
        raise GateError(
            f"{backbone!r} comes with code of its own; read that code, and if you trust it, pass --model.trust_remote_code true"
        ) from error
    except (OSError, KeyError) as error:
        raise GateError(
            f"cannot load a model from {backbone!r}: it is neither a folder with a config.json of a known architecture nor a "
            "reachable hub name; check the path or the network"
        ) from error
    except Exception as error:  # fields that are none, of a type that cannot be, or nested without end
        raise GateError(f"cannot load a model from {backbone!r}: its config.json is damaged ({first_line(error)})") from error


def config_of(source: Source) -> Any:
    """Return the config of a source's backbone; see :func:`read_config`."""
    return read_config(str(source.backbone), trust_remote_code=source.trust_remote_code)


def check_class(auto: Any, config: Any, name: str, purpose: str) -> None:
    """Raise :class:`GateError` if an Auto class has no model of this config, called ``name``."""
    if type(config) not in auto._model_mapping and not hasattr(config, "auto_map"):
        raise GateError(f"{name!r} is a {config.model_type} model, which does not {purpose}")


def read_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a hub name or local folder. No code from it is run."""
    folder = Path(name)
    if folder.is_dir():
        verify_checksums(folder)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except ImportError as error:
        raise GateError(
            f"the tokenizer of {name!r} needs a package that is not installed ({first_line(error)}); pip install "
            "sentencepiece sacremoses"
        ) from error
    except Exception as error:  # damaged files raise errors of many kinds
        if not folder.is_dir() or not any((folder / file).is_file() for file in TOKENIZER_FILES):
            raise GateError(
                f"cannot load a tokenizer from {name!r}: it is neither a folder with tokenizer files nor a hub name that can "
                "be reached; check the path or the network"
            ) from error
        raise GateError(
            f"the tokenizer files in {name!r} cannot be read ({type(error).__name__}: {first_line(error)}); copy them again"
        ) from error
    check_vocabulary(tokenizer, repr(name))
    return tokenizer


def load_pretrained(auto: Any, source: Source, config: Any, *, what: str, resized: bool = False) -> PreTrainedModel:
    """Load the weights of a hub name or local folder, exports of this project among them, in the type of the source.

    Args:
        config: The config that :func:`read_config` gave, perhaps changed.
        what: The name of the model in errors, such as ``a classifier``.
        resized: Whether weights of another size are initialised again.
    """
    more: dict[str, Any] = {"trust_remote_code": source.trust_remote_code}
    if hasattr(config, "pruned_attention"):  # an export of this project, whose own code is not needed
        check_pruned_config(config)
        auto, more = pruned_class(auto._model_mapping[type(config)]), {}
    try:
        model, info = auto.from_pretrained(
            source.backbone,
            config=config,
            output_loading_info=True,
            dtype=getattr(torch, source.dtype),
            ignore_mismatched_sizes=resized,
            use_safetensors=None if source.allow_pickle else True,
            **more,
        )
    except Exception as error:  # damaged weights raise errors of many kinds
        reason = first_line(error)
        folder = Path(str(source.backbone))
        pickled, readable = any(folder.glob("*.bin")), any(folder.glob("*.safetensors"))
        if any(folder.glob("*.onnx")) and not pickled and not readable:
            reason += " (its files are for ONNX Runtime; give an export of another --format)"
        elif any(folder.glob("*.gguf")) and not pickled and not readable:
            reason += " (a GGUF file, whose weights are rounded for inference, is not read; give the original model)"
        elif not source.allow_pickle and "safetensors" in reason and (pickled or not folder.is_dir()):
            reason += " (a pytorch_model.bin is read only with --model.allow_pickle true)"
        raise GateError(f"cannot load {what} from {source.backbone!r}: {reason}") from error
    _check_new_weights(model, info, source)
    return model if source.is_half else model.float()  # Transformers leaves frequencies and the like in float32


def _check_new_weights(model: PreTrainedModel, info: Mapping[str, Any], source: Source) -> None:
    """Check the part on top of a model that is not fine-tuned: warn if it is not in the files, refuse it at another size."""
    if not isinstance(source, PrunerOptions) or source.finetune > 0:
        return
    for name, in_file, wanted in info["mismatched_keys"]:
        raise GateError(
            f"{name!r} has the shape {list(in_file)} in the files of {str(source.backbone)!r} and {list(wanted)} for these "
            "data, and --model.finetune is 0; give data with the classes of the model, or set --model.finetune to some epochs"
        )
    if new := sorted(name for name in info["missing_keys"] if not name.startswith(f"{model.base_model_prefix}.")):
        progress.notice(
            f"warning: {new[0]!r} is not in the files of {str(source.backbone)!r}, so its values are random, and "
            "--model.finetune is 0; fine-tune the model first, or set --model.finetune to some epochs"
        )


def from_config(auto: Any, fields: Mapping[str, Any], ours: Mapping[str, Any] | None = None) -> PreTrainedModel:
    """Make a new model from config fields, with ``model_type`` among them."""
    fields = dict(fields)
    model_type = fields.pop("model_type", None)
    ours = ours or {}
    known = _default_config(model_type)
    if "image_size" in ours:
        if not hasattr(known, "image_size"):
            raise GateError(
                f"model.from_scratch is a model of type {model_type!r}, which takes no images; give one such as vit"
            )
    elif ours and not hasattr(known.get_text_config(), "vocab_size"):
        raise GateError(f"model.from_scratch is a model of type {model_type!r}, which takes no text; give one such as bert")
    for name in fields:
        if name not in ours and not hasattr(known, name):  # Transformers would keep it without a warning
            near = difflib.get_close_matches(name, sorted({*known.to_dict(), *known.attribute_map}), n=1)
            raise GateError(
                f"model.from_scratch has the field {name!r}, which a config of {model_type} does not have"
                + (f"; did you mean {near[0]!r}?" if near else "; see its documentation")
            )
    try:
        model: PreTrainedModel = auto.from_config(AutoConfig.for_model(model_type, **{**ours, **fields}))
    except Exception as error:  # configs and models raise errors of their own kinds
        raise GateError(f"model.from_scratch does not make a model: {first_line(error)}; correct its fields") from error
    return model


def _default_config(model_type: Any) -> PreTrainedConfig:
    if model_type is None:
        raise GateError("model.from_scratch has no model_type; give one, such as model_type: bert")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type).lower(), list(CONFIG_MAPPING), n=1)
        raise GateError(
            f"model.from_scratch has the model_type {model_type!r}, which Transformers does not know"
            + (f"; did you mean {near[0]!r}?" if near else "; give one such as bert")
        )
    try:
        return AutoConfig.for_model(model_type)
    except Exception as error:
        raise GateError(f"model.from_scratch is not a config of Transformers: {first_line(error)}") from error


def base_model_name(source: Source) -> str:
    """Return the name of a run's model: a hub name as it is; the last part of a local folder, since paths mean nothing
    elsewhere; the type of a new model."""
    if source.backbone is None:
        return str((source.from_scratch or {}).get("model_type", "a new model"))
    name = source.backbone
    return Path(name).name if Path(name).exists() else name
