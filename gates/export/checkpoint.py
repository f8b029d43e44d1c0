"""Save and reload pruned models in one of three forms.

``pruned``: safetensors in the pruned shape with a self-contained modeling file.
``AutoModelFor….from_pretrained(directory, trust_remote_code=True)`` works where this project is not installed.
``stock``: safetensors in the pruned shape with a stock class, where possible (see :mod:`gates.export.stock`).
``masked``: the dense shape with zeroed heads, which stock Transformers loads without extra code.
"""

from __future__ import annotations

import copy
import inspect
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeGuard, cast, get_args

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from gates import modeling_pruned as pruned
from gates.attention.inputs import example_inputs, of_dtype
from gates.attention.sites import AttentionSite, find_attention
from gates.errors import GateError, first_line
from gates.export import stock as padding
from gates.export.card import ModelCard, card_text
from gates.export.cost import count_parameters, measure_cost
from gates.export.safe_load import check_pruned_config, holds_only_an_export, verify_checksums, write_checksums
from gates.export.stock import stock_model
from gates.files import written_whole
from gates.gating.latency import LatencyTable
from gates.surgery.masks import save_mask
from gates.surgery.modeling_file import auto_classes, saves_pruned_shape_
from gates.surgery.remove import check_removable, remove_heads_, zero_heads_
from gates.surgery.verify import check_same_outputs, check_same_weights, tolerance_of

SPACES = " \u2581\u0120"
"""Marks for a space in a vocabulary, which are no text by themselves."""

# Transformers 5 makes a tokenizer with only special tokens for a folder without tokenizer files. Every text then becomes
# unknown tokens, or none, and a model would be trained, measured and saved with it without an error.


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise :class:`GateError` for a tokenizer with only special tokens. Tokenizers without a readable vocabulary pass."""
    try:
        vocabulary = tokenizer.get_vocab()
    except NotImplementedError:
        return
    special = {*tokenizer.all_special_tokens}
    if not any(token not in special and token.strip(SPACES) for token in vocabulary):
        raise GateError(
            f"the tokenizer of {name} has only its {len(vocabulary)} special tokens, so its files may be missing; save the "
            "model's own tokenizer there, or give the folder or hub name of one"
        )


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens that stand for no text. The unknown token is one of them only if it has another purpose, as in GPT-2,
    which knows every byte."""
    others = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "cls", "sep", "mask")}
    return {*tokenizer.all_special_ids} - ({tokenizer.unk_token_id} - others)


