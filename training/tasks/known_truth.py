"""A question that a compiled program answers: the model is given, with its weights and with the heads that it needs."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gates.errors import GateError
from training.config import Source
from training.tasks.classification import Classification
from training.truth.compiler import compiled
from training.truth.programs import PROGRAMS


@dataclass
class KnownAnswer(Classification):
    """The classifier that is compiled from a program.

    Args:
        labels: ``no`` and ``yes``.
        program: name of the program.
    """

    program: str = ""

    def build(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """The compiled model; rotation, places of heads and noise come from torch's seed. See :meth:`Task.build`."""
        if source.backbone is not None or source.from_scratch is None:
            raise GateError(
                f"the model of the program {self.program!r} is compiled, and {source.backbone!r} is given; give "
                "--model.from_scratch '{model_type: bert}' alone"
            )
        names = {label: index for index, label in enumerate(self.labels)}
        model = compiled(
            PROGRAMS[self.program],
            vocabulary=tokenizer.get_vocab(),
            labels=names,
            id2label={index: label for label, index in names.items()},
            label2id=names,
        )
        fields = model.config.to_dict()
        for name, value in source.from_scratch.items():
            if name not in fields or fields[name] != value:
                raise GateError(
                    f"model.from_scratch has {name}: {value}, but the program {self.program!r} decides on the model "
                    f"({name}: {fields.get(name)}); leave it out"
                )
        return model
