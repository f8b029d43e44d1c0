"""Give a stock Transformers model the shape of a pruned one.

This file imports torch and transformers only. It is part of the library and is also copied, unchanged, into
exported checkpoints, so that they load where this project is not installed.

A pruned shape is plain data, kept in the model's config as ``pruned_attention``. For each attention module (named from
the base model) it has the remaining ``heads`` and ``kv_heads``, and, all by path below the module:

* ``projections``: sizes ``[in, out]`` of its projections;
* ``attributes``: values to set;
* ``parameters``: shapes of parameters with an axis of heads (attention sinks, norms, tables of position biases);
* ``modules``: how many modules stay in a list of one module per head;
* ``selected``: features that stay after a norm which spans all heads, so that the projection before it stays whole;
* ``config``: values that this module alone reads from its config;
* ``arguments``: inputs with an axis of ``of`` heads (ALiBi, position biases), to select from. The input ``handed_on`` is also
  the module's second output for the next layer, and stays whole there (UDOP);
* ``own_bias``: the number of buckets of the module's own table of position biases (T5). A bias from another layer does not fit
  its heads;
* ``multihead``: PyTorch's own attention gets a forward pass for heads that do not fill its width. Masks with one entry per head
  are selected for the ``kept`` ``of`` all heads;
* ``own_size``: attention that assumes the width of its input for its heads (BLIP) gets a forward pass that does not;
* ``flat_heads``: heads are split without the four parts of CodeGen's weights;
* ``headless``: the module lost all its heads; the arguments of its replacement.
"""

import copy
import copyreg
import functools
import inspect
import sys

import torch
import transformers
from torch import nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

CACHE_NAMES = ("past_key_values", "layer_past", "cache")
STATES_NAMES = ("key_value_states", "encoder_hidden_states")
LAYER_NAMES = ("layer_idx", "layer_id")
RECORDING_MODULE = "transformers.utils.output_capturing"


class Bias(nn.Linear):
    """An output projection without inputs: only its bias remains.

    It is a linear layer, so adapters for linear layers (LoRA) fit. Its empty weight is saved, so that a stock class finds a
    weight of another shape and raises an error. It would draw new weights for a missing layer.
    """

    def __init__(self, features, has_bias):
        super().__init__(0, features, bias=has_bias)
        del self.weight
        self.register_buffer("weight", torch.zeros(features, 0))

    def reset_parameters(self):
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, heads):
        output = heads.new_zeros(*heads.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias


class Selected(nn.Module):
    """A norm over the features of all heads, followed by a selection of the features of the remaining heads."""

    def __init__(self, norm, features):
        super().__init__()
        self.norm = norm
        self.register_buffer("index", torch.zeros(features, dtype=torch.long))

    def forward(self, features):
        return self.norm(features).index_select(-1, self.index)


class Headless(nn.Module):
    """Replacement for attention without heads: no computation, and the output projection's bias as output.

    A decoder's cache has to count its tokens, so one key of width 1 is stored per token. Returned attention probabilities are
    ``[batch, 0, query, key]``. Transformers records them at modules of the attention's class, so :func:`headless_class` makes
    a subclass of it.
    """

    def __init__(self, attention, kind, adds="", returns=2, as_list=False, **parts):
        nn.Module.__init__(self)
        self._is_hf_initialized = True  # there are no weights to initialise
        self._forward_hooks.update(_recording_hooks(attention))
        states = vars(attention)
        self.layer_idx = next((states[name] for name in LAYER_NAMES if name in states), None)
        self.config = states.get("config")
        self.takes_request = "output_attentions" in _argument_names(attention)
        self.returns = returns
        self.as_list = as_list
        self.kind = kind
        self.adds = adds
        self.output_name = next(iter(parts), None)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, hidden_states=None, *args, **kwargs):
        hidden_states = kwargs["query"] if hidden_states is None else hidden_states  # nn.MultiheadAttention, by keyword
        cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
        states = next((kwargs[name] for name in STATES_NAMES if kwargs.get(name) is not None), hidden_states)
        keys = states.shape[1]
        if cache is not None and self.kind != "cross":
            if isinstance(cache, EncoderDecoderCache):
                cache = cache.self_attention_cache
            token = hidden_states.new_zeros(hidden_states.shape[0], 1, hidden_states.shape[1], 1)
            keys = cache.update(token, token, self.layer_idx)[0].shape[2]
        output = hidden_states.new_zeros(*hidden_states.shape[:-1], 0)
        if self.output_name is not None:
            output = getattr(self, self.output_name)(output)
        if self.adds == "residual":
            output = output + (kwargs["residual"] if "residual" in kwargs else args[0])
        elif self.adds:
            output = getattr(self, self.adds)(output + hidden_states)
        if self.returns == 1:
            return output
        weights = None
        if self.takes_request or getattr(self.config, "_attn_implementation", "eager") == "eager":  # others return none
            weights = hidden_states.new_zeros(hidden_states.shape[0], 0, hidden_states.shape[1], keys)
        # Before the third of three, the attention matrix, comes the position bias for the next layer.
        if self.returns == 2:
            return [output, weights] if self.as_list else (output, weights)
        return (output, kwargs.get("position_bias"), weights)

    def __reduce__(self):
        return _empty_stand_in, (type(self).__bases__[1],), vars(self)


