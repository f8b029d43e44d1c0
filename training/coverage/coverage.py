"""What works for which architecture, found out by running it.

Every row is a tiny random model from :mod:`training.coverage.architectures`. A cell says ``yes`` (or how) only after its check
has passed here and now; ``no`` with a reason where this project refuses; ``FAILED`` with the difference where it should have
worked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gates.errors import GateError
from gates.export.checkpoint import load_pruned, save_pruned
from gates.export.onnx import export_onnx
from gates.head_gates import HeadGates
from gates.hooks.observe import entropy_route, observe_entropy
from gates.hooks.probe import seen_kinds
from gates.recovery.refit import refit_
from gates.scores.entropy import AttentionEntropy
from gates.scores.importance import head_gradients
from gates.sites import describe_kinds, find_attention, weight_by_output
from gates.surgery.remove import remove_heads_
from training.coverage import architectures as zoo
from training.runs import progress
from training.runs.tracking import versions

TOLERANCE = 1e-5
"""Largest absolute difference between outputs of size 1 that should be equal; float rounding only."""
NOT_APPLICABLE = "-"
NOT_TAKEN = "torch.onnx.export does not take"
FALCON_ALIBI = "Falcon (ALiBi)"
SPARSE_ENTROPY = "a query of block-sparse attention does not see all keys, so its entropy is not comparable"
LIMITS = {
    (FALCON_ALIBI, "onnx"): "ONNX Runtime has no multiplication of bfloat16 on CPUs, in which it computes its slopes",
    ("NllbMoe", "onnx"): "torch.onnx.export does not take its experts",
    ("Longformer", "entropy"): SPARSE_ENTROPY,
    ("BigBird", "entropy"): SPARSE_ENTROPY,
    ("LED", "entropy"): SPARSE_ENTROPY,
}
"""Cells where a refusal is expected, with the reason; any other error is a failure."""


@dataclass(frozen=True)
class Row:
    """What was seen of one architecture; the fields are the table's columns."""

    architecture: str
    gate: str
    his: str
    entropy: str
    refit: str
    prune: str
    generate: str
    reload: str
    onnx: str

    @property
    def failed(self) -> bool:
        return any(value.startswith("FAILED") for value in asdict(self).values())


