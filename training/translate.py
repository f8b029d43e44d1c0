"""``python -m training.translate SYSTEM... --source FILE --reference FILE``: translate, score, and test the differences.

A system is a folder of an encoder-decoder with its tokenizer: an export, a fine-tuned model, or a run directory, whose export
is taken. The first system is the baseline of the paired bootstrap.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jsonargparse import ArgumentParser
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from gates.errors import GateError, first_line
from gates.files import replacing
from training.data.base import check_positive
from training.data.batches import SplitBatches
from training.data.parallel_text import read_aligned, read_lines
from training.fit import quiet_libraries
from training.tasks.translation import Decoding, Translation, decode, generate
from training.translation_metrics import corpus_score, paired_bootstrap, signatures


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m training.translate", description="Translate a file with one or more systems.")
    parser.add_argument("systems", type=str, nargs="+", help="Folders of models or runs; the first is the baseline.")
    parser.add_argument("--source", type=str, required=True, help="Text file with a sentence on each line; .gz is unpacked.")
    parser.add_argument("--reference", type=str | None, default=None, help="Its translation, for BLEU and chrF.")
    parser.add_argument("--source_prefix", type=str, default="", help="Text before every source (T5).")
    parser.add_argument("--beams", type=int, default=4, help="1 for greedy decoding.")
    parser.add_argument("--length_penalty", type=float, default=1.0, help="Power of the length that divides a beam's score.")
    parser.add_argument("--max_length", type=int, default=128, help="Longest translation in tokens.")
    parser.add_argument("--batch_size", type=int, default=64, help="Sentences per batch.")
    parser.add_argument("--samples", type=int, default=1000, help="Of the bootstrap.")
    parser.add_argument("--device", type=str, default="cpu", help="Such as cuda.")
    parser.add_argument("--out", type=str | None, default=None, help="Folder to write translations and scores into.")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 2 for input that its user can mend."""
    quiet_libraries()
    options = build_parser().parse_args(list(sys.argv[1:] if arguments is None else arguments))
    try:
        check_positive(
            beams=options.beams, max_length=options.max_length, batch_size=options.batch_size, samples=options.samples
        )
        if options.reference is None:
            source, reference = read_lines(options.source), None
        else:
            source, reference = read_aligned(options.source, options.reference)
        names = system_names(options.systems)
        decoding = Decoding(options.beams, options.length_penalty, options.max_length)
        found = {}
        for name, folder in names.items():
            model, tokenizer = load_system(folder)
            found[name] = translate(
                model.to(options.device),
                tokenizer,
                [options.source_prefix + text for text in source],
                decoding,
                batch_size=options.batch_size,
            )
        rows = score(found, reference, samples=options.samples) if reference is not None else []
        if options.out is not None:
            write(Path(options.out), found, rows)
    except GateError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return 130
    show(Console(), found, rows)
    return 0


def system_names(folders: Sequence[str]) -> dict[str, str]:
    """Folders by the shortest name that tells them apart: the last part, or the path as it was given."""
    last = [Path(folder).resolve().name for folder in folders]
    names = dict(zip(last if len(set(last)) == len(last) else folders, folders, strict=True))
    if len(names) < len(folders):
        raise GateError(f"the system {folders[0]!r} is given twice; name each system once")
    return names


def load_system(folder: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in evaluation mode, and the tokenizer of a folder, or of a run's export. No code from it is run.

    Raises:
        GateError: if there is none, or it is not an encoder-decoder.
    """
    path = Path(folder)
    if (path / "export").is_dir():
        path = path / "export"
    if not (path / "config.json").is_file():
        raise GateError(f"{folder!r} holds no model: it has no config.json; give a folder of a model or a run directory")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise GateError(f"{str(path)!r} has no tokenizer that can be loaded: {first_line(error)}") from error
    model = Translation(tokenizer).build(str(path), None, tokenizer)
    return model.eval(), tokenizer


def translate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: Sequence[str], decoding: Decoding, *, batch_size: int
) -> list[str]:
    """Translations of sentences, in their order; empty ones stay empty."""
    ids: list[list[int]] = tokenizer(list(source))["input_ids"]
    limit = getattr(model.config, "max_position_embeddings", None)
    for line, own in enumerate(ids, start=1):
        if isinstance(limit, int) and len(own) > limit:
            raise GateError(f"line {line} has {len(own)} tokens, more than the {limit} positions of the model; shorten it")
    texts = [""] * len(ids)
    for rows in SplitBatches([len(own) for own in ids], batch_size):
        batch = tokenizer.pad({"input_ids": [ids[row] for row in rows]}, return_tensors="pt").to(model.device)
        out = decode(tokenizer, generate(model, batch["input_ids"], batch["attention_mask"], decoding, beams=decoding.beams))
        for row, text in zip(rows, out, strict=True):
            texts[row] = text if source[row].strip() else ""
    return texts


def score(found: dict[str, list[str]], reference: Sequence[str], *, samples: int) -> list[dict[str, Any]]:
    """BLEU and chrF of every system; for two and more, with the paired bootstrap against the first."""
    if len(found) > 1:
        return paired_bootstrap(found, reference, samples=samples)
    return [
        {"system": name, "bleu": corpus_score("bleu", texts, reference), "chrf": corpus_score("chrf", texts, reference)}
        for name, texts in found.items()
    ]


def write(folder: Path, found: dict[str, list[str]], rows: list[dict[str, Any]]) -> None:
    """``NAME.txt`` for each system, ``scores.csv`` and ``signatures.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {f"{name.replace('/', '_')}.txt": "".join(f"{text}\n" for text in texts) for name, texts in found.items()}
    if rows:
        files["scores.csv"] = pd.DataFrame(rows).to_csv(index=False)
        files["signatures.txt"] = "".join(f"{signature}\n" for signature in signatures().values())
    for name, text in files.items():
        with replacing(folder / name) as partial:
            partial.write_text(text, encoding="utf-8")


def show(console: Console, found: dict[str, list[str]], rows: list[dict[str, Any]]) -> None:
    """Scores with their signatures, or the translations themselves if there is nothing to score them with."""
    if not rows:
        for texts in found.values():
            for text in texts:
                print(text)
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*("" if v is None else f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)
    for name, signature in signatures().items():
        console.print(f"{name}: {signature}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
