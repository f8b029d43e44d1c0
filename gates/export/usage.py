"""Python that loads an export and predicts with it, as each export's README shows it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers import PreTrainedModel

from gates.errors import GateError
from gates.export.example_inputs import at_rest, example_inputs
from gates.surgery.modeling_file import auto_classes

PIPELINE_TAGS = {
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSeq2SeqLM": "translation",
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
    "AutoModelForCTC": "automatic-speech-recognition",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForAudioClassification": "audio-classification",
    "AutoModel": "feature-extraction",
}
"""The Hub's name of the task of an Auto class."""

PATH = 'path = "path/to/this/directory"  # or its name on the Hub'
SENTENCE = "The attention heads that are left do the work."
QUESTION = "What do the heads do?"
TEXT_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "decoder_input_ids"}
"""What a tokenizer gives; beside other inputs, a text has tokens that stand for them."""
TRIAL_PASSES = 4
"""Forward passes that a trial of two tokens may take. Two are usual; a diffusion model takes dozens."""


def torch_usage(model: PreTrainedModel, auto: str, *, remote_code: bool, has_tokenizer: bool) -> list[str]:
    """Lines that load an export in PyTorch and print a prediction.

    Args:
        model: the model of the export, dense or pruned.
        auto: the Auto class that loads it.
        remote_code: whether it needs the modeling file beside it.
        has_tokenizer: whether a tokenizer lies beside it.
    """
    example = _example(model)
    reads_text = has_tokenizer and _is_text(example)
    loader = auto if remote_code else stock_loader(model, auto)
    names = ", ".join([loader, *(["AutoTokenizer"] if reads_text else [])])
    remote = ", trust_remote_code=True" if remote_code else ""
    return [
        "import torch",
        f"from transformers import {names}",
        "",
        PATH,
        f"model = {loader}.from_pretrained(path{remote}).eval()",
        *_prediction(model, auto, example, reads_text=reads_text),
    ]


def stock_loader(model: PreTrainedModel, auto: str) -> str:
    """The Auto class that loads a stock model; its own class if no Auto class does (MllamaForCausalLM)."""
    own = type(model).__name__
    return own if hasattr(transformers, own) and auto not in auto_classes(model) else auto


def prediction(model: PreTrainedModel, auto: str) -> list[str]:
    """Lines that print what ``model`` says of an example; none for a model whose inputs are unknown."""
    return _prediction(model, auto, _example(model), reads_text=False)


def _prediction(model: PreTrainedModel, auto: str, example: Mapping[str, Tensor] | None, *, reads_text: bool) -> list[str]:
    """The same for a known example, or a text for the tokenizer at ``path``."""
    if example is None:
        return []
    generates = _generates(model, example)
    given = _inputs(example, auto, reads_text=reads_text, library="torch", generates=generates)
    if generates:
        show = "tokenizer.decode(generated[0], skip_special_tokens=True)" if reads_text else "generated[0].tolist()"
        return [*given, "generated = model.generate(**inputs, max_new_tokens=20)", f"print({show})"]
    shown = _shown(model, auto, example, reads_text=reads_text)
    return [*given, "with torch.no_grad():", "    outputs = model(**inputs)", *shown]


def _example(model: PreTrainedModel) -> dict[str, Tensor] | None:
    try:
        return example_inputs(model, batch=1, length=8)
    except GateError:
        return None


def _is_text(example: Mapping[str, Tensor] | None) -> bool:
    return example is not None and "input_ids" in example and example.keys() <= TEXT_INPUTS


def _generates(model: PreTrainedModel, example: Mapping[str, Tensor]) -> bool:
    """Whether a model generates two tokens from these inputs in at most :data:`TRIAL_PASSES` forward passes.

    Some models need a start token, or inputs that their forward pass does without. Diffusion models take too many passes.
    """
    if not model.can_generate():
        return False
    given = {name: tensor for name, tensor in example.items() if name != "decoder_input_ids"}
    try:
        with at_rest(model):
            with _counted_calls(model) as calls:
                model(**example)
            with _counted_calls(model, limit=TRIAL_PASSES * len(calls)):
                model.generate(**given, max_new_tokens=2)  # type: ignore[operator]
    except Exception:  # models refuse in many ways
        return False
    return True


