"""``python -m training evaluate MODEL --tasks TASKS``: a language model on the tasks of lm-evaluation-harness.

Of a finished run the dense model, the gated one, whose mask is in force, and the pruned one, whose heads are gone; or the model
of any folder or hub name. All are evaluated in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from gates.export.example_inputs import example_inputs
from gates.files import replacing
from gates.head_gates import HeadGates
from gates.sites import find_attention
from gates.surgery.remove import remove_heads_
from training.cli.ending import stdout
from training.cli.line import CommandLine
from training.commands.evaluate_line import RESULTS, TABLE, is_run, output_folder, task_names
from training.commands.evaluate_parser import Form
from training.commands.harness import Tasks, evaluated, rows_of
from training.commands.refitted import load_with_dense_weights
from training.commands.trained import choose_mask, load_trained
from training.commands.translate import usable_device
from training.config import Source
from training.config.paths import HubName
from training.runs.run_directory import writing_to
from training.runs.tracking import versions
from training.setup import quiet_libraries
from training.tasks.causal_lm import check_causal
from training.tasks.encoder_decoder import check_vocabulary
from training.tasks.loading import load_pretrained, read_config, read_tokenizer


@dataclass(frozen=True)
class System:
    """A model that is evaluated.

    Args:
        model: in evaluation mode; gates may be in force on it.
        tokenizer: its own.
        heads: that are left of it.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    heads: int


def evaluate_model(line: CommandLine) -> None:
    """Evaluate every form, write and show."""
    quiet_libraries()
    options = line.options
    device = usable_device(options.device)
    tasks = Tasks(task_names(options.tasks), options.limit, options.fewshot)
    said, rows = {}, []
    for name, opened in systems(options.model, options.forms).items():
        with opened as system:
            system.model.to(device)  # type: ignore[arg-type]
            said[name] = evaluated(system.model, system.tokenizer, tasks, batch_size=options.batch_size)
        rows += [{"form": name, "heads": system.heads, **row} for row in rows_of(said[name])]
    folder = output_folder(options.model, options.output)
    if folder is not None:
        about = {"command": line.command, "versions": versions() | {"lm_eval": metadata.version("lm_eval")}}
        write(folder, about | {"limit": options.limit, "forms": said}, rows)
    show(stdout(), rows)
    if folder is not None:
        stdout().print(f"results: {folder / TABLE}", soft_wrap=True, highlight=False, markup=False)


def systems(model: str, forms: Sequence[Form]) -> dict[str, AbstractContextManager[System]]:
    """What is evaluated by name, each loaded when it is entered.

    Args:
        model: a run's directory, another folder, or a hub name.
        forms: of a run.
    """
    if is_run(model):
        return {form: of_run(model, form) for form in forms}
    return {Path(model).name: of_folder(model)}


@contextmanager
def of_run(run: str, form: Form) -> Iterator[System]:
    """A form of a finished run's model.

    Raises:
        GateError: if it has not ended, is of no language model, or its heads cannot be removed.
    """
    trained = load_with_dense_weights(run) if form == "dense" else load_trained(run)
    check_causal(trained.model.config, run)
    assert isinstance(trained.tokenizer, PreTrainedTokenizerBase)  # as every language model's run has
    if form == "dense":
        yield System(trained.model, trained.tokenizer, trained.gates.heads)
        return
    mask = choose_mask(trained)
    kept = int(mask.sum())
    if form == "pruned":
        remove_heads_(trained.model, mask, example=example_inputs(trained.model))
        yield System(trained.model, trained.tokenizer, kept)
        return
    gates = HeadGates(trained.model)
    with gates.attached(), gates.use(mask):
        yield System(trained.model, trained.tokenizer, kept)


@contextmanager
def of_folder(name: str) -> Iterator[System]:
    """The language model of a folder, exports among them, or of a hub name. No code from it is run.

    Raises:
        GateError: if there is none, or it does not predict the next token.
    """
    config = read_config(name)
    check_causal(config, name)
    tokenizer = read_tokenizer(name)
    model = load_pretrained(AutoModelForCausalLM, Source(HubName(name)), config, what="a language model").eval()
    check_vocabulary(model, tokenizer, repr(name))
    yield System(model, tokenizer, sum(site.heads for site in find_attention(model)))


def write(folder: Path, said: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write what the harness said, and its metrics as a table."""
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / RESULTS) as partial:
            partial.write_text(json.dumps(said, indent=2, default=str) + "\n", encoding="utf-8")
        with replacing(folder / TABLE) as partial:
            pd.DataFrame(rows).to_csv(partial, index=False)


def show(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """A row for every metric, and a column for every form, with the standard error where the harness knows it."""
    table, forms = Table(), list(dict.fromkeys((row["form"], row["heads"]) for row in rows))
    for name in ("task", "shots", "examples", "metric"):
        table.add_column(name)
    for form, heads in forms:
        table.add_column(f"{form}\n{heads} heads", justify="right")
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        filtered = "" if row["filter"] == "none" else f" ({row['filter']})"
        arrow = {True: " \u2191", False: " \u2193"}.get(row["higher_is_better"], "")
        key = (row["task"], *map(_text, (row["shots"], row["examples"])), f"{row['metric']}{filtered}{arrow}")
        error = "" if row["error"] is None else f" \u00b1 {row['error']:.3g}"
        cells.setdefault(key, {})[row["form"]] = f"{row['value']:.4g}{error}"
    for key, values in cells.items():
        table.add_row(*map(escape, key), *(values.get(form, "") for form, _ in forms))
    console.print(table)
    console.print("\u00b1: standard error over the examples of a task, of each model alone", highlight=False)


def _text(value: object) -> str:
    return "" if value is None else str(value)
