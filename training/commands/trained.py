"""What a finished run left: its dense model, the gates it learned, and its rankings. Only the run directory is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from gates.artefact import GateConfig
from gates.budget import Budget, budget_mask
from gates.errors import GateError
from gates.head_gates import TOP_K_FAMILIES, HeadGates
from gates.surgery.masks import load_mask
from gates.surgery.pruned import reshape_
from training.pruner.checkpoints import read_checkpoint
from training.pruner.module import PRUNED_BEFORE
from training.pruner.options import mask_found_by
from training.runs.run_directory import RunDirectory
from training.tasks import base_model_name

LEARNED = "learned"
SCORES = "scores/heads.csv"


@dataclass(frozen=True)
class TrainedModel:
    """What a run left: the dense model with its gates, and where it is from.

    Args:
        run: finished.
        model: dense, with the weights of the checkpoint.
        gates: of the end of the run, not attached.
        gate_config: how the run gated it; ``base_model`` is a hub name as it is, and of a local folder the last part.
        minimum_per_layer: heads that every layer keeps.
        mask_found_by: see :func:`training.pruner.options.mask_found_by`.
        checkpoint: its name, such as ``final``.
        tokenizer: None if the run saved none.
    """

    run: RunDirectory
    model: PreTrainedModel
    gates: HeadGates
    gate_config: GateConfig
    minimum_per_layer: int
    mask_found_by: str
    checkpoint: str
    tokenizer: PreTrainedTokenizerBase | None


def load_trained(path: str) -> TrainedModel:
    """The dense model and the gates of a finished run, from a run directory or a checkpoint in one.

    Gates are those of the end of the run also when the weights are of an earlier checkpoint: before, nothing was learned
    about heads.

    Raises:
        GateError: if there is no such run, it has not ended, or a file is damaged.
    """
    is_checkpoint = Path(path).suffix == ".ckpt"
    if is_checkpoint and not Path(path).is_file():
        raise GateError(f"the checkpoint {path!r} does not exist; check the path")
    run = RunDirectory.finished(Path(path).resolve().parents[1] if is_checkpoint else path)
    final = read_checkpoint(run.checkpoint("final"))
    content = read_checkpoint(path) if is_checkpoint else final
    model = _dense_model(run, content, path)
    settings, state = final["hyper_parameters"], final["state_dict"]
    config = GateConfig(
        unit=state["gates._extra_state"].get("unit", "head"),
        temperature=settings["temperature"],
        initial_log_alpha=settings["initial_log_alpha"],
        straight_through=settings["straight_through"],
        draw_per=settings["draw_per"],
        family=settings.get("gate", "hard-concrete"),
        budget=settings["budget"] if settings.get("gate") in TOP_K_FAMILIES else None,
        base_model=base_model_name(settings),
    )
    gates = config.gates_for(model)
    gates.load_state_dict({name.removeprefix("gates."): value for name, value in state.items() if name.startswith("gates.")})
    try:
        tokenizer = AutoTokenizer.from_pretrained(run.export, trust_remote_code=False)
    except (OSError, ValueError, KeyError):  # a run without text has none
        tokenizer = None
    name = Path(path).stem if is_checkpoint else "final"
    return TrainedModel(run, model, gates, config, settings["minimum_per_layer"], mask_found_by(settings), name, tokenizer)


def choose_mask(
    trained: TrainedModel,
    ranking: str = LEARNED,
    budget: int | float | Mapping[str, int | float] | None = None,
    *,
    minimum_per_layer: int | None = None,
) -> Tensor:
    """The mask ``[heads]`` of a ranking at a budget; without one, as in the run.

    Args:
        trained: what a run left.
        ranking: ``learned``, or one that the run compared.
        budget: see :class:`gates.budget.Budget`.
        minimum_per_layer: with a budget, heads that every layer keeps; as in the run by default.

    Raises:
        GateError: for an unknown ranking or a budget the model cannot have.
    """
    run, gates = trained.run, trained.gates
    table = _scores(run)
    known = list(dict.fromkeys([LEARNED, *(name.removeprefix("ranking:") for name in table if name.startswith("ranking:"))]))
    if ranking not in known:
        raise GateError(f"this run has no ranking {ranking!r}; expected one of {', '.join(known)}")
    if budget is None:
        if minimum_per_layer is not None:
            raise GateError("a minimum per layer needs a budget; give --budget too")
        return load_mask(run.path / "masks" / f"{ranking}.json", gates.sites)
    if ranking == LEARNED:
        scores = gates.log_alpha.detach()
    else:
        scores = gates.to_gates(torch.tensor(table[f"ranking:{ranking}"], dtype=torch.float64))
    mask = budget_mask(
        scores,
        Budget.parse(budget, gates.kind_sizes()),
        kind_index=gates.kind_index(),
        layer_index=gates.layer_index(),
        minimum_per_layer=trained.minimum_per_layer if minimum_per_layer is None else minimum_per_layer,
    )
    return gates.to_heads(mask)


def _scores(run: RunDirectory) -> dict[str, list[float]]:
    """The columns of the run's table of scores, by name."""
    try:
        table = pd.read_csv(run.path / SCORES)
    except (OSError, ValueError) as error:
        raise GateError(f"cannot read {str(run.path / SCORES)!r}: {str(error).splitlines()[0]}") from error
    return {str(name): column.tolist() for name, column in table.items()}


def _dense_model(run: RunDirectory, checkpoint: Mapping[str, Any], path: str) -> PreTrainedModel:
    """The model that a checkpoint holds; its config is that of the run's export, but with all heads the run started with."""
    state = checkpoint["state_dict"]
    try:
        config = AutoConfig.from_pretrained(run.export, trust_remote_code=False)
        stock = getattr(transformers, config.architectures[0])
    except (OSError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise GateError(
            f"{str(run.export / 'config.json')!r} is damaged ({str(error).splitlines()[0]}); run fit again"
        ) from error
    for name in ("pruned_attention", "auto_map"):
        if hasattr(config, name):
            delattr(config, name)
    model: PreTrainedModel = stock(config)
    if checkpoint.get(PRUNED_BEFORE):
        reshape_(model, checkpoint[PRUNED_BEFORE])
    try:
        model.load_state_dict({name.removeprefix("backbone."): v for name, v in state.items() if name.startswith("backbone.")})
    except RuntimeError as error:
        raise GateError(
            f"the weights in {path!r} are not of the model in {str(run.export)!r}; use a checkpoint of the run"
        ) from error
    if model.can_generate() and (run.export / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(run.export)
    return model.eval()
