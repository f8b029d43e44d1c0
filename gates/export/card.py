"""Write the README of an exported model: facts, a prediction in Python, results, kept heads and cost."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import transformers
from huggingface_hub import EvalResult, ModelCardData, metadata_load
from torch import Tensor
from transformers import PreTrainedModel
from yaml import YAMLError

from gates.attention.inputs import at_rest, example_inputs
from gates.attention.sites import find_attention, site_labels
from gates.errors import GateError
from gates.export.cost import Cost, count_parameters, milliseconds
from gates.files import replacing
from gates.gating.head_gates import HeadGates
from gates.surgery.modeling_file import auto_classes

MetricTypes = Mapping[str, Mapping[str, Any]]
"""For each metric, its ``type`` for ``evaluate.load`` of Hugging Face's ``evaluate``, and the ``args`` of its ``compute``, such
as ``{"f1": {"type": "f1", "args": {"average": "macro"}}}``."""

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
"""The Hub's task name for each Auto class."""

PATH = 'path = "path/to/this/directory"  # or its name on the Hub'
SENTENCE = "The attention heads that are left do the work."


def torch_usage(model: PreTrainedModel, auto: str, *, remote_code: bool, has_tokenizer: bool) -> list[str]:
    """Return lines of Python that load an export in PyTorch, with or without remote code, and print a prediction."""
    loader = auto if remote_code else stock_loader(model, auto)
    lines = prediction(model, auto, has_tokenizer=has_tokenizer)
    names = ", ".join([loader, *(["AutoTokenizer"] if any("AutoTokenizer" in line for line in lines) else [])])
    remote = ", trust_remote_code=True" if remote_code else ""
    return [
        "import torch",
        f"from transformers import {names}",
        "",
        PATH,
        f"model = {loader}.from_pretrained(path{remote}).eval()",
        *lines,
    ]


def stock_loader(model: PreTrainedModel, auto: str) -> str:
    """Return the Auto class that loads a stock model; its own class if no Auto class does (MllamaForCausalLM)."""
    own = type(model).__name__
    return own if hasattr(transformers, own) and auto not in auto_classes(model) else auto


def prediction(model: PreTrainedModel, auto: str, *, has_tokenizer: bool = False) -> list[str]:
    """Return lines that print a prediction for an example, or for a text with the tokenizer at ``path``; none if no example
    inputs are found."""
    example = _example(model)
    if example is None:
        return []
    reads_text = has_tokenizer and _is_text(example)
    generates = _generates(model, example)
    inputs = _inputs(example, auto, reads_text=reads_text, of="torch", generates=generates)
    if generates:
        show = "tokenizer.decode(generated[0], skip_special_tokens=True)" if reads_text else "generated[0].tolist()"
        return [*inputs, "generated = model.generate(**inputs, max_new_tokens=20)", f"print({show})"]
    printing = _printing(model, auto, example, reads_text=reads_text)
    return [*inputs, "with torch.no_grad():", "    outputs = model(**inputs)", *printing]


def _example(model: PreTrainedModel) -> dict[str, Tensor] | None:
    try:
        return example_inputs(model, batch=1, length=8)
    except GateError:
        return None


def _is_text(example: Mapping[str, Tensor]) -> bool:
    """Return whether a tokenizer makes all these inputs. A text with other inputs needs placeholder tokens for them."""
    text_inputs = {"input_ids", "attention_mask", "token_type_ids", "decoder_input_ids"}
    return "input_ids" in example and example.keys() <= text_inputs


def _generates(model: PreTrainedModel, example: Mapping[str, Tensor]) -> bool:
    """Return whether a model generates two tokens from these inputs in at most four forward passes.

    Two passes are usual. Diffusion models take dozens. Some models need a start token or further inputs.
    """
    if not model.can_generate():
        return False
    inputs = {name: tensor for name, tensor in example.items() if name != "decoder_input_ids"}
    try:
        with at_rest(model):
            with _counted_calls(model) as calls:
                model(**example)
            with _counted_calls(model, limit=4 * len(calls)):
                model.generate(**inputs, max_new_tokens=2)  # type: ignore[operator]
    except Exception:  # models refuse in many ways
        return False
    return True


