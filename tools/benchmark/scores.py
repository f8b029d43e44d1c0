"""Scores against plain passes over the same batch, and the entropy of attention against attention itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import PreTrainedModel

from gates import AttentionConfidence, AttentionEntropy, HeadGates, head_gradients, observe_attention
from gates.scores.attention import attention_entropy, visible_keys
from gates.scores.importance import gradient_rows, requiring_gradients
from gates.scores.weights import output_weights
from tools.benchmark.memory import memory_columns, peaks_in_turn
from tools.benchmark.setting import KINDS, Row, Setting, Size, columns
from training.latency import Work

HEAD_DIM = 64
MASKS = ("none", "causal", "padded", "causal, padded")
"""What hides keys: nothing; later positions; the padding of the second half of the texts; both."""


def measure_scores(setting: Setting) -> list[Row]:
    """Return a row for each model, size and precision; on a GPU for the encoder alone."""
    kinds = KINDS[:1] if setting.device == "cuda" else KINDS
    return [_score_row(setting, kind, size, dtype) for kind in kinds for size in setting.sizes for dtype in setting.dtypes]


def _score_row(setting: Setting, kind: str, size: Size, dtype: str) -> Row:
    work = {name: setting.rounded(dtype, run) for name, run in prepare_passes(setting, kind, size).items()}
    times = setting.times(f"scores of the {kind}, {size}, {dtype}", work)
    return {"model": kind, "size": str(size), "dtype": dtype} | columns(
        times,
        "backward",
        "his",
        his_ratio=("his", "backward"),
        all_ratio=("all", "backward"),
        one_by_one_speedup=("one by one", "his"),
        attention_ratio=("attention", "forward"),
    )


def prepare_passes(setting: Setting, kind: str, size: Size) -> dict[str, Work]:
    """Return passes over one batch in evaluation mode.

    ``backward`` yields the gradients of all weights. ``his`` is exact HIS for each example, and ``one by one`` the same with a
    backward pass for each. ``all`` has every score from gradients, and ``attention`` entropy and confidence in a forward pass.
    """
    model = setting.trained(kind).eval()
    batch = setting.batch_for(model, size, kind)
    gates = HeadGates(model)
    weights = output_weights(gates)

    def backward() -> None:
        losses_of(model, batch).mean().backward()
        model.zero_grad()

    def one_by_one() -> None:
        for index in range(size.batch):
            one = {name: tensor[index : index + 1] for name, tensor in batch.items()}
            head_gradients(gates, lambda one=one: losses_of(model, one), "batch")  # type: ignore[misc]

    def all_at_once() -> None:
        with requiring_gradients(weights):
            gradient_rows(gates, lambda: losses_of(model, batch), weights)

    work: dict[str, Work] = {
        "forward": torch.no_grad()(lambda: losses_of(model, batch)),
        "backward": backward,
        "his": lambda: head_scores(gates, batch),
        "all": all_at_once,
        "attention": lambda: attend(model, gates, batch),
    }
    return work | ({"one by one": one_by_one} if size.batch > 1 else {})


def head_scores(gates: HeadGates, batch: dict[str, Tensor]) -> Tensor:
    """Return the gradients ``[batch, heads]`` that HIS is made of."""
    return head_gradients(gates, lambda: losses_of(gates.model, batch))


def attend(model: PreTrainedModel, gates: HeadGates, batch: dict[str, Tensor]) -> None:
    """Run a forward pass with the entropy and confidence of every head."""
    metrics = [metric(gates.sites).to(batch["input_ids"].device) for metric in (AttentionEntropy, AttentionConfidence)]
    valid: dict[str, Tensor | None] = {site.kind: batch["attention_mask"].bool() for site in gates.sites}
    with torch.no_grad(), observe_attention(model, gates.sites, metrics, valid):
        losses_of(model, batch)


def losses_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of each example ``[batch]``; that of a text is the mean over its tokens but the first."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"]
    if labels.dim() == 1:
        return cross_entropy(logits, labels, reduction="none")
    return cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none").mean(1)


def measure_entropy(setting: Setting) -> list[Row]:
    """Return a row for each precision, mask and length."""
    lengths = (32, 64) if setting.quick else (128, 512, 2048, 8192)
    return [_entropy_row(setting, dtype, mask, length) for dtype in setting.dtypes for mask in MASKS for length in lengths]


def _entropy_row(setting: Setting, dtype: str, mask: str, length: int) -> Row:
    what = f"entropy of {length} tokens, mask: {mask}, {dtype}"
    texts, heads = texts_and_heads(setting, mask)
    explicit = 4 * texts * heads * length**2 <= (2**28 if setting.device == "cpu" else 2**33)  # bytes of the matrices
    names = ("attention", "entropy", *(("definition",) if explicit else ()))
    variants = {name: (prepare_entropy, (setting, dtype, mask, length, name)) for name in names}
    work = {name: make(*arguments) for name, (make, arguments) in variants.items()}
    times = setting.times(what, work)
    exact = prepare_entropy(setting, dtype, mask, length, "exact")()
    error = float((work["entropy"]()[0][:1, :2] - exact).abs().max())  # type: ignore[index]
    turns = setting.memory_turns if length >= 2048 else 0  # shorter texts take less than the noise
    peaks = peaks_in_turn(what, setting, turns, variants)
    row: Row = {"dtype": dtype, "mask": mask, "length": length, "largest_error": f"{error:.1e}"}
    ratios = {"over_attention": ("entropy", "attention"), "definition_speedup": ("definition", "entropy")}
    return row | columns(times, "attention", "entropy", **ratios) | memory_columns(peaks, "entropy", "attention")


def prepare_entropy(setting: Setting, dtype: str, mask: str, length: int, name: str) -> Work:
    """Return ``attention`` as PyTorch computes it fastest, its ``entropy``, or the entropy from the ``definition``.

    ``exact`` is that of two heads of the first text in float64.
    """
    draw = torch.Generator().manual_seed(0)
    texts, heads = texts_and_heads(setting, mask)
    shape = (texts, heads, length, HEAD_DIM)
    query, key, value = (torch.randn(shape, generator=draw).to(setting.on, getattr(torch, dtype)) for _ in range(3))
    scale, causal = HEAD_DIM**-0.5, mask == "causal"
    hiding = visible(mask, length, texts, setting.on) if "padded" in mask else None
    shown = visible(mask, length, texts, setting.on) if name in ("definition", "exact") else None
    work: dict[str, Work] = {
        "attention": lambda: scaled_dot_product_attention(query, key, value, hiding, is_causal=causal, scale=scale),
        "entropy": lambda: (
            attention_entropy(query, key, scale, hiding, causal=causal),
            visible_keys(query, key, hiding, causal),  # the numbers of keys that entropies are divided by
        ),
        "definition": lambda: explicit_entropy(query.float(), key.float(), scale, shown),
        "exact": lambda: explicit_entropy(query[:1, :2].double(), key[:1, :2].double(), scale, shown[:1]),  # type: ignore[index]
    }
    return work[name]


def texts_and_heads(setting: Setting, mask: str) -> tuple[int, int]:
    """Return the numbers of texts and heads: enough to fill the device."""
    return (4, 12) if setting.device == "cuda" else (2 if "padded" in mask else 1, 4)


def visible(mask: str, length: int, texts: int, device: torch.device) -> Tensor:
    """Return whether queries see keys, ``[texts, 1, length, length]``. The second half of the texts is three quarters as
    long."""
    seen = torch.ones(texts, 1, length, length, dtype=torch.bool, device=device)
    if "padded" in mask:
        seen[texts // 2 :, :, :, 3 * length // 4 :] = False
    return seen.tril() if "causal" in mask else seen


@torch.no_grad()
def explicit_entropy(query: Tensor, key: Tensor, scale: float, shown: Tensor | None = None) -> Tensor:
    """Return ``-sum_j p_ij log p_ij`` ``[batch, heads, query]`` from the whole attention matrix."""
    scores = query @ key.transpose(-1, -2) * scale
    if shown is not None:
        scores = scores.masked_fill(~shown, torch.finfo(torch.float32).min)
    log_p = scores.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)
