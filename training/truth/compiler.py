"""Compile a program into the weights of a BERT, as Tracr (Lindner et al. 2023) does for its own architecture.

The residual stream holds the program's variables in orthonormal directions, rotated at random. BERT's layer norms would change
them. With an epsilon far above every variance, and its root as weight, they only subtract the mean. The mean is 0 in directions
orthogonal to the vector of ones, so the model is exactly the program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from training.truth.program import ANSWER, FIRST, LETTER, PLACE, Head, Program, Unit

HEAD_SIZE = 16
COLDNESS = 10.0
"""The score of a match: attention is nearly hard, and gradients do not vanish."""
NOISE = 0.06
"""The standard deviation of the sum of all noise heads at one place, in the directions of variables."""
LOUD = 1.0
"""The standard deviation of each head of a cancelling pair, in the directions of the answer and of its layer's variables."""
UNUSED = 0.5
"""The standard deviation of a noise head in directions without a variable."""
SHARPEST = 5.0
"""The largest factor of a noise head's scores over random weights: some attend as hard as needed heads."""
LARGE = 1e8
"""The epsilon of the layer norms."""
GAIN = 4.0
"""The factor of the logits: a clear answer has a loss of about 0.02, and gradients."""
NECESSARY = "necessary_heads"
"""The field of the config with the heads ``[layer, head]`` of each necessary function; any one of them is enough."""


def compiled(
    program: Program, *, vocabulary: Mapping[str, int], labels: Mapping[str, int], **fields: Any
) -> BertForSequenceClassification:
    """Return a classifier with the program's weights, whose config has the truth as ``necessary_heads``.

    torch's global generator draws the rotation, the order of heads within each layer, and noise.

    Args:
        vocabulary: The id of every letter and special token.
        labels: The numbers of ``no`` and ``yes``.
        fields: Further fields of the config.
    """
    variables, hidden = program.variables, program.heads * HEAD_SIZE
    state = sum(variables.values())
    if state >= hidden:
        raise ValueError(f"the variables of {program.name} have {state} values, but a residual stream of {hidden} has fewer")
    order = [torch.randperm(program.heads).tolist() for _ in program.layers]
    stated: dict[str, Any] = {NECESSARY: necessary_heads(program, order), "num_labels": len(labels), **fields}
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        num_hidden_layers=len(program.layers),
        num_attention_heads=program.heads,
        intermediate_size=max(1, *(len(layer.units) for layer in program.layers)),
        max_position_embeddings=program.places,
        hidden_act="relu",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        layer_norm_eps=LARGE,
        pad_token_id=vocabulary["[PAD]"],
        **stated,
    )
    model = BertForSequenceClassification(config)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.fill_(math.sqrt(LARGE))
                module.bias.zero_()
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                module.weight.zero_()
                if isinstance(module, nn.Linear):
                    module.bias.zero_()
        _Writer(program, model).write(order, vocabulary, labels)
    return model


