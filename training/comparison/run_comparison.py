"""Compare the learned mask with what scores would have kept, on the same dense model, at the same budget and cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from gates.budget import Budget, budget_mask
from gates.errors import GateError
from gates.scores.ranking import RANKINGS, RankingName, ranking_scores
from training.comparison.translations import save_translations
from training.data.base import TaskData
from training.pruner.evaluation import TrainerFactory, evaluate
from training.pruner.module import HeadPruner
from training.runs.progress import CellProgress, cell_progress
from training.runs.run_directory import RunDirectory
from training.scoring.subject import Scores, score_heads

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
METHODS = ("learned", *RANKINGS)


@dataclass
class Comparison:
    """Results: one row per method and stage.

    Args:
        rows: method, stage (``post hoc``: mask only; ``settled``: trained on with the mask), heads, metrics on the
            selection and the test split, optimiser steps after the dense model, seconds.
        curve: post hoc quality of every ranking at other budgets, on the selection split.
        masks: 0/1 mask of each method at the run's budget.
        scores: what the rankings were made of.
        keep: scores of each ranking, higher kept first.
        alpha: of ``hies``, chosen on the selection split.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    curve: list[dict[str, Any]] = field(default_factory=list)
    masks: dict[str, Tensor] = field(default_factory=dict)
    scores: Scores | None = None
    keep: dict[str, Tensor] = field(default_factory=dict)
    alpha: float = 0.5

    def table(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows)


def check_methods(methods: Sequence[str], *, more: Sequence[str] = ()) -> None:
    """Raises :class:`GateError` for a name that is no method."""
    allowed = (*METHODS, *more)
    for method in methods:
        if method not in allowed:
            raise GateError(f"unknown method {method!r}; expected some of {', '.join(allowed)}")


def compare(
    pruner: HeadPruner,
    data: TaskData,
    run: RunDirectory,
    make_trainer: TrainerFactory,
    *,
    learned_row: dict[str, Any],
    settled: Sequence[str],
    curve_fractions: Sequence[float],
    show_progress: bool = True,
) -> Comparison:
    """Fill a :class:`Comparison`. The pruner comes with the learned mask in force and leaves in that state.

    Args:
        pruner: after training.
        data: its data.
        run: holds ``checkpoints/dense.ckpt``, where every rival starts.
        make_trainer: makes trainers with the run's own settings.
        learned_row: the learned method's settled result.
        settled: methods to train on with their mask, for as many steps as the learned one; ``dense`` among them is the
            control that keeps all heads.
        curve_fractions: budgets of the post hoc curve, see :func:`curve_budget`.
        show_progress: whether to draw bars.
    """
    gates = pruner.gates
    learned_mask = gates.mask.detach().cpu().clone()
    learned_state = {
        name: tensor.detach().cpu().clone() for name, tensor in pruner.state_dict().items() if torch.is_tensor(tensor)
    }
    learned_log_alpha = gates.log_alpha.detach().cpu().clone()
    result = Comparison(masks={"learned": learned_mask})
    rivals = [method for method in settled if method != "learned"]
    count = 1 + len(METHODS) + len(ALPHAS) + len(METHODS) * len(curve_fractions) + len(rivals)
    try:
        scorer = make_trainer()
        _load_dense(pruner, run)
        result.scores = score_heads(pruner, data.score_dataloader(), scorer)
        with cell_progress(count, visible=show_progress and scorer.is_global_zero) as progress:
            cells = _Cells(pruner, data, run, make_trainer, progress)
            sizes = gates.kind_sizes()
            budget = pruner.budget_of(learned_mask)
            kinds, layers = gates.kind_index().cpu(), gates.layer_index().cpu()
            minimum = pruner.hparams["minimum_per_layer"]

            def keep(name: RankingName, alpha: float) -> Tensor:
                assert result.scores is not None
                return ranking_scores(
                    name,
                    his=result.scores.importance.his,
                    entropy=result.scores.entropy,
                    layer_index=layers,
                    alpha=alpha,
                    seed=pruner.hparams["seed"],
                )

            def mask(keep: Tensor, at: Budget = budget, minimum: int = minimum) -> Tensor:
                return budget_mask(keep, at, kind_index=kinds, layer_index=layers, minimum_per_layer=minimum)

            # The best post hoc result on the selection split, the first of equals.
            main = f"select_{pruner.task.main_metric}"
            quality = [cells.post_hoc("hies", mask(keep("hies", alpha)), splits=("select",))[main] for alpha in ALPHAS]
            result.alpha = ALPHAS[max(range(len(ALPHAS)), key=quality.__getitem__)]
            result.keep = {"learned": learned_log_alpha, **{name: keep(name, result.alpha) for name in RANKINGS}}
            result.masks |= {name: mask(result.keep[name]) for name in RANKINGS}

            dense = torch.ones(gates.size)
            result.rows.append(cells.post_hoc("dense", dense))
            result.rows += [cells.post_hoc(method, mask) for method, mask in result.masks.items()]
            for fraction in curve_fractions:
                at = curve_budget(budget, fraction, sizes)
                result.curve += [
                    cells.post_hoc(method, mask(scores, at, 0), splits=("select",)) for method, scores in result.keep.items()
                ]
            result.rows.append(learned_row)
            result.rows += [cells.settle(method, dense if method == "dense" else result.masks[method]) for method in rivals]
    finally:
        pruner.fixed_mask = None
        pruner.load_state_dict(learned_state, strict=False)
        gates.set_mask_(learned_mask.to(pruner.device))
    return result