class Check:
    """The checks of one architecture; each returns a cell's text or raises."""

    def __init__(self, architecture: zoo.Architecture) -> None:
        self.architecture = architecture
        self.batch = zoo.inputs(architecture)

    @cached_property
    def dense(self) -> PreTrainedModel:
        return zoo.build(self.architecture)

    def gate(self) -> str:
        """All sites found, of the kinds that they show; gates of one change nothing; a zero gate is a zero block of the output
        projection."""
        model = zoo.build(self.architecture)
        gates = HeadGates(model)
        if describe_kinds(gates.sites) != dict(self.architecture.kinds):
            raise AssertionError(f"found {describe_kinds(gates.sites)}")
        one = zoo.inputs(self.architecture, batch=1, padding=False)
        shown = seen_kinds(model, gates.sites, lambda: model(**one))
        if shown != [site.kind for site in gates.sites]:
            raise AssertionError(f"its attention behaves as {shown}")
        expected = _output(model, self.batch)
        with gates.attached(), gates.use(torch.ones(gates.heads)):
            _equal(_output(model, self.batch), expected)
        for head in (0, gates.heads - 1):
            values = torch.ones(gates.heads)
            values[head] = 0.0
            with gates.attached(), gates.use(values):
                gated = _output(model, self.batch)
            site = gates.sites[head // 4]
            block = weight_by_output(site.output)[:, site.head_dim * (head % 4) :][:, : site.head_dim]
            before = block.detach().clone()
            with torch.no_grad():
                block.zero_()
                _equal(_output(model, self.batch), gated)
                block.copy_(before)
        return "yes"

    def his(self) -> str:
        """Per-example gradients of a batch equal those of its examples, and no gate is without a gradient."""
        gates = HeadGates(self.dense).eval()
        together = head_gradients(gates, lambda: self._losses(self.batch))
        examples = [{name: tensor[row : row + 1] for name, tensor in self.batch.items()} for row in range(3)]
        alone = torch.cat([head_gradients(gates, lambda one=one: self._losses(one)) for one in examples])  # type: ignore[misc]
        _equal(together / together.abs().max(), alone / together.abs().max(), tolerance=1e-4)
        if int((together.abs().amax(0) > 0).sum()) != self.architecture.heads - self.architecture.idle:
            raise AssertionError("some gate has no gradient")
        return "yes"

    def entropy(self) -> str:
        """Entropies in (0, 1], the same for a batch as for its examples, and the outputs unchanged."""
        model = zoo.build(self.architecture)  # BigBird changes its attention when it first sees a short text
        sites = find_attention(model)
        batch = zoo.inputs(self.architecture, padding=False)
        metrics = [AttentionEntropy(sites), AttentionEntropy(sites)]
        with observe_entropy(model, sites, metrics[0], {}):
            observed = _output(model, batch)
        if not torch.equal(observed, _output(model, batch)):
            raise AssertionError("the observed model has other outputs")
        for row in range(3):
            one = {name: tensor[row : row + 1] for name, tensor in batch.items()}
            with observe_entropy(model, sites, metrics[1], {}):
                _output(model, one)
        _equal(metrics[0].compute(), metrics[1].compute())
        if not bool(((metrics[0].compute() > 0) & (metrics[0].compute() <= 1 + 1e-6)).all()):
            raise AssertionError(f"entropies from {metrics[0].compute().min():.3g} to {metrics[0].compute().max():.3g}")
        return entropy_route(sites)

    def refit(self) -> str:
        """No refitted projection is further from the dense model's stream than before, and the outputs come nearer to its."""
        mask = zoo.random_mask(self.architecture)
        expected = _output(zoo.build(self.architecture), self.batch)
        pruned, model = self._masked(mask, _output, self.batch)
        gates = HeadGates(model)
        done = refit_(gates, mask, lambda: [self.batch], lambda batch: model(**batch), lambda batch: {})
        worse = [one.name for one in done if not one.after <= one.before]
        if not done or worse:
            raise AssertionError(f"refitted {len(done)} projections, of which {len(worse)} became worse")
        with gates.attached(), gates.use(mask):
            left = float((_output(model, self.batch) - expected).norm() / (pruned - expected).norm())
        if not left < 1:
            raise AssertionError(f"the outputs are {left:.2g} times as far from the dense model's as before")
        return "yes"

    def prune(self) -> str:
        """Pruned equals masked, for masks with a site of no heads, one of all heads, and uneven groups."""
        for seed in (2, 3):
            mask = zoo.random_mask(self.architecture, seed=seed)
            expected, model = self._masked(mask, _output, self.batch)
            _equal(_output(remove_heads_(model, mask), self.batch), expected)
        return "yes"

    def generate(self) -> str:
        """Greedy text with dynamic and static caches, pruned as masked."""
        if not self.architecture.generates:
            return NOT_APPLICABLE
        caches = {"dynamic": "dynamic", "static": "static"}
        if self.architecture.name == FALCON_ALIBI:  # Transformers does not take a static cache for it, pruned or dense
            del caches["static"]
        for seed in (2, 3):
            mask = zoo.random_mask(self.architecture, seed=seed)
            for cache in caches:
                expected, model = self._masked(mask, _text, self.batch, cache)
                if not torch.equal(_text(remove_heads_(model, mask), self.batch, cache), expected):
                    raise AssertionError(f"other text with a {cache} cache")
        return ", ".join(caches)

    def reload(self) -> str:
        """Saved and loaded again, the outputs are those of the masked model."""
        mask = zoo.random_mask(self.architecture)
        expected, model = self._masked(mask, _output, self.batch)
        with tempfile.TemporaryDirectory() as folder:
            save_pruned(model, Path(folder) / "export", mask, check_batch=self.batch, tokenizer=None)
            _equal(_output(load_pruned(Path(folder) / "export").eval(), self.batch), expected)
        return "yes"

    def onnx(self) -> str:
        """The pruned model in ONNX Runtime equals PyTorch; of an encoder-decoder, at least its encoder."""
        model = remove_heads_(zoo.build(self.architecture), zoo.random_mask(self.architecture, seed=3))
        batch = zoo.inputs(self.architecture, padding=False)
        with tempfile.TemporaryDirectory() as folder:
            try:
                export_onnx(model, Path(folder) / "model.onnx", batch)
                return "yes"
            except GateError as error:
                if "cross" not in self.architecture.kinds or NOT_TAKEN not in str(error):
                    raise
            encoder = model.get_encoder()
            own = {name: tensor for name, tensor in batch.items() if not name.startswith("decoder")}
            export_onnx(encoder, Path(folder) / "encoder.onnx", own)
        return "encoder"

    def _masked(self, mask: Tensor, run: Callable[..., Tensor], *arguments: object) -> tuple[Tensor, PreTrainedModel]:
        model = zoo.build(self.architecture)
        gates = HeadGates(model)
        with gates.attached(), gates.use(mask):
            return run(model, *arguments), model

    def _losses(self, batch: dict[str, Tensor]) -> Tensor:
        """A loss per example ``[batch]``."""
        result = self.dense(**batch)
        parts = [result.image_embeds, result.text_embeds] if self.architecture.input == "image-and-text" else [result[0]]
        return torch.stack([part.flatten(1).double().pow(3).mean(1) for part in parts]).sum(0)


def coverage(architectures: Sequence[zoo.Architecture], *, onnx: bool = True) -> list[Row]:
    """Run all checks of all architectures.

    Args:
        architectures: rows of :data:`training.coverage.architectures.ARCHITECTURES`.
        onnx: whether to export to ONNX too, which takes some seconds for each.
    """
    names = [name for name in Row.__dataclass_fields__ if name != "architecture"]
    rows = []
    for architecture in progress.track(architectures, "architectures", name_of=lambda one: one.name):
        check = Check(architecture)
        removable = ("prune", "generate", "reload", "onnx")
        reason = next((site.gate_only for site in find_attention(check.dense) if site.gate_only), "")
        cells = {}
        for name in names:
            if reason and name in removable:
                cells[name] = f"no: {reason}" if name == "prune" else NOT_APPLICABLE
            elif name == "onnx" and not onnx:
                cells[name] = "not run"
            else:
                cells[name] = _cell(getattr(check, name), LIMITS.get((architecture.name, name)))
        rows.append(Row(architecture.name, **cells))
    return rows


def _cell(check: Callable[[], str], limit: str | None) -> str:
    try:
        return check()
    except Exception as error:  # whatever goes wrong belongs in the table and must not lose the other rows
        if limit is not None and isinstance(error, GateError):
            return f"no: {limit}"
        return f"FAILED: {type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"


@torch.no_grad()
def _output(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    output: Tensor = model(**batch)[0]
    return output


def _text(model: PreTrainedModel, batch: dict[str, Tensor], cache: str) -> Tensor:
    prompt = {name: tensor for name, tensor in batch.items() if name != "decoder_input_ids"}
    more = {"cache_implementation": "static"} if cache == "static" else {}
    text: Tensor = model.generate(  # type: ignore[operator]
        **prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False, **more
    )
    return text


def _equal(found: Tensor, expected: Tensor, *, tolerance: float = TOLERANCE) -> None:
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    if not difference <= tolerance:
        raise AssertionError(f"differs by {difference:.2g}")


HEADING = "# What works for which architecture"
"""The first line of the table for the documentation."""


def markdown(rows: Sequence[Row]) -> str:
    """The table for the documentation, with the versions it was made with and the reasons as notes below it."""
    notes: list[str] = []

    def cell(value: str) -> str:
        if ": " not in value:
            return value
        short, _, reason = value.partition(": ")
        if reason not in notes:
            notes.append(reason)
        return f"{short} [{notes.index(reason) + 1}]"

    names = list(Row.__dataclass_fields__)
    body = ["| " + " | ".join(cell(str(value)) for value in asdict(row).values()) + " |" for row in rows]
    used = versions()
    lines = [
        HEADING,
        "",
        "Written by `python -m training coverage --output FILE`, which runs every cell on a tiny random model:",
        "",
        "- `gate`: all heads are found, with the kind of attention that changed tokens show, and none goes round its gate;",
        "  gates of one change nothing, a zero gate is a zero block of the output projection;",
        "- `his`: per-example gradients of a batch equal those of its examples, and every gate has one;",
        "- `entropy`: `fast` without an attention matrix, `explicit` from the scores;",
        "- `refit`: no refitted projection is further from the dense model's residual stream than before, and the outputs come",
        "  nearer to the dense model's;",
        "- `prune`: equals the masked model, with a layer of no heads, a layer of all heads and uneven groups;",
        "- `generate`: the same greedy text, with these caches;",
        "- `reload`: saved, loaded and equal;",
        "- `onnx`: the pruned model in ONNX Runtime equals PyTorch, at other batch sizes and lengths than the example's.",
        "",
        f"Transformers {used['transformers']}, PyTorch {used['torch']}.",
        "",
        "| " + " | ".join(names) + " |",
        "|" + " --- |" * len(names),
        *body,
        "",
        *(f"[{number}] {note}" for number, note in enumerate(notes, start=1)),
    ]
    return "\n".join(lines).rstrip() + "\n"
