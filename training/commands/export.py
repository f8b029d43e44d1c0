"""``python -m training export RUN_OR_CHECKPOINT --format FORMAT --out DIR``: a finished run's model in another form.

Any budget of any ranking of the run, without training again. Nothing is read but the run directory.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from gates.errors import GateError
from gates.export.card import card_text
from gates.export.checkpoint import TOLERANCE, ModelCard, own_auto_class, refuse_taken, save_pruned, written_whole
from gates.export.cost import Cost, count_parameters, measure_cost
from gates.export.example_inputs import example_inputs
from gates.export.onnx import export_onnx_files
from gates.export.safe_load import write_checksums
from gates.export.stock import relative_difference
from gates.model import GatedModel
from gates.surgery.masks import load_mask, save_mask
from gates.surgery.remove import remove_heads_
from training.cli import finish, stdout
from training.commands.trained import TrainedModel, choose_mask, load_trained
from training.runs import progress
from training.runs.tracking import versions
from training.setup import quiet_libraries

Format = Literal["stock", "remote-code", "masked", "gates", "onnx"]
FORMS: dict[str, Literal["stock", "pruned", "masked"]] = {"stock": "stock", "remote-code": "pruned", "masked": "masked"}


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m training export", description="A finished run's model in another form.")
    parser.add_argument("run", type=str, help="A run directory that fit wrote, or a .ckpt in its checkpoints folder.")
    parser.add_argument(
        "--format",
        type=Format,
        required=True,
        help="stock: heads gone, plain Transformers, if every layer keeps the same number; remote-code: heads gone, any mask; "
        "masked: dense shape; gates: the gates alone; onnx: for ONNX Runtime.",
    )
    parser.add_argument("--out", type=str, required=True, help="Directory to write.")
    parser.add_argument(
        "--budget",
        type=int | float | dict[str, int | float] | None,
        default=None,
        help="Heads to keep: a count, a fraction, or one of these per kind (default: the ranking's own mask in the run).",
    )
    parser.add_argument(
        "--ranking",
        type=str | None,
        default=None,
        help="Whose order of heads: a ranking the run compared (default: the run's own method, by log_alpha).",
    )
    parser.add_argument(
        "--minimum_per_layer",
        type=int | None,
        default=None,
        help="With --budget, heads that every layer keeps (default: as in the run). The stock format needs the same number in "
        "every layer: a budget of this number times the layers gives that.",
    )
    parser.add_argument("--measure", type=list[int], default=[1, 8, 32], help="Batch sizes to measure latency at; [] for none.")
    parser.add_argument("--length", type=int, default=128, help="Tokens per example of the check and the measurement.")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 2 for input that its user can mend."""
    quiet_libraries()
    given = list(sys.argv[1:] if arguments is None else arguments)
    return finish(lambda: build_parser().parse_args(given), export_run, when_stopped="nothing was written")


def export_run(options: Namespace) -> None:
    """Load the run, choose its heads, write the form and show it."""
    if options.length < 2:
        raise GateError(f"--length is {options.length}; expected at least 2 tokens")
    if options.minimum_per_layer is not None and options.minimum_per_layer < 0:
        raise GateError(f"--minimum_per_layer is {options.minimum_per_layer}; expected 0 or more")
    if any(size < 1 for size in options.measure):
        raise GateError(f"--measure is {options.measure}; expected batch sizes of at least 1")
    refuse_taken(options.out)
    with progress.stage("loading the run"):
        trained = load_trained(options.run)
    mask = choose_mask(trained, options.ranking, options.budget, minimum_per_layer=options.minimum_per_layer)
    cost = export(
        trained, mask, options.format, Path(options.out), options.ranking, measure=options.measure, length=options.length
    )
    show(stdout(), trained, mask, options.format, Path(options.out), cost)


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

    Raises:
        GateError: if the form is not possible, the check fails or the directory is taken; nothing is left then.
    """
    refuse_taken(out)
    if format == "gates":
        _export_gates(trained, mask, out)
        return None
    model, inputs = trained.model, example_inputs(trained.model, length=length, padded=True)
    cut = copy.deepcopy(model).eval()
    cost = None
    if format != "masked":
        remove_heads_(cut, mask)
        with progress.stage("measuring parameters, FLOPs and latency"):
            cost = measure_cost(model, cut, inputs, batch_sizes=measure)
    card = _card(trained, mask, ranking or trained.method, cost)
    if format == "onnx":
        _export_onnx(trained, cut, mask, inputs, card, out)
    else:
        save_pruned(model, out, mask, form=FORMS[format], tokenizer=trained.tokenizer, card=card, check_batch=inputs)
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
            files=[file.name for file in files],
        )
        (partial / "README.md").write_text(text, encoding="utf-8")


def _card(trained: TrainedModel, mask: Tensor, ranking: str, cost: Cost | None) -> ModelCard:
    """States the run's results only for what the run tested: its learned mask, with the weights retrained with it."""
    own = load_mask(trained.run.path / "masks" / f"{trained.method}.json", trained.gates.sites)
    if trained.checkpoint == "final" and torch.equal(mask, own):
        results = json.loads((trained.run.path / "metrics.json").read_text(encoding="utf-8"))["run"]["result"]
        metrics = {name.removeprefix("test_"): value for name, value in results.items() if name.startswith("test_")}
        method = trained.options.mask_found_by
    else:
        metrics = {}
        method = f"the ranking {ranking!r} of a run; its {trained.checkpoint} weights, not trained on with this mask"
    return ModelCard(base_model=trained.gate_config.base_model, method=method, metrics=metrics, versions=versions(), cost=cost)


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
            f"--budget {trained.gates.size} --out ...",
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
        table.add_row(f"ms at batch size {row.batch_size}", f"{row.dense_ms:.3g}", f"{row.pruned_ms:.3g}", f"{row.ratio:.2f}")
    console.print(table)
