"""Python that loads an export and predicts with it, as each export's README shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from gates.errors import GateError
from gates.export.example_inputs import example_inputs

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


def torch_usage(model: PreTrainedModel, auto: str, *, remote_code: bool, has_tokenizer: bool) -> list[str]:
    """Lines that load an export in PyTorch and print a prediction.

    Args:
        model: the model of the export, dense or pruned.
        auto: the Auto class that loads it.
        remote_code: whether it needs the modeling file beside it.
        has_tokenizer: whether a tokenizer lies beside it.
    """
    reads_text = has_tokenizer and model.main_input_name == "input_ids"
    names = ", ".join([auto, *(["AutoTokenizer"] if reads_text else [])])
    remote = ", trust_remote_code=True" if remote_code else ""
    return [
        "import torch",
        f"from transformers import {names}",
        "",
        PATH,
        f"model = {auto}.from_pretrained(path{remote}).eval()",
        *prediction(model, auto, reads_text=reads_text),
    ]


def prediction(model: PreTrainedModel, auto: str, *, reads_text: bool) -> list[str]:
    """Lines that print what ``model`` says of an example, with the tokenizer at ``path`` where there is one; none for a model
    whose inputs are unknown."""
    given = _inputs(model, auto, reads_text=reads_text, library="torch")
    if given is None:
        return []
    if model.can_generate():
        show = "tokenizer.decode(generated[0], skip_special_tokens=True)" if reads_text else "generated[0].tolist()"
        return [*given, "generated = model.generate(**inputs, max_new_tokens=20)", f"print({show})"]
    return [*given, "with torch.no_grad():", "    outputs = model(**inputs)", *_shown(model, auto, reads_text=reads_text)]


def _shown(model: PreTrainedModel, auto: str, *, reads_text: bool) -> list[str]:
    """Lines that print a prediction from ``outputs``."""
    match auto.removeprefix("AutoModelFor"):
        case "SequenceClassification" | "ImageClassification" | "AudioClassification" if _classes(model) > 1:
            return ["print(model.config.id2label[int(outputs.logits[0].argmax())])"]
        case "SequenceClassification":
            return ["print(float(outputs.logits[0]))"]
        case "TokenClassification":
            return ["print([model.config.id2label[label] for label in outputs.logits[0].argmax(-1).tolist()])"]
        case "QuestionAnswering" if reads_text:
            return [
                "start, end = int(outputs.start_logits[0].argmax()), int(outputs.end_logits[0].argmax())",
                'print(tokenizer.decode(inputs["input_ids"][0][start : end + 1]))',
            ]
        case "MaskedLM" if reads_text:
            return ["print(tokenizer.decode(outputs.logits[0].argmax(-1)))"]
        case _:
            return ["print(outputs[0].shape)"]


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
    reads_text = has_tokenizer and model.main_input_name == "input_ids"
    names = ", ".join(["AutoConfig", *(["AutoTokenizer"] if reads_text else [])])
    sessions = [f'{Path(file).stem} = onnxruntime.InferenceSession(f"{{path}}/{file}")' for file in files]
    lines = ["import numpy as np", "import onnxruntime", f"from transformers import {names}", "", PATH, *sessions]
    given = _inputs(model, auto, reads_text=reads_text, library="numpy")
    if given is None:
        return lines
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


def _inputs(model: PreTrainedModel, auto: str, *, reads_text: bool, library: str) -> list[str] | None:
    """Lines that make ``inputs``: a sentence where there is a tokenizer, and otherwise numbers of the right shape."""
    try:
        example: Mapping[str, Tensor] = example_inputs(model, batch=1, length=8)
    except GateError:
        return None
    tensor, zeros, kind = ("torch.tensor", "torch.zeros", "pt") if library == "torch" else ("np.array", "np.zeros", "np")
    lines = []
    if reads_text:
        text = f'"{QUESTION}", "{SENTENCE}"' if auto.endswith("QuestionAnswering") else f'"{SENTENCE}"'
        lines = [
            "tokenizer = AutoTokenizer.from_pretrained(path)",
            f'inputs = dict(tokenizer({text}, return_tensors="{kind}"))',
        ]
    elif "input_ids" in example:
        ids = example["input_ids"].tolist()
        lines = [f"ids = {tensor}({ids})  # of the tokenizer that the model was trained with"]
        ones = "torch.ones_like(ids)" if library == "torch" else "np.ones_like(ids)"
        lines.append(f'inputs = {{"input_ids": ids, "attention_mask": {ones}}}')
    else:
        lines = ["inputs = {}"]
    for name, value in example.items():
        if value.is_floating_point():
            dtype = "" if library == "torch" else ", np.float32"
            lines.append(f'inputs["{name}"] = {zeros}({tuple(value.shape)}{dtype})')
        elif name == "decoder_input_ids" and not model.can_generate():
            lines.append(f'inputs["{name}"] = inputs["input_ids"]')
    return lines
