"""What is logged of the gates while they train."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import WandbLogger
from torch import Tensor

from gates.sites import KINDS
from gates.surgery.labels import site_labels
from training.plotting import figure_image, gate_heat_map
from training.pruner.module import HeadPruner


def _interval(trainer: pl.Trainer) -> int:
    """Steps between log entries."""
    return int(trainer.log_every_n_steps)  # type: ignore[attr-defined]


class GateLog(pl.Callback):
    """Log expected, hard and target open heads; keep every gate's course, with what is expected and paid, for pictures.

    Args:
        pictures: heat maps that are sent to W&B over the prune phase; the mask follows it. Before, all gates are open.
    """

    def __init__(self, pictures: int = 8) -> None:
        self.pictures = pictures
        self._sent = 0
        self.steps: list[int] = []
        self.values: list[Tensor] = []
        self.beside: list[dict[str, float]] = []
        """Of each step, the expected number of open gates and the prices of one."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "values": self.values, "beside": self.beside}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps, self.values = list(state_dict["steps"]), list(state_dict["values"])
        self.beside = list(state_dict.get("beside", [{} for _ in self.steps]))  # checkpoints of earlier versions have none

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, HeadPruner)
        step = trainer.global_step
        if step % _interval(trainer) == 0 and (not self.steps or self.steps[-1] != step):
            self._record(trainer, pl_module, step)

    @torch.no_grad()
    def _record(self, trainer: pl.Trainer, pruner: HeadPruner, step: int) -> None:
        gates = pruner.gates
        values = gates.values().cpu()
        self.steps.append(step)
        self.values.append(values)
        open_gates = (values > 0).float()
        stochastic = gates.mode == "stochastic"
        expected = gates.open_probability().cpu() if stochastic else open_gates
        self.beside.append({"expected": float(expected.sum())} | pruner.steering.logged_prices(pruner.ramp(step - 1)))
        kinds = gates.kind_index().cpu()
        logged, labels = {}, site_labels(gates.sites)
        for name, counts in (("heads/open", open_gates), ("heads/expected", expected)):
            logged[name] = float(counts.sum())
            for index, kind in enumerate(KINDS):
                if bool((kinds == index).any()):
                    logged[f"{name}/{kind}"] = float(counts[kinds == index].sum())
            for label, part in zip(labels, counts.split(gates.sizes), strict=True):
                logged[f"{name}/{label}"] = float(part.sum())
        logged |= {f"latency/{name}": ms for name, ms in pruner.steering.milliseconds(pruner.ramp(step - 1)).items()}
        budget, goals = pruner.steering.budget, pruner.goals(step - 1)  # which the step that is done aimed at
        if budget is not None and goals:
            logged["heads/target"] = float(sum(goals))
            logged |= {f"heads/target/{kind}": goal for kind, goal in zip(budget.per_kind, goals, strict=False)}
        pruner.log_dict(logged, rank_zero_only=True)
        first, last, _ = pruner.boundaries
        due = self._sent + (last - first) // max(1, self.pictures)
        if first < step <= last and step >= max(first, due):
            self._sent = step
            self._send_picture(trainer, pruner, values, f"gates at step {step}")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The mask, which the end of the prune phase or of training has made."""
        assert isinstance(pl_module, HeadPruner)
        if pl_module.gates.mode == "masked":
            self._send_picture(trainer, pl_module, pl_module.gates.values().detach().cpu(), "heads kept")

    def _send_picture(self, trainer: pl.Trainer, pruner: HeadPruner, values: Tensor, title: str) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and trainer.is_global_zero:
                figure = gate_heat_map(pruner.gates.sites, pruner.gates.to_heads(values), title=title)
                logger.log_image("gates", [figure_image(figure)], step=trainer.global_step)

    def of_pruning(self, pruner: HeadPruner) -> pd.DataFrame:
        """The rows of :meth:`table` in the prune phase; a checkpoint may have brought earlier ones."""
        table, (first, last, _) = self.table(pruner), pruner.boundaries
        return table[(table["step"] > first) & (table["step"] <= last)]

    def table(self, pruner: HeadPruner) -> pd.DataFrame:
        """One row per recorded step: the number of gates ``expected`` to be open, what an open one costs in units of the loss
        (``price``, and ``price/KIND`` where several kinds are pruned), and one column per gate, such as ``encoder.3.11``."""
        gates = pruner.gates
        names = [f"{label}.{i}" for label, size in zip(site_labels(gates.sites), gates.sizes, strict=True) for i in range(size)]
        values = torch.stack(self.values) if self.values else torch.zeros(0, len(names))
        course = pd.DataFrame({name: values[:, i].numpy() for i, name in enumerate(names)})
        return pd.concat([pd.DataFrame({"step": self.steps}), pd.DataFrame(self.beside), course], axis="columns")
