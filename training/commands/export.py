"""``head-gates export RUN_OR_CHECKPOINT``: a finished run's model in another form.

Any budget of any ranking of the run, without training again. Nothing is read but the run directory and, for ``--refit`` and
for a ranking that is scored now, its data.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from jsonargparse import Namespace
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from transformers import BaseImageProcessor, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from gates.artefact import GateConfig
from gates.attention.inputs import example_inputs
from gates.errors import GateError, first_line
from gates.export.card import card_text
from gates.export.checkpoint import ModelCard, check_dense, copy_in_form, own_auto_class, refuse_taken, save_pruned
from gates.export.cost import Cost, count_parameters, measure_cost, milliseconds
from gates.export.hub import check_can_push, push_to_hub
from gates.export.onnx import export_onnx_files
from gates.export.safe_load import write_checksums
from gates.export.stock import check_head_size
from gates.files import written_whole
from gates.gating.budget import Budget, budget_mask
from gates.gating.head_gates import HeadGates, read_extra_state
from gates.gating.latency import LatencyTable, TimeLimit
from gates.model import GatedModel
from gates.modeling_pruned import reshape_
from gates.options import TOP_K_FAMILIES
from gates.surgery.masks import load_mask, save_mask
from gates.surgery.verify import TOLERANCE, relative_difference
from training.analysis.model import LoadedRun, load_run, names_of_other_data
from training.cli.command_line import CommandLine
from training.cli.exit import stdout
from training.commands.options import Format
from training.commands.preflight import check_no_others
from training.comparison.estimate import EXPORT, expected, refit_seconds, score_seconds, speed_of
from training.comparison.methods import Method, file_name, mask_found_by, own_method
from training.comparison.run import metrics_on_test
from training.config import PrunerOptions, RefitOptions
from training.config.checks import check_range
from training.config.comparison import POST_HOC, is_retrained
from training.config.data import TOKENIZER_FILES
from training.pruner.checkpoints import KEPT, check_identity, read_checkpoint
from training.pruner.module import PRUNED_BEFORE
from training.report.captions import card_notes
from training.runs import progress
from training.runs.directory import LATENCY, RunDirectory, writing_to
from training.runs.resume import noted_identity
from training.runs.stored import RUN_AGAIN, check_unchanged, damaged, read_json, read_table
from training.runs.tracking import versions
from training.scoring.refits import Refit, quality, refit_if_better_
from training.scoring.scorers import SCORERS, Scores
from training.setup import quiet_libraries
from training.stats.numbers import counted, quantity
from training.tasks import base_model_name
from training.tasks.classification import read_image_processor
from training.tasks.loading import read_config, read_tokenizer

COMPUTABLE = [name for name, scorer in SCORERS.items() if scorer.ranks and not scorer.is_weighted]
"""The scored methods whose ranking follows from the dense model and training data, with nothing to choose."""

# A finished run: its dense model, its learned gates, and its rankings. Only the run directory is read.

SCORES = "scores.csv"


@dataclass(frozen=True)
class TrainedModel:
    """The dense model and the gates of a finished run.

    Args:
        model: The dense model, with the weights of the checkpoint.
        gates: The gates at the end of the run, not attached.
        gate_config: The config of the gates; ``base_model`` is a hub name, or the last part of a local folder.
        method: The method whose heads the run keeps, such as ``learned+refit``.
        learned: The run's own method, which learned the gates.
        checkpoint: The name of the checkpoint, such as ``final``.
        changed: A few words on changes of the weights since; empty for none.
    """

    run: RunDirectory
    model: PreTrainedModel
    gates: HeadGates
    gate_config: GateConfig
    options: PrunerOptions
    method: str
    learned: str
    checkpoint: str
    tokenizer: PreTrainedTokenizerBase | BaseImageProcessor | None
    changed: str = ""


def load_trained(path: str) -> TrainedModel:
    """Load the dense model and the gates of a finished run, from a run directory or a checkpoint in one.

    The gates are those of the end of the run, also with the weights of another checkpoint.
    """
    is_checkpoint = names_checkpoint(path)
    if is_checkpoint and not Path(path).is_file():
        raise GateError(f"the checkpoint {path!r} does not exist; check the path")
    run = RunDirectory.finished(run_of(path))
    final = read_checkpoint(run.checkpoint("final"))
    content = read_checkpoint(path) if is_checkpoint else final
    of = f"the run in {str(run.path)!r}"
    check_identity(final, run.checkpoint("final"), noted_identity(run, "final"), of)
    if is_checkpoint:
        check_identity(content, path, noted_identity(run, Path(path).stem), of)
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
    return TrainedModel(run, model, gates, config, options, str(final[KEPT]), own_method(options).name, name, tokenizer)


def names_checkpoint(path: str) -> bool:
    """Return whether a path has the ending of a checkpoint and is not a directory."""
    return Path(path).suffix == ".ckpt" and not Path(path).is_dir()


def run_of(path: str) -> Path:
    """Return the directory of a run, given the directory or a checkpoint in it."""
    return Path(path).resolve().parents[1] if names_checkpoint(path) else Path(path)


def options_of(checkpoint: Mapping[str, Any], path: str) -> PrunerOptions:
    """Return the options that a checkpoint was trained with."""
    try:
        settings = dict(checkpoint["hyper_parameters"])
        settings.pop("seed", None)
        if isinstance(settings["budget"], Mapping) and "table" in settings["budget"]:
            settings["budget"] = TimeLimit.of_plain(settings["budget"])
        return PrunerOptions(**settings)
    except (KeyError, TypeError, ValueError) as error:
        raise GateError(
            f"the options in {path!r} are not those of this version ({first_line(error)}); use the version that trained it, or "
            "run fit again"
        ) from error


def choose_mask(
    trained: TrainedModel,
    ranking: str | None = None,
    budget: int | float | Mapping[str, int | float] | None = None,
    *,
    minimum_per_layer: int | None = None,
    compute: Callable[[str], Tensor],
) -> Tensor:
    """Return the mask ``[heads]`` of a ranking at a budget; without a budget, as in the run.

    Args:
        ranking: A ranking that the run compared, or one of :data:`COMPUTABLE`. Default: the method whose heads the run keeps.
        minimum_per_layer: With a budget, the heads that every layer keeps. Default: as in the run.
        compute: A function that computes the ranking ``[gates]`` of a method that the run did not compare.
    """
    run, gates, ranking = trained.run, trained.gates, ranking or trained.method
    known = dict.fromkeys((trained.learned, Method.parse(trained.learned).base), gates.log_alpha.detach())
    for name, scores in _compared_rankings(run).items():
        known.setdefault(name, scores)  # the run's own follows its gates
    others = [name for name in COMPUTABLE if name not in known]
    if ranking not in [*known, *others]:
        expected = f"{', '.join(known)}, or with --budget one of {', '.join(others)}"
        raise GateError(f"this run has no ranking {ranking!r}; expected one of {expected}")
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
        mask_by(torch.zeros(gates.size))  # refuse an impossible budget before scoring
        return gates.to_heads(mask_by(compute(ranking)))
    return gates.to_heads(mask_by(known[ranking]))


def _compared_rankings(run: RunDirectory) -> dict[str, Tensor]:
    """Return the rankings ``[gates]`` in the run's table of scores, by method; none if it compared nothing."""
    if not (run.path / SCORES).is_file():
        return {}
    table, prefix = read_table(run.path / SCORES, needed=("gate", "layer", "head")), "ranking:"
    rankings = (str(name) for name in table if str(name).startswith(prefix))
    return {name.removeprefix(prefix): torch.tensor(table[name].tolist(), dtype=torch.float64) for name in rankings}


