"""``python -m training export RUN_OR_CHECKPOINT``: a finished run's model in another form.

Any budget of any ranking of the run, without training again. Nothing is read but the run directory and, for ``--refit`` and
for a ranking that is scored now, its data.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from jsonargparse import Namespace
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from gates.budget import Budget
from gates.errors import GateError, first_line
from gates.export.card import card_text
from gates.export.checkpoint import ModelCard, check_dense, copy_in_form, own_auto_class, refuse_taken, save_pruned
from gates.export.cost import Cost, count_parameters, measure_cost, milliseconds
from gates.export.example_inputs import example_inputs
from gates.export.hub import check_can_push, push_to_hub
from gates.export.onnx import export_onnx_files
from gates.export.reloaded import TOLERANCE, relative_difference
from gates.export.safe_load import write_checksums
from gates.export.stock import check_head_size
from gates.files import written_whole
from gates.model import GatedModel
from gates.surgery.masks import load_mask, save_mask
from training.analysis.model import DenseModel, load_dense, names_of_other_data
from training.cli.ending import stdout
from training.cli.line import CommandLine
from training.commands.parsers import Format
from training.commands.refitted import load_with_dense_weights, refitted_to
from training.commands.scored import later_rankings
from training.commands.trained import TrainedModel, choose_mask, load_trained, names_checkpoint, run_of
from training.commands.unused import check_no_others
from training.comparison.run_results import metrics_on_test
from training.config.stages import POST_HOC, RETRAINED
from training.runs import progress
from training.runs.run_directory import writing_to
from training.runs.stored import AGAIN, damaged, read_json
from training.runs.tracking import versions
from training.setup import quiet_libraries
from training.stats.numbers import counted

BEHIND = ("--data", "--trainer.", "--model.backbone", "--model.trust_remote_code", "--model.allow_pickle")
"""Beginnings of options of fit that may stand behind ``--``: where things are, and on what device."""
FORMS: dict[str, Literal["stock", "pruned", "masked"]] = {"stock": "stock", "remote-code": "pruned", "masked": "masked"}


def export_run(line: CommandLine) -> None:
    """Load the run, choose its heads, write the form and show it."""
    quiet_libraries()
    options = line.options
    out = Path(options.output or default_output(options))
    _check(line, out)
    trained, mask = _model_and_mask(line)
    with writing_to(out):
        cost = export(
            trained,
            mask,
            options.format,
            out,
            options.ranking,
            measure=options.measure,
            length=options.length,
            pad_heads=options.pad_heads,
        )
    show(stdout(), trained, mask, options.format, out, cost)
    if options.push_to_hub is not None:
        with progress.stage("uploading"):
            address = push_to_hub(out, options.push_to_hub, private=options.private or None)
        stdout().print(f"uploaded to {escape(address)}", soft_wrap=True, highlight=False)


def _model_and_mask(line: CommandLine) -> tuple[TrainedModel, Tensor]:
    """What the run left, refitted if that is asked for, and the mask ``[heads]``. What is impossible is said before anything is
    scored or refitted."""
    options = line.options
    trained = load_with_dense_weights(options.run) if options.refit else load_trained(options.run)

    @cache
    def dense() -> DenseModel:
        """The run's dense model and data: read once, by who needs them first."""
        return load_dense(str(trained.run.path), line.rest)

    if options.refit:
        trained.options.check_refits()
    if options.format in ("stock", "masked"):
        check_dense(trained.model, options.format)
    if options.format == "stock" and options.budget is not None:
        sizes = trained.gates.kind_sizes()
        if Budget.parse(options.budget, sizes).total < sum(sizes.values()):
            check_head_size(trained.model)
    later = later_rankings(dense)
    mask = choose_mask(trained, options.ranking, options.budget, minimum_per_layer=options.minimum_per_layer, later=later)
    if options.refit:
        if options.format == "stock":
            inputs = example_inputs(trained.model)
            copy_in_form(trained.model, mask, "stock", inputs, pad_heads=options.pad_heads)  # possible, whatever the weights?
        trained, refit, reached = refitted_to(trained, mask, dense())
        if others := names_of_other_data(line.rest):
            trained = replace(trained, changed=f"{trained.changed}, with data given at the export ({', '.join(others)})")
        heads, seconds = counted(int(mask.sum()), "head"), f"in {refit.cost.seconds:.0f} s"
        if refit.ridge is None:
            said = f"weights stay as they were for {heads}: {reached}, {seconds}"
        else:
            said = f"refitted to {heads}: {reached}, with ridge {refit.ridge:g}, {seconds}"
        stdout().print(said, soft_wrap=True, highlight=False)
    elif line.rest and not dense.cache_info().currsize:
        raise GateError(f"{line.rest[0]!r} behind -- is for the run's data, which this export does not read; leave it out")
    return trained, mask


def default_output(options: Namespace) -> str:
    """The directory of an export for which none is named: beside the run, by what is exported.

    >>> given = {"minimum_per_layer": 1, "pad_heads": False, "refit": True}
    >>> default_output(Namespace(run="runs/mine/", format="remote-code", ranking="obs", budget={"encoder": 9}, **given))
    'runs/mine-remote-code-obs-encoder9-min1-refit'
    """
    budget = options.budget
    kinds = "-".join(f"{kind}{count}" for kind, count in budget.items()) if isinstance(budget, dict) else budget
    least = None if options.minimum_per_layer is None else f"min{options.minimum_per_layer}"
    ways = [way for way, is_taken in (("padded", options.pad_heads), ("refit", options.refit)) if is_taken]
    run, checkpoint = run_of(options.run), Path(options.run).stem if names_checkpoint(options.run) else None
    if run.name in ("", ".."):
        run = run.resolve()
    parts = [checkpoint, options.format, options.ranking, kinds, least, *ways]
    return "-".join([str(run), *(str(part).replace(os.sep, "-") for part in parts if part is not None)])


