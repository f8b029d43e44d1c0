"""The parts of the benchmark: what each measures, the columns of its table, and its goals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from training.benchmark import entropy, growth, job, large, methods, precision, profiles, pruned, scores, step
from training.benchmark.goals import Goal
from training.benchmark.setting import Setting

STEP_BOUND = 1.02
"""Of the time of a gated step over a plain one."""


@dataclass(frozen=True)
class Part:
    """One question.

    Args:
        title: of its table.
        measure: gives the rows.
        columns: keys of a row with their headings.
        goals: that the rows are judged by.
    """

    title: str
    measure: Callable[[Setting], list[dict[str, Any]]]
    columns: Mapping[str, str]
    goals: tuple[Goal, ...] = ()


PARTS = {
    "step": Part(
        "A training step with gates against one without",
        step.measure,
        {
            "model": "model", "size": "batch x tokens", "compiled": "compiled", "plain_ms": "plain, ms",
            "gated_ms": "gated, ms", "time_ratio": "gated / plain", "plain_mb": "plain, MB", "gated_mb": "gated, MB",
            "memory_ratio": "memory, gated / plain",
        },
        (
            Goal("time of a gated step over a plain one", "time_ratio", STEP_BOUND),
            Goal("peak memory of a gated step over a plain one", "memory_ratio", 1.02),
        ),
    ),
    "precision": Part(
        "bfloat16 autocast against float32",
        precision.measure,
        {
            "model": "model", "size": "batch x tokens", "what": "what", "float32_ms": "float32, ms",
            "bfloat16_ms": "bfloat16, ms", "time_ratio": "bfloat16 / float32", "difference": "difference of the results",
        },
    ),
    "scores": Part(
        "Scores against plain passes over the same batch",
        scores.measure,
        {
            "model": "model", "size": "batch x tokens", "backward_ms": "forward and backward, ms", "his_ms": "exact HIS, ms",
            "his_ratio": "HIS / forward and backward", "least_ratio": "the least / forward and backward",
            "his_over_least": "HIS / the least", "one_by_one_speedup": "one example at a time / HIS",
            "all_ratio": "all scores of gradients / forward and backward",
            "attention_ratio": "entropy and confidence / forward",
        },
        (
            Goal("time of exact HIS over a plain forward and backward pass", "his_ratio", 0.75),
            Goal("speed of exact HIS over one example at a time", "one_by_one_speedup", 30, "at least", device="cuda"),
        ),
    ),
    "entropy": Part(
        "The entropy of attention by length, 4 heads of 64",
        entropy.measure,
        {
            "dtype": "precision", "mask": "mask", "length": "tokens", "attention_ms": "attention, ms",
            "entropy_ms": "entropy, ms", "over_attention": "entropy / attention",
            "definition_speedup": "from the matrix / entropy",
            "attention_mb": "attention, MB", "entropy_mb": "entropy, MB", "definition_mb": "from the matrix, MB",
            "memory_ratio": "memory, entropy / attention",
        },
        (Goal("time of the entropy over that of attention itself", "over_attention", 1.3),),
    ),
    "pruned": Part(
        "Models without some of their heads against the dense one",
        pruned.measure,
        {
            "how": "run by", "size": "batch x tokens", "heads_kept": "heads kept", "dense_ms": "dense, ms",
            "pruned_ms": "pruned, ms",
            "tokens_per_second": "tokens / s", "speedup": "speed-up", "ideal": "ideal", "of_ideal": "of the ideal",
            "parameters_left": "parameters left", "memory_left": "memory left",
        },
        tuple(
            Goal(f"share of the ideal speed-up, {name}", "of_ideal", 0.95, "at least", (("how", how),))
            for how, name in (("eager", "PyTorch"), ("compiled", "compiled"), ("onnx", "ONNX Runtime"), ("decode", "decoding"))
        ),
    ),
    "profile": Part(
        "Where the time of dense and pruned models goes",
        profiles.measure,
        {
            "how": "run by", "size": "batch x tokens", "heads_kept": "heads kept", "whole_ms": "all, ms",
            "products_ms": "matrix products, ms", "others_ms": "other operators, ms", "around_ms": "around operators, ms",
            "calls": "operators", "weights_mb": "weights read, MB", "gb_per_second": "GB of weights / s of products",
        },
    ),
    "job": Part(
        "The whole job against plain fine-tuning for as many steps, and what starts before it",
        job.measure,
        {
            "what": "what", "over": "against", "first_ms": "the first, ms", "second_ms": "the second, ms",
            "more_ms": "more, ms", "time_ratio": "ratio",
        },
        (Goal("time of the whole job over plain fine-tuning", "time_ratio", 1.03, where=(("over", job.PLAIN),)),),
    ),
    "growth": Part(
        "How costs grow with heads, layers and length, and those of scores with texts and processes",
        growth.measure,
        {
            "varied": "varied", "value": "value", "plain_ms": "plain step, ms", "gated_ms": "gated step, ms",
            "time_ratio": "gated / plain", "more_ms": "more, ms", "steering_ms": "steering alone, ms",
            "his_ms": "exact HIS, ms",
            "attention_ms": "entropy and confidence, ms",
        },
        (Goal("time of a gated step over a plain one, of small models of other shapes", "time_ratio", STEP_BOUND),),
    ),
    "methods": Part(
        "What scoring methods cost against plain training on as many texts",
        methods.measure,
        {
            "pass": "way over the data", "methods": "methods", "forward": "forward passes of a text",
            "backward": "backward passes", "scores_ms": "scores, ms", "over_training": "over training",
        },
    ),
    "large": Part(
        "Gates on large language models whose weights rest: what they need, and the largest tried here",
        large.measure,
        {
            "model": "model", "parameters": "parameters", "gates": "gates", "dtype": "weights in", "weights_gb": "weights, GB",
            "frozen_gb": "gates trained alone, GB", "full_gb": "all trained with AdamW, GB", "tried": "tried here",
            "measured_gb": "measured, GB", "step_ms": "gated step, ms",
        },
    ),
}  # fmt: skip