def _dense_model(run: RunDirectory, checkpoint: Mapping[str, Any], path: str) -> PreTrainedModel:
    """Return the model of a checkpoint. Its config is that of the run's export, with all heads that the run started with."""
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
        if name in weights:  # of the type in training
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


# The dense model of a finished run, refitted to a mask without training.


def dense_checkpoint(path: str) -> str:
    """Return the path of a run's dense weights, given the run directory or that path."""
    if not names_checkpoint(path):
        return str(RunDirectory.finished(path).checkpoint("dense"))
    if Path(path).stem != "dense":
        raise GateError(f"--refit starts from the dense weights of a run, not from those of {path!r}; give its directory")
    return path


@progress.stage("refitting the weights to the mask")
def refitted_to(trained: TrainedModel, mask: Tensor, dense: LoadedRun) -> tuple[TrainedModel, Refit, str]:
    """Return the run with output projections refitted to a mask, the refit, and the selection result in words.

    Training data give the fits; the selection split decides whether they stay. The weights of ``dense`` are changed and its
    gates detached.
    """
    aim = {name: parameter.detach() for name, parameter in trained.model.named_parameters()}
    before = quality(dense, torch.ones(dense.gates.size)).metric
    found = refit_if_better_(dense, trained.gates.to_gates(mask), RefitOptions(), aim)
    dense.gates.detach()
    after, of_dense = (quantity(dense.metric, value) for value in (found.reached, before))
    reached = f"{dense.metric} on the selection split {after} (dense {of_dense})"
    changed = (
        f"refitted to this mask by least squares, without training; {reached}"
        if found.is_applied
        else f"not refitted, because that does clearly worse than the mask alone; {reached}"
    )
    return replace(trained, model=dense.backbone.cpu().eval(), changed=changed), found, reached


