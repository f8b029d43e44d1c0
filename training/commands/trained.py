"""What a finished run left: its dense model, the gates it learned, and its rankings. Only the run directory is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import BaseImageProcessor, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from gates.artefact import GateConfig
from gates.budget import Budget, budget_mask
from gates.errors import GateError, first_line
from gates.head_gates import HeadGates, read_extra_state
from gates.latency.table import TimeLimit
from gates.options import TOP_K_FAMILIES
from gates.surgery.masks import load_mask
from gates.surgery.pruned import reshape_
from training.comparison.methods import file_name, own_method
from training.config import PrunerOptions
from training.config.data import TOKENIZER_FILES
from training.pruner.checkpoints import check_identity, read_checkpoint
from training.pruner.module import PRUNED_BEFORE
from training.runs.checksums import check_unchanged
from training.runs.resuming import noted_identity
from training.runs.run_directory import RunDirectory
from training.runs.stored import read_table
from training.tasks import base_model_name
from training.tasks.image_classification import read_image_processor
from training.tasks.loading import read_config, read_tokenizer

SCORES = "scores.csv"


@dataclass(frozen=True)
class TrainedModel:
    """What a run left: the dense model with its gates, and where it is from.

    Args:
        run: finished.
        model: dense, with the weights of the checkpoint.
        gates: of the end of the run, not attached.
        gate_config: how the run gated it; ``base_model`` is a hub name as it is, and of a local folder the last part.
        options: of the run.
        method: the run's own, such as ``learned``.
        checkpoint: its name, such as ``final``.
        tokenizer: or image processor; None if the run saved none.
        changed: what was done to the weights since, in a few words; empty for nothing.
    """

    run: RunDirectory
    model: PreTrainedModel
    gates: HeadGates
    gate_config: GateConfig
    options: PrunerOptions
    method: str
    checkpoint: str
    tokenizer: PreTrainedTokenizerBase | BaseImageProcessor | None
    changed: str = ""


def load_trained(path: str) -> TrainedModel:
    """The dense model and the gates of a finished run, from a run directory or a checkpoint in one.

    Gates are those of the end of the run also when the weights are of an earlier checkpoint: before, nothing was learned
    about heads.

    Raises:
        GateError: if there is no such run, it has not ended, or a file is damaged.
    """
    is_checkpoint = names_checkpoint(path)
    if is_checkpoint and not Path(path).is_file():
        raise GateError(f"the checkpoint {path!r} does not exist; check the path")
    run = RunDirectory.finished(run_of(path))
    final = read_checkpoint(run.checkpoint("final"))
    content = read_checkpoint(path) if is_checkpoint else final
    identity, of = noted_identity(run), f"the run in {str(run.path)!r}"
    check_identity(final, run.checkpoint("final"), identity, of)
    check_identity(content, path, identity, of)
    model = _dense_model(run, content, path)
    options, state = options_of(final, path), final["state_dict"]
    config = GateConfig(
        unit=read_extra_state(state["gates._extra_state"]).get("unit", "head"),
        temperature=options.temperature,
        initial_log_alpha=options.initial_log_alpha,
        straight_through=options.straight_through,
        draw_per=options.draw_per,
        family=options.gate,
        budget=options.budget if options.gate in TOP_K_FAMILIES and not isinstance(options.budget, str) else None,
        base_model=base_model_name(options),
    )
    gates = config.gates_for(model)
    gates.load_state_dict({name.removeprefix("gates."): value for name, value in state.items() if name.startswith("gates.")})
    has_tokenizer = any((run.export / file).is_file() for file in TOKENIZER_FILES)  # a run without text has none
    has_images = (run.export / "preprocessor_config.json").is_file()
    reads = read_tokenizer if has_tokenizer else read_image_processor if has_images else None
    tokenizer = None if reads is None else reads(str(run.export))
    name = Path(path).stem if is_checkpoint else "final"
    return TrainedModel(run, model, gates, config, options, own_method(options).name, name, tokenizer)


def names_checkpoint(path: str) -> bool:
    """Whether this is a checkpoint's path by its ending; a run's directory may have that too."""
    return Path(path).suffix == ".ckpt" and not Path(path).is_dir()


def run_of(path: str) -> Path:
    """The directory of the run that is named, or whose checkpoint is."""
    return Path(path).resolve().parents[1] if names_checkpoint(path) else Path(path)


def options_of(checkpoint: Mapping[str, Any], path: str) -> PrunerOptions:
    """The options that a checkpoint was trained with.

    Raises:
        GateError: if it does not say, as of another version.
    """
    try:
        settings = dict(checkpoint["hyper_parameters"])
        settings.pop("seed", None)
        if isinstance(settings["budget"], Mapping) and "table" in settings["budget"]:
            settings["budget"] = TimeLimit.of_plain(settings["budget"])
        return PrunerOptions(**settings)
    except (KeyError, TypeError, ValueError) as error:
        raise GateError(f"the run of {path!r} does not say with which options it was trained; run fit again") from error


def choose_mask(
    trained: TrainedModel,
    ranking: str | None = None,
    budget: int | float | Mapping[str, int | float] | None = None,
    *,
    minimum_per_layer: int | None = None,
    later: Mapping[str, Callable[[], Tensor]] | None = None,
) -> Tensor:
    """The mask ``[heads]`` of a ranking at a budget; without one, as in the run.

    Args:
        trained: what a run left.
        ranking: the run's own method by default, whose order is that of log_alpha, or one that the run compared.
        budget: see :class:`gates.budget.Budget`.
        minimum_per_layer: with a budget, heads that every layer keeps; as in the run by default.
        later: by name what computes rankings ``[gates]`` that the run did not compare.

    Raises:
        GateError: for an unknown ranking or a budget the model cannot have.
    """
    run, gates, ranking, later = trained.run, trained.gates, ranking or trained.method, later or {}
    known = {trained.method: gates.log_alpha.detach()}
    for name, scores in _compared_rankings(run).items():
        known.setdefault(name, scores)  # the run's own follows its gates
    others = [name for name in later if name not in known]
    if ranking not in [*known, *others]:
        further = f", or with --budget one of {', '.join(others)}" if others else ""
        raise GateError(f"this run has no ranking {ranking!r}; expected one of {', '.join(known)}{further}")
    if budget is None and ranking in others:
        raise GateError(f"this run did not compare {ranking!r} and has no mask of it; give --budget, and it is scored now")
    if budget is None:
        if minimum_per_layer is not None:
            raise GateError("a minimum per layer needs a budget; give --budget too")
        path = run.path / "masks" / f"{file_name(ranking)}.json"
        if path.is_file():
            check_unchanged(path, path.read_text(encoding="utf-8", errors="replace"))
        return load_mask(path, gates.sites)
    mask_by = partial(
        budget_mask,
        budget=Budget.parse(budget, gates.kind_sizes()),
        kind_index=gates.kind_index(),
        layer_index=gates.layer_index(),
        minimum_per_layer=trained.options.minimum_per_layer if minimum_per_layer is None else minimum_per_layer,
    )
    if trained.options.prune == 0 and ranking == trained.method and mask_by(torch.zeros(gates.size)).sum() < gates.size:
        raise GateError("this run pruned nothing, so its gates rank no heads; give --ranking, for example obs")
    if ranking in others:
        mask_by(torch.zeros(gates.size))  # what is impossible is said before anything is scored
        return gates.to_heads(mask_by(later[ranking]()))
    return gates.to_heads(mask_by(known[ranking]))


def _compared_rankings(run: RunDirectory) -> dict[str, Tensor]:
    """The rankings ``[gates]`` in the run's table of scores, by method; none if it compared nothing."""
    if not (run.path / SCORES).is_file():
        return {}
    table, prefix = read_table(run.path / SCORES, needed=("gate", "layer", "head")), "ranking:"
    rankings = (str(name) for name in table if str(name).startswith(prefix))
    return {name.removeprefix(prefix): torch.tensor(table[name].tolist(), dtype=torch.float64) for name in rankings}


def _dense_model(run: RunDirectory, checkpoint: Mapping[str, Any], path: str) -> PreTrainedModel:
    """The model that a checkpoint holds; its config is that of the run's export, but with all heads the run started with."""
    state = checkpoint["state_dict"]
    config = read_config(str(run.export))
    try:
        stock = getattr(transformers, config.architectures[0])
    except (TypeError, IndexError, AttributeError) as error:
        raise GateError(f"{str(run.export / 'config.json')!r} is damaged ({first_line(error)}); run fit again") from error
    for name in ("pruned_attention", "auto_map"):
        if hasattr(config, name):
            delattr(config, name)
    model: PreTrainedModel = stock(config)
    if checkpoint.get(PRUNED_BEFORE):
        reshape_(model, checkpoint[PRUNED_BEFORE])
    weights = {name.removeprefix("backbone."): value for name, value in state.items() if name.startswith("backbone.")}
    for name, parameter in model.named_parameters():
        if name in weights:  # of the type that they were trained beside
            parameter.data = parameter.data.to(weights[name].dtype)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise GateError(
            f"the weights in {path!r} are not of the model in {str(run.export)!r}; use a checkpoint of the run"
        ) from error
    if model.can_generate() and (run.export / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(run.export)
    return model.eval()