def check_known(tokenizer: PreTrainedTokenizerBase, encoded: Sequence[Sequence[int]], name: str) -> None:
    """Raise :class:`GateError` if most tokens of the encoded texts are unknown, judged by about 500 evenly spread texts."""
    if not len(encoded):
        return
    sampled = [encoded[row] for row in range(0, len(encoded), max(1, len(encoded) // 500))]
    special = special_ids(tokenizer)
    unknown = None if tokenizer.unk_token_id in special else tokenizer.unk_token_id
    ids = [token for row in sampled for token in row if token not in special]
    if not ids:
        raise GateError(f"the tokenizer of {name} finds no tokens in the texts; give the tokenizer of the trained model")
    lost = sum(token == unknown for token in ids)
    text = {token for token in {*ids} if token != unknown and str(tokenizer.convert_ids_to_tokens(token)).strip(SPACES)}
    read = sum(token in text for token in ids)
    if lost > 0.5 * (lost + read):
        raise GateError(
            f"the tokenizer of {name} does not know the texts: {100 * lost / (lost + read):.0f} % of their tokens are "
            f"{tokenizer.unk_token}; give the tokenizer of the trained model, or texts in its language"
        )


Form = Literal["pruned", "stock", "masked"]


class SavesPretrained(Protocol):
    """Describe a tokenizer or a processor."""

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> object: ...


def save_pruned(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    mask: Tensor | None = None,
    *,
    values: Tensor | None = None,
    form: Form = "pruned",
    pad_heads: bool | LatencyTable = False,
    tokenizer: SavesPretrained | None = None,
    card: ModelCard | None = None,
    check_batch: Mapping[str, Tensor] | None = None,
    measure: Sequence[int] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write ``model`` without the heads that ``mask`` drops, and do not change the model.

    The directory is written under a temporary name, reloaded and compared with the gated model. Then it is renamed into
    place, so a directory of that name is always complete.

    Args:
        model: The model without attached gates. It must be dense, or pruned for the form ``pruned``.
        directory: The directory to create. It must not exist or must be empty.
        mask: The mask of 0 and 1, ``[heads]``. None for a pruned model, which keeps all its heads.
        values: The gate values to fold into the output projection, ``[heads]``.
        form: The form of the weights: ``pruned``, ``stock`` or ``masked``.
        pad_heads: Whether to add heads of zeros until all layers of a stack are equally large, for the form ``stock``. A table
            of measured times chooses the fastest numbers. See :func:`gates.export.stock.pad_heads`.
        tokenizer: The tokenizer or processor to save with the model; None for none.
        card: The facts for the README.
        check_batch: The model inputs for the comparison. Default: random inputs.
        measure: The batch sizes at which latency is measured for the README, on ``check_batch`` or random inputs. An empty
            list for parameters and FLOPs only, None for no measurement.
        overwrite: Whether to replace an earlier export in the directory, once this one is complete. A directory with other
            files is refused.

    Raises:
        GateError: If the directory is not empty, the tokenizer has only special tokens, the form is not possible for the
            model's class, or the comparison fails.

    >>> import tempfile
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = save_pruned(model, directory, torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1]), tokenizer=None)
    ...     sorted(file.name for file in path.iterdir() if file.suffix == ".json")
    ['checksums.json', 'config.json', 'mask.json']
    """
    directory = Path(directory)
    is_replaced = overwrite and holds_only_an_export(directory)
    if not is_replaced:
        refuse_taken(directory)
    given, model = model, as_stock_class(model)
    _check_form(model, form, pad_heads=pad_heads)
    text_tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor contains one
    if isinstance(text_tokenizer, PreTrainedTokenizerBase):
        check_vocabulary(text_tokenizer, repr(text_tokenizer.name_or_path))
    sites, card = find_attention(model), card or ModelCard()
    if mask is None:
        if not getattr(model.config, "pruned_attention", None):
            raise GateError("no mask is given, and no head of this model was removed; give the mask of the heads to keep")
        mask = torch.ones(sum(site.heads for site in sites))
    if form != "masked":
        check_removable(sites)
    check_batch = of_dtype(example_inputs(model) if check_batch is None else check_batch, model.dtype)
    cut, kept = copy_in_form(model, mask, form, check_batch, values=values, pad_heads=pad_heads)
    unpadded = count_parameters(copy_in_form(model, mask, "pruned", check_batch)[0]) if pad_heads else None
    with written_whole(directory, overwrite=is_replaced) as partial:
        cut.save_pretrained(partial)
        for file in partial.glob("*.safetensors"):  # safetensors lets only their owner read them
            shutil.copymode(partial / "config.json", file)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        save_mask(partial / "mask.json", mask.cpu(), sites, method=card.method)
        write_checksums(partial)
        reloaded = _loaded_like(model, partial)
        check_same_weights(cut, reloaded)
        check_same_outputs(given, reloaded, check_batch, mask if values is None else mask * values)
        if measure is not None:
            card = replace(card, cost=measure_cost(model, reloaded, check_batch, batch_sizes=measure))
        text = card_text(
            model,
            mask,
            form,
            card,
            auto=own_auto_class(model),
            parameters=count_parameters(cut),
            zero_heads=int((kept - mask).sum()),
            unpadded=unpadded,
            has_tokenizer=isinstance(tokenizer, PreTrainedTokenizerBase),
        )
        (partial / "README.md").write_text(text, encoding="utf-8")
    return directory


def _check_form(model: PreTrainedModel, form: Form, *, pad_heads: bool | LatencyTable) -> None:
    if form not in get_args(Form):
        raise GateError(f"form is {form!r}; expected one of {', '.join(get_args(Form))}")
    if pad_heads and form != "stock":
        raise GateError(f"pad_heads is for the form 'stock', but the form is {form!r}; remove it or use form='stock'")
    if form != "pruned":
        check_dense(model, form)


def _loaded_like(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """Return the model in a directory, on the device and with the attention implementation of another."""
    reloaded = load_pruned(directory, model_class=type(model))
    torch.nn.Module.to(reloaded, model.device)
    if reloaded.config._attn_implementation != model.config._attn_implementation:
        reloaded.set_attn_implementation(model.config._attn_implementation)
    return reloaded


def copy_in_form(
    model: PreTrainedModel,
    mask: Tensor,
    form: Form,
    example: Mapping[str, Tensor],
    *,
    values: Tensor | None = None,
    pad_heads: bool | LatencyTable = False,
) -> tuple[PreTrainedModel, Tensor]:
    """Return a copy of a model in one form, and the mask of its heads ``[heads]``, including heads of zeros.

    The removal of heads is checked on the example. The form ``masked`` has all heads and no padding. For the other arguments
    see :func:`save_pruned`.
    """
    cut, kept = copy.deepcopy(model).eval(), mask
    if form == "masked":
        return zero_heads_(cut, mask, values=values), kept
    if pad_heads:
        table = pad_heads if isinstance(pad_heads, LatencyTable) else None
        kept, values = padding.pad_heads(model, mask, table), mask if values is None else mask * values
    remove_heads_(cut, kept, values=values, example=example)
    if form == "stock":
        cut = stock_model(cut, model, kept, example, tolerance=tolerance_of(model.dtype))
    return cut, kept


def as_stock_class(model: PreTrainedModel) -> PreTrainedModel:
    """Return a view of a user's subclass as the stock class, with the same modules; a stock model is returned unchanged."""
    if not isinstance(model, PreTrainedModel):
        raise GateError(
            f"{type(model).__name__} is not a Transformers model; call prune_and_unload(), then save its Transformers part by "
            "save_pretrained, or all of it by torch.save"
        )
    kinds = [
        kind for kind in type(model).__mro__ if _is_model_class(kind) and getattr(transformers, kind.__name__, None) is kind
    ]
    if not kinds or kinds[0] is PreTrainedModel or hasattr(transformers, type(model).__name__):
        return model
    stock, is_pruned = kinds[0], bool(getattr(model.config, "pruned_attention", None))
    with torch.device("meta"):
        known = set((pruned.pruned_class(stock) if is_pruned else stock)(copy.deepcopy(model.config)).state_dict())
    if further := sorted(set(model.state_dict()) - known):
        raise GateError(
            f"{type(model).__name__} has the weight {further[0]!r}, which {stock.__name__} does not have; call "
            "prune_and_unload() and torch.save"
        )
    view = copy.copy(model)
    vars(view).pop("save_pretrained", None)
    view.__class__ = pruned.pruned_class(stock) if pruned.is_of(type(model), pruned.Pruned) else stock
    return view


def check_dense(model: PreTrainedModel, form: str) -> None:
    """Raise :class:`GateError` if the form needs a dense model and this one is pruned."""
    if getattr(model.config, "pruned_attention", None):
        raise GateError(f"the form {form!r} needs a dense model, but this one is pruned; use form='pruned'")


def load_pruned(
    directory: str | os.PathLike[str], *, model_class: type[PreTrainedModel] | None = None, new_heads: bool = False
) -> PreTrainedModel:
    """Load a directory that :func:`save_pruned` wrote, in any form, without running code from it.

    All files are checked before any weight is used.

    Args:
        directory: The directory that :func:`save_pruned` wrote.
        model_class: The stock class to load. Default: the class that was saved.
        new_heads: Whether weights that only ``model_class`` has, such as those of a classifier, may be drawn at random.

    Raises:
        GateError: If the directory is not a saved model, a file is damaged, weights are missing, or the config has
            impossible head counts or unsafe names.

    >>> import tempfile
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     _ = save_pruned(model, directory, torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1]), tokenizer=None)
    ...     [site.heads for site in find_attention(load_pruned(directory))]
    [3, 1]
    """
    directory = Path(directory)
    verify_checksums(directory)
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        name = config.architectures[0]
    except (OSError, ValueError, TypeError, IndexError) as error:
        raise GateError(
            f"{str(directory)!r} is not a saved model: its config.json cannot be read ({first_line(error)})"
        ) from error
    check_pruned_config(config)
    own = getattr(transformers, str(name), None)
    if not _is_model_class(own):
        raise GateError(f"{str(directory)!r} was saved from {name!r}; expected a class of Transformers")
    stock = model_class or own
    if hasattr(config, "pruned_attention"):
        stock = pruned.pruned_class(cast(Any, stock))
    loaded: tuple[PreTrainedModel, dict[str, set[str]]]
    try:
        loaded = stock.from_pretrained(directory, config=config, use_safetensors=True, output_loading_info=True)  # type: ignore[assignment]
    except Exception as error:  # safetensors and Transformers raise many kinds for damaged files
        raise GateError(f"the weights in {str(directory)!r} cannot be loaded: {first_line(error)}") from error
    model, report = loaded
    _check_complete(model, report["missing_keys"], directory, saved_as=str(name), new_heads=new_heads)
    _check_counts(model, directory, whole=issubclass(stock, own))
    if hasattr(config, "pruned_attention"):
        saves_pruned_shape_(model)
    return model


def _is_model_class(candidate: object) -> TypeGuard[type[PreTrainedModel]]:
    return inspect.isclass(candidate) and issubclass(candidate, PreTrainedModel)


def _check_complete(model: PreTrainedModel, missing: set[str], directory: Path, *, saved_as: str, new_heads: bool) -> None:
    """Raise an error unless all weights came from the directory; ``new_heads`` allows weights that were not saved."""
    if lost := pruned.lost_weights(model, missing):
        raise GateError(
            f"the weights in {str(directory)!r} lack {lost[0]!r} for {type(model).__name__}; copy or save them again, or load "
            f"them as {saved_as}"
        )
    if missing and not new_heads:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise GateError(
            f"{type(model).__name__} has {min(missing)!r}{more}, which the {saved_as} in {str(directory)!r} does not have; "
            "pass new_heads=True to draw such weights at random"
        )


def _check_counts(model: PreTrainedModel, directory: Path, *, whole: bool) -> None:
    """Raise an error unless the attention modules have the numbers of heads in the config. A part of the saved model, such as
    the decoder of an encoder-decoder, may lack modules."""
    shapes: Mapping[str, Any] = getattr(model.config, "pruned_attention", {})
    if not whole:
        modules = dict(model.base_model.named_modules())
        shapes = {name: shape for name, shape in shapes.items() if name in modules}
    found_sites: Sequence[AttentionSite] = ()
    try:
        found_sites = find_attention(model.base_model) if shapes else ()
    except GateError:
        if any(shape["heads"] for shape in shapes.values()):  # a model without heads has no attention
            raise
    sites = {site.name: (site.heads, site.kv_heads) for site in found_sites}
    for name, shape in shapes.items():
        stated, found = (shape["heads"], shape["kv_heads"]), sites.get(name, (0, 0))
        if stated != found:
            raise GateError(
                f"config.json in {str(directory)!r} states {stated[0]} heads and {stated[1]} key/value heads for {name!r}, "
                f"but its weights have {found[0]} and {found[1]}; copy or save it again"
            )


def own_auto_class(model: PreTrainedModel) -> str:
    """Return the Auto class for a model's class, preferably of its task; ``AutoModel`` if there is none."""
    own = [auto for auto, stock in auto_classes(model).items() if stock.__name__ == type(model).__name__]
    return min(own, key=lambda auto: auto == "AutoModelForPreTraining", default="AutoModel")


def refuse_taken(directory: str | os.PathLike[str]) -> None:
    """Raise :class:`GateError` if a directory to write is not empty or cannot be created."""
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise GateError(f"{str(directory)!r} exists already; give a new directory or remove it first")
    for place in directory.parents:
        if place.exists() and not place.is_dir():
            raise GateError(f"{str(directory)!r} is inside a file ({str(place)!r}); give a directory")
