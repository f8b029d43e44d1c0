"""``python -m training deployment``: by which route exports load, what runs them, and how fast, tried here and now."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import transformers

from gates.errors import GateError
from gates.files import replacing
from training.cli.ending import stdout
from training.cli.line import CommandLine
from training.config.checks import check_positive
from training.coverage import architectures as zoo
from training.coverage import gguf
from training.coverage.routes import BY_LAYER, ROUTES, route_table
from training.coverage.runtimes import packages, runtime_table
from training.coverage.speed import HEADS, KEPT, Effort, speed_table
from training.coverage.vllm import FAMILIES, HEAD_DIM, NEW, vllm_table
from training.coverage.vllm_process import Vllm, check_python, opened
from training.coverage.writers import ways
from training.runs.outputs import check_new_output
from training.runs.tracking import versions

HEADING = "# How exports load and what runs them"
"""The first line of the page."""


def deployment(line: CommandLine) -> None:
    """The whole command.

    Raises:
        GateError: for a line that makes no sense, or, once everything is written, if a route gave other outputs.
    """
    options = line.options
    check_positive(**{"--repeats": options.repeats})
    for size in options.batch_sizes:
        check_positive(**{"a batch size": size})
    if not options.tables or (not options.batch_sizes and "speed" in options.tables):
        empty = "--batch_sizes" if options.tables else "--tables"
        raise GateError(f"{empty} is empty; give some, or leave it out")
    chosen = _chosen(options.only)
    if options.output is not None:
        check_new_output(options.output, HEADING, "page of this command")
    check_python(options.vllm_python)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    with opened(options.vllm_python if {"vllm", "speed"}.intersection(options.tables) else None) as vllm:
        parts = {
            "routes": lambda: [*_about_routes(), *route_table(chosen)],
            "runtimes": lambda: [*_about_runtimes(), *runtime_table()],
            "gguf": lambda: [*_about_gguf(), *gguf.gguf_table([row for row in gguf.FAMILIES if row in chosen])],
            "vllm": lambda: [*_about_vllm(vllm), *vllm_table(vllm, [row for row in FAMILIES if row in chosen])],
            "speed": lambda: [*_about_speed(), *speed_table(ways(vllm), options.batch_sizes, Effort(repeats=options.repeats))],
        }
        lines = [HEADING, "", *_about_page()]
        for name in parts:
            if name in options.tables:
                lines += ["", *parts[name]()]
    text = "\n".join(lines) + "\n"
    stdout().print(text, markup=False, highlight=False, soft_wrap=True)
    if options.output is not None:
        with replacing(options.output) as partial:
            partial.write_text(text, encoding="utf-8")
    if "FAILED" in text:
        raise GateError("a route gave other outputs than the gated model; the table says which")


def _chosen(only: Sequence[str]) -> list[zoo.Architecture]:
    """The architectures whose heads can be removed and whose names have one of these parts."""
    known = [row for row in (*zoo.ARCHITECTURES, *BY_LAYER) if not row.gate_only]
    for given in only:
        if not any(given.lower() in row.name.lower() for row in known):
            names = ", ".join(row.name for row in known)
            raise GateError(f"--only names {given!r}, which is part of no architecture's name; there are {names}")
    return [row for row in known if not only or any(given.lower() in row.name.lower() for given in only)]


def _about_page() -> list[str]:
    used = {**versions(), **packages()}
    names = ("transformers", "torch", "peft", *packages())
    return [
        "Written by `python -m training deployment --output FILE`, which tries every cell where it runs; here with "
        + ", ".join(f"{name} {used[name]}" for name in dict.fromkeys(names) if name in used)
        + ". Nothing here is a promise for other versions: run it with yours.",
    ]


def _about_routes() -> list[str]:
    return [
        "## Routes",
        "",
        "An export of a tiny random model is written, loaded by the route, and its outputs are compared with those of the",
        "gated model. A `no` is a refusal in one sentence before anything is written. The routes, best first:",
        "",
        *(f"- `{route.name}`: {route.meaning}" for route in ROUTES),
        "",
    ]


def _about_runtimes() -> list[str]:
    return [
        "## Runtimes",
        "",
        "A Llama of 3 layers with 4 heads and 2 key/value heads each: dense; exports in the stock form with 2 heads in each",
        "layer, and of 3, 2 and 2 heads padded with heads of zeros; with 3, 2 and 2 heads; with 3, 0 and 2 heads.",
        "Differences are from the same model in PyTorch, relative to its largest output, so that quantisation can be judged by",
        "what it does to the dense model.",
        "",
    ]


def _about_gguf() -> list[str]:
    return [
        "## GGUF",
        "",
        "Tiny random models through llama.cpp's converter to GGUF and llama.cpp itself, in float32: the stock form, and in the",
        "last column the form `remote-code`, or `stock` where a family reads numbers of heads by layer (Laguna, Gemma 4). For",
        "the last column of Llama and Mistral the converter is told to write numbers by layer, as [exports](exports.md#gguf)",
        "shows.",
        "Differences are of the log probabilities of the next token from the gated model's, relative to the largest of these.",
        "",
    ]


def _about_vllm(vllm: Vllm) -> list[str]:
    used = ", ".join(f"{name} {version}" for name, version in vllm.versions.items())
    return [
        "## vLLM",
        "",
        f"Exports of tiny random models with heads of {HEAD_DIM} features in {used or 'vLLM'}, in float32: the stock form,",
        "padded or not, and for the last two columns the form `remote-code`, or `stock` where a family reads numbers of heads",
        f"by layer. vLLM writes {NEW} tokens after a text. Differences are of all their log probabilities from the gated",
        "model's, relative to the largest of these. Its Transformers backend is told the heads of each layer, as",
        "[exports](exports.md#vllm) shows.",
        "",
    ]


def _about_speed() -> list[str]:
    return [
        "## Speed and cache",
        "",
        f"A random Llama of {len(KEPT)} layers with {HEADS} heads in groups of two, of which {', '.join(map(str, KEPT))} stay,",
        "dense, pruned, and padded with heads of zeros to the largest layer, as a stock class needs it.",
        "",
    ]
