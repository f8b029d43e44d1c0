"""Exports in vLLM, which another interpreter has because it needs other versions than this project."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.export.checkpoint import save_pruned
from tools.coverage import architectures as zoo
from tools.coverage.checks import masked_outputs
from tools.deployment import in_vllm
from tools.deployment.cells import BY_LAYER, Row, dense, differs, even, tokens, uneven, unpadded
from tools.deployment.gguf import DIFFER

BACKENDS = {"vLLM's own class": "auto", "its Transformers backend": "transformers"}
NAMES = "Llama Mistral Qwen2 Qwen3 Gemma Gemma2 Gemma3 Phi3 Granite Cohere Mixtral Qwen3Moe GptOss"
FAMILIES = (*(zoo.BY_NAME[name] for name in NAMES.split()), *BY_LAYER)
"""Families with a stock form here and a class in vLLM."""
WITHOUT = "a layer without heads"
KINDS = ("dense", "equal layers", f"{DIFFER}, padded", DIFFER, WITHOUT)
NEW = 3
"""The number of tokens that vLLM writes; later ones come from its cache."""


def ask(python: str | None, jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers of :mod:`tools.deployment.in_vllm` to jobs, run by another interpreter."""
    if python is None:
        return [{"error": "not tried: no --vllm_python"}] * len(jobs)
    line = [python, "-P", in_vllm.__file__]  # without its folder, whose modules have names of packages
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(line, input=json.dumps(jobs), capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        error = (done.stderr.strip() or f"it ended with exit code {done.returncode}").splitlines()[-1]
        return [{"error": f"not tried: {error}"}] * len(jobs)
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def rows(python: str | None) -> Iterator[Row]:
    """Iterate over the table. All exports are written first, because vLLM takes many seconds to start."""
    with tempfile.TemporaryDirectory() as made:
        exports = {(family, kind): Path(made, f"{family.name} {kind}") for family in FAMILIES for kind in KINDS}
        masks = {(family, kind): _export(family, kind, folder) for (family, kind), folder in exports.items()}
        job = {"texts": tokens().tolist(), "new": NEW, "vocabulary": zoo.VOCABULARY, "repeats": 0}
        written = [(*key, name) for key, mask in masks.items() if not isinstance(mask, str) for name in BACKENDS]
        jobs = [{**job, "folder": str(exports[one[:2]]), "backend": BACKENDS[one[2]]} for one in written]
        answers = dict(zip(written, ask(python, jobs), strict=True))
    for (family, kind), mask in masks.items():
        for name in BACKENDS:
            found = mask if isinstance(mask, str) else cell_of(answers[family, kind, name], zoo.build(wide(family)), mask)
            yield "vllm", f"{family.name}, {name}", kind, found


def _export(family: zoo.Architecture, kind: str, folder: Path) -> Tensor | str:
    """Write an export; return its mask, or why there is none."""
    model = zoo.build(wide(family))
    heads = [site.heads for site in find_attention(model)]
    mask, form = mask_of(kind, heads), "pruned" if kind in (DIFFER, WITHOUT) else "stock"
    pad = form == "stock"
    if kind == DIFFER and family in BY_LAYER:
        mask, form, pad = unpadded(family, heads), "stock", False
    try:
        save_pruned(model, folder, mask, form=form, pad_heads=pad, tokenizer=None)  # type: ignore[arg-type]
    except GateError as error:
        return f"no: {error}"
    return mask


def mask_of(kind: str, heads: Sequence[int]) -> Tensor:
    """Return the mask of a column. With layers that differ, the first has all heads, so that groups differ too."""
    if kind in (DIFFER, WITHOUT):
        mask = even(heads)
        mask[: heads[0]] = float(kind == DIFFER)
        return mask
    return {"dense": dense, "equal layers": even}.get(kind, uneven)(heads)


def wide(family: zoo.Architecture) -> zoo.Architecture:
    """Return the architecture with heads of 32 features; vLLM's attention on a CPU takes no fewer."""
    names = {"head_dim", "global_head_dim"}.intersection({*family.config, "head_dim"})
    return replace(family, config={**family.config, **dict.fromkeys(names, 32)})


def cell_of(answer: Mapping[str, Any], model: PreTrainedModel, mask: Tensor) -> str:
    """Compare the log probabilities of the written tokens with those of the gated model."""
    if error := answer.get("error"):
        return str(error) if error.startswith("not tried") else f"no: {error}"
    whole = torch.cat([tokens(), torch.tensor(answer["tokens"])], dim=1)
    expected = masked_outputs(model, {"input_ids": whole}, mask)[0][0, -NEW - 1 : -1].log_softmax(-1)
    found = torch.full_like(expected, -torch.inf)
    for step, probabilities in zip(found, answer["probabilities"], strict=True):
        for token, probability in probabilities.items():
            step[int(token)] = probability
    return f"yes, {differs(found, expected)}"