def _check(line: CommandLine, out: Path) -> None:
    """What can be said of a line before anything is read.

    Raises:
        GateError: for values that are impossible or do not go together, and an upload that cannot be.
    """
    options = line.options
    for given in line.rest:
        if given.startswith("--") and not given.startswith(BEHIND):
            raise GateError(f"{given!r} behind -- does not say where something is; expected one of {', '.join(BEHIND)}")
    if options.length < 2:
        raise GateError(f"--length is {options.length}; expected at least 2 tokens")
    if options.minimum_per_layer is not None and options.minimum_per_layer < 0:
        raise GateError(f"--minimum_per_layer is {options.minimum_per_layer}; expected 0 or more")
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
def export(
    trained: TrainedModel,
    mask: Tensor,
    format: Format,
    out: Path,
    ranking: str | None = None,
    *,
    measure: Sequence[int] = (),
    length: int = 128,
    pad_heads: bool = False,
) -> Cost | None:
    """Write one form; returns what was measured.

    Args:
        trained: what a run left.
        mask: 0/1 per head, ``[heads]``.
        format: of the export.
        out: directory to write; must not exist or be empty.
        ranking: that the mask is of, for the model card; the run's own by default.
        measure: batch sizes to measure latency at.
        length: tokens per example of the check and the measurement.
        pad_heads: whether heads of zeros make the layers of the stock form equally large.

    Raises:
        GateError: if the form is not possible, the check fails or the directory is taken; nothing is left then.
    """
    refuse_taken(out)
    if format == "gates":
        _export_gates(trained, mask, out)
        return None
    model, inputs = trained.model, example_inputs(trained.model, length=length, padded=True)
    cost = None
    if format != "masked":
        cut, _ = copy_in_form(model, mask, "pruned", inputs, pad_heads=pad_heads)
        with progress.stage("measuring parameters, FLOPs and latency"):
            cost = measure_cost(model, cut, inputs, batch_sizes=measure)
    card = _card(trained, mask, ranking or trained.method, cost)
    if format == "onnx":
        _export_onnx(trained, cut, mask, inputs, card, out)
    else:
        save_pruned(
            model,
            out,
            mask,
            form=FORMS[format],
            pad_heads=pad_heads,
            tokenizer=trained.tokenizer,
            card=card,
            check_batch=inputs,
        )
    return cost


def _export_gates(trained: TrainedModel, mask: Tensor, out: Path) -> None:
    """The gates alone, fixed at the mask."""
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


def _card(trained: TrainedModel, mask: Tensor, ranking: str, cost: Cost | None) -> ModelCard:
    """States the run's results only for what the run tested: its learned mask, with the weights retrained with it."""
    own = load_mask(trained.run.path / "masks" / f"{trained.method}.json", trained.gates.sites)
    if trained.checkpoint == "final" and torch.equal(mask, own):
        file = trained.run.path / "metrics.json"
        described = read_json(file, dict).get("run")
        try:
            dense = described.get("dense", {})  # type: ignore[union-attr]
            known = {
                "metrics": metrics_on_test(described["result"]),  # type: ignore[index]
                "dense_metrics": metrics_on_test(dense.get(RETRAINED, dense.get(POST_HOC, {}))),
                **described.get("data", {}),  # type: ignore[union-attr]
            }
        except (AttributeError, KeyError, TypeError) as error:
            raise damaged(file, "results of a run", first_line(error), AGAIN) from error
        method = trained.options.mask_found_by
    else:
        known = {}
        method = f"the ranking {ranking!r} of a run; its {trained.checkpoint} weights, "
        method += trained.changed or "not trained on with this mask"
    return ModelCard(base_model=trained.gate_config.base_model, method=method, **known, versions=versions(), cost=cost)


def show(console: Console, trained: TrainedModel, mask: Tensor, format: Format, out: Path, cost: Cost | None) -> None:
    """What was written, and what it costs."""
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    space = f"{size / 1e6:.2f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
    console.print(f"{format}: {int(mask.sum())} of {len(mask)} heads, {space} in {escape(str(out))}", soft_wrap=True)
    if format == "gates":
        run, name = trained.run, trained.checkpoint
        source = run.path if name == "final" else run.checkpoint(name)
        console.print(
            f"the weights they belong to: python -m training export {escape(str(source))} --format masked "
            f"--budget {trained.gates.size} --output ...",
            soft_wrap=True,
        )
    if cost is None:
        return
    table = Table(title=cost.hardware)
    for name in ("", "dense", "pruned", "dense / pruned"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("parameters", f"{cost.dense_parameters:,}", f"{cost.pruned_parameters:,}", f"{cost.parameter_ratio:.2f}")
    table.add_row("FLOPs of one example", f"{cost.dense_flops:,}", f"{cost.pruned_flops:,}", f"{cost.flop_ratio:.2f}")
    for row in cost.latency:
        times = milliseconds(row.dense_ms), milliseconds(row.pruned_ms)
        table.add_row(f"ms at batch size {row.batch_size}", *times, f"{row.ratio:.2f}")
    console.print(table)