BEHIND = ("--data", "--trainer.", "--model.backbone", "--model.trust_remote_code", "--model.allow_pickle")
"""The beginnings of the options of fit that may stand behind ``--``: places, and the device."""


def export_run(line: CommandLine) -> None:
    """Load the run, choose its heads, write the form and show it."""
    quiet_libraries()
    options = line.options
    out = Path(options.output or default_output(options))
    _check(line, out)
    padding = padding_of(options)
    trained, mask = _model_and_mask(line, padding)
    with writing_to(out):
        cost = export(trained, mask, options, out, padding)
    show(stdout(), trained, mask, options.format, out, cost)
    if not (options.refit or options.format == "gates" or is_result_of_run(trained, mask)):
        stdout().print("quality: not measured with these heads and weights; --refit refits and measures", soft_wrap=True)
    if options.push_to_hub is not None:
        with progress.stage("uploading"):
            address = push_to_hub(out, options.push_to_hub, private=options.private or None)
        stdout().print(f"uploaded to {escape(address)}", soft_wrap=True, highlight=False)


def _model_and_mask(line: CommandLine, padding: bool | LatencyTable) -> tuple[TrainedModel, Tensor]:
    """Return the run's model, refitted on request, and the mask ``[heads]``. Whatever is impossible is refused before anything
    is scored or refitted."""
    options = line.options
    trained = load_trained(dense_checkpoint(options.run) if options.refit else options.run)

    @cache
    def dense() -> LoadedRun:
        return load_run(str(trained.run.path), line.rest)

    if options.refit and trained.options.why_not_refitted:
        raise GateError(f"--refit is not possible for this run: {trained.options.why_not_refitted}")
    if options.format in ("stock", "masked"):
        check_dense(trained.model, options.format)
    if options.format == "stock" and options.budget is not None:
        sizes = trained.gates.kind_sizes()
        if Budget.parse(options.budget, sizes).total < sum(sizes.values()):
            check_head_size(trained.model)

    def compute(name: str) -> Tensor:
        if options.refit:
            _notice_time(dense(), options, scores=True)
        with progress.stage(f"scoring by {name}"):
            return Scores(dense()).ranking(name, seed=dense().setup.run.seed)

    least = options.minimum_per_layer
    mask = choose_mask(trained, options.ranking, options.budget, minimum_per_layer=least, compute=compute)
    if options.refit:
        if options.format == "stock":
            inputs = example_inputs(trained.model)
            copy_in_form(trained.model, mask, "stock", inputs, pad_heads=padding)  # possible, whatever the weights?
        if not dense.cache_info().currsize:  # nothing was scored
            _notice_time(dense(), options)
        trained, refit, reached = refitted_to(trained, mask, dense())
        if others := names_of_other_data(line.rest):
            trained = replace(trained, changed=f"{trained.changed}, with data given at the export ({', '.join(others)})")
        heads, seconds = counted(int(mask.sum()), "head"), f"in {refit.cost.seconds:.0f} s"
        done, why = ("refitted", "") if refit.is_applied else ("not refitted", ", because the loss rises")
        text = f"dense weights {done} to {heads} of {options.ranking or trained.method}{why}: {reached}, {seconds}"
        stdout().print(text, soft_wrap=True, highlight=False)
    elif line.rest and not dense.cache_info().currsize:
        raise GateError(f"{line.rest[0]!r} behind -- is for the run's data, which this export does not read; remove it")
    return trained, mask


def _notice_time(dense: LoadedRun, options: Namespace, *, scores: bool = False) -> None:
    """Say how long the refit and the export take, if that is known."""
    if (speed := speed_of(dense)) is not None:
        of_dense = speed.batch * len(dense.data.val_dataloader())
        seconds = refit_seconds(speed, dense.data) + of_dense + bool(options.measure) * EXPORT
        progress.notice(expected(seconds + scores * score_seconds(speed, dense.data)))