def necessary_heads(program: Program, order: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Return the heads of each necessary function as ``[layer, head]``; ``order`` has the place of each head of a layer."""
    found: dict[str, list[list[int]]] = {name: [] for name in program.needed}
    for number, layer in enumerate(program.layers):
        for index, head in enumerate(layer.heads):
            if head.does in found:
                found[head.does].append([number, order[number][index]])
    return [sorted(heads) for heads in found.values()]


class _Writer:
    """Write a program into a model of zeros.

    Attributes:
        basis: The orthonormal directions ``[hidden, state + unused]``, each of mean 0, those of the variables first.
    """

    def __init__(self, program: Program, model: BertForSequenceClassification) -> None:
        self.program, self.model = program, model
        self.starts: dict[str, int] = {}
        for name in program.variables:
            self.starts[name] = sum(program.variables[other] for other in self.starts)
        self.state = sum(program.variables.values())
        self.basis = directions(model.config.hidden_size)

    def write(self, order: Sequence[Sequence[int]], vocabulary: Mapping[str, int], labels: Mapping[str, int]) -> None:
        self._embeddings(vocabulary)
        free = sum(self.program.heads - len(layer.heads) - 2 * self.program.cancelling for layer in self.program.layers)
        for number, layer in enumerate(self.program.layers):
            for index, head in enumerate(layer.heads):
                self._put(number, order[number][index], *self._weights(head))
            left = list(order[number][len(layer.heads) :])
            for _ in range(self.program.cancelling):
                query, key, value, output = self._noise(LOUD)
                self._put(number, left.pop(), query, key, value, output)
                self._put(number, left.pop(), query, key, value, -output)
            for place in left:
                self._put(number, place, *self._noise(NOISE / math.sqrt(free)))
            self._units(number, layer.units)
        self._answer(labels)

    def at(self, variable: str, value: int) -> int:
        """Return the direction of a value of a variable."""
        return self.starts[variable] + value

    def linear(self, path: str) -> nn.Linear:
        found = self.model.get_submodule(path)
        assert isinstance(found, nn.Linear)
        return found

    def _embeddings(self, vocabulary: Mapping[str, int]) -> None:
        words, places = (self.model.get_parameter(f"bert.embeddings.{name}_embeddings.weight") for name in ("word", "position"))
        for value, letter in enumerate(self.program.letters):
            words[vocabulary[letter]] = self.basis[:, self.at(LETTER, value)]
        for place in range(self.program.places):
            places[place] = self.basis[:, self.at(PLACE, place)]

    def _weights(self, head: Head) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query ``[head size, directions + 1]`` with its bias, key, value ``[head size, directions]`` and output ``[directions,
        head size]``. The last feature of query and key is ``[CLS]``, which has half the score of a match."""
        program, width = self.program, self.basis.shape[1]
        keys, values = program.variables[head.key], program.variables[head.value]
        query, key = torch.zeros(HEAD_SIZE, width + 1), torch.zeros(HEAD_SIZE, width)
        value, output = torch.zeros(HEAD_SIZE, width), torch.zeros(width, HEAD_SIZE)
        for index in range(keys):
            key[index, self.at(head.key, index)] = 1.0
            for queried in range(program.variables[head.query]):
                query[index, self.at(head.query, queried)] = COLDNESS * head.match(queried, index)
        key[-1, self.at(PLACE, FIRST)] = 1.0
        query[-1, width] = COLDNESS / 2
        carries = head.carries or {index: (index, 1.0) for index in range(values)}
        for feature, (source, (target, weight)) in enumerate(carries.items()):
            value[feature, self.at(head.value, source)] = 1.0
            output[self.at(head.to, target), feature] = weight
        return query, key, value, output

    def _noise(self, amount: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same of a head that reads letters and places at random and writes everywhere."""
        width = self.basis.shape[1]
        query, key, value = (torch.zeros(HEAD_SIZE, width + 1) for _ in range(3))
        read = [self.at(name, index) for name in (LETTER, PLACE) for index in range(self.program.variables[name])]
        for matrix in (query, key, value):
            matrix[:, read] = torch.randn(HEAD_SIZE, len(read)) / math.sqrt(2)
        query *= 1 + (SHARPEST - 1) * torch.rand(1)
        output = torch.randn(width, HEAD_SIZE) / math.sqrt(HEAD_SIZE)
        output[: self.state] *= amount
        output[self.state :] *= UNUSED
        return query, key[:, :-1], value[:, :-1], output

    def _put(self, layer: int, head: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        attention, rows = f"bert.encoder.layer.{layer}.attention", slice(head * HEAD_SIZE, (head + 1) * HEAD_SIZE)
        root = math.sqrt(HEAD_SIZE)  # by which attention divides its scores
        self.linear(f"{attention}.self.query").weight[rows] = root * query[:, :-1] @ self.basis.T
        self.linear(f"{attention}.self.query").bias[rows] = root * query[:, -1]
        self.linear(f"{attention}.self.key").weight[rows] = key @ self.basis.T
        self.linear(f"{attention}.self.value").weight[rows] = value @ self.basis.T
        self.linear(f"{attention}.output.dense").weight[:, rows] = self.basis @ output

    def _units(self, number: int, units: Sequence[Unit]) -> None:
        first, second = (self.linear(f"bert.encoder.layer.{number}.{name}.dense") for name in ("intermediate", "output"))
        for index, unit in enumerate(units):
            for (variable, value), weight in unit.reads.items():
                first.weight[index] += weight * self.basis[:, self.at(variable, value)]
            first.bias[index] = unit.bias
            for (variable, value), weight in unit.writes.items():
                second.weight[:, index] += weight * self.basis[:, self.at(variable, value)]

    def _answer(self, labels: Mapping[str, int]) -> None:
        """The pooler's first feature is how far the answer is from undecided; its tanh decides."""
        pooler, classifier = self.linear("bert.pooler.dense"), self.linear("classifier")
        pooler.weight[0] = self.basis[:, self.at(ANSWER, 0)]
        pooler.bias[0] = -0.5
        classifier.weight[labels["yes"], 0], classifier.weight[labels["no"], 0] = GAIN, -GAIN


def directions(hidden: int) -> Tensor:
    """Draw orthonormal directions of mean 0 from torch's global generator: ``[hidden, hidden - 1]``."""
    random = torch.randn(hidden, hidden, dtype=torch.float64)
    random[:, 0] = 1.0
    return torch.linalg.qr(random).Q[:, 1:].float()
