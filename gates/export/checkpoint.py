"""Save and reload pruned models.

``pruned``: safetensors in the pruned shape with a self-contained modeling file, so that
``AutoModelFor….from_pretrained(directory, trust_remote_code=True)`` works where this project is not installed.
``stock``: safetensors in the pruned shape with a stock class, where it can have one (see :mod:`gates.export.stock`).
``masked``: the dense shape with zeroed heads, which stock Transformers loads with no extra code.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Collection, Mapping, Sequence
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
from gates.export.safe_load import check_pruned_config, verify_checksums, write_checksums
from gates.export.stock import stock_model
from gates.files import written_whole
from gates.surgery.masks import save_mask
from gates.surgery.modeling_file import auto_classes, saves_pruned_shape_
from gates.surgery.remove import check_removable, remove_heads_, zero_heads_
from gates.surgery.verify import check_same_outputs, check_same_weights, tolerance_of

# Whether a tokenizer knows what it reads.
#
# Of a folder with a model and no tokenizer files, Transformers 5 makes an empty tokenizer of special tokens alone. Every text
# is then unknown tokens, or none at all, and a model would be trained, measured and saved with it without a word.

MOSTLY = 0.5
"""Share of unknown tokens above which texts are not read but lost."""
SAMPLED = 500
"""Texts that are looked at."""
SPACES = " \u2581\u0120"
"""Marks for a space in a vocabulary, which stand for no text by themselves."""


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise :class:`GateError` for a tokenizer of special tokens alone. How many others there are does not matter: bytes,
    characters and few words will do. A tokenizer whose class does not tell its vocabulary passes."""
    try:
        vocabulary = tokenizer.get_vocab()
    except NotImplementedError:
        return
    special = {*tokenizer.all_special_tokens}
    if not any(token not in special and token.strip(SPACES) for token in vocabulary):
        raise GateError(
            f"the tokenizer of {name} has {len(vocabulary)} special tokens and no other, as Transformers makes one where the "
            "tokenizer's files are missing; save the model's own tokenizer there, or name the folder or hub name of one"
        )


