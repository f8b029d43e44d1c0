"""Measure ratios of two checkouts of this repository in turn: ``python notebooks/two_versions.py OLD NEW --seconds 215``.

Each checkout has a process of its own, and both take turns in changing order. Times are processor times of one thread.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import BertConfig, BertForSequenceClassification

from gates import GateConfig, HeadGates, get_gated_model, head_gradients

try:
    from gates.scores.attention import attention_entropy
except ImportError:  # versions before 0.2.0
    from gates.scores.entropy import attention_entropy

Action = Callable[[], object]


def encoder() -> BertForSequenceClassification:
    """Return the small encoder of the benchmark, with random weights."""
    torch.manual_seed(0)
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    return BertForSequenceClassification(BertConfig(**shape, max_position_embeddings=512))


def inputs(examples: int, tokens: int) -> dict[str, torch.Tensor]:
    """Return random inputs with labels."""
    ids = torch.randint(5, 4000, (examples, tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}


def step(batch: dict[str, torch.Tensor], *, gated: bool, alone: bool = False) -> Action:
    """Return a training step: plain, gated, or of gates alone."""
    model = encoder().train()
    if not gated:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        steered = None
    else:
        steered = get_gated_model(model.requires_grad_(not alone), GateConfig(budget=0.5)).train()
        if alone:
            model.eval()
        steered(**batch)
        groups = [steered.gates.log_alpha] if alone else steered.parameter_groups(1e-5, 1e-5)
        optimizer = torch.optim.AdamW(groups, lr=1e-5)

    def run() -> None:
        (steered or model)(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if steered is not None:
            steered.step_(0.5, optimizer)

    return run


def scores(batch: dict[str, torch.Tensor]) -> tuple[Action, Action]:
    """Return exact HIS, and a plain forward and backward pass."""
    model = encoder().eval()
    gates, given = HeadGates(model), {name: value for name, value in batch.items() if name != "labels"}

    def losses() -> torch.Tensor:
        return cross_entropy(model(**given).logits, batch["labels"], reduction="none")

    def plain() -> None:
        losses().mean().backward()
        model.zero_grad()

    return lambda: head_gradients(gates, losses), plain


def pairs() -> dict[str, tuple[Action, Action]]:
    """Return what is measured, and what it is compared to, by name."""
    batch, one = inputs(8, 64), inputs(1, 128)
    plain = step(batch, gated=False)
    query, key, value = (torch.randn(1, 4, 2048, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    return {
        "a gated step over a plain one, 8 x 64": (step(batch, gated=True), plain),
        "a gated step over a plain one, 1 x 128": (step(one, gated=True), step(one, gated=False)),
        "a step of gates alone over a plain one, 8 x 64": (step(batch, gated=True, alone=True), plain),
        "exact HIS over a plain forward and backward pass, 8 x 64": scores(batch),
        "the entropy over attention itself, 2,048 tokens": (
            lambda: attention_entropy(query, key, 0.125, None, causal=False),
            lambda: scaled_dot_product_attention(query, key, value),
        ),
    }


def seconds(action: Action) -> float:
    """Return the processor time of an action."""
    start = time.process_time()
    action()
    return time.process_time() - start


def work() -> None:
    """Measure all pairs once for each line of the standard input, and print the ratios as JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    measured = pairs()
    for pair in measured.values():
        for action in (*pair, *pair):  # warm up
            action()
    print("ready", flush=True)
    for turn, _ in enumerate(sys.stdin):
        ratios = {}
        for name, (own, other) in measured.items():
            first, second = (own, other) if turn % 2 else (other, own)
            times = {first: seconds(first), second: seconds(second)}
            ratios[name] = times[own] / times[other]
        print(json.dumps(ratios), flush=True)


def compare(checkouts: list[str], limit: float) -> None:
    """Let the checkouts take turns for some seconds, and print medians and quartiles."""
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": checkout},
        )
        for checkout in checkouts
    ]
    for worker in workers:
        worker.stdout.readline()
    ratios: list[list[dict[str, float]]] = [[] for _ in workers]
    end, turn = time.monotonic() + limit, 0
    while time.monotonic() < end or turn < 2:
        order = list(zip(workers, ratios, strict=True))
        for worker, own in order if turn % 2 else reversed(order):
            worker.stdin.write("again\n")
            worker.stdin.flush()
            own.append(json.loads(worker.stdout.readline()))
        turn += 1
    print(f"{turn} turns")
    for name in ratios[0][0]:
        cells = []
        for own in ratios:
            low, median, high = statistics.quantiles([one[name] for one in own], n=4)
            cells.append(f"{median:.3f} ({low:.3f} to {high:.3f})")
        print(f"| {name} | {' | '.join(cells)} |")
    for worker in workers:
        worker.communicate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="*", help="folders of two checkouts")
    parser.add_argument("--seconds", type=float, default=215.0)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
    else:
        compare(options.checkouts, options.seconds)