@contextmanager
def _counted_calls(model: PreTrainedModel, limit: float = math.inf) -> Iterator[list[None]]:
    """Yield a list that grows by one with each call of a module; a call beyond the limit raises :class:`GateError`."""
    calls: list[None] = []

    def count(*_: object) -> None:
        if len(calls) >= limit:
            raise GateError(f"{type(model).__name__} calls its modules more than {limit} times; expected fewer")
        calls.append(None)

    hooks = [module.register_forward_pre_hook(count) for module in model.modules()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _shown(model: PreTrainedModel, auto: str, example: Mapping[str, Tensor], *, reads_text: bool) -> list[str]:
    """Lines that print a prediction from ``outputs``."""
    with at_rest(model):
        outputs = model(**example)
    first, place = outputs[0], "outputs[0]"
    names = outputs.keys() if isinstance(outputs, Mapping) else ()
    while isinstance(first, (tuple, list)):  # feature maps
        first, place = first[0], f"{place}[0]"
    plain = [f"print({place}.shape)"]
    if "logits" not in names:
        answers = "QuestionAnswering" in auto and "start_logits" in names and "end_logits" in names and reads_text
        return (
            plain
            if not answers
            else [
                "start, end = int(outputs.start_logits[0].argmax()), int(outputs.end_logits[0].argmax())",
                'print(tokenizer.decode(inputs["input_ids"][0][start : end + 1]))',
            ]
        )
    if not isinstance(outputs.logits, Tensor):
        return plain
    match auto.removeprefix("AutoModelFor"):
        case "SequenceClassification" | "ImageClassification" | "AudioClassification" if _classes(model) > 1:
            return ["print(model.config.id2label[int(outputs.logits[0].argmax())])"]
        case "SequenceClassification":
            return ["print(float(outputs.logits[0]))"]
        case "TokenClassification":
            return ["print([model.config.id2label[label] for label in outputs.logits[0].argmax(-1).tolist()])"]
        case "MaskedLM" if reads_text:
            return ["print(tokenizer.decode(outputs.logits[0].argmax(-1)))"]
        case _:
            return plain


def _classes(model: PreTrainedModel) -> int:
    return int(model.config.num_labels or 0)


def onnx_usage(model: PreTrainedModel, auto: str, files: Sequence[str], *, has_tokenizer: bool) -> list[str]:
    """Lines that run the ONNX graphs of an export and print a prediction.

    Args:
        model: the model of the export, dense or pruned.
        auto: the Auto class of the model.
        files: names of the graphs.
        has_tokenizer: whether a tokenizer lies beside them.
    """
    example = _example(model)
    reads_text = has_tokenizer and _is_text(example)
    names = ", ".join(["AutoConfig", *(["AutoTokenizer"] if reads_text else [])])
    sessions = [f'{Path(file).stem} = onnxruntime.InferenceSession(f"{{path}}/{file}")' for file in files]
    lines = ["import numpy as np", "import onnxruntime", f"from transformers import {names}", "", PATH, *sessions]
    if example is None:
        return lines
    given = _inputs(example, auto, reads_text=reads_text, library="numpy", generates=model.can_generate())
    lines += ["config = AutoConfig.from_pretrained(path)", *given]
    if model.can_generate():
        return lines + _decoding(model, reads_text=reads_text)
    lines.append("outputs = model.run(None, {known.name: inputs[known.name] for known in model.get_inputs()})")
    if auto.endswith("Classification") and "Token" not in auto and _classes(model) > 1:
        return [*lines, "print(config.id2label[int(outputs[0][0].argmax())])"]
    return [*lines, "print(outputs[0].shape)"]


def _decoding(model: PreTrainedModel, *, reads_text: bool) -> list[str]:
    """Lines that decode greedily with a graph of one step."""
    if model.config.is_encoder_decoder:
        decoder, mask = "decoder_model", "attention_mask"
        first = [
            "hidden = encoder_model.run(None, {known.name: inputs[known.name] for known in encoder_model.get_inputs()})[0]",
            "ids = new = np.array([[config.decoder_start_token_id]])",
        ]
        given = f'{{"input_ids": new, "encoder_hidden_states": hidden, "encoder_attention_mask": inputs.get("{mask}")}}'
    else:
        decoder, first = "model", ['ids = new = inputs["input_ids"]']
        given = '{"input_ids": new, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.shape[1])[None]}'
    cut = [] if model.config.is_encoder_decoder else ['    given["position_ids"] = given["position_ids"][:, -new.shape[1] :]']
    show = "tokenizer.decode(ids[0], skip_special_tokens=True)" if reads_text else "ids[0].tolist()"
    return [
        *first,
        f"known = {{known.name: known.shape for known in {decoder}.get_inputs()}}",
        'past = {name: shape for name, shape in known.items() if name.startswith("past")}',
        "cache = {name: np.zeros((1, shape[1], 0, shape[3]), np.float32) for name, shape in past.items()}",
        "for _ in range(20):",
        f"    given = {given}",
        *cut,
        f"    logits, *kept = {decoder}.run(None, {{name: x for name, x in (given | cache).items() if name in known}})",
        "    cache = dict(zip(cache, kept))",
        "    new = logits[:, -1:].argmax(-1)",
        "    ids = np.concatenate([ids, new], axis=1)",
        f"print({show})",
    ]


def _inputs(example: Mapping[str, Tensor], auto: str, *, reads_text: bool, library: str, generates: bool) -> list[str]:
    """Lines that make ``inputs``: a sentence for a tokenizer, and otherwise the example, with ones for pictures and sound."""
    lines = ["inputs = {}"]
    given = dict(example)
    if generates:
        given.pop("decoder_input_ids", None)
    if reads_text:
        text = f'"{QUESTION}", "{SENTENCE}"' if auto.endswith("QuestionAnswering") else f'"{SENTENCE}"'
        kind = "pt" if library == "torch" else "np"
        lines = [
            "tokenizer = AutoTokenizer.from_pretrained(path)",
            f'inputs = dict(tokenizer({text}, return_tensors="{kind}"))',
        ]
        given = {name: tensor for name, tensor in given.items() if name == "decoder_input_ids"}
    elif "input_ids" in given:
        ids = _literal(given.pop("input_ids"), library)
        lines = [f"ids = {ids}  # of the tokenizer that the model was trained with", 'inputs = {"input_ids": ids}']
        if given.pop("attention_mask", None) is not None:
            ones = "torch.ones_like(ids)" if library == "torch" else "np.ones_like(ids)"
            lines[-1] = f'inputs = {{"input_ids": ids, "attention_mask": {ones}}}'
    for name, value in given.items():
        is_same = name == "decoder_input_ids" and "input_ids" in example
        lines.append(f'inputs["{name}"] = ' + ('inputs["input_ids"]' if is_same else _literal(value, library)))
    return lines


def _literal(value: Tensor, library: str) -> str:
    """Python for a tensor: its numbers, or ones for pictures and sound: some models skip pictures of zeros."""
    shape: Any = tuple(value.shape)
    if value.is_floating_point():
        return f"torch.ones({shape})" if library == "torch" else f"np.ones({shape}, np.float32)"
    of = "torch" if library == "torch" else "np"
    if value.numel() > 1 and bool((value == value.flatten()[0]).all()):
        return f"{of}.full({shape}, {value.flatten()[0].item()})"
    return f"{of}.{'tensor' if library == 'torch' else 'array'}({value.tolist()})"
