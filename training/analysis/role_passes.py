"""The passes over texts in which a model's attention is watched, and the shares that come of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pytorch_lightning.utilities import move_data_to_device
from torch import Tensor

from gates.roles.coreference import CoreferenceShares
from gates.roles.induction import CopyShares, earlier_copies
from gates.roles.observe import Take, observe_weights
from gates.roles.positional import PositionalShares
from gates.roles.rare import RareTokenShares, token_counts
from gates.roles.roles import (
    BROAD,
    COREFERENCE,
    DUPLICATE,
    FIRST_TOKEN,
    INDUCTION,
    POSITIONAL,
    RARE,
    SEPARATOR,
    SYNTACTIC,
    Role,
    assign,
)
from gates.roles.shares import SentenceShares, Shares
from gates.roles.sinks import CONFIDENCE, SinkShares
from gates.roles.syntactic import SyntacticShares
from gates.roles.view import View
from gates.sites import Kind
from training.analysis.observed import ObservedModel
from training.analysis.role_texts import RoleTexts, mentions_of, own_pairs, repeats, special_ids, trees_of
from training.runs import progress
from training.tasks.encoding import IGNORED, shifted_right


@dataclass(frozen=True)
class Measured:
    """What came of all passes.

    Args:
        roles: of every head that is not pruned.
        syntactic: shares of all relations and directions.
        columns: their names.
        offsets: names of the fixed offsets they are compared with.
        coreference: shares of pronouns; None where no file is given.
        confidence: of every head, ``[heads]``.
    """

    roles: list[Role]
    syntactic: Shares
    columns: list[str]
    offsets: list[str]
    coreference: Shares | None
    confidence: Tensor

    @property
    def unknown(self) -> list[str]:
        """Names of the roles that no head had enough opportunities for."""
        return [role.rule.name for role in self.roles if bool(role.strength.isnan().all())]


class RolePasses:
    """Runs a model on texts and adds up what its heads look at.

    Args:
        observed: the model.
        texts: what it reads.
    """

    def __init__(self, observed: ObservedModel, texts: RoleTexts) -> None:
        self.observed, self.texts = observed, texts
        sites, device = observed.sites, observed.device
        self.positional = PositionalShares(sites).to(device)
        self.sinks = SinkShares(sites).to(device)
        self.rare = RareTokenShares(sites).to(device)
        self.syntactic = SyntacticShares(sites, texts.relations).to(device)
        self.coreference = CoreferenceShares(sites).to(device)
        self.copies = CopyShares(sites).to(device)
        self.special = torch.tensor(sorted(special_ids(observed.tokenizer)), device=device)
        self.frequencies = {name: token_counts(counts.to(device)) for name, counts in texts.frequencies.items()}

    @property
    def has_decoder(self) -> bool:
        return any(site.kind == "decoder" for site in self.observed.sites)

    def run(self) -> Measured:
        """All passes."""
        with self.observed.at_rest():
            self._trees()
            if self.texts.pronouns is not None:
                self._pronouns()
            if self.has_decoder:
                self._repeats()
            if self.observed.is_encoder_decoder:
                self._pairs()
        return self._measured()

    # -- passes ------------------------------------------------------------------------------------------------

    def _trees(self) -> None:
        texts, device = self.texts.trees, self.observed.device
        for rows in progress.track(list(texts.batches()), "reading the treebank"):
            ids = texts.ids(rows).to(device)
            trees, views = trees_of(rows, texts, self.texts.relations, device), self._views(ids, rows)

            def take(site: int, weights: Tensor, ids: Tensor = ids, trees: Any = trees, views: Any = views) -> None:
                view = views[self.observed.sites[site].kind]
                self._common(site, weights, view, ids, "source")
                self.syntactic.observe(site, weights, view, trees)

            self._read(ids, take)

    def _pronouns(self) -> None:
        texts = self.texts.pronouns
        assert texts is not None
        for rows in progress.track(list(texts.batches()), "reading pronouns"):
            ids = texts.ids(rows).to(self.observed.device)
            mentions, views = mentions_of(rows, texts, self.observed.device), self._views(ids, rows)

            def take(site: int, weights: Tensor, mentions: Any = mentions, views: Any = views) -> None:
                self.coreference.observe(site, weights, views[self.observed.sites[site].kind], mentions)

            self._read(ids, take)

    def _repeats(self) -> None:
        batches = list(repeats(self.observed, self.texts.seen))
        for number, ids in enumerate(progress.track(batches, "reading repeated sequences")):
            ids = ids.to(self.observed.device)
            view = self._views(ids, range(number * len(batches[0]), number * len(batches[0]) + len(ids)))["decoder"]
            earlier = earlier_copies(ids, view.text)

            def take(site: int, weights: Tensor, view: View = view, earlier: Tensor = earlier) -> None:
                if self.observed.sites[site].kind == "decoder":
                    self.copies.observe(site, weights, view, earlier)

            if self.observed.is_encoder_decoder:
                inputs = _inputs(ids)
                with observe_weights(self.observed.backbone, self.observed.sites, take):
                    self.observed.backbone(**inputs, decoder_input_ids=inputs["input_ids"])
            else:
                self._read(ids, take)

    def _pairs(self) -> None:
        """Decoder and cross attention: on the run's own pairs, or of a model without pairs on every sentence and itself."""
        first = 0
        for batch in progress.track(self._batches_of_pairs(), "reading pairs"):
            batch = move_data_to_device(batch, self.observed.device)
            inputs, target = self._inputs_of_pair(batch)
            source = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -1)
            numbers = range(first, first + len(target))
            first += len(target)
            views = {"decoder": self._views(target, numbers)["decoder"]}
            text = self._is_text(source)
            views["cross"] = View(views["decoder"].sentences, views["decoder"].queries, source >= 0, text)
            tokens = {"decoder": (target, "target"), "cross": (source, "source")}

            def take(site: int, weights: Tensor, views: Any = views, tokens: Any = tokens) -> None:
                kind = self.observed.sites[site].kind
                if kind != "encoder":
                    self._common(site, weights, views[kind], *tokens[kind])

            with observe_weights(self.observed.backbone, self.observed.sites, take):
                self.observed.backbone(**inputs)

    def _batches_of_pairs(self) -> list[Any]:
        own = list(own_pairs(self.observed))
        texts = self.texts.trees
        return own or [texts.ids(rows) for rows in texts.batches()]

    def _inputs_of_pair(self, batch: Any) -> tuple[dict[str, Tensor], Tensor]:
        """What goes into the model, and the decoder's tokens with padding as -1."""
        backbone, labels = self.observed.backbone, batch
        if isinstance(batch, Mapping):
            labels = batch["labels"]
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        else:
            inputs, labels = _inputs(batch), batch.masked_fill(batch < 0, IGNORED)
        decoder = shifted_right(backbone, labels)
        return inputs | {"decoder_input_ids": decoder}, decoder.masked_fill(labels == IGNORED, -1)

    # -- parts of them -----------------------------------------------------------------------------------------

    def _read(self, ids: Tensor, take: Take) -> None:
        """Run the model on texts, of an encoder-decoder the encoder alone."""
        backbone, sites = self.observed.backbone, self.observed.sites
        if not self.observed.is_encoder_decoder:
            with observe_weights(backbone, sites, take):
                backbone(**_inputs(ids))
            return
        places = [place for place, site in enumerate(sites) if site.kind == "encoder"]
        encoder = tuple(sites[place] for place in places)
        with observe_weights(backbone, encoder, lambda site, weights: take(places[site], weights)):
            backbone.get_encoder()(**_inputs(ids))

    def _common(self, site: int, weights: Tensor, view: View, ids: Tensor, side: str) -> None:
        """What is defined for every kind of attention."""
        frequency, common = self.frequencies[side]
        index = ids.clamp(min=0, max=len(frequency) - 1)
        self.positional.observe(site, weights, view)
        self.sinks.observe(site, weights, view)
        self.rare.observe(site, weights, view, frequency[index], common[index])

    def _is_text(self, ids: Tensor) -> Tensor:
        return (ids >= 0) & ~torch.isin(ids, self.special)

    def _views(self, ids: Tensor, numbers: Any) -> dict[Kind, View]:
        """A batch as bidirectional and as causal self-attention sees it."""
        text, sentences = self._is_text(ids), torch.tensor(list(numbers), device=ids.device)
        return {
            "encoder": View(sentences, text, ids >= 0, text),
            "decoder": View(sentences, text, ids >= 0, text, causal=True),
        }

    def _shares(self, metric: SentenceShares) -> Shares:
        """Of the heads that are not pruned."""
        return metric.compute().of_heads(self.observed.kept)

    def _measured(self) -> Measured:
        positional, sinks, rare = (self._shares(metric) for metric in (self.positional, self.sinks, self.rare))
        syntactic = self._shares(self.syntactic)
        coreference = self._shares(self.coreference) if self.texts.pronouns is not None else None
        roles = [assign(POSITIONAL, positional, self.positional.names)]
        roles += [assign(SYNTACTIC, syntactic, self.syntactic.names), assign(RARE, rare, self.rare.names)]
        if coreference is not None:
            compared = coreference.against_column(0, 1).of(0, 2)
            roles.append(assign(COREFERENCE, compared, [self.coreference.names[0], self.coreference.names[2]]))
        if self.has_decoder:
            copies = self._shares(self.copies)
            roles += [assign(rule, copies.of(column), [rule.name]) for column, rule in enumerate((INDUCTION, DUPLICATE))]
        for column, rule in enumerate((SEPARATOR, FIRST_TOKEN, BROAD)):
            roles.append(assign(rule, sinks.of(column), [rule.name]))
        names = self.syntactic.names, self.syntactic.baseline_names
        return Measured(roles, syntactic, *names, coreference, sinks.value[:, CONFIDENCE])


def _inputs(ids: Tensor) -> dict[str, Tensor]:
    """Tokens and mask of texts that are padded with -1."""
    return {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long()}
