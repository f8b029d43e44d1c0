"""Save and load the learned gates of a model without its weights, in a few kilobytes.

The artefact is a directory with ``gate_config.json``, ``gates.safetensors`` (``log_alpha`` and ``mask``, with the sites in its
metadata) and a model card. A checksum detects damage; pickles are never read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self, get_args

import huggingface_hub
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from gates.attention.sites import KINDS
from gates.errors import GateError, first_line
from gates.files import read_json, replacing
from gates.gating.hard_concrete import Stretch
from gates.gating.head_gates import HeadGates, Mode, summary
from gates.gating.schedule import BudgetController
from gates.options import TOP_K_FAMILIES, DrawPer, GateFamily, Unit

CONFIG_FILE = "gate_config.json"
WEIGHTS_FILE = "gates.safetensors"
CHOICES: dict[str, tuple[str, ...]] = {
    "unit": get_args(Unit), "draw_per": get_args(DrawPer), "family": get_args(GateFamily),
}  # fmt: skip


@dataclass(frozen=True)
class GateConfig:
    """Configure the gates of a model.

    Args:
        unit: ``head``, or ``group`` for a key/value head with its query heads; see :class:`gates.gating.head_gates.HeadGates`.
        temperature: The temperature of the Hard-Concrete distribution.
        stretch_low: The lower end of its stretched interval, below 0.
        stretch_high: The upper end of its stretched interval, above 1.
        initial_log_alpha: The first ``log_alpha`` of every gate. 2.5 is nearly open.
        straight_through: Whether to round gates to 0 and 1 in training.
        draw_per: ``example`` for one draw of the gates per example, the default of the commands, or ``batch``, as in the
            papers; see :class:`gates.gating.head_gates.HeadGates`.
        base_model: The name of the model, for the reader.
        family: The family of gates. Temperature, stretch, start and rounding belong to ``hard-concrete``.
        budget: The number of heads to keep by :meth:`gates.model.GatedModel.step_`: a count (18), a fraction (0.25) or one of
            these per kind ({"encoder": 10}; other kinds keep all heads). None for a price.
        kinds: The kinds of attention with learned gates, such as ``["encoder"]``; None for those of the budget, or all.
        minimum_per_layer: The number of heads that every layer keeps within the budget.
        ramp: The share of the pruning after which the expected number of open heads reaches the budget.

    Raises:
        GateError: For a field of another type or outside its range.

    >>> config = GateConfig(budget={"encoder": 10}, draw_per="batch")
    >>> GateConfig(unit="layer")
    Traceback (most recent call last):
    gates.errors.GateError: unit is 'layer'; expected 'head' or 'group'
    """

    unit: Unit = "head"
    temperature: float = 0.33
    stretch_low: float = -0.1
    stretch_high: float = 1.1
    initial_log_alpha: float = 2.5
    straight_through: bool = False
    draw_per: DrawPer = "example"
    base_model: str = ""
    family: GateFamily = "hard-concrete"
    budget: int | float | dict[str, int | float] | None = None
    kinds: list[str] | None = None
    minimum_per_layer: int = 0
    ramp: float = 0.6

    def __post_init__(self) -> None:
        for field in fields(self):
            value, example = getattr(self, field.name), field.default
            if isinstance(example, float):
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
                expected = "" if is_number else f"a number such as {example}"
            elif field.name in CHOICES:
                expected = "" if value in CHOICES[field.name] else " or ".join(map(repr, CHOICES[field.name]))
            elif field.name == "budget":
                is_budget = isinstance(value, (int, float, dict, type(None))) and not isinstance(value, bool)
                such = "a number of heads such as 18, a fraction such as 0.25, or one of these per kind such as {'encoder': 10}"
                expected = "" if is_budget else such
            elif field.name == "kinds":
                is_list = value is None or (isinstance(value, list) and all(kind in KINDS for kind in value))
                expected = "" if is_list else f"a list of some of {', '.join(map(repr, KINDS))}"
            else:
                expected = "" if isinstance(value, type(example)) else f"a value such as {example!r}"
            if expected:
                raise GateError(f"{field.name} is {value!r}; expected {expected}")
        _ = self.stretch  # checks the interval
        if not 0 < self.ramp <= 1:
            raise GateError(f"ramp is {self.ramp}; expected a share of the pruning above 0 and at most 1")
        if self.minimum_per_layer < 0:
            raise GateError(f"minimum_per_layer is {self.minimum_per_layer}; expected 0 or more")
        self._check_kinds()

    def _check_kinds(self) -> None:
        """Raise an error unless the budget only counts learned gates."""
        if self.budget is None or self.kinds is None:
            return
        if not isinstance(self.budget, dict) or not set(self.budget) <= set(self.kinds):
            raise GateError(
                f"the budget is {self.budget!r}, but only gates of the kinds {self.kinds!r} are learned; give a budget for "
                "each of these, such as {'encoder': 10}, or remove kinds"
            )

    @property
    def stretch(self) -> Stretch:
        """Return temperature and interval as one object."""
        return Stretch(self.temperature, self.stretch_low, self.stretch_high)

    def gates_for(self, model: PreTrainedModel) -> HeadGates:
        """Return the configured gates for a model, not attached."""
        return HeadGates(
            model,
            self.unit,
            stretch=self.stretch,
            initial_log_alpha=self.initial_log_alpha,
            straight_through=self.straight_through,
            draw_per=self.draw_per,
            family=self.family,
            budget=self.budget if self.family in TOP_K_FAMILIES else None,
            kinds=list(self.budget) if self.kinds is None and isinstance(self.budget, dict) else self.kinds,
        )

    def steering_for(self, gates: HeadGates) -> BudgetController | None:
        """Return the controller that leads gates to the budget; None without a budget."""
        if self.budget is None:
            return None
        return BudgetController(gates, self.budget, minimum_per_layer=self.minimum_per_layer, ramp=self.ramp)

    def to_json_file(self, path: str | os.PathLike[str]) -> None:
        """Write the fields as JSON."""
        with replacing(path) as partial:
            partial.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_json_file(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file of :meth:`to_json_file`.

        Raises:
            GateError: If the file cannot be read, is not a JSON object, or has unknown or ill-typed fields.
        """
        content = read_json(path, "gate configuration")
        if not isinstance(content, dict):
            raise GateError(f"{str(path)!r} is not a gate configuration: expected a JSON object")
        known = [field.name for field in fields(cls)]
        unknown = next((name for name in content if name not in known), None)
        if unknown is not None:
            raise GateError(f"{str(path)!r} has the unknown field {unknown!r}; expected some of {', '.join(known)}")
        try:
            return cls(**content)
        except GateError as error:
            raise GateError(f"in {str(path)!r}, {error}") from error


