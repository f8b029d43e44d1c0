"""A GPT-2 whose weights are set by hand: a previous-token head that an induction head is built upon (Elhage et al. 2021), a
duplicate-token head, and heads of noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2Model

from gates import find_attention
from gates.roles.measures import LENGTHS, copy_shares, earlier_copies, positional_shares, repeated_sequences, sink_shares
from gates.roles.roles import BROAD, DUPLICATE, FIRST_TOKEN, INDUCTION, POSITIONAL, Role, assign, observe_weights
from gates.roles.shares import View
from tests.gates.roles.built import padded

HEADS, START = 3, 1
BUILT = [["positional"], ["duplicate"], [], [], [], ["induction"]]
"""The roles that the heads are built for, layer by layer; the others are noise."""
PREVIOUS, DOUBLE, COPIER = (0, 0), (0, 1), (1, 2)
SHARP, LOUD, LARGE = 20.0, 3.0, 1e8
"""Score of a match, spread of the scores of noise, and the epsilon of layer norms: one so large that they only subtract the
mean."""


class DecoderWeights:
    """Writes heads into a GPT-2 of zeros whose residual stream holds the token, its place, and the token before.

    Args:
        vocabulary: how many tokens there are.
        places: the most tokens of a text.
    """

    def __init__(self, vocabulary: int, places: int) -> None:
        self.size, self.vocabulary, self.places = vocabulary + places, vocabulary, places
        self.token, self.place = range(vocabulary), range(vocabulary, self.size)
        self.before = range(self.size, self.size + vocabulary)
        self.hidden = HEADS * self.size
        self.model = GPT2Model(
            GPT2Config(
                vocab_size=vocabulary, n_positions=places, n_embd=self.hidden, n_layer=2, n_head=HEADS, n_inner=4,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, layer_norm_epsilon=LARGE, bos_token_id=None, eos_token_id=None,
            )
        ).eval()  # fmt: skip
        for name, parameter in self.model.named_parameters():
            parameter.data.fill_(math.sqrt(LARGE) if ".ln_" in name and name.endswith("weight") else 0.0)
        self.model.wte.weight.data[:, self.token] = torch.eye(vocabulary)
        self.model.wpe.weight.data[:, self.place] = torch.eye(places)

    def parts(self, layer: int, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weights of queries, keys and values ``[hidden, size]``, and of the output ``[size, hidden]``."""
        attention = self.model.h[layer].attn
        own = slice(head * self.size, (head + 1) * self.size)
        query, key, value = (part[:, own] for part in attention.c_attn.weight.data.split(self.hidden, dim=1))
        return query, key, value, attention.c_proj.weight.data[own]

    def write(self) -> GPT2Model:
        match, token, place = SHARP * math.sqrt(self.size), torch.eye(self.vocabulary), torch.eye(self.places)
        query, key, value, output = self.parts(*PREVIOUS)
        query[self.place, : self.places] = match * place.roll(-1, 1).tril()  # the place before its own; the first has none
        key[self.place, : self.places] = place
        value[self.token, : self.vocabulary] = token
        output[: self.vocabulary, self.before] = token
        query, key, *_ = self.parts(*DOUBLE)
        query[self.token, : self.vocabulary], key[self.token, : self.vocabulary] = match * token, token
        query[self.place, self.vocabulary :], key[self.place, self.vocabulary :] = -2 * match * place, place  # not on itself
        query, key, *_ = self.parts(*COPIER)
        query[self.token, : self.vocabulary], key[self.before, : self.vocabulary] = match * token, token
        query[self.token, self.vocabulary] = match
        key[self.place[0], self.vocabulary] = -2.0  # the first token looks as if it came behind itself
        generator = torch.Generator().manual_seed(0)
        for layer, head in ((0, 2), (1, 0), (1, 1)):
            self.noise(*self.parts(layer, head), generator)
        return self.model

    def shuffle(self) -> None:
        """Exchange what the queries of every head are made of; they are as sharp as before."""
        generator = torch.Generator().manual_seed(0)
        for head in range(2 * HEADS):
            query, known = self.parts(*divmod(head, HEADS))[0], self.before.stop
            query[:known] = query[torch.randperm(known, generator=generator)]

    def noise(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, generator: torch.Generator) -> None:
        """Scores and values at random from tokens and places; what is written lies in directions that nothing reads."""
        for part, scale in ((query, LOUD / 2), (key, 1.0), (value, 1.0)):  # tokens and places are two parts of queries and keys
            part[: self.size] = scale * torch.randn(self.size, self.size, generator=generator)
        free = torch.randn(self.size, self.hidden - self.before.stop, generator=generator) / self.size
        output[:, self.before.stop :] = free - free.mean(1, keepdim=True)


def built_decoder(vocabulary: int = 60, places: int = 2 * LENGTHS[1] + 1) -> GPT2Model:
    """Two layers with three heads each: see :data:`BUILT`."""
    return DecoderWeights(vocabulary, places).write()


@torch.no_grad()
def roles_of(model: GPT2Model, *, shuffled: bool = False, rows: int = 60) -> list[Role]:
    """The roles of the heads on random sequences that are said twice; ``shuffled`` has the model read the tokens of each in
    another order than they are said to have."""
    sites = find_attention(model)
    positional, sinks, copies = positional_shares(sites), sink_shares(sites), copy_shares(sites)
    texts = repeated_sequences(range(START + 1, model.config.vocab_size), rows, start=START)
    generator = torch.Generator().manual_seed(3)
    for first in range(0, rows, 20):
        ids = padded(texts[first : first + 20], -1)
        text = ids > START
        view = View(torch.arange(first, first + len(ids)), text, ids >= 0, text, causal=True)
        earlier, read = earlier_copies(ids, text), ids.clone()
        for row, own in zip(read, text, strict=True):
            if shuffled:
                row[own] = row[own][torch.randperm(int(own.sum()), generator=generator)]

        def take(site: int, weights: Tensor, view: View = view, earlier: Tensor = earlier) -> None:
            positional.observe(site, weights, view)
            sinks.observe(site, weights, view)
            copies.observe(site, weights, view, earlier)

        with observe_weights(model, sites, take):
            model(read.clamp(min=0), attention_mask=(ids >= 0).long())
    found, background = copies.compute(), sinks.compute()
    return [
        assign(POSITIONAL, positional.compute(), positional.names),
        *(assign(rule, found.of(column), [rule.name]) for column, rule in enumerate((INDUCTION, DUPLICATE))),
        *(assign(rule, background.of(1 + column), [rule.name]) for column, rule in enumerate((FIRST_TOKEN, BROAD))),
    ]


def named(roles: list[Role], *, background: bool = True) -> list[list[str]]:
    """The names of the roles of every head, with those of background or without."""
    told = [role for role in roles if background or role.rule.specialised]
    return [[role.rule.name for role in told if role.holds[head]] for head in range(2 * HEADS)]
