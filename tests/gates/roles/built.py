"""A BERT whose weights are set by hand, so that what each head does is known, with sentences for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import BertConfig, BertModel

from gates import find_attention
from gates.roles.measures import (
    RoleShares,
    Trees,
    positional_shares,
    rare_token_shares,
    sink_shares,
    syntactic_shares,
    token_counts,
)
from gates.roles.roles import BROAD, FIRST_TOKEN, POSITIONAL, RARE, SEPARATOR, SYNTACTIC, Role, assign, observe_weights
from gates.roles.shares import View

PLACES, HEADS, RARITIES = 16, 4, 3
CLS, SEP, FIRST = 1, 2, 3
RELATIONS = ["near", "far"]
VOCABULARY = FIRST + PLACES * RARITIES


def token(head: int, rarity: int) -> int:
    """The token of a word whose head stands at a place among the tokens."""
    return FIRST + head * RARITIES + rarity


def built_model() -> BertModel:
    """One layer with four heads: the token before, the gold head, the rarest token, and all tokens alike."""
    width = HEADS * PLACES
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=8,
        max_position_embeddings=PLACES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False).eval()
    embeddings, attention = model.embeddings, model.encoder.layer[0].attention.self
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        embeddings.LayerNorm.weight.fill_(1.0)
        embeddings.position_embeddings.weight[:, :PLACES] = torch.eye(PLACES)  # the place of a token
        for head in range(PLACES):
            for rarity in range(RARITIES):
                embeddings.word_embeddings.weight[token(head, rarity), PLACES + head] = 1.0  # the place of its head
                embeddings.word_embeddings.weight[token(head, rarity), 2 * PLACES] = 0.5 * rarity
        query, key, eye = attention.query, attention.key, torch.eye(PLACES)
        query.weight[:PLACES, :PLACES] = 40 * eye.roll(-1, 0)  # the place before its own
        key.weight[:PLACES, :PLACES] = eye
        query.weight[PLACES : 2 * PLACES, PLACES : 2 * PLACES] = 40 * eye
        key.weight[PLACES : 2 * PLACES, :PLACES] = eye
        query.bias[2 * PLACES] = 40.0
        key.weight[2 * PLACES, 2 * PLACES] = 1.0
    return model


@dataclass(frozen=True)
class Sentences:
    """Sentences with trees and one rare word each.

    Args:
        ids: tokens of each sentence.
        heads: heads of its words, -1 for the root.
        relations: numbers of the relations, -1 for the root.
    """

    ids: list[list[int]]
    heads: list[list[int]]
    relations: list[list[int]]


def sentences(rows: int = 120, seed: int = 0) -> Sentences:
    """Random trees in which no fixed offset finds the heads."""
    generator = torch.Generator().manual_seed(seed)
    found = Sentences([], [], [])

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    for _ in range(rows):
        length = 8 + draw(PLACES - 2 - 8 + 1)
        root = draw(length)
        heads = [-1 if word == root else (word + 1 + draw(length - 1)) % length for word in range(length)]
        rare = draw(length)
        words = [token(max(head, 0) + 1, 2 if word == rare else draw(2)) for word, head in enumerate(heads)]
        found.ids.append([CLS, *words, SEP])
        found.heads.append(heads)
        found.relations.append([-1 if head < 0 else int(abs(head - word) > 3) for word, head in enumerate(heads)])
    return found


def padded(rows: list[list[int]], value: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


class Measured:
    """The Metrics that a pass over sentences fills."""

    def __init__(self, model: BertModel) -> None:
        self.model, self.sites = model, find_attention(model)
        self.positional, self.sinks = positional_shares(self.sites), sink_shares(self.sites)
        self.rare, self.syntactic = rare_token_shares(self.sites), syntactic_shares(self.sites, RELATIONS)
        counts = torch.zeros(VOCABULARY, dtype=torch.long)
        counts[FIRST:] = torch.tensor([1000, 900, 1]).repeat(PLACES)
        self.frequency, self.common = token_counts(counts, common=2 * PLACES)

    @property
    def metrics(self) -> tuple[RoleShares, ...]:
        return self.positional, self.sinks, self.rare, self.syntactic

    @torch.no_grad()
    def read(self, texts: Sentences, *, batch: int = 32, first: int = 0, shuffled: bool = False) -> Measured:
        """Fill the Metrics; ``shuffled`` exchanges the keys of every sentence at random."""
        generator = torch.Generator().manual_seed(7)
        for start in range(0, len(texts.ids), batch):
            rows = slice(start, start + batch)
            ids = padded(texts.ids[rows], 0)
            text = ids >= FIRST
            words = torch.where(text, torch.arange(ids.shape[1]) - 1, -1)
            view = View(first + torch.arange(start, start + len(ids)), text, ids > 0, text)
            trees = Trees(words, padded(texts.heads[rows], -1), padded(texts.relations[rows], -1))

            def take(site, weights, ids=ids, view=view, trees=trees):
                if shuffled:
                    order = torch.rand(len(ids), weights.shape[2], ids.shape[1], generator=generator).argsort(-1)
                    weights = weights.gather(3, order.unsqueeze(1).expand_as(weights))
                self.positional.observe(site, weights, view)
                self.sinks.observe(site, weights, view)
                self.rare.observe(site, weights, view, self.frequency[ids], self.common[ids])
                self.syntactic.observe(site, weights, view, trees)

            with observe_weights(self.model, self.sites, take):
                self.model(ids, attention_mask=(ids > 0).long())
        return self

    def roles(self) -> list[Role]:
        sinks = self.sinks.compute()
        return [
            assign(POSITIONAL, self.positional.compute(), self.positional.names),
            assign(SYNTACTIC, self.syntactic.compute(), self.syntactic.names),
            assign(RARE, self.rare.compute(), self.rare.names),
            *(assign(rule, sinks.of(column), [rule.name]) for column, rule in enumerate((SEPARATOR, FIRST_TOKEN, BROAD))),
        ]

    def named(self) -> list[list[str]]:
        """The names of the roles of every head."""
        roles = self.roles()
        return [[role.rule.name for role in roles if role.holds[head]] for head in range(HEADS)]