def check_known(tokenizer: PreTrainedTokenizerBase, encoded: Sequence[Sequence[int]], name: str) -> None:
    """Raise :class:`GateError` for a tokenizer that does not know most of the texts that it has encoded. Some of them, evenly
    spread, are looked at; none is empty or padded."""
    if not len(encoded):
        return
    sampled = [encoded[row] for row in range(0, len(encoded), max(1, len(encoded) // SAMPLED))]
    others = {getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "cls", "sep")}
    # Where the unknown token has another use too, as of GPT-2, which knows every byte, it does not tell anything.
    unknown = None if tokenizer.unk_token_id in others else tokenizer.unk_token_id
    special = {*tokenizer.all_special_ids} - {unknown}
    ids = [token for row in sampled for token in row if token not in special]
    if not ids:
        raise GateError(
            f"the tokenizer of {name} makes no tokens of the texts; give the tokenizer that the model was trained with"
        )
    lost = sum(token == unknown for token in ids)
    text = {token for token in {*ids} if token != unknown and str(tokenizer.convert_ids_to_tokens(token)).strip(SPACES)}
    read = sum(token in text for token in ids)
    if lost > MOSTLY * (lost + read):
        raise GateError(
            f"the tokenizer of {name} does not know the texts: {100 * lost / (lost + read):.0f} % of their tokens are "
            f"{tokenizer.unk_token}; give the tokenizer that the model was trained with, or texts in its language"
        )


Form = Literal["pruned", "stock", "masked"]


class SavesPretrained(Protocol):
    """A tokenizer or a processor."""

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> object: ...


def save_pruned(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    mask: Tensor | None = None,
    *,
    values: Tensor | None = None,
    form: Form = "pruned",
    pad_heads: bool = False,
    tokenizer: SavesPretrained | None = None,
    card: ModelCard | None = None,
    check_batch: Mapping[str, Tensor] | None = None,
    measure: Sequence[int] | None = None,
) -> Path:
    """Write ``model`` without the heads that ``mask`` drops; the model itself is not changed.

    The directory is first written under a temporary name, reloaded and compared with the gated model in memory; only then
    is it renamed into place, so a directory of that name is always complete.

    Args:
        model: model without attached gates; dense, or for the form ``pruned`` also pruned before.
        directory: directory to create; must not exist or be empty.
        mask: 0/1 per head, ``[heads]``; None for a model whose heads were removed already, which keeps those it has.
        values: gate values to fold into the output projection, ``[heads]``.
        form: form of the weights: ``pruned``, ``stock`` or ``masked``.
        pad_heads: for the form ``stock``, whether heads of zeros make all layers of a stack equally large, where a mask leaves
            different numbers; see :func:`gates.export.stock.pad_heads`.
        tokenizer: tokenizer or processor to save beside the model, so that the directory is all a user needs; None for a model
            that has none.
        card: contents of the README.
        check_batch: model inputs for the comparison; by default random ones.
        measure: batch sizes at which latency is measured for the README, on ``check_batch`` or random inputs, beside the counts
            of parameters and FLOPs; an empty list for the counts alone, None for nothing.

    Raises:
        GateError: if the directory is taken, the tokenizer has special tokens alone, the model's class is not a stock one, the
            stock form is not possible, or the comparison fails.

    >>> import tempfile
    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = save_pruned(model, directory, torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1]), tokenizer=None)
    ...     sorted(file.name for file in path.iterdir() if file.suffix == ".json")
    ['checksums.json', 'config.json', 'mask.json']
    """
    directory = Path(directory)
    refuse_taken(directory)
    own, model = model, as_stock_class(model)
    _check_form(model, form, pad_heads=pad_heads)
    own_tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor has one
    if isinstance(own_tokenizer, PreTrainedTokenizerBase):
        check_vocabulary(own_tokenizer, repr(own_tokenizer.name_or_path))
    sites, card = find_attention(model), card or ModelCard()
    if mask is None:
        if not getattr(model.config, "pruned_attention", None):
            raise GateError(
                "no mask is given, and no head of this model was removed before; give the mask of the heads to keep"
            )
        mask = torch.ones(sum(site.heads for site in sites))
    if form != "masked":
        check_removable(sites)
    check_batch = of_dtype(example_inputs(model) if check_batch is None else check_batch, model.dtype)
    cut, kept = copy_in_form(model, mask, form, check_batch, values=values, pad_heads=pad_heads)
    unpadded = count_parameters(copy_in_form(model, mask, "pruned", check_batch)[0]) if pad_heads else None
    with written_whole(directory) as partial:
        cut.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        save_mask(partial / "mask.json", mask.cpu(), sites, method=card.method)
        write_checksums(partial)
        reloaded = _loaded_like(model, partial)
        check_same_weights(cut, reloaded)
        check_same_outputs(own, reloaded, check_batch, mask if values is None else mask * values)
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


def _check_form(model: PreTrainedModel, form: Form, *, pad_heads: bool) -> None:
    """Raise an error for a form that there is not, or that this model cannot have."""
    if form not in get_args(Form):
        raise GateError(f"there is no form {form!r}; expected one of {', '.join(get_args(Form))}")
    if pad_heads and form != "stock":
        raise GateError(f"pad_heads is for the form 'stock', and the form is {form!r}; leave it out or use form='stock'")
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
    pad_heads: bool = False,
) -> tuple[PreTrainedModel, Tensor]:
    """Return a copy of a model in one form, and its heads ``[heads]``: those of the mask and, with ``pad_heads``, some of
    zeros.

    The removal of heads is checked on the example. The form ``masked`` has all heads, so that nothing is padded there. For the
    other arguments see :func:`save_pruned`.
    """
    cut, kept = copy.deepcopy(model).eval(), mask
    if form == "masked":
        return zero_heads_(cut, mask, values=values), kept
    if pad_heads:
        kept, values = padding.pad_heads(model, mask), mask if values is None else mask * values
    remove_heads_(cut, kept, values=values, example=example)
    if form == "stock":
        cut = stock_model(cut, model, kept, example, tolerance=tolerance_of(model.dtype))
    return cut, kept


def as_stock_class(model: PreTrainedModel) -> PreTrainedModel:
    """A model of one's own subclass as one of the stock class, with the same modules; a model of a stock class as it is."""
    if not isinstance(model, PreTrainedModel):
        raise GateError(
            f"{type(model).__name__} is no Transformers model, so it cannot be exported; call prune_and_unload(), then save "
            "the Transformers model in it by save_pretrained, or all of it by torch.save"
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
            f"{type(model).__name__} has the weight {further[0]!r}, which {stock.__name__} does not have, so it cannot be "
            "exported; call prune_and_unload() and torch.save"
        )
    view = copy.copy(model)
    vars(view).pop("save_pretrained", None)
    view.__class__ = pruned.pruned_class(stock) if pruned.is_of(type(model), pruned.Pruned) else stock
    return view


def check_dense(model: PreTrainedModel, form: str) -> None:
    """Raises :class:`GateError` for a model that was pruned before, if only a dense one has the form."""
    if getattr(model.config, "pruned_attention", None):
        raise GateError(
            f"the form {form!r} needs a dense model, and this one was pruned before; use form='pruned' (--format remote-code)"
        )


def load_pruned(
    directory: str | os.PathLike[str], *, model_class: type[PreTrainedModel] | None = None, new_heads: bool = False
) -> PreTrainedModel:
    """Load a directory that :func:`save_pruned` wrote, in any form, without running code from it.

    Args:
        directory: directory that :func:`save_pruned` wrote.
        model_class: stock class to load it as; by default the one it was saved from.
        new_heads: whether weights that only ``model_class`` has, such as those of a classifier, may be drawn anew. Weights that
            the saved model has are never drawn.

    Raises:
        GateError: if the directory is not a saved model, a file is damaged, weights are missing, or its config states
            impossible head counts or names that are not plain; all before any weight is used.

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
        raise GateError(f"{str(directory)!r} was saved from {name!r}, a class that Transformers does not have")
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
    """Whether all weights came from the directory; with ``new_heads``, all that the saved model has."""
    if lost := pruned.lost_weights(model, missing):
        raise GateError(
            f"the weights in {str(directory)!r} lack {lost[0]!r} for {type(model).__name__}; copy or save them again, or load "
            f"them as {saved_as}"
        )
    if missing and not new_heads:
        raise GateError(
            f"{type(model).__name__} has {min(missing)!r}{_and_more(missing)}, which the {saved_as} in {str(directory)!r} does "
            "not have; pass new_heads=True to draw such weights anew"
        )


def _and_more(names: Collection[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _check_counts(model: PreTrainedModel, directory: Path, *, whole: bool) -> None:
    """Whether the attention modules have the heads that the config states for them.

    A model that is not the ``whole`` one that was saved, such as the decoder of an encoder-decoder, may lack some of them.
    """
    shapes: Mapping[str, Any] = getattr(model.config, "pruned_attention", {})
    if not whole:
        modules = dict(model.base_model.named_modules())
        shapes = {name: shape for name, shape in shapes.items() if name in modules}
    found_sites: Sequence[AttentionSite] = ()
    try:
        found_sites = find_attention(model.base_model) if shapes else ()
    except GateError:
        if any(shape["heads"] for shape in shapes.values()):  # a model without any head has no attention to be found
            raise
    sites = {site.name: (site.heads, site.kv_heads) for site in found_sites}
    for name, shape in shapes.items():
        stated, found = (shape["heads"], shape["kv_heads"]), sites.get(name, (0, 0))
        if stated != found:
            raise GateError(
                f"config.json in {str(directory)!r} states {stated[0]} heads and {stated[1]} key/value heads for {name!r}, "
                f"whose weights are of {found[0]} and {found[1]}; copy or save it again"
            )


def own_auto_class(model: PreTrainedModel) -> str:
    """The Auto class that loads a model's own class, by its task's name where there is one; ``AutoModel`` if none does."""
    own = [auto for auto, stock in auto_classes(model).items() if stock.__name__ == type(model).__name__]
    return min(own, key=lambda auto: auto == "AutoModelForPreTraining", default="AutoModel")


def refuse_taken(directory: str | os.PathLike[str]) -> None:
    """Raises :class:`GateError` if a directory to be written exists and is not empty, or cannot be made."""
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise GateError(f"{str(directory)!r} exists already; give a new directory or remove it first")
    for place in directory.parents:
        if place.exists() and not place.is_dir():
            raise GateError(f"{str(directory)!r} lies in a file ({str(place)!r}); give a directory")