@contextmanager
def _counted_calls(model: PreTrainedModel, limit: float = math.inf) -> Iterator[list[None]]:
    """Yield a list that grows by one with each call of a module; raise an error for calls beyond the limit."""
    calls: list[None] = []

    def count(*_: object) -> None:
        if len(calls) >= limit:
            raise GateError(f"{type(model).__name__} calls its modules more than {limit} times; expected fewer calls")
        calls.append(None)

    hooks = [module.register_forward_pre_hook(count) for module in model.modules()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _printing(model: PreTrainedModel, auto: str, example: Mapping[str, Tensor], *, reads_text: bool) -> list[str]:
    """Return lines that print a prediction from ``outputs``."""
    with at_rest(model):
        outputs = model(**example)
    first, place = outputs[0], "outputs[0]"
    names = outputs.keys() if isinstance(outputs, Mapping) else ()
    while isinstance(first, (tuple, list)):  # feature maps
        first, place = first[0], f"{place}[0]"
    plain = [f"print({place}.shape)"]
    if "QuestionAnswering" in auto and "start_logits" in names and "end_logits" in names and reads_text:
        return [
            "start, end = int(outputs.start_logits[0].argmax()), int(outputs.end_logits[0].argmax())",
            'print(tokenizer.decode(inputs["input_ids"][0][start : end + 1]))',
        ]
    if "logits" not in names or not isinstance(outputs.logits, Tensor):
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
    """Return lines that run the ONNX graphs of an export and print a prediction."""
    example = _example(model)
    reads_text = has_tokenizer and example is not None and _is_text(example)
    names = ", ".join(["AutoConfig", *(["AutoTokenizer"] if reads_text else [])])
    sessions = [f'{Path(file).stem} = onnxruntime.InferenceSession(f"{{path}}/{file}")' for file in files]
    lines = ["import numpy as np", "import onnxruntime", f"from transformers import {names}", "", PATH, *sessions]
    if example is None:
        return lines
    given = _inputs(example, auto, reads_text=reads_text, of="np", generates=model.can_generate())
    lines += ["config = AutoConfig.from_pretrained(path)", *given]
    if model.can_generate():
        return lines + _decoding(model, reads_text=reads_text)
    lines.append("outputs = model.run(None, {known.name: inputs[known.name] for known in model.get_inputs()})")
    if auto.endswith("Classification") and "Token" not in auto and _classes(model) > 1:
        return [*lines, "print(config.id2label[int(outputs[0][0].argmax())])"]
    return [*lines, "print(outputs[0].shape)"]


def _decoding(model: PreTrainedModel, *, reads_text: bool) -> list[str]:
    """Return lines that decode greedily with a graph of one step."""
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


def _inputs(example: Mapping[str, Tensor], auto: str, *, reads_text: bool, of: str, generates: bool) -> list[str]:
    """Return lines that make ``inputs``: a sentence for a tokenizer, else the example, with ones for pictures and sound."""
    lines = ["inputs = {}"]
    given = dict(example)
    if generates:
        given.pop("decoder_input_ids", None)
    if reads_text:
        text = f'"What do the heads do?", "{SENTENCE}"' if auto.endswith("QuestionAnswering") else f'"{SENTENCE}"'
        kind = "pt" if of == "torch" else "np"
        lines = [
            "tokenizer = AutoTokenizer.from_pretrained(path)",
            f'inputs = dict(tokenizer({text}, return_tensors="{kind}"))',
        ]
        given = {name: tensor for name, tensor in given.items() if name == "decoder_input_ids"}
    elif "input_ids" in given:
        ids = _literal(given.pop("input_ids"), of)
        lines = [f"ids = {ids}  # from the tokenizer of the model", 'inputs = {"input_ids": ids}']
        if given.pop("attention_mask", None) is not None:
            lines[-1] = f'inputs = {{"input_ids": ids, "attention_mask": {of}.ones_like(ids)}}'
    for name, value in given.items():
        is_same = name == "decoder_input_ids" and "input_ids" in example
        lines.append(f'inputs["{name}"] = ' + ('inputs["input_ids"]' if is_same else _literal(value, of)))
    return lines


def _literal(value: Tensor, of: str) -> str:
    """Return Python for a tensor: its numbers, or ones for pictures and sound, because some models skip pictures of zeros."""
    shape: Any = tuple(value.shape)
    if value.is_floating_point():
        return f"torch.ones({shape})" if of == "torch" else f"np.ones({shape}, np.float32)"
    if value.numel() > 1 and bool((value == value.flatten()[0]).all()):
        return f"{of}.full({shape}, {value.flatten()[0].item()})"
    return f"{of}.{'tensor' if of == 'torch' else 'array'}({value.tolist()})"


CardForm = Literal["pruned", "stock", "masked", "onnx"]
FORMS: dict[str, str] = {
    "pruned": "pruned (heads removed; the shape is in `config.json` and `modeling_pruned.py`)",
    "stock": "stock (heads removed; a stock class with its own config)",
    "masked": "masked (dense shape, dropped heads are zero)",
    "onnx": "ONNX (heads removed)",
}
LOADS = {
    "pruned": "Transformers loads this model with `trust_remote_code=True`, or where the package head-gates is installed.",
    "stock": "Transformers alone loads this model.",
    "masked": "Transformers alone loads this model.",
    "onnx": "ONNX Runtime runs this model.",
}
RESULTS, END = "<!-- results -->", "<!-- end of results -->"
Metrics = Mapping[str, float | int | str]


@dataclass(frozen=True)
class ModelCard:
    """Hold the facts for a saved model's README that do not follow from the model.

    Args:
        base_model: The hub name or a description of the dense model. Default: the place that it was loaded from.
        method: The name of the method that chose the mask.
        metrics: The results of the export by name (``{"accuracy": 0.91}``).
        dense_metrics: The results of the dense model by name.
        notes: Lines behind the table of results, such as an interval or a warning.
        metric_types: The metrics of Hugging Face's ``evaluate`` by name; see :data:`MetricTypes`. Others keep their names in
            the Hub's evaluation block.
        dataset: The hub name or a description of the evaluation data, required for the Hub's evaluation block.
        subset, split: The configuration and the split of the dataset.
        more_splits: The names of further splits, which precede the names of their metrics, as in ``mismatched_accuracy``.
        versions: The package versions by name.
        cost: The measured parameters, FLOPs and latency; None if not measured.

    >>> card = ModelCard(base_model="bert-base-uncased", metrics={"accuracy": 0.91}, dense_metrics={"accuracy": 0.92})
    >>> card.split
    'test'
    """

    base_model: str = ""
    method: str = ""
    metrics: Metrics = field(default_factory=dict)
    dense_metrics: Metrics = field(default_factory=dict)
    notes: Sequence[str] = ()
    metric_types: MetricTypes = field(default_factory=dict)
    dataset: str = ""
    subset: str = ""
    split: str = "test"
    more_splits: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    cost: Cost | None = None


def evaluation_block(card: ModelCard, task: str) -> list[EvalResult]:
    """Return the Hub's evaluation block of finite results for a task such as ``text-classification``; [] without a dataset."""
    block = []
    for result, value in card.metrics.items() if card.dataset else ():
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            continue
        split = next((more for more in card.more_splits if result.startswith(f"{more}_")), None)
        name = result if split is None else result.removeprefix(f"{split}_")
        metric = card.metric_types.get(name, {})
        block.append(
            EvalResult(
                task_type=task,
                dataset_type=card.dataset,
                dataset_name=" ".join(filter(None, [card.dataset, card.subset])),
                dataset_config=card.subset or None,
                dataset_split=split or card.split,
                metric_name=name,
                metric_type=metric.get("type", name),
                metric_args=metric.get("args"),
                metric_value=value,
            )
        )
    return block


def card_text(
    dense: PreTrainedModel,
    mask: Tensor,
    form: CardForm,
    card: ModelCard,
    *,
    auto: str,
    parameters: int,
    has_tokenizer: bool,
    files: Sequence[str] = (),
    zero_heads: int = 0,
    unpadded: int | None = None,
) -> str:
    """Return the text of the README. ``unpadded`` is the number of parameters without heads of zeros; None if not padded."""
    sites = find_attention(dense)
    sizes = [site.heads for site in sites]
    kept = [int(part.sum()) for part in mask.split(sizes)]
    source = dense.name_or_path or ""
    base_model = card.base_model or (Path(source).name if Path(source).is_dir() else source)
    shown, hub_name = stated_base_model(base_model, default=type(dense).__name__)
    title = f"{type(dense).__name__} with {int(mask.sum())} of {len(mask)} attention heads"
    if form == "onnx":
        usage = onnx_usage(dense, auto, files, has_tokenizer=has_tokenizer)
    else:
        usage = torch_usage(dense, auto, remote_code=form == "pruned", has_tokenizer=has_tokenizer)
    license = known_license(source) or known_license(base_model)
    lines = [
        *_header(card, form, PIPELINE_TAGS.get(auto), base_model=hub_name, license=license, model_name=title),
        f"# {title}\n\n{LOADS[form]}\n",
        f"- Base model: `{shown}`",
        f"- Mask found by: {' '.join(card.method.split()) or 'not stated'} (the kept heads are in `mask.json`)",
        f"- Parameters: {parameters:,} (dense: {count_parameters(dense):,})",
        f"- Form: {FORMS[form]}",
        *(_padded(zero_heads, parameters, unpadded) if unpadded is not None else ()),
        "",
        "```python",
        *usage,
        "```",
    ]
    if form == "pruned":
        lines += [
            "",
            "With head-gates, call `import gates; gates.register()` first. The model then loads without "
            "`trust_remote_code`, and no code of this folder runs.",
        ]
    if card.metrics:
        lines += ["", *_results(card.metrics, card.dense_metrics, card.notes)]
    lines += [
        "",
        "| site | heads | kept |",
        "| --- | --: | --: |",
        *(f"| {label} | {of} | {count} |" for label, of, count in zip(site_labels(sites), sizes, kept, strict=True)),
    ]
    if card.cost is not None:
        lines += ["", *_cost_table(card.cost)]
    if card.versions:
        lines += ["", "| package | |", "| --- | --: |", *(f"| {name} | {value} |" for name, value in card.versions.items())]
    return "\n".join(lines) + "\n"


def _padded(zero_heads: int, parameters: int, unpadded: int) -> list[str]:
    if not zero_heads:
        return ["- Padded: by no head, because all layers of a stack keep equally many heads"]
    share = parameters / unpadded - 1
    return [
        f"- Padded: {zero_heads} heads of zeros (`--pad_heads`) make all layers of a stack equally large. They change no "
        f"output and cost {parameters - unpadded:,} parameters ({share:.1%} of {unpadded:,} without them)"
    ]


def update_results(readme: Path, metrics: Metrics, dense_metrics: Metrics, notes: Sequence[str]) -> None:
    """Add the dense model's results and notes to a README of :func:`card_text`; do not change any other README."""
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    if RESULTS not in text or END not in text:
        return
    before, _, rest = text.partition(RESULTS)
    after = rest.partition(END)[2]
    with replacing(readme) as partial:
        partial.write_text(before + "\n".join(_results(metrics, dense_metrics, notes)) + after, encoding="utf-8")


def gate_card(gates: HeadGates, model: PreTrainedModel, open_heads: dict[str, list[int]], *, base_model: str, auto: str) -> str:
    """Return the text of the model card of saved gates."""
    shown, hub_name = stated_base_model(base_model, default="not stated")
    loader = stock_loader(model, auto)
    heads = {kind: [site.heads for site in gates.sites if site.kind == kind] for kind in open_heads}
    count, total = (sum(map(sum, table.values())) for table in (open_heads, heads))
    lines = [
        *_front_matter(tags=["head-gates"], base_model=hub_name, license=known_license(base_model)),
        f"# Gates of {total} attention heads, {count} open",
        "",
        f"- Base model: `{shown}` (not included)",
        f"- One gate per {'query head' if gates.unit == 'head' else 'key/value head with its query heads'}: {gates.size} gates",
        "",
        "```python",
        "import torch",
        f"from transformers import {loader}",
        "",
        "from gates import GatedModel",
        "",
        f'base_model = {loader}.from_pretrained("path/to/base/model")  # with the weights that the gates were trained with',
        PATH,
        "model = GatedModel.from_pretrained(base_model, path).prune_and_unload().eval()",
        *prediction(model, auto),
        "```",
        "",
        "| site | heads | open |",
        "| --- | --: | --: |",
    ]
    named = list(zip(gates.sites, site_labels(gates.sites), strict=True))
    for kind, counts in open_heads.items():
        labels = [label for site, label in named if site.kind == kind]
        lines += [f"| {label} | {of} | {n} |" for label, of, n in zip(labels, heads[kind], counts, strict=True)]
    return "\n".join(lines) + "\n"


def stated_base_model(name: str, *, default: str) -> tuple[str, str | None]:
    """Return a base model's name for the text of a card, and for its metadata: None unless it is a hub name."""
    shown = re.sub(r"[`\s]+", " ", name).strip() or default
    is_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", shown) and not Path(shown).exists()
    return shown, shown if is_hub_name else None


def known_license(base_model: str) -> str | None:
    """Return the licence in the card of a base model, if the card is in its folder or in the Hub's cache."""
    try:
        folder = Path(base_model)
        cached = folder / "README.md" if folder.is_dir() else huggingface_hub.try_to_load_from_cache(base_model, "README.md")
        if not isinstance(cached, (str, Path)):
            return None
        license = (metadata_load(cached) or {}).get("license")
    except (OSError, ValueError, AttributeError, YAMLError):  # no such card, no name of a repository, or other metadata
        return None
    return license if isinstance(license, str) else None


def _header(card: ModelCard, form: CardForm, pipeline_tag: str | None, **known: str | None) -> list[str]:
    return _front_matter(
        tags=["attention-head-pruning"],
        library_name="onnx" if form == "onnx" else "transformers",
        pipeline_tag=pipeline_tag,
        eval_results=evaluation_block(card, pipeline_tag or "other") or None,
        **known,
    )


def _front_matter(**known: object) -> list[str]:
    """Return the YAML header for the Hub."""
    return ["---", ModelCardData(**known).to_yaml(), "---", ""]  # type: ignore[arg-type]


def _results(metrics: Metrics, dense_metrics: Metrics, notes: Sequence[str]) -> list[str]:
    """Return the table of results and notes between two marks."""
    columns = {"dense": dense_metrics, "pruned": metrics} if dense_metrics else {"pruned": metrics}
    rows = [
        f"| {name} | {' | '.join(_number(column[name]) if name in column else '' for column in columns.values())} |"
        for name in metrics
    ]
    table = [f"| metric | {' | '.join(columns)} |", f"| --- |{' --: |' * len(columns)}", *rows]
    return [RESULTS, *table, *([""] if notes else []), *notes, END]


def _number(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cost_table(cost: Cost) -> list[str]:
    rows = [
        ("parameters", f"{cost.dense_parameters:,}", f"{cost.pruned_parameters:,}", cost.parameter_ratio),
        ("FLOPs of one example", f"{cost.dense_flops:,}", f"{cost.pruned_flops:,}", cost.flop_ratio),
    ]
    if cost.dense_cache:
        ratio = cost.dense_cache / cost.pruned_cache if cost.pruned_cache else math.inf
        rows.append(("bytes of KV cache per token", f"{cost.dense_cache:,}", f"{cost.pruned_cache:,}", ratio))
    for row in cost.latency:
        times = milliseconds(row.dense_ms), milliseconds(row.pruned_ms)
        rows.append((f"ms at batch size {row.batch_size}", *times, row.ratio))
    versions = ", ".join(f"{name} {version}" for name, version in cost.versions.items())
    measured = (
        f" Times are medians of one forward pass in PyTorch on {cost.hardware}; {versions}. Dense and pruned took turns. Their "
        "ratio is the median of the turns' ratios, which other work on the machine disturbs less than the times."
        if cost.latency
        else ""
    )
    return [
        "| | dense | pruned | dense / pruned |",
        "| --- | --: | --: | --: |",
        *(f"| {title} | {dense} | {pruned} | {ratio:.2f} |" for title, dense, pruned, ratio in rows),
        "",
        f"One example: {cost.example}.{measured}",
    ]
