"""Load an encoder-decoder, and refuse a model that cannot translate or take the texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerBase

from gates.errors import GateError
from training.config import Source
from training.tasks.loading import config_of, load_pretrained

BEHIND_PADDING = (
    "roberta", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "camembert", "data2vec-text", "ibert", "xmod",
    "longformer", "mpnet", "esm", "lilt", "layoutlmv3", "luke", "markuplm",
)  # fmt: skip
"""Types of models whose first position is the one after the padding token's number, so that fewer are left for tokens."""


def load_encoder_decoder(source: Source) -> PreTrainedModel:
    """Load the encoder-decoder of a hub name or local folder; see :meth:`training.tasks.base.Task.build`."""
    config = config_of(source)
    check_encoder_decoder(config, str(source.backbone))
    model = load_pretrained(AutoModelForSeq2SeqLM, source, config, what="an encoder-decoder")
    if model.config.decoder_start_token_id is None:
        raise GateError(
            f"{source.backbone!r} does not state how its decoder starts; set decoder_start_token_id in its config.json"
        )
    return model


def check_encoder_decoder(config: Any, name: str) -> None:
    """Raise :class:`GateError` if a model of this config, called ``name``, cannot translate."""
    if type(config) not in AutoModelForSeq2SeqLM._model_mapping or not getattr(config, "is_encoder_decoder", False):
        raise GateError(
            f"{name!r} is a {config.model_type} model, which has no encoder and decoder; translation needs one that "
            "has, such as Marian, BART or T5"
        )


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise :class:`GateError` if the tokenizer has a token that the model, called ``name``, has no embedding for."""
    embeddings: Any = model.get_input_embeddings()
    rows, highest = int(embeddings.weight.shape[0]), max(tokenizer.get_vocab().values())
    if highest >= rows:
        raise GateError(
            f"the tokenizer has tokens up to number {highest}, but {name} has embeddings of {rows}; a model needs its own "
            "tokenizer (see --data.tokenizer), and a new one a vocab_size that suffices"
        )


def check_positions(
    config: Any, name: str, max_length: int, *, sides: Sequence[str] = ("encoder", "decoder"), mend: str = ""
) -> None:
    """Check that texts of a length fit into a model.

    Args:
        max_length: The longest source, target or translation in tokens.
        sides: The parts of the model that see such texts.
        mend: Another way to mend it, to end the error with.
    """
    for side in sides:
        limit = positions(config, side)
        if limit is not None and max_length > limit:
            raise GateError(
                f"max_length is {max_length}, but the {side} of {name} has {limit} positions; set "
                f"--data.max_length {limit} or lower{mend}"
            )


def check_longest(config: Any, name: str, longest: int) -> None:
    """Raise :class:`GateError` if a model of this config, called ``name``, takes fewer tokens than the longest text has."""
    limit = min((limit for side in ("encoder", "decoder") if (limit := positions(config, side)) is not None), default=longest)
    if longest > limit:
        raise GateError(
            f"the longest text has {longest} tokens, but {name} has {limit} positions; set --data.max_length {limit} or lower"
        )


def positions(config: Any, side: str) -> int | None:
    """Return the most tokens that the ``encoder`` or ``decoder`` takes; None where no table limits them, as in T5, or with
    rotary or relative positions alone."""
    own: Any = getattr(config, side, None)
    own = own if hasattr(own, "model_type") else config  # two models in one
    if getattr(own, "rope_parameters", None) or getattr(own, "position_biased_input", True) is False:
        return None
    if getattr(own, "position_embedding_type", None) == "rotary":  # ESM
        return None
    stated = (
        getattr(config, f"max_{side}_position_embeddings", None),  # LED
        getattr(config, "max_position_embeddings", None),
        getattr(own, "max_position_embeddings", None),
        getattr(own, "max_seq_len", None),  # MPT, whose ALiBi is a table
    )
    limit = next((limit for limit in stated if isinstance(limit, int) and limit > 0), None)  # XLNet states -1
    if limit is not None and own.model_type in BEHIND_PADDING:
        return limit - 1 - (1 if own.model_type == "mpnet" else own.pad_token_id or 0)
    return limit