def default_output(options: Namespace) -> str:
    """Return the default directory of an export: that of the run with the options of the export in its name.

    >>> given = {"minimum_per_layer": 1, "pad_heads": None, "refit": True}
    >>> default_output(Namespace(run="runs/mine/", format="pruned", ranking="obs", budget={"encoder": 9}, **given))
    'runs/mine-pruned-obs-encoder9-min1-refit'
    """
    budget = options.budget
    kinds = "-".join(f"{kind}{count}" for kind, count in budget.items()) if isinstance(budget, dict) else budget
    least = None if options.minimum_per_layer is None else f"min{options.minimum_per_layer}"
    padded = "padded-fastest" if options.pad_heads == "fastest" else "padded"
    ways = [way for way, is_taken in ((padded, options.pad_heads), ("refit", options.refit)) if is_taken]
    run, checkpoint = run_of(options.run), Path(options.run).stem if names_checkpoint(options.run) else None
    if run.name in ("", ".."):
        run = run.resolve()
    parts = [checkpoint, options.format, options.ranking, kinds, least, *ways]
    return "-".join([str(run), *(str(part).replace(os.sep, "-") for part in parts if part is not None)])


def padding_of(options: Namespace) -> bool | LatencyTable:
    """Return whether to pad heads, or the latency table of the run where the fastest number is wanted."""
    if options.pad_heads != "fastest":
        return options.pad_heads is not None
    file = run_of(options.run) / LATENCY
    if not file.is_file():
        raise GateError(
            f"--pad_heads fastest needs the measured times in {str(file)!r}, which only a run with a budget in time has; write "
            f"them by head-gates latency --output {file}, or give --pad_heads alone"
        )
    return LatencyTable.read(file)


def _check(line: CommandLine, out: Path) -> None:
    """Raise :class:`GateError` for options that are impossible or do not go together, before anything is read."""
    options = line.options
    for given in line.rest:
        if given.startswith("--") and not given.startswith(BEHIND):
            raise GateError(f"{given!r} behind -- does not say where something is; expected one of {', '.join(BEHIND)}")
    check_range(options, "length", least=2, prefix="--")
    check_range(options, "minimum_per_layer", least=0, prefix="--")
    if any(size < 1 for size in options.measure):
        raise GateError(f"--measure is {options.measure}; expected batch sizes of at least 1")
    unused = {"--length"} if options.format == "gates" else set()  # whose check has one shape
    if options.measure and options.format in ("masked", "gates"):  # dense, and as fast as the model was
        unused.add("--measure")
    check_no_others(line.given, f"--format {options.format}", unused)
    refuse_taken(out)
    if options.pad_heads and options.format != "stock":
        raise GateError(f"--pad_heads is for --format stock, and the format is {options.format}; leave one of them out")
    if options.private and options.push_to_hub is None:
        raise GateError(
            "--private says how a repository is made, but nothing is uploaded; give --push_to_hub USER/NAME as well"
        )
    if options.push_to_hub is not None:
        check_can_push(options.push_to_hub)
    if options.refit and options.format == "gates":
        raise GateError("--refit changes weights, but the format gates holds none; give another --format")


@progress.stage("exporting, reloading and checking")
def export(trained: TrainedModel, mask: Tensor, options: Namespace, out: Path, padding: bool | LatencyTable) -> Cost | None:
    """Write the form of the options, and return its measured cost."""
    if options.format == "gates":
        _export_gates(trained, mask, out)
        return None
    model, inputs = trained.model, example_inputs(trained.model, length=options.length, padded=True)
    cost = None
    if options.format != "masked":
        cut, _ = copy_in_form(model, mask, "pruned", inputs, pad_heads=padding)
        with progress.stage("measuring parameters, FLOPs and latency"):
            cost = measure_cost(model, cut, inputs, batch_sizes=options.measure)
    card = _card(trained, mask, options.ranking or trained.method, cost)
    if options.format == "onnx":
        _export_onnx(trained, cut, mask, inputs, card, out)
    else:
        more = {"form": options.format, "pad_heads": padding}
        save_pruned(model, out, mask, **more, tokenizer=trained.tokenizer, card=card, check_batch=inputs)
    return cost


def _export_gates(trained: TrainedModel, mask: Tensor, out: Path) -> None:
    """Write the gates alone, fixed at the mask."""
    ungated = copy.deepcopy(trained.model)
    gated = GatedModel(trained.model, trained.gate_config)
    gated.gates.log_alpha.data.copy_(trained.gates.log_alpha.detach())
    gated.set_mask_(trained.gates.to_gates(mask))
    with written_whole(out) as partial:
        gated.save_pretrained(partial)
        again = GatedModel.from_pretrained(ungated, partial)
        inputs = example_inputs(trained.model)
        difference = relative_difference(gated, again, inputs)  # type: ignore[arg-type]
        if not difference <= TOLERANCE:
            raise GateError(f"the reloaded gates differ from the saved ones by {difference:.2g} (relative); nothing was kept")
        save_mask(partial / "mask.json", mask, trained.gates.sites)
    gated.unload()


