"""Give a stock Transformers model the shape of a pruned one.

This file imports torch and transformers only. It is part of the library and is also copied, unchanged, into
exported checkpoints, so that they load where this project is not installed.

A pruned shape is plain data, kept in the model's config as ``pruned_attention``: for each attention module
(named from the base model) its remaining ``heads``, the sizes ``[in, out]`` of its projections, the attributes to
set, and, for a module that lost all its heads, how to stand in for it.
"""

import torch
from torch import nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.pytorch_utils import Conv1D


class Bias(nn.Module):
    """An output projection with no input left: only its bias remains."""

    def __init__(self, features, has_bias):
        super().__init__()
        self.features = features
        self.register_parameter("bias", nn.Parameter(torch.zeros(features)) if has_bias else None)

    def forward(self, heads):
        shape = (*heads.shape[:-1], self.features)
        return heads.new_zeros(shape) if self.bias is None else self.bias.expand(shape)


class Headless(nn.Module):
    """Stands in for attention without heads: no computation, and the output projection's bias as output.

    A decoder's cache still has to know how many tokens went by, so one key of width 1 is stored per token.
    """

    def __init__(self, layer_idx, kind, output_name=None, output=None):
        super().__init__()
        self.layer_idx = layer_idx
        self.kind = kind
        self.output_name = output_name
        if output_name is not None:
            setattr(self, output_name, output)

    def forward(self, hidden_states, *args, past_key_values=None, **kwargs):
        if past_key_values is not None and self.kind != "cross":
            cache = past_key_values
            if isinstance(cache, EncoderDecoderCache):
                cache = cache.self_attention_cache
            token = hidden_states.new_zeros(hidden_states.shape[0], 1, hidden_states.shape[1], 1)
            cache.update(token, token, self.layer_idx)
        heads = hidden_states.new_zeros(*hidden_states.shape[:-1], 0)
        return (heads if self.output_name is None else getattr(self, self.output_name)(heads)), None


def reshape_(model, pruned_attention):
    """Shrink the attention modules of ``model`` (built dense) to the sizes that ``pruned_attention`` states.

    Weights are left as they come: the caller loads them.
    """
    base = model.base_model
    for name, shape in pruned_attention.items():
        attention = base.get_submodule(name)
        for path, (features_in, features_out) in shape["projections"].items():
            parent_path, _, child = path.rpartition(".")
            parent = attention.get_submodule(parent_path)
            setattr(parent, child, _resized(getattr(parent, child), features_in, features_out))
        for path, value in shape["attributes"].items():
            parent_path, _, child = path.rpartition(".")
            setattr(attention.get_submodule(parent_path), child, value)
        if "headless" in shape:
            _behead_(base, name, **shape["headless"])
    model.config.pruned_attention = pruned_attention
    return model


def _resized(old, features_in, features_out):
    place = {"device": old.weight.device, "dtype": old.weight.dtype}
    if isinstance(old, Conv1D):
        return Conv1D(features_out, features_in).to(**place)
    return nn.Linear(features_in, features_out, bias=old.bias is not None, **place)


def _behead_(base, name, core, output, kind):
    attention = base.get_submodule(name)
    parent_path, _, child = output.rpartition(".")
    holder = attention.get_submodule(parent_path)
    projection = getattr(holder, child)
    features = projection.weight.shape[1 if isinstance(projection, Conv1D) else 0]
    bias = Bias(features, projection.bias is not None).to(projection.weight.device, projection.weight.dtype)
    layer_idx = getattr(attention.get_submodule(core), "layer_idx", None)
    if core:
        setattr(holder, child, bias)
        target, stand_in = f"{name}.{core}", Headless(layer_idx, kind)
    else:
        target, stand_in = name, Headless(layer_idx, kind, child, bias)
    parent_path, _, child = target.rpartition(".")
    setattr(base.get_submodule(parent_path), child, stand_in)


def pruned_class(stock):
    """A subclass of a stock model class that takes the shape its config states before weights are loaded."""

    class Pruned(stock):
        def __init__(self, config, *args, **kwargs):
            super().__init__(config, *args, **kwargs)
            reshape_(self, config.pruned_attention)

    Pruned.__name__ = Pruned.__qualname__ = "Pruned" + stock.__name__
    return Pruned