def curve_budget(budget: Budget, fraction: float, sizes: Mapping[str, int]) -> Budget:
    """The budget of a point of the curve: a fraction of all heads or, where the run has a budget per kind, of the heads of each
    kind that it prunes; the other kinds stay whole, as in the run.

    Args:
        budget: the run's.
        fraction: above 0, at most 1; at least one head is kept.
        sizes: heads of each kind in the model.
    """
    if not budget.per_kind:
        return Budget.parse(max(1, round(fraction * sum(sizes.values()))), sizes)
    return Budget.parse({kind: max(1, round(fraction * sizes[kind])) for kind in budget.pruned(sizes)}, sizes)


def _load_dense(pruner: HeadPruner, run: RunDirectory) -> None:
    """Weights as at the end of the warm-up."""
    checkpoint = torch.load(run.checkpoint("dense"), map_location="cpu", weights_only=True)
    pruner.load_state_dict(checkpoint["state_dict"])


class _Cells:
    """Evaluates and trains single cells of the comparison; the pruner comes with the dense weights loaded."""

    def __init__(
        self,
        pruner: HeadPruner,
        data: TaskData,
        run: RunDirectory,
        make_trainer: TrainerFactory,
        progress: CellProgress,
    ) -> None:
        self.pruner, self.data, self.make_trainer, self.progress = pruner, data, make_trainer, progress
        self.run, self.dense_path = run, run.checkpoint("dense")
        self.evaluator = make_trainer()
        self.settled: dict[tuple[float, ...], tuple[dict[str, Any], dict[str, list[str]]]] = {}

    def post_hoc(self, method: str, mask: Tensor, splits: Sequence[str] = ("select", "test")) -> dict[str, Any]:
        """Mask only, no training."""
        start = time.perf_counter()
        self.pruner.gates.set_mask_(mask.to(self.pruner.device))
        row: dict[str, Any] = {"method": method, "stage": "post hoc", "heads": self.pruner.gates.open_heads(mask)}
        with self.progress.cell(f"{method}, post hoc, {row['heads']} heads"):
            row |= evaluate(self.evaluator, self.pruner, self.data, splits)
        if "test" in splits:
            self._save_outputs(row, self.pruner.outputs.get("test", {}))
        return row | {"steps": 0, "seconds": round(time.perf_counter() - start, 2)}

    def settle(self, method: str, mask: Tensor) -> dict[str, Any]:
        """Train on from the dense checkpoint with the mask fixed, to the end of the learned method's schedule.

        Methods that chose the same mask share one training: it would be the same to the last bit.
        """
        key = tuple(mask.tolist())
        if key not in self.settled:
            self.settled[key] = self._train_on(method, mask)
        row, outputs = self.settled[key]
        row = row | {"method": method}
        self._save_outputs(row, outputs)
        return row

    def _train_on(self, method: str, mask: Tensor) -> tuple[dict[str, Any], dict[str, list[str]]]:
        """The row of the table, and the translations of the test split by search; none for other tasks."""
        start = time.perf_counter()
        self.pruner.fixed_mask = mask
        self.pruner.train()  # Lightning keeps the mode it finds
        row: dict[str, Any] = {"method": method, "stage": "settled", "heads": self.pruner.gates.open_heads(mask)}
        with self.progress.cell(f"{method}, settled, {row['heads']} heads") as steps_shown:
            trainer = self.make_trainer(steps_shown, limit_val_batches=0)
            trainer.fit(self.pruner, self.data, ckpt_path=self.dense_path, weights_only=True)
            row |= evaluate(self.evaluator, self.pruner, self.data)
        steps = trainer.global_step - self.pruner.boundaries[0]
        row |= {"steps": steps, "seconds": round(time.perf_counter() - start, 2)}
        return row, dict(self.pruner.outputs.get("test", {}))

    def _save_outputs(self, row: dict[str, Any], outputs: dict[str, list[str]]) -> None:
        if self.evaluator.is_global_zero:
            save_translations(self.run, self.data, f"{row['method']}.{row['stage']}", outputs)
