"""``python -m training convert OLD_DIR``: make a checkpoint that Transformers 4 pruned load again under Transformers 5.

Reads ``pruned_heads`` from its config.json (for the families in :data:`gates.export.legacy.LAYOUTS`) and writes an export as
:func:`gates.export.checkpoint.save_pruned` does: weights, tokenizer, ``mask.json`` with the original head numbers.
"""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.utils import logging as transformers_logging

from gates.errors import GateError
from gates.export.card import ModelCard
from gates.export.checkpoint import SavesPretrained, own_auto_class, save_pruned
from gates.export.legacy import load_legacy
from training.cli.line import CommandLine
from training.commands.parsers import ConvertedForm
from training.runs.run_directory import writing_to

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt", "sentencepiece.bpe.model",
    "spiece.model", "sentencepiece.model",
)  # fmt: skip


def convert_checkpoint(line: CommandLine) -> None:
    """The whole command."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    options = line.options
    print(convert(options.old_dir, options.output, form=options.form, allow_pickle=options.allow_pickle))


def convert(old_dir: str, out: str | None = None, *, form: ConvertedForm = "pruned", allow_pickle: bool = False) -> str:
    """Convert one checkpoint; returns what to tell the user.

    Raises:
        GateError: see :func:`gates.export.legacy.load_legacy` and :func:`gates.export.checkpoint.save_pruned`.
    """
    old = Path(old_dir).resolve()
    if not old.name:
        raise GateError(f"{old_dir!r} holds no checkpoint of Transformers 4; give its folder")
    target = Path(out) if out is not None else old.with_name(f"{old.name}-converted")
    model, mask = load_legacy(old, allow_pickle=allow_pickle)
    _keep_generation_settings_(model, old)
    card = ModelCard(base_model=old.name, method="removed under Transformers 4 (pruned_heads)")
    with writing_to(target):
        save_pruned(model, target, mask, form=form, tokenizer=_preprocessor(old), card=card)
    remote = ", trust_remote_code=True" if form == "pruned" else ""
    call = f"{own_auto_class(model)}.from_pretrained({str(target)!r}{remote})"
    return f"{target}: {int(mask.sum())} of {len(mask)} heads; load with {call}"


def _preprocessor(directory: Path) -> SavesPretrained | None:
    """The tokenizer, or the image processor of a model that reads pictures; None if there is neither."""
    kind: str
    auto: type[AutoTokenizer | AutoImageProcessor]
    if any((directory / name).is_file() for name in TOKENIZER_FILES):
        kind, auto = "tokenizer", AutoTokenizer
    elif (directory / "preprocessor_config.json").is_file():
        kind, auto = "image processor", AutoImageProcessor
    else:
        return None
    try:
        found: SavesPretrained = auto.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # their classes raise many kinds
        raise GateError(
            f"the {kind} in {str(directory)!r} cannot be loaded ({' '.join(str(error).split())[:200]}); "
            "mend its files, or move them away to convert the model alone"
        ) from error
    return found


def _keep_generation_settings_(model: PreTrainedModel, directory: Path) -> None:
    if not (directory / "generation_config.json").is_file():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(directory)
    except Exception as error:
        raise GateError(f"generation_config.json in {str(directory)!r} cannot be read; mend or remove it") from error
