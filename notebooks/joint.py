"""Choose heads with gates while the projections that a refit changes are trained, and compare with the score ``obs``.

    python notebooks/joint.py FILE RESULTS --backbone DIR --columns label,sentence --rows 500 --heads 9 --seeds 0,1,2,3,4

FILE has a text and a label in each line, separated by tabs and without a header. Of its distinct lines, 30 percent are the
selection split, the same for all seeds. Each seed draws its training rows from the others and trains a dense model on them.
Four variants then choose heads:

- ``obs``: the highest scores of the optimal brain surgeon.
- ``gates``: gates that start from these scores, on frozen weights.
- ``joint``: the same, with the output projections of the attention and their biases trained together with the gates.
- ``joint-stream``: ``joint`` with another loss, the distance of the states after every layer to those of the dense model.

Each variant only gives a mask. The mask is put on the dense weights, which are refitted and judged on the selection split.
Appends a JSON line for each seed and variant to RESULTS, and prints a table. The same command continues where it stopped.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from gates import Budget, GateConfig, GatedModel, get_gated_model, top_k_mask
from gates.scores.brain_surgeon import brain_surgeon
from training.pruner.distillation import hidden_mse

Batch = dict[str, Tensor]
VARIANTS = ("obs", "gates", "joint", "joint-stream")
SETTINGS = ("rows", "heads", "dense_steps", "steps", "learning_rate", "gate_learning_rate", "stream")
"""The options that results depend on. Each row of the results has them, and the name of the file."""
DENSE_LEARNING_RATE = 1e-4
BATCH_SIZE = 32
REFIT_ROWS = 512


class Data:
    """The training rows of a seed and the selection split of a file, as batches."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        text, label = (options.columns.split(",").index(name) for name in ("sentence", "label"))
        lines = dict.fromkeys(Path(options.file).read_text(encoding="utf-8").splitlines())  # without duplicates, in order
        rows = [(fields[text], fields[label]) for fields in (line.split("\t") for line in lines)]
        random.Random(0).shuffle(rows)
        held_out = len(rows) * 3 // 10
        self.labels = sorted({label for _, label in rows})
        self.tokenizer = AutoTokenizer.from_pretrained(options.backbone)
        self.rows = random.Random(seed).sample(rows[held_out:], options.rows)
        self.train = self.batches(self.rows)
        self.select = self.batches(sorted(rows[:held_out], key=lambda row: len(row[0])), size=128)

    def batch(self, rows: list[tuple[str, str]]) -> Batch:
        texts, labels = zip(*rows, strict=True)
        encoded = self.tokenizer(list(texts), padding=True, truncation=True, max_length=64, return_tensors="pt")
        return {**encoded, "labels": torch.tensor([self.labels.index(label) for label in labels])}

    def batches(self, rows: list[tuple[str, str]], size: int = BATCH_SIZE) -> list[Batch]:
        return [self.batch(rows[first : first + size]) for first in range(0, len(rows), size)]

    def shuffled(self, steps: int, seed: int) -> Iterator[Batch]:
        """Yield full batches of the training rows, in a new order in every epoch."""
        generator, left = random.Random(seed), []
        for _ in range(steps):
            if len(left) < BATCH_SIZE:
                left = generator.sample(self.rows, len(self.rows))
            yield self.batch(left[:BATCH_SIZE])
            left = left[BATCH_SIZE:]


def train_dense(options: argparse.Namespace, data: Data, seed: int) -> PreTrainedModel:
    """Return a model that is fine-tuned on the training rows, in evaluation mode."""
    torch.manual_seed(seed)  # of the classifier and dropout
    # On short texts on the CPU, eager attention is twice as fast as the fused one in bfloat16.
    more = {"num_labels": len(data.labels), "attn_implementation": "eager"}
    model = AutoModelForSequenceClassification.from_pretrained(options.backbone, **more).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=DENSE_LEARNING_RATE, fused=True)
    warmup = max(1, options.dense_steps // 10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (options.dense_steps - step) / (options.dense_steps - warmup + 1))
    )
    for batch in data.shuffled(options.dense_steps, seed):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model.eval()


def obs_scores(dense: PreTrainedModel, batches: list[Batch]) -> Tensor:
    """Return the score ``obs`` of every head, ``[gates]``."""
    gated = get_gated_model(copy.deepcopy(dense)).eval()

    def losses(batch: Batch) -> Tensor:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        return cross_entropy(gated(**inputs).logits, batch["labels"], reduction="none")

    return brain_surgeon(gated.gates, batches, losses, lambda batch: {"encoder": batch["attention_mask"]})


