"""Random tiny models of every family, from configs alone, with inputs for them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as t
from torch import Tensor, nn

from gates.gating.head_gates import HeadGates

VOCABULARY = 50


@dataclass(frozen=True)
class Family:
    """A tiny model and what a test knows about it, written down by hand and not read from the library."""

    build: Callable[[], t.PreTrainedModel]
    kinds: dict[str, int]
    output_paths: tuple[str, ...]
    generates: bool = False
    kv_heads: int = 4


def _sizes(**more: object) -> dict[str, object]:
    return {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
        "vocab_size": VOCABULARY, "max_position_embeddings": 48, "pad_token_id": 0, **more,
    }  # fmt: skip


SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "vocab_size": VOCABULARY, "max_position_embeddings": 48,
    "pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
SEQ2SEQ_PATHS = (
    *(f"model.encoder.layers.{i}.self_attn.out_proj" for i in range(2)),
    *(f"model.decoder.layers.{i}.{name}.out_proj" for i in range(3) for name in ("self_attn", "encoder_attn")),
)
LLAMA_LIKE = tuple(f"model.layers.{i}.self_attn.o_proj" for i in range(2))


def _bert_like(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.encoder.layer.{i}.attention.output.dense" for i in range(2))


FAMILIES: dict[str, Family] = {
    "bert": Family(lambda: t.BertForSequenceClassification(t.BertConfig(**_sizes())), {"encoder": 8}, _bert_like("bert")),
    "roberta": Family(
        lambda: t.RobertaForSequenceClassification(t.RobertaConfig(**_sizes())), {"encoder": 8}, _bert_like("roberta")
    ),
    "distilbert": Family(
        lambda: t.DistilBertForSequenceClassification(
            t.DistilBertConfig(dim=32, n_layers=2, n_heads=4, hidden_dim=40, vocab_size=VOCABULARY, max_position_embeddings=48)
        ),
        {"encoder": 8},
        tuple(f"distilbert.transformer.layer.{i}.attention.out_lin" for i in range(2)),
    ),
    "gpt2": Family(
        lambda: t.GPT2LMHeadModel(
            t.GPT2Config(
                n_embd=32,
                n_layer=2,
                n_head=4,
                vocab_size=VOCABULARY,
                n_positions=48,
                bos_token_id=1,
                eos_token_id=2,
                pad_token_id=0,
            )
        ),
        {"decoder": 8},
        tuple(f"transformer.h.{i}.attn.c_proj" for i in range(2)),
        generates=True,
    ),
    "llama": Family(
        lambda: t.LlamaForCausalLM(t.LlamaConfig(num_key_value_heads=2, **_sizes())),
        {"decoder": 8},
        LLAMA_LIKE,
        generates=True,
        kv_heads=2,
    ),
    "qwen3": Family(
        lambda: t.Qwen3ForCausalLM(t.Qwen3Config(num_key_value_heads=2, head_dim=8, **_sizes())),
        {"decoder": 8},
        LLAMA_LIKE,
        generates=True,
        kv_heads=2,
    ),
    "mistral": Family(
        lambda: t.MistralForCausalLM(t.MistralConfig(num_key_value_heads=1, **_sizes())),
        {"decoder": 8},
        LLAMA_LIKE,
        generates=True,
        kv_heads=1,
    ),
    "opt": Family(
        lambda: t.OPTForCausalLM(
            t.OPTConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                ffn_dim=40,
                vocab_size=VOCABULARY,
                max_position_embeddings=48,
                word_embed_proj_dim=32,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
            )
        ),
        {"decoder": 8},
        tuple(f"model.decoder.layers.{i}.self_attn.out_proj" for i in range(2)),
        generates=True,
    ),
    "bart": Family(
        lambda: t.BartForConditionalGeneration(t.BartConfig(**SEQ2SEQ)),
        {"encoder": 8, "decoder": 12, "cross": 12},
        SEQ2SEQ_PATHS,
        generates=True,
    ),
    "marian": Family(
        lambda: t.MarianMTModel(t.MarianConfig(**SEQ2SEQ)),
        {"encoder": 8, "decoder": 12, "cross": 12},
        SEQ2SEQ_PATHS,
        generates=True,
    ),
    "vit": Family(
        lambda: t.ViTForImageClassification(
            t.ViTConfig(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40, image_size=8, patch_size=4
            )
        ),
        {"encoder": 8},
        tuple(f"vit.layers.{i}.attention.o_proj" for i in range(2)),
    ),
}
GENERATING = [name for name, family in FAMILIES.items() if family.generates]


def build(name: str, *, seed: int = 0) -> t.PreTrainedModel:
    """A model with weights large enough that every head matters and biases that are not zero, in evaluation mode."""
    torch.manual_seed(seed)
    return with_large_weights(FAMILIES[name].build())


def with_large_weights(model: t.PreTrainedModel) -> t.PreTrainedModel:
    """The same of any model."""
    for module in model.modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2 and not isinstance(module, nn.Embedding):
                nn.init.normal_(parameter, std=0.15)
            elif "bias" in parameter_name:
                nn.init.normal_(parameter, std=0.1)
    return model.eval()


def inputs(name: str, *, batch: int = 3, length: int = 7, padding: bool = True, seed: int = 1) -> dict[str, Tensor]:
    """A batch for a model of this family; the second example is shorter where padding makes sense."""
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        return {"pixel_values": torch.randn(batch, 3, 8, 8, generator=generator)}
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    if padding and batch > 1:
        mask[1, length - 3 :] = 0
        if FAMILIES[name].generates and "cross" not in FAMILIES[name].kinds:
            mask[1] = mask[1].flip(0)  # decoders are padded on the left
    found = {"input_ids": ids, "attention_mask": mask}
    if "cross" in FAMILIES[name].kinds:
        found["decoder_input_ids"] = torch.randint(3, VOCABULARY, (batch, length - 2), generator=generator)
    return found


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Logits ``[batch, ...]`` without gradients."""
    with torch.no_grad():
        return model(**batch).logits


