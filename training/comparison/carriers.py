"""Masks against the heads that carry the facts behind the answers, which interchange interventions on the dense model tell: the
rows of ``interchange.csv``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.utilities import move_data_to_device
from torch import Tensor

from gates.scores.interchange import effects, interchange
from training.comparison.experiments import Experiments
from training.comparison.tables import Results
from training.config import Setup
from training.config.data import Synthetic
from training.data.synthetic import SyntheticData
from training.runs.cost import measured
from training.scoring.subject import Batch, Subject

ROWS = 1536
"""Examples that are exchanged."""
CARRIES = 0.1
"""Share of the way to the other answer from which a head counts as a carrier."""
LEARNED = 0.6
"""Share of right answers from which a model has learned a fact. A model that has not is right half the time, since every
example has a counterpart of the opposite answer, and its effects are ratios of noise."""


def carried_rows(experiments: Experiments, results: Results) -> list[dict[str, Any]]:
    """A row for each mask of a seed; none where the data know of no facts, are not asked for them, or the
    seed's dense model has learned none.

    ``carried`` is the share of the effects of all heads that the kept ones have, the mean over facts that the model has
    learned; ``at_best`` what the best mask with as many heads has; ``carriers`` how many heads carry a fact, and ``recall`` the
    share of them that is kept, of as many as the mask could keep.
    """
    data = experiments.data
    if not isinstance(data, SyntheticData) or not data.options.interchange:
        return []
    of_facts = {fact: torch.tensor(found) for fact, found in facts_of(experiments, data).items()}
    if not of_facts:
        return []
    carriers = torch.stack([found >= CARRIES for found in of_facts.values()]).any(0)
    shares = shares_of(of_facts)
    rows = []
    for entry in results.masks:
        if entry["seed"] != experiments.seed or entry["method"] == "dense":
            continue
        mask = torch.tensor(entry.get("post_hoc_mask", entry["mask"])) > 0
        kept = int(mask.sum())
        most = min(kept, int(carriers.sum()))
        rows.append(
            {
                "seed": experiments.seed, "method": entry["method"], "budget": entry["budget"],
                "carried": float(shares[mask].sum()), "at_best": float(shares.topk(kept).values.sum()),
                "carriers": int(carriers.sum()),
                "recall": float((mask & carriers).sum()) / most if most else 1.0,
            }
        )  # fmt: skip
    return rows


def without_facts(setup: Setup, seeds: Sequence[int], results: Results) -> str | None:
    """What a user is told of seeds that have no rows, although rows are asked for; None where all have some."""
    lacking = [str(seed) for seed in seeds if seed not in {row["seed"] for row in results.carried}]
    if not lacking or not isinstance(setup.data, Synthetic) or not setup.data.interchange:
        return None
    return (
        f"interchange.csv has nothing of seed {', '.join(lacking)}: the dense model answers no question right in {LEARNED:.0%} "
        "of the cases, so no head can be told to carry a fact; train longer (--model.finetune)."
    )


def shares_of(effects_of_facts: Mapping[str, Tensor]) -> Tensor:
    """The share of each gate in the effects of all, the mean over facts, ``[gates]``; an effect below 0 counts as none."""
    positive = [found.clamp(min=0) for found in effects_of_facts.values()]
    totals = [found.sum().clamp(min=torch.finfo(found.dtype).tiny) for found in positive]  # no head may carry it
    return torch.stack([found / total for found, total in zip(positive, totals, strict=True)]).mean(0)


def facts_of(experiments: Experiments, data: SyntheticData) -> dict[str, list[float]]:
    """The interchange effects of every gate of the dense model, by fact; of those that it has learned, which may be none."""
    dense = experiments.dense()
    determined_by = {"experiment": "interchange", "dense": dense.key, "rows": ROWS, "learned": LEARNED}

    def make(folder: Path) -> dict[str, Any]:
        subject = experiments.subject(dense, {})
        with measured(subject.device, subject.gates) as cost:
            found = effects_on(subject, data)
        return cost.as_row() | {"effects": found}

    return dict(experiments.do("exchanging heads", determined_by, make).result["effects"])


def effects_on(subject: Subject, data: SyntheticData) -> dict[str, list[float]]:
    """The same of a subject."""

    def for_answers(answers: Tensor) -> Callable[[Batch], Tensor]:
        """How much the model speaks for the answers, of two, rather than for the others, ``[batch]``."""

        def margin(batch: Batch) -> Tensor:
            logits = subject.task.losses(subject.backbone, batch)[1]
            return (logits[:, 1] - logits[:, 0]) * (2.0 * answers - 1.0)

        return margin

    moved: dict[str, Tensor] = {}
    apart: dict[str, Tensor] = {}
    right: dict[str, list[Tensor]] = {}
    with subject.at_rest():
        for fact, original, counterpart in data.counterparts(ROWS):
            batch, other = (move_data_to_device(one, subject.device) for one in (original, counterpart))
            found = interchange(subject.gates, batch, other, for_answers(batch["labels"]))
            moved[fact] = moved.get(fact, 0) + found.moved.sum(0).cpu()
            apart[fact] = apart.get(fact, 0) + found.apart.sum().cpu()
            right.setdefault(fact, []).extend([found.own > 0, found.own < found.apart])
    learned = [fact for fact, answers in right.items() if float(torch.cat(answers).double().mean()) >= LEARNED]
    return {fact: effects(moved[fact], apart[fact]).tolist() for fact in learned}
