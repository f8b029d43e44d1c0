"""A gated model's own artefact: its gates alone, written to a folder or to the hub."""

from __future__ import annotations

import os
import tempfile
from typing import Any, Self

import huggingface_hub
from transformers import PreTrainedModel

from gates.artefact import GateConfig, load_gates_, save_gates, upload
from gates.export.card import gate_card
from gates.export.checkpoint import own_auto_class
from gates.head_gates import HeadGates
from gates.surgery.open_heads import open_heads_by_layer
from gates.surgery.remove import transformers_part


class SharedGates:
    """What a model with gates can do with them alone.

    Attributes:
        base_model: the model without gates.
        gates: on its heads.
        gate_config: that they are made with.
    """

    base_model: PreTrainedModel
    gates: HeadGates
    gate_config: GateConfig

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write the gates alone, a few kilobytes: ``gate_config.json``, ``gates.safetensors`` and a model card.

        The model's own weights are not included; if they were trained too, save them with
        ``gated.base_model.save_pretrained``.
        """
        part = transformers_part(self.base_model, self.gates.sites)
        auto = own_auto_class(part)
        name = self.gate_config.base_model
        card = gate_card(self.gates, part, open_heads_by_layer(self.gates), base_model=name, auto=auto)
        save_gates(directory, self.gates, self.gate_config, card=card)

    def load_gates_(self, directory: str | os.PathLike[str]) -> Self:
        """Bring the gates to the state that :meth:`save_pretrained` left in a local folder.

        Raises:
            GateError: for damaged files, gates of another model or of other settings; nothing is changed then.
        """
        load_gates_(directory, self.gates, self.gate_config)
        return self

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | bool | None = None, **more: Any
    ) -> huggingface_hub.CommitInfo:
        """Upload what :meth:`save_pretrained` writes to a repository on the Hugging Face hub, made if it is missing.

        Args:
            repo_id: ``user/repository``.
            private, token: see :meth:`huggingface_hub.HfApi.create_repo`.
            more: ``commit_message``, ``revision`` and what else :meth:`huggingface_hub.HfApi.upload_folder` takes.
        """
        with tempfile.TemporaryDirectory() as directory:
            self.save_pretrained(directory)
            return upload(directory, repo_id, private=private, token=token, **more)