def save_gates(directory: str | os.PathLike[str], gates: HeadGates, config: GateConfig, *, card: str = "") -> None:
    """Write the artefact of some gates. Each file is complete or missing, and other files stay.

    Args:
        gates: The gates, whose ``log_alpha``, mask and mode are saved.
        card: The text of the model card. It does not replace a ``README.md`` that is not such a card.
    """
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise GateError(f"{str(directory)!r} is a file; expected a directory to save gates in")
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {"log_alpha": gates.log_alpha.detach().cpu().contiguous(), "mask": gates.mask.cpu().contiguous()}
    metadata = {"mode": gates.mode, "sites": json.dumps(_sites(gates))}
    with replacing(directory / WEIGHTS_FILE) as partial:
        save_file(tensors, partial, metadata={**metadata, "checksum": _checksum(config, metadata, tensors)})
    config.to_json_file(directory / CONFIG_FILE)
    readme = directory / "README.md"
    if card and (not readme.exists() or "tags:\n- head-gates\n" in readme.read_text(encoding="utf-8", errors="replace")):
        with replacing(readme) as partial:
            partial.write_text(card, encoding="utf-8")


@torch.no_grad()
def load_gates_(directory: str | os.PathLike[str], gates: HeadGates, config: GateConfig) -> None:
    """Load gates that :func:`save_gates` wrote to a local folder; do not change them on an error."""
    directory = Path(directory)
    saved = GateConfig.from_json_file(directory / CONFIG_FILE)
    tensors, metadata, sites = _read(directory / WEIGHTS_FILE)
    if metadata.pop("checksum", None) != _checksum(saved, metadata, tensors):
        raise GateError(
            f"{WEIGHTS_FILE} and {CONFIG_FILE} in {str(directory)!r} do not match their checksum, so one of them was damaged "
            "or changed; fetch or save them again"
        )
    expected = _sites(gates)
    if sites != expected or any(tensor.shape != gates.mask.shape for tensor in tensors.values()):
        raise GateError(
            f"the gates in {str(directory)!r} belong to a model with {summary(dict(sites))}, but this model "
            f"has {summary(dict(expected))}; use the model they were trained with"
        )
    differing = [name for name, value in asdict(saved).items() if name != "base_model" and value != getattr(config, name)]
    if differing:
        name = differing[0]
        raise GateError(
            f"the gates in {str(directory)!r} were trained with {name} {getattr(saved, name)!r}, but these have "
            f"{getattr(config, name)!r}; build them from the GateConfig in that folder"
        )
    gates.log_alpha.copy_(tensors["log_alpha"])
    gates.mask.copy_(tensors["mask"])
    gates.mode = metadata["mode"]  # type: ignore[assignment]


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str], list[tuple[str, int]]]:
    """Return the tensors, metadata and sites of a gates file."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except OSError as error:
        raise GateError(f"cannot read the gates in {str(path)!r}: {error.strerror or error}") from error
    except Exception as error:  # safetensors raises many kinds
        raise GateError(f"{str(path)!r} is damaged or no safetensors file ({error}); fetch or save it again") from error
    try:
        sites = [(str(name), int(size)) for name, size in json.loads(metadata["sites"])]
    except (KeyError, TypeError, ValueError, RecursionError):
        sites = []
    is_vector = all(tensor.dtype == torch.float32 and tensor.dim() == 1 for tensor in tensors.values())
    if not (sites and is_vector and tensors.keys() == {"log_alpha", "mask"} and metadata.get("mode") in get_args(Mode)):
        raise GateError(f"{str(path)!r} holds no gates; expected a file that GatedModel.save_pretrained wrote")
    return tensors, metadata, sites


def _sites(gates: HeadGates) -> list[tuple[str, int]]:
    return [(site.name, size) for site, size in zip(gates.sites, gates.sizes, strict=True)]


def fetch(directory_or_name: str | os.PathLike[str], **download: Any) -> Path:
    """Return the local folder of an artefact, downloaded from the Hugging Face Hub if necessary, with the arguments of
    :func:`huggingface_hub.hf_hub_download`."""
    if Path(directory_or_name).is_dir():
        return Path(directory_or_name)
    try:
        found = [
            huggingface_hub.hf_hub_download(str(directory_or_name), name, **download) for name in (WEIGHTS_FILE, CONFIG_FILE)
        ]
    except (OSError, ValueError) as error:  # base classes of the Hub's errors
        raise GateError(
            f"no gates at {str(directory_or_name)!r}: it is no local folder, and the hub gave none ({first_line(error)})"
        ) from error
    return Path(found[0]).parent


def _checksum(config: GateConfig, metadata: dict[str, str], tensors: dict[str, Tensor]) -> str:
    settings = {name: value for name, value in asdict(config).items() if name != "base_model"}  # a reader may correct it
    digest = hashlib.sha256(json.dumps([settings, metadata], sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