def is_of(module_class, own_class):
    """Return whether a class is ``own_class`` of this file, or of the copy of this file in an export."""
    return any(
        known.__qualname__ == own_class.__qualname__ and known.__module__.endswith("pruned") for known in module_class.__mro__
    )


def headless_class(attention_class):
    """Return the replacement for attention of a class, as a subclass of it."""
    return type("Headless", (Headless, attention_class), {})


def _empty_stand_in(attention_class):
    stand_in = headless_class(attention_class)
    return stand_in.__new__(stand_in)


def _recording_hooks(attention):
    """Return the hooks by which Transformers records attentions, if it has added them already."""
    return {key: hook for key, hook in attention._forward_hooks.items() if hook.__module__ == RECORDING_MODULE}


class OwnConfig:
    """A model's config with other values for one of its modules."""

    def __init__(self, config, values):
        self.__dict__.update(values, _shared=config)

    def __getattr__(self, name):
        if name.startswith("__") or "_shared" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._shared, name)


def reshape_(model, pruned_attention):
    """Shrink the attention modules of a dense ``model`` to the sizes of ``pruned_attention``; the caller loads the weights."""
    base = model.base_model
    modules = dict(base.named_modules())
    for name, shape in pruned_attention.items():
        if name not in modules:
            continue  # a class for a part of the model, such as the decoder of an encoder-decoder
        attention = base.get_submodule(name)
        if "headless" in shape:
            if any(is_of(type(part), Headless) for part in attention.modules()):
                continue  # a model that was built in this shape
            _behead_(base, name, **shape["headless"])
            continue
        for path, (features_in, features_out) in shape["projections"].items():
            _replace_(attention, path, lambda old, i=features_in, o=features_out: _resized(old, i, o))
        for path, size in shape.get("parameters", {}).items():
            _reshape_parameter_(attention, path, size)
        for path, count in shape.get("modules", {}).items():
            _replace_(attention, path, lambda old, n=count: nn.ModuleList([copy.deepcopy(old[0]) for _ in range(n)]))
        for path, features in shape.get("selected", {}).items():
            _replace_(attention, path, lambda old, n=features: _select(old, n))
        for path, value in shape["attributes"].items():
            parent, child = _parent(attention, path)
            setattr(parent, child, value)
        if "config" in shape:
            shared = attention.config
            shared = shared._shared if is_of(type(shared), OwnConfig) else shared
            attention.config = OwnConfig(shared, shape["config"])
        if "arguments" in shape:
            _follow_heads_(attention, shape["heads"], **shape["arguments"])
        if "own_bias" in shape:
            _compute_own_bias_(attention, shape["own_bias"], shape["heads"])
        if "multihead" in shape:
            attention.kept_of = (shape["multihead"]["kept"], shape["multihead"]["of"])
            attention.forward = functools.partial(_multihead_forward, attention)
        if "own_size" in shape:
            attention.forward = functools.partial(_fused_forward, attention)
        if "flat_heads" in shape:
            attention._split_heads = _split_flat_heads
    model.config.pruned_attention = pruned_attention
    if _kv_heads_differ(model.config.get_text_config(), pruned_attention):
        model.init_continuous_batching = _no_continuous_batching
    return model


def _kv_heads_differ(config, pruned_attention):
    """Return whether a layer has another number of key/value heads than the config."""
    try:
        stated = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    except RuntimeError:  # the config states a number for each layer
        return True
    return any(shape["kv_heads"] != stated for shape in pruned_attention.values())


def _no_continuous_batching(*args, **kwargs):
    raise ValueError(
        "continuous batching keeps as many key/value heads for every layer as the config states, but layers of this pruned "
        "model have other numbers; use generate()"
    )


def _parent(module, path):
    parent_path, _, child = path.rpartition(".")
    return module.get_submodule(parent_path), child


def _replace_(module, path, make):
    parent, child = _parent(module, path)
    setattr(parent, child, make(getattr(parent, child)))


def _resized(old, features_in, features_out):
    place = {"device": old.weight.device, "dtype": old.weight.dtype}
    if isinstance(old, Conv1D):
        new = Conv1D(features_out, features_in).to(**place)
    else:
        new = type(old)(features_in, features_out, bias=old.bias is not None, **place)
    return new.requires_grad_(old.weight.requires_grad)