def _export_onnx(
    trained: TrainedModel, cut: PreTrainedModel, mask: Tensor, inputs: Mapping[str, Tensor], card: ModelCard, out: Path
) -> None:
    model = trained.model
    with written_whole(out) as partial:
        files = export_onnx_files(cut, partial, inputs)
        cut.config.save_pretrained(partial)
        if trained.tokenizer is not None:
            trained.tokenizer.save_pretrained(partial)
        save_mask(partial / "mask.json", mask, trained.gates.sites, method=card.method)
        write_checksums(partial)
        text = card_text(
            model,
            mask,
            "onnx",
            card,
            auto=own_auto_class(model),
            parameters=count_parameters(cut),
            has_tokenizer=trained.tokenizer is not None,
            files=[file.name for file in files],
        )
        (partial / "README.md").write_text(text, encoding="utf-8")


def is_result_of_run(trained: TrainedModel, mask: Tensor) -> bool:
    """Return whether a mask ``[heads]`` has the heads that the run kept, and the weights are those it ended with."""
    own = load_mask(trained.run.path / "masks" / f"{file_name(trained.method)}.json", trained.gates.sites)
    return trained.checkpoint == "final" and torch.equal(mask, own)


def _card(trained: TrainedModel, mask: Tensor, ranking: str, cost: Cost | None) -> ModelCard:
    """Return the model card, with the run's results if they are of these heads and weights."""
    if is_result_of_run(trained, mask):
        file, kept = trained.run.path / "metrics.json", Method.parse(trained.method)
        metrics = read_json(file, dict)
        described = metrics.get("run")
        try:
            dense: Mapping[str, Mapping[str, Any]] = described.get("dense", {})  # type: ignore[union-attr]
            trained_on = next((row for stage, row in dense.items() if is_retrained(stage)), dense.get(POST_HOC, {}))
            dropped = described.get("refits_dropped", ())  # type: ignore[union-attr]
            known = {
                "metrics": metrics_on_test(described["result"]),  # type: ignore[index]
                "dense_metrics": metrics_on_test(trained_on),
                "notes": card_notes(metrics),
                **described.get("data", {}),  # type: ignore[union-attr]
            }
        except (AttributeError, KeyError, TypeError) as error:
            raise damaged(file, "results of a run", first_line(error), RUN_AGAIN) from error
        method = mask_found_by(trained.options, kept, is_refitted="refit" in kept.modifiers and kept.name not in dropped)
    else:
        known = {}
        method = f"the ranking {ranking!r} of a run; its {trained.checkpoint} weights, "
        method += trained.changed or "not trained on with this mask"
    return ModelCard(base_model=trained.gate_config.base_model, method=method, **known, versions=versions(), cost=cost)


def show(console: Console, trained: TrainedModel, mask: Tensor, format: Format, out: Path, cost: Cost | None) -> None:
    """Print the export's size and its measured cost."""
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    space = f"{size / 1e6:.2f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
    console.print(f"{format}: {int(mask.sum())} of {len(mask)} heads, {space} in {escape(str(out))}", soft_wrap=True)
    if format == "gates":
        run, name = trained.run, trained.checkpoint
        source = run.path if name == "final" else run.checkpoint(name)
        console.print(
            f"the weights they belong to: head-gates export {escape(str(source))} --format masked "
            f"--budget {trained.gates.size} --output ...",
            soft_wrap=True,
        )
    if cost is None:
        return
    table = Table(title=cost.hardware, caption=f"one example: {cost.example}")
    for name in ("", "dense", "pruned", "dense / pruned"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("parameters", f"{cost.dense_parameters:,}", f"{cost.pruned_parameters:,}", f"{cost.parameter_ratio:.2f}")
    table.add_row("FLOPs of one example", f"{cost.dense_flops:,}", f"{cost.pruned_flops:,}", f"{cost.flop_ratio:.2f}")
    for row in cost.latency:
        times = milliseconds(row.dense_ms), milliseconds(row.pruned_ms)
        table.add_row(f"ms at batch size {row.batch_size}", *times, f"{row.ratio:.2f}")
    console.print(table)