def learned_mask(
    options: argparse.Namespace, data: Data, dense: PreTrainedModel, scores: Tensor, seed: int, variant: str
) -> Tensor:
    """Return the mask of gates that start from scores, ``[gates]``. The dense model does not change and is the teacher."""
    torch.manual_seed(seed)
    model = copy.deepcopy(dense).requires_grad_(False)
    gated = get_gated_model(model, GateConfig(budget=options.heads)).start_from_(scores, by_layer=False)
    if variant != "gates":
        for site in gated.gates.sites:
            site.output.requires_grad_(True)
    gated.eval().gates.train()  # no dropout
    groups = gated.parameter_groups(options.learning_rate, options.gate_learning_rate)
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0.0)
    for step, batch in enumerate(data.shuffled(options.steps, seed), start=1):
        with torch.autocast("cpu", torch.bfloat16):
            output = gated(**batch, output_hidden_states=variant == "joint-stream")
            loss = output.loss
            if variant == "joint-stream":
                with torch.no_grad():
                    target = dense(**batch, output_hidden_states=True)
                distance = hidden_mse(output.hidden_states[1:], target.hidden_states[1:], valid=batch["attention_mask"])
                loss = loss + options.stream * distance
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        gated.step_(step / options.steps, optimizer)
    return gated.fix_mask_()


@torch.no_grad()
def quality(model: PreTrainedModel | GatedModel, batches: list[Batch]) -> tuple[float, float]:
    """Return the accuracy in percent and the mean loss, in float32."""
    logits = torch.cat([model(**batch).logits for batch in batches])
    labels = torch.cat([batch["labels"] for batch in batches])
    return float((logits.argmax(-1) == labels).double().mean()) * 100, float(cross_entropy(logits, labels))


def refitted(data: Data, dense: PreTrainedModel, mask: Tensor) -> dict[str, object]:
    """Return the quality of a mask on the dense weights with a refit in float32."""
    gated = get_gated_model(copy.deepcopy(dense)).set_mask_(mask).eval()
    gated.refit_(data.train[: REFIT_ROWS // BATCH_SIZE], held_out=None, ridge=(0.01, 0.1, 1.0))
    accuracy, loss = quality(gated, data.select)
    return {"accuracy": accuracy, "loss": loss, "kept": mask.nonzero().flatten().tolist()}


def run(options: argparse.Namespace) -> None:
    """Append the rows that are missing, seed by seed, and print the table of all rows with these settings."""
    results = Path(options.results)
    settings = {"file": Path(options.file).parent.name} | {name: getattr(options, name) for name in SETTINGS}
    variants = options.variants.split(",")
    for seed in map(int, options.seeds.split(",")):
        done = {row["variant"] for row in stored(results, settings) if row["seed"] == seed}
        if done.issuperset(variants):
            continue
        data = Data(options, seed)
        dense = train_dense(options, data, seed)
        accuracy, _ = quality(dense, data.select)
        scores = obs_scores(dense, data.train)
        for variant in [name for name in variants if name not in done]:
            if variant == "obs":
                mask = top_k_mask(scores, Budget(options.heads, {}), torch.zeros(len(scores)))
            else:
                mask = learned_mask(options, data, dense, scores, seed, variant)
            row = settings | {"seed": seed, "variant": variant, "dense": accuracy} | refitted(data, dense, mask)
            print(json.dumps(row), flush=True)
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    print(as_text(stored(results, settings)))


def stored(results: Path, settings: dict[str, object]) -> list[dict[str, object]]:
    """Return the rows of a file with these settings; none if there is no file."""
    rows = map(json.loads, results.read_text(encoding="utf-8").splitlines()) if results.exists() else []
    return [row for row in rows if settings.items() <= row.items()]


def as_text(rows: list[dict[str, object]]) -> str:
    """Return the accuracies with a refit as Markdown, with the paired differences to ``obs``."""
    table = pd.DataFrame(rows).pivot(index="seed", columns="variant", values="accuracy")
    lines = ["| variant | accuracy | of each seed | minus obs | of each seed |", "| --- | --: | --- | --: | --- |"]
    for variant in [name for name in VARIANTS if name in table]:
        own = table[variant].dropna()
        difference = (own - table["obs"]).dropna() if "obs" in table else own[:0]
        cells = [
            f"{values.mean():.1f} ± {values.std():.1f} | {' '.join(f'{one:.1f}' for one in values)}"
            for values in (own, difference)
        ]
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", help="training rows; never the test split")
    parser.add_argument("results", help="JSON lines")
    parser.add_argument("--backbone", required=True, help="folder of the encoder")
    parser.add_argument("--columns", default="sentence,label", help="order of the columns sentence and label")
    parser.add_argument("--rows", type=int, default=500, help="training rows of each seed")
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--dense_steps", type=int, default=160)
    parser.add_argument("--steps", type=int, default=150, help="steps of the gates")
    parser.add_argument("--learning_rate", type=float, default=1e-4, help="of the projections")
    parser.add_argument("--gate_learning_rate", type=float, default=0.05)
    parser.add_argument("--stream", type=float, default=1.0, help="weight of the distance of joint-stream")
    run(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