def _reshape_parameter_(attention, path, size):
    parent, child = _parent(attention, path)
    old = getattr(parent, child)
    setattr(parent, child, nn.Parameter(old.new_empty(size), requires_grad=old.requires_grad))


def _select(norm, features):
    norm = norm.norm if is_of(type(norm), Selected) else norm
    return Selected(norm, features).to(norm.weight.device)


def _follow_heads_(attention, heads, names, of, handed_on=None):
    """Reduce the inputs ``names``, with an axis of ``of`` heads, to the heads in the buffer ``kept_heads``."""
    known = "kept_heads" in attention._buffers
    device = next(attention.parameters()).device
    attention.register_buffer("kept_heads", torch.zeros(heads, dtype=torch.long, device=device))
    attention.head_arguments = {"names": names, "of": of, "handed_on": handed_on}
    if not known:
        attention.register_forward_pre_hook(_select_arguments, with_kwargs=True)
    if not known and handed_on is not None:
        attention.register_forward_hook(_hand_on_whole)


def _select_arguments(attention, args, kwargs):
    names, of, handed_on = attention.head_arguments.values()
    if handed_on is not None:
        attention.whole_argument = kwargs.get(handed_on)
    named = zip(_argument_names(attention), args, strict=False)  # further arguments may come by keyword
    args = [_of_kept_heads(arg, attention.kept_heads, of) if name in names else arg for name, arg in named]
    kwargs = {name: _of_kept_heads(arg, attention.kept_heads, of) if name in names else arg for name, arg in kwargs.items()}
    return tuple(args), kwargs


def _hand_on_whole(attention, args, output):
    """Return the whole argument as the second output; the next layer selects from it."""
    return (output[0], vars(attention).pop("whole_argument"), *output[2:])


def _argument_names(module):
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _of_kept_heads(argument, kept_heads, of):
    """Select from ``[batch or 1, heads, query, key]``, or from a tensor with batch and heads in one axis."""
    if argument is None or (argument.dim() == 4 and argument.shape[1] != of):
        return argument
    if argument.dim() == 4:
        return argument.index_select(1, kept_heads)
    return argument.unflatten(0, (-1, of)).index_select(1, kept_heads).flatten(0, 1)


def _compute_own_bias_(attention, buckets, heads):
    """Make attention compute its own position bias from a table of ``buckets``; 0 for none (cross-attention)."""
    if buckets:
        weight = attention.q.weight
        attention.relative_attention_bias = nn.Embedding(buckets, heads, device=weight.device, dtype=weight.dtype)
        attention.has_relative_attention_bias = True
    if "position_bias" in _argument_names(attention) and not getattr(attention, "computes_own_bias", False):
        attention.computes_own_bias = True
        attention.register_forward_pre_hook(_without_position_bias, with_kwargs=True)


def _without_position_bias(attention, args, kwargs):
    return args, {**kwargs, "position_bias": None}


def _multihead_forward(
    attention,
    query,
    key,
    value,
    key_padding_mask=None,
    need_weights=True,
    attn_mask=None,
    average_attn_weights=True,
    is_causal=False,
):
    """Run ``nn.MultiheadAttention`` for any number of heads; a mask is for all heads or for each of the dense heads."""
    if not attention.batch_first:
        query, key, value = (part.transpose(0, 1) for part in (query, key, value))
    weights = attention.in_proj_weight.chunk(3)
    biases = (None, None, None) if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3)
    parts = zip((query, key, value), weights, biases, strict=True)
    query, key, value = (
        nn.functional.linear(part, weight, bias).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
        for part, weight, bias in parts
    )
    scores = (query @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5
    if attn_mask is not None and attn_mask.dim() == 3:
        kept, of = attention.kept_of
        attn_mask = attn_mask.unflatten(0, (-1, of))[:, kept]
    for mask in (attn_mask, None if key_padding_mask is None else key_padding_mask[:, None, None]):
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, dim=-1)
    output = attention.out_proj((weights @ value).transpose(1, 2).flatten(-2))
    output = output if attention.batch_first else output.transpose(0, 1)
    return output, ((weights.mean(1) if average_attn_weights else weights) if need_weights else None)


def _fused_forward(attention, hidden_states, **kwargs):
    """Run BLIP's and BLIP-2's attention for heads that do not fill the width of its input."""
    fused = attention.qkv(hidden_states).unflatten(-1, (3, attention.num_heads, attention.head_dim))
    query, key, value = fused.permute(2, 0, 3, 1, 4)
    if hasattr(attention, "attention_dropout"):
        eager = sys.modules[type(attention).__module__].eager_attention_forward
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, eager)
        dropout = attention.attention_dropout if attention.training else 0.0
        heads, weights = attend(
            attention, query, key, value, attention_mask=None, dropout=dropout, scaling=attention.scale, **kwargs
        )
    else:
        weights = attention.dropout(torch.softmax((query @ key.transpose(-1, -2)) * attention.scale, dim=-1))
        heads = (weights @ value).transpose(1, 2)
    return attention.projection(heads.flatten(-2)), weights


