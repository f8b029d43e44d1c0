"""``head-gates convert OLD_DIR``: make a checkpoint that Transformers 4 pruned load again under Transformers 5."""

from __future__ import annotations

from pathlib import Path

from transformers import GenerationConfig

from gates.errors import GateError, first_line
from gates.export.card import ModelCard
from gates.export.checkpoint import SavesPretrained, own_auto_class, save_pruned
from gates.export.legacy import load_legacy
from training.cli.command_line import CommandLine
from training.config.data import TOKENIZER_FILES
from training.runs.directory import writing_to
from training.setup import quiet_libraries
from training.tasks.classification import read_image_processor
from training.tasks.loading import read_tokenizer


def convert_checkpoint(line: CommandLine) -> None:
    """Write an export with ``mask.json`` in the original head numbers, and print how it loads."""
    quiet_libraries()
    options = line.options
    old = Path(options.old_dir).resolve()
    if not old.name:
        raise GateError(f"{options.old_dir!r} holds no checkpoint of Transformers 4; give its folder")
    output = Path(options.output or old.with_name(f"{old.name}-converted"))
    model, mask = load_legacy(old, allow_pickle=options.allow_pickle)
    if (old / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(old)
        except Exception as error:  # damaged files raise errors of many kinds
            raise GateError(
                f"generation_config.json in {str(old)!r} cannot be read ({first_line(error)}); correct or remove it"
            ) from error
    card = ModelCard(base_model=old.name, method="removed under Transformers 4 (pruned_heads)")
    with writing_to(output):
        save_pruned(model, output, mask, form=options.form, tokenizer=_preprocessor(old), card=card)
    remote = ", trust_remote_code=True" if options.form == "pruned" else ""
    call = f"{own_auto_class(model)}.from_pretrained({str(output)!r}{remote})"
    print(f"{output}: {int(mask.sum())} of {len(mask)} heads; load with {call}")


def _preprocessor(directory: Path) -> SavesPretrained | None:
    """Load the tokenizer or the image processor of a model, if there is one."""
    if any((directory / name).is_file() for name in TOKENIZER_FILES):
        return read_tokenizer(str(directory))
    if (directory / "preprocessor_config.json").is_file():
        return read_image_processor(str(directory))
    return None
