"""``head-gates translate SYSTEM... --source FILE --reference FILE``: translate, score, and test the differences.

A system is a folder of an encoder-decoder with its tokenizer: an export, a fine-tuned model, or a run directory, whose export
is taken. The first system is the baseline of the paired bootstrap.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gates.errors import GateError, first_line
from gates.export.checkpoint import check_known
from gates.files import replacing
from training.cli.command_line import CommandLine
from training.cli.exit import stdout
from training.config import Source
from training.config.checks import check_range
from training.config.paths import HubName
from training.data.base import SplitBatches
from training.data.translation import language_token, read_aligned, read_lines, set_languages
from training.runs import progress
from training.runs.directory import check_output_folder, writing_to
from training.setup import quiet_libraries
from training.tasks.base import encode_sources
from training.tasks.encoder_decoder import load_encoder_decoder, positions
from training.tasks.loading import read_tokenizer
from training.tasks.translation import (
    SCORERS,
    BleuTokenizer,
    Decoding,
    begin_with_,
    corpus_score,
    decode,
    generate,
    make_scorer,
    paired_bootstrap,
    signatures,
)

SCORES, SIGNATURES = "scores.csv", "signatures.txt"


def translate_files(line: CommandLine) -> None:
    """Translate with every system, score, write and show."""
    quiet_libraries()
    options = line.options
    check_range(options, "beams", "max_length", "batch_size", "samples", least=1, prefix="--")
    if options.reference is None:
        source, reference = read_lines(options.source), None
    else:
        source, reference = read_aligned(options.source, options.reference)
    make_scorer("bleu", options.bleu_tokenize)  # before the work is done
    names, device = system_names(options.systems), usable_device(options.device)
    if options.output is not None:
        check_output_folder(options.output, [*map(_file_of, names), SCORES, SIGNATURES])
    decoding = Decoding(options.beams, options.length_penalty, options.max_length)
    found = {}
    for name, folder in names.items():
        model, tokenizer = load_system(folder, options.source_language, options.target_language)
        found[name] = translate(
            model.to(device),  # type: ignore[arg-type]
            tokenizer,
            source,
            decoding,
            batch_size=options.batch_size,
            prefix=options.source_prefix,
        )
    scored = {"samples": options.samples, "tokenize": options.bleu_tokenize}
    rows = score(found, reference, **scored) if reference is not None else []
    if options.output is not None:
        with writing_to(Path(options.output)):
            write(Path(options.output), found, rows, options.bleu_tokenize)
    show(stdout(), found, rows, options.bleu_tokenize)


def system_names(folders: Sequence[str]) -> dict[str, str]:
    """Return the folders by a unique name: the last part of the path (of the run, for its export), or the given path."""
    paths = [Path(folder).resolve() for folder in folders]
    last = [path.parent.name if path.name == "export" else path.name for path in paths]
    names = dict(zip(last if len(set(last)) == len(last) else folders, folders, strict=True))
    if len(names) < len(folders):
        raise GateError(f"the system {folders[0]!r} is given twice; name each system once")
    return names


def load_system(
    folder: str, source_language: str | None = None, target_language: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model, in evaluation mode, and the tokenizer of a folder or of a run's export, without running its code."""
    path = Path(folder)
    if (path / "export").is_dir():
        path = path / "export"
    if not (path / "config.json").is_file():
        raise GateError(f"{folder!r} holds no model: it has no config.json; give a folder of a model or a run directory")
    tokenizer = read_tokenizer(str(path))
    model = load_encoder_decoder(Source(HubName(path))).eval()
    set_languages(tokenizer, source=source_language, target=target_language)
    if target_language is not None:
        begin_with_(model, tokenizer, language_token(tokenizer, target_language))
    return model, tokenizer


def usable_device(name: str) -> torch.device:
    """Return a device by its name."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, ValueError) as error:
        raise GateError(
            f"--device {name!r} cannot be used here ({first_line(error)}); expected cpu, or cuda where there is a GPU"
        ) from error


def fitting_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: Sequence[str], *, prefix: str = ""
) -> list[list[int]]:
    """Return the token ids of sources that fit the model."""
    ids, limit = encode_sources(tokenizer, source, prefix=prefix), positions(model.config, "encoder")
    for text, own in zip(source, ids, strict=True):
        if limit is not None and len(own) > limit:
            raise GateError(
                f"the source {shorten(text, 60)!r} has {len(own)} tokens, more than the {limit} positions of the model; "
                "shorten it"
            )
    check_known(tokenizer, [own for text, own in zip(source, ids, strict=True) if text.strip()], repr(tokenizer.name_or_path))
    return ids


def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: Sequence[str],
    decoding: Decoding,
    *,
    batch_size: int,
    prefix: str = "",
) -> list[str]:
    """Translate sentences in their order; empty ones stay empty."""
    ids = fitting_ids(model, tokenizer, source, prefix=prefix)
    texts = [""] * len(ids)
    for rows in progress.track(SplitBatches([len(own) for own in ids], batch_size), "translating"):
        batch = tokenizer.pad({"input_ids": [ids[row] for row in rows]}, return_tensors="pt").to(model.device)
        out = decode(tokenizer, generate(model, batch["input_ids"], batch["attention_mask"], decoding, beams=decoding.beams))
        for row, text in zip(rows, out, strict=True):
            texts[row] = text if source[row].strip() else ""
    return texts


def score(
    found: dict[str, list[str]], reference: Sequence[str], *, samples: int, tokenize: BleuTokenizer = "13a"
) -> list[dict[str, Any]]:
    """Return BLEU and chrF of every system, and with several systems the paired bootstrap against the first."""
    if len(found) > 1:
        return paired_bootstrap(found, reference, samples=samples, tokenize=tokenize)
    return [
        {"system": system} | {name: corpus_score(name, texts, reference, tokenize=tokenize) for name in SCORERS}
        for system, texts in found.items()
    ]


def _file_of(system: str) -> str:
    return f"{system.replace('/', '_')}.txt"


def write(folder: Path, found: dict[str, list[str]], rows: list[dict[str, Any]], tokenize: BleuTokenizer) -> None:
    """Write ``NAME.txt`` for each system, ``scores.csv`` and ``signatures.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {_file_of(name): "".join(f"{text}\n" for text in texts) for name, texts in found.items()}
    if rows:
        files[SCORES] = pd.DataFrame(rows).to_csv(index=False)
        files[SIGNATURES] = "".join(f"{signature}\n" for signature in signatures(tokenize).values())
    for name, text in files.items():
        with replacing(folder / name) as partial:
            partial.write_text(text, encoding="utf-8")


def show(console: Console, found: dict[str, list[str]], rows: list[dict[str, Any]], tokenize: BleuTokenizer) -> None:
    """Print scores with their signatures, or the translations if there is no reference."""
    if not rows:
        for texts in found.values():
            for text in texts:
                print(text)
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*("" if v is None else f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)
    if len(rows) > 1:
        text = "p: paired bootstrap over these sentences, for these systems alone; other seeds of theirs may differ."
        console.print(text, highlight=False, soft_wrap=True)
    for name, signature in signatures(tokenize).items():
        console.print(f"{name}: {signature}", highlight=False, soft_wrap=True)
