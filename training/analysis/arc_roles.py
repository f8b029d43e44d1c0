"""Which heads of a model of the generated language look along its gold arcs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gates.errors import GateError
from gates.roles.observe import observe_weights
from gates.roles.positional import PositionalShares
from gates.roles.roles import POSITIONAL, SYNTACTIC, Role, Rule, assign
from gates.roles.shares import Shares
from gates.roles.sinks import SinkShares
from gates.roles.syntactic import SyntacticShares, Trees
from gates.roles.view import View
from training.analysis.known_roles import roles_without_trees
from training.data.synthetic import RELATIONS, SyntheticData, arc_name
from training.scoring.subject import Batch, Subject

ARC = "arc"
QUESTION_OF = {arc_name(*pair): question for question, pairs in RELATIONS.items() for pair in pairs}
"""The question that each arc is needed for, by the arc's name."""
NEAR = arc_name("marker", "marked")
"""The one arc that is of one distance, so that no head can be better at it than that distance."""
Arcs = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class ArcRoles:
    """What the heads of a model look along.

    Args:
        far: the arcs at varying distances, by the rule for syntactic heads.
        near: the arc of one distance, by the share that positional heads need.
        shares: how often the largest weight at an arc's source falls on its target, by its name, ``[heads]`` each.
        baselines: the share of the best fixed distance, by the name of the arc; NaN of arcs that are not seen.
        others: roles that need no arcs.
    """

    far: Role
    near: Role
    shares: dict[str, Tensor]
    baselines: dict[str, float]
    others: list[Role]

    def arcs_of(self, head: int) -> dict[str, str]:
        """The arcs that a head looks along, with their questions."""
        names = [name for name in QUESTION_OF if name != NEAR]
        held = {name for name, passes in zip(names, self.far.passing[head].tolist(), strict=True) if passes}
        held |= {NEAR} if bool(self.near.holds[head]) else set()
        return {name: question for name, question in QUESTION_OF.items() if name in held}


def arc_roles(subject: Subject, data: SyntheticData, rows: int) -> ArcRoles:
    """Roles of every head of a model.

    Special tokens do not count as attended, as in syntactic roles; the one at which the answer is read does attend.

    Args:
        subject: the model.
        data: that generate its language.
        rows: examples to look at.

    Raises:
        GateError: if the model does not read its answer at the first or the last token.
    """
    first = next(data.with_arcs(rows, 0))[0]
    with subject.at_rest():
        reader = reader_of(subject, first)
        batches = list(data.with_arcs(rows, reader))
        return _watched(subject, data, batches, reader)


def reader_of(subject: Subject, batch: Batch) -> int:
    """The token where a classifier reads its answer off: 0, or -1 for the last one. It is the one whose last hidden state the
    answer depends on.

    Args:
        subject: the model, at rest.
        batch: examples of one length.

    Raises:
        GateError: if it is another one, or there are several.
    """
    backbone = subject.backbone
    if backbone.config.is_encoder_decoder:
        raise GateError(
            f"{type(backbone).__name__} is an encoder-decoder, and arcs are known within one text; give an encoder or a decoder"
        )
    inputs = {name: tensor.to(subject.device) for name, tensor in batch.items()}
    with torch.enable_grad():
        found = backbone(**inputs, output_hidden_states=True)
        (gradient,) = torch.autograd.grad(found.logits[:, -1].sum(), found.hidden_states[-1], allow_unused=True)
    places = [] if gradient is None else gradient.abs().sum((0, 2)).nonzero().flatten().tolist()
    last = inputs["input_ids"].shape[1] - 1
    if places not in ([0], [last]):
        raise GateError(
            f"{type(backbone).__name__} reads its answer off {len(places)} of {last + 1} tokens; arcs to an answer are known "
            "where it is the first or the last token alone"
        )
    return 0 if places == [0] else -1


@torch.no_grad()
def _watched(subject: Subject, data: SyntheticData, batches: Sequence[tuple[Batch, list[Arcs]]], reader: int) -> ArcRoles:
    sites, device, tokenizer = subject.gates.sites, subject.device, data.tokenizer
    assert tokenizer is not None
    special = torch.tensor(tokenizer.all_special_ids, device=device)
    longest = max(batch["input_ids"].shape[1] for batch, _ in batches)
    positional, sinks = PositionalShares(sites).to(device), SinkShares(sites).to(device)
    arcs = SyntacticShares(sites, list(QUESTION_OF), reach=longest).to(device)
    number = 0
    for batch, found in batches:
        inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        ids = inputs["input_ids"]
        text, sentences = ~torch.isin(ids, special), torch.arange(number, number + len(ids), device=device)
        number += len(ids)
        views = {
            kind: View(sentences, text, torch.ones_like(text), text, causal=kind == "decoder")
            for kind in ("encoder", "decoder")
        }
        trees = trees_of_arcs(found, text, reader)

        def take(
            site: int, weights: Tensor, text: Tensor = text, views: dict[str, View] = views, trees: list[Trees] = trees
        ) -> None:
            view, to_words = views[sites[site].kind], weights.masked_fill(~text[:, None, None], 0.0)
            positional.observe(site, weights, view)
            sinks.observe(site, weights, view)
            for tree in trees:
                arcs.observe(site, to_words, view, tree)

        with observe_weights(subject.backbone, sites, take):
            subject.backbone(**inputs)
    return _assigned(arcs.compute(), roles_without_trees(positional, sinks))


def trees_of_arcs(found: Sequence[Arcs], text: Tensor, reader: int) -> list[Trees]:
    """Arcs of one batch as trees, one for each relation, since a word can have an arc of several.

    Args:
        found: arcs of every example, from token to token; of the same relations.
        text: tokens that are no special ones, ``[batch, token]``.
        reader: the special token that attends.
    """
    places = torch.arange(text.shape[1], device=text.device)
    attends = text | (places == reader % text.shape[1])
    words = torch.where(attends, places, -1)
    examples, trees = torch.arange(len(found), device=text.device), []
    for name in found[0]:
        source, target = torch.tensor([arcs[name] for arcs in found], device=text.device).T
        heads, relations = torch.full_like(words, -1), torch.full_like(words, -1)
        heads[examples, source] = target
        relations[examples, source] = list(QUESTION_OF).index(name)
        trees.append(Trees(words, heads, relations))
    return trees


def _assigned(shares: Shares, others: list[Role]) -> ArcRoles:
    """Roles from the shares of the arcs; those from a word back to where it is looked at from, the other columns, are none."""
    names = list(QUESTION_OF)
    far = [column for column, name in enumerate(names) if name != NEAR]
    near = shares.of(names.index(NEAR))
    alone = replace(near, baseline=torch.full_like(near.baseline, torch.nan))
    return ArcRoles(
        far=assign(Rule(ARC, margin=SYNTACTIC.margin), shares.of(*far), [names[column] for column in far]),
        near=assign(Rule(ARC, least=POSITIONAL.least), alone, [NEAR]),
        shares={name: shares.value[:, column] for column, name in enumerate(names)},
        baselines={name: float(shares.baseline[0, column]) for column, name in enumerate(names)},  # heads are of one kind
        others=others,
    )
