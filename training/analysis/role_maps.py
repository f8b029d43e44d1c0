"""Attention of single heads in the first sentences, as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

from gates.roles.observe import observe_weights
from gates.roles.roles import Role
from gates.sites import KINDS
from training.analysis.observed import ObservedModel
from training.analysis.plots import attention_map
from training.analysis.role_texts import RoleTexts, padded
from training.tasks.encoding import shifted_right

SENTENCES = 3
"""That are shown."""
TOKENS = (5, 30)
"""Of a sentence that can be shown."""


@dataclass(frozen=True)
class Shown:
    """One sentence with the attention of all heads.

    Args:
        tokens: by kind of attention, of queries and of keys.
        weights: by site, ``[heads, query, key]``.
    """

    tokens: dict[str, tuple[list[str], list[str]]]
    weights: list[Tensor]


def shown_sentences(observed: ObservedModel, texts: RoleTexts) -> list[Shown]:
    """The sentences that are to be shown, by default the first of the treebank that are neither short nor long; those of an
    encoder-decoder are read by its decoder too."""
    rows = [pieces.ids for pieces in texts.trees.pieces if TOKENS[0] <= len(pieces.ids) <= TOKENS[1]][:SENTENCES]
    rows = texts.shown or rows or [texts.trees.pieces[0].ids]
    found = []
    with observed.at_rest():
        for row in rows:
            ids = padded([row], 0).to(observed.device)
            inputs, weights = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, [torch.empty(0)] * len(observed.sites)
            if observed.is_encoder_decoder:
                inputs["decoder_input_ids"] = shifted_right(observed.backbone, ids)

            def take(site: int, own: Tensor, weights: list[Tensor] = weights) -> None:
                weights[site] = own[0].float().cpu()

            with observe_weights(observed.backbone, observed.sites, take):
                observed.backbone(**inputs)
            source, target = (_names(observed, inputs.get(name, ids)) for name in ("input_ids", "decoder_input_ids"))
            sides = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}
            found.append(Shown({kind: sides[kind] for kind in KINDS}, weights))
    return found


def _names(observed: ObservedModel, ids: Tensor) -> list[str]:
    return [str(token) for token in observed.tokenizer.convert_ids_to_tokens(ids[0].tolist())]


def maps_of_heads(observed: ObservedModel, shown: Sequence[Shown], heads: Sequence[tuple[int, int]]) -> dict[str, Figure]:
    """The attention of some heads in every sentence, by file name.

    Args:
        observed: the model.
        shown: sentences.
        heads: the number of its site, and its number there, of each.
    """
    figures = {}
    for site, head in heads:
        name, kind = f"{observed.sites[site].label}.{head}", observed.sites[site].kind
        for number, one in enumerate(shown, start=1):
            drawn = attention_map(one.weights[site][head].numpy(), *one.tokens[kind], f"{name}, sentence {number}")
            figures[f"attention_{name.replace('.', '_')}_{number}"] = drawn
    return figures


def strongest_maps(observed: ObservedModel, shown: Shown, roles: Sequence[Role]) -> dict[str, Figure]:
    """The strongest head of every role that some head has, in one sentence, by file name."""
    places, sites, figures = observed.heads, observed.sites, {}
    for role in roles:
        if not bool(role.holds.any()):
            continue
        best = int(torch.where(role.holds, role.strength, -1.0).argmax())
        site, head = places[best]
        name, kind = role.rule.name, sites[site].kind
        by = "" if role.column[best] == name else f"{role.column[best]}, "
        title = f"{sites[site].label}.{head}: {name}\n{by}{100 * float(role.strength[best]):.0f} %"
        figures[f"attention_{name.replace('-', '_')}"] = attention_map(
            shown.weights[site][head].numpy(), *shown.tokens[kind], title
        )
    return figures