def _split_flat_heads(features, heads, head_dim, mp_num):
    """Run CodeGen's ``_split_heads`` for any number of heads, not only multiples of four."""
    return features.flatten(-2).unflatten(-1, (heads, head_dim))


def _behead_(base, name, core, output, kind, adds="", returns=2, as_list=False, keeps=()):
    attention = base.get_submodule(name)
    holder, child = _parent(attention, output)
    projection = getattr(holder, child)
    features = projection.weight.shape[1 if isinstance(projection, Conv1D) else 0]
    bias = Bias(features, projection.bias is not None).to(projection.weight.device, projection.weight.dtype)
    replaced = attention.get_submodule(core)
    stand_in = headless_class(type(replaced))
    if core:
        setattr(holder, child, bias)
        target, stand_in = f"{name}.{core}", stand_in(replaced, kind)
    else:
        kept = {path: getattr(attention, path) for path in (*keeps, adds) if path not in ("", "residual")}
        parts = {child: bias}
        if "." in output:  # the projection lies in a module of its own
            setattr(holder, child, bias)
            child = output.split(".")[0]
            parts = {child: getattr(attention, child)}
        target, stand_in = name, stand_in(replaced, kind, adds, returns, as_list, **parts, **kept)
    owner, child = _parent(base, target)
    setattr(owner, child, stand_in)


class Pruned:
    """Mixin for a stock model class, which gives it the shape in its config before weights are loaded."""

    def __init__(self, config, *args, **kwargs):
        known = (getattr(config, "architectures", None) or [""])[0]  # a model type may use the class of another
        if not isinstance(config, self.config_class) and known != type(self).__name__:
            raise ValueError(
                f"{type(self).__name__} reads a {self.config_class.__name__}, but this pruned model has a "
                f"{type(config).__name__}; load the whole model"
            )
        super().__init__(config, *args, **kwargs)
        reshape_(self, config.pruned_attention)

    def __reduce__(self):
        """Pickle by the stock class, because a class that is made at run time cannot be imported by its name."""
        own = type(self)
        if getattr(sys.modules.get(own.__module__), own.__name__, None) is own:  # one of an exported file
            return copyreg.__newobj__, (own,), vars(self)
        stock = next(kind for kind in own.__mro__ if not is_of(kind, Pruned) and hasattr(kind, "from_pretrained"))
        return _empty_model, (stock,), vars(self)

    @classmethod
    def is_custom_code(cls):
        """Return False: Transformers renames the weights on saving and loading, as it does for the stock class."""
        return False

    @classmethod
    def from_pretrained(cls, *args, output_loading_info=False, **kwargs):
        """Load as the stock class does, and raise an error if a saved weight is lost in this class."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        lost = lost_weights(model, info["missing_keys"])
        if lost:
            own = model.config.architectures[0]
            raise ValueError(
                f"{cls.__name__} needs {lost[0]!r} (one of {len(lost)}), which the pruned {own} has, but not in its files "
                f"under that name; load it as {own}"
            )
        return (model, info) if output_loading_info else model


def lost_weights(model, missing):
    """Return the sorted names of the ``missing`` weights of a loaded model that the saved model has.

    Other missing weights are correctly initialised: a new classifier, or fixed positions that are never saved. Names are
    compared below the base model.
    """
    if not missing:
        return []
    config = copy.deepcopy(model.config)
    saved_class = getattr(transformers, (config.architectures or [""])[0], type(model))
    with torch.device("meta"):
        saved = saved_class(config)
    reshape_(saved, getattr(config, "pruned_attention", {}))
    names = set(saved.state_dict()).difference(saved._keys_to_ignore_on_save or ())
    known = {name.removeprefix(f"{saved.base_model_prefix}.") for name in names}
    return sorted(name for name in missing if name.removeprefix(f"{model.base_model_prefix}.") in known)


def _empty_model(stock):
    pruned = pruned_class(stock)
    return pruned.__new__(pruned)


@functools.cache
def pruned_class(stock):
    """Return a subclass of a stock model class for the shape in a config.

    It keeps the name of the class, by which Transformers finds the renaming of weights and the pipelines.
    """
    if issubclass(stock, Pruned):
        return stock
    if is_of(stock, Pruned):  # by the code of an export
        stock = getattr(transformers, stock.__name__)
    return type(stock.__name__, (Pruned, stock), {})
