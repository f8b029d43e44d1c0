"""``python -m training speed SYSTEM... --source FILE``: tokens per second of translators, by batch size.

The systems take turns on the same sentences, so that whatever else the machine does falls on all of them; the first is the
one the others are compared with. Every system generates equally many tokens, so that only their speed differs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gates.errors import GateError
from gates.export.cost import count_parameters, hardware, wait_for
from gates.files import replacing
from training.cli.ending import stdout
from training.cli.line import CommandLine
from training.commands.translate import fitting_ids, load_system, system_names, usable_device
from training.config.checks import check_positive
from training.data.parallel_text import read_lines
from training.runs import progress
from training.runs.outputs import check_new_output
from training.runs.run_directory import writing_to
from training.setup import quiet_libraries
from training.tasks.decoding import Decoding, generate
from training.tasks.encoder_decoder import positions


def measure_speed(line: CommandLine) -> None:
    """Measure, write and show."""
    quiet_libraries()
    options = line.options
    for name in ("beams", "tokens", "repeats"):
        check_positive(**{f"--{name}": options[name]})
    if not options.batch_sizes:
        raise GateError("--batch_sizes is empty; give some, for example [1,8,32]")
    for size in options.batch_sizes:
        check_positive(**{"a batch size": size})
    if options.output is not None:
        check_new_output(options.output, "system,parameters,", "table of this command")
    lines, device = [line for line in read_lines(options.source) if line], usable_device(options.device)
    languages = (options.source_language, options.target_language)
    loaded = {name: load_system(folder, *languages) for name, folder in system_names(options.systems).items()}
    for name, (model, _) in loaded.items():
        check_tokens(name, model, options.tokens)
    models = {name: model.to(device) for name, (model, _) in loaded.items()}  # type: ignore[arg-type]
    rows = []
    for size in options.batch_sizes:
        chosen = [lines[index % len(lines)] for index in range(size)]
        batches = {name: batch_of(*system, chosen, prefix=options.source_prefix) for name, system in loaded.items()}
        rows += measure(models, batches, beams=options.beams, tokens=options.tokens, repeats=options.repeats)
    if options.output is not None:
        with writing_to(Path(options.output)), replacing(Path(options.output)) as partial:
            pd.DataFrame(rows).to_csv(partial, index=False)
    show(stdout(), rows)


def check_tokens(name: str, model: PreTrainedModel, tokens: int) -> None:
    """Raises :class:`GateError` if a model, called ``name``, has too few positions for so many tokens."""
    limit = positions(model.config, "decoder")
    if limit is not None and tokens > limit:
        raise GateError(f"--tokens is {tokens}, more than the {limit} positions of {name!r}; give at most {limit}")


def batch_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: Sequence[str], *, prefix: str = ""
) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` ``[source, tokens]`` on the model's device; see :func:`fitting_ids`."""
    ids = fitting_ids(model, tokenizer, source, prefix=prefix)
    return dict(tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(model.device))


def measure(
    models: Mapping[str, PreTrainedModel],
    batches: Mapping[str, Mapping[str, Tensor]],
    *,
    beams: int = 1,
    tokens: int = 32,
    repeats: int = 10,
) -> list[dict[str, Any]]:
    """Generation speed of several models on one batch each.

    Args:
        models: by name, all on one device; the first is what the others are compared with.
        batches: ``input_ids`` and ``attention_mask`` for each.
        beams: 1 for greedy decoding.
        tokens: that every translation has; none ends earlier.
        repeats: timed calls of each model, in turn.

    Returns:
        One row per model: ``system``, ``parameters``, ``batch_size``, ``beams``, ``tokens_per_second`` (median) and
        ``speedup`` over the first (median of the ratios of neighbouring calls), ``hardware``.
    """
    seconds: dict[str, list[float]] = {name: [] for name in models}
    turns = range(repeats + 1)  # the first is to warm up
    order = [(turn, name) for turn in turns for name in (list(models) if turn % 2 else reversed(list(models)))]
    size = len(next(iter(batches.values()))["input_ids"])
    for turn, name in progress.track(order, f"timing batches of {size}"):
        took = _timed(models[name], batches[name], beams=beams, tokens=tokens)
        if turn:
            seconds[name].append(took)
    first = next(iter(models))
    rows = []
    for name, model in models.items():
        size = len(batches[name]["input_ids"])
        rows.append(
            {
                "system": name,
                "parameters": count_parameters(model),
                "batch_size": size,
                "beams": beams,
                "tokens_per_second": size * tokens / statistics.median(seconds[name]),
                "speedup": statistics.median(a / b for a, b in zip(seconds[first], seconds[name], strict=True)),
                "hardware": hardware(model.device),
            }
        )
    return rows


def _timed(model: PreTrainedModel, batch: Mapping[str, Tensor], *, beams: int, tokens: int) -> float:
    wait_for(model.device)
    start = time.perf_counter()
    ids = generate(
        model, batch["input_ids"], batch["attention_mask"], Decoding(beams, max_length=tokens), beams=beams, exactly=tokens
    )
    wait_for(model.device)
    assert ids.shape[1] == tokens + 1, "the start token and as many tokens as asked for"
    return time.perf_counter() - start


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table("system", "parameters", "batch", "beams", "tokens / s", "speed-up")
    for row in rows:
        table.add_row(
            row["system"], f"{row['parameters']:,}", str(row["batch_size"]), str(row["beams"]),
            f"{row['tokens_per_second']:.0f}", f"{row['speedup']:.2f}",
        )  # fmt: skip
    console.print(table)
    console.print(f"measured on {rows[0]['hardware']}", highlight=False)