def projection_inputs(model: nn.Module, name: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the heads that each output projection of a family reads, by its path."""
    seen: dict[str, Tensor] = {}

    def keep(path: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen[path] = args[0].detach().clone()

    paths = FAMILIES[name].output_paths
    hooks = [model.get_submodule(path).register_forward_pre_hook(partial(keep, path)) for path in paths]
    logits(model, batch)
    for hook in hooks:
        hook.remove()
    return seen


@contextmanager
def replaced_heads(model: nn.Module, name: str, mask: Tensor, instead: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Replace the heads whose entry of a mask ``[heads]`` is 0, without gates.

    ``instead`` gets the index of an output projection and the heads that it reads, ``[..., features]``.
    """

    def replace(site: int, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        kept = mask[4 * site : 4 * site + 4].bool().repeat_interleave(8)
        return (torch.where(kept, args[0], instead(site, args[0]).to(args[0])),)

    paths = FAMILIES[name].output_paths
    hooks = [model.get_submodule(path).register_forward_pre_hook(partial(replace, site)) for site, path in enumerate(paths)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def masked(model: nn.Module, values: Tensor, run: Callable[[], Any]) -> Any:
    """What a function returns while the heads of a model have these gates: a reference that knows nothing of surgery."""
    gates = HeadGates(model)
    with gates.attached(), gates.use(values), torch.no_grad():
        return run()


def slope(gates: HeadGates, gate: int, losses: Callable[[], Tensor], step: float) -> Tensor:
    """Return the derivative of losses ``[batch]`` by a gate at 1, from two evaluations, in float64."""
    found = []
    for change in (step, -step):
        values = torch.ones(gates.size, dtype=torch.float64)
        values[gate] += change
        with torch.no_grad(), gates.attached(), gates.use(values):
            found.append(losses().double())
    return (found[0] - found[1]) / (2 * step)


def random_mask(name: str, *, seed: int = 2) -> Tensor:
    """A mask with a site without heads, a site with all heads, and the rest at random."""
    heads = sum(FAMILIES[name].kinds.values())
    mask = (torch.rand(heads, generator=torch.Generator().manual_seed(seed)) < 0.5).float()
    mask[:4], mask[4:8] = 0.0, 1.0
    return mask


def script(path: Path) -> Any:
    """Return a script that is in no package as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def run_fresh(code: str, *arguments: object, folder: Path, **environment: str) -> str:
    """Return what Python code prints in a new process, which has no network and finds this project only if it is named."""
    own = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=own | environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def values_of_a_call(gates: HeadGates, call: Callable[[], object]) -> Tensor:
    """Return the gate values that a call of the model uses, ``[gates]`` or ``[examples, gates]``."""
    seen: list[Tensor] = []

    def see(*_: object) -> None:
        seen.append(gates._calls.running().values)  # type: ignore[arg-type, union-attr]

    handle = gates.sites[0].output.register_forward_hook(see)
    try:
        call()
    finally:
        handle.remove()
    return seen[-1]
