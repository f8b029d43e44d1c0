"""Read and write mask files: JSON that lists the heads to keep, which a person can read and edit."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gates.attention.sites import AttentionSite, site_labels
from gates.errors import GateError
from gates.files import read_json, replacing
from gates.gating.budget import check_mask


def kept_heads(sites: tuple[AttentionSite, ...], mask: Tensor) -> dict[str, list[int]]:
    """Return the indices of the heads that each site keeps under a mask ``[heads]``."""
    parts = mask.split([site.heads for site in sites])
    return {site.name: part.nonzero().flatten().tolist() for site, part in zip(sites, parts, strict=True)}


def save_mask(path: str | os.PathLike[str], mask: Tensor, sites: tuple[AttentionSite, ...], *, method: str = "") -> None:
    """Write a mask ``[heads]`` of 0 and 1 as JSON: the kind, layer, head count and kept heads of every site.

    >>> import tempfile
    >>> from gates import find_attention
    >>> from transformers import BertConfig, BertModel
    >>> sites = find_attention(BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save_mask(f"{directory}/mask.json", torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1]), sites)
    ...     read_mask(f"{directory}/mask.json")["sites"][1]["kept"]
    [3]
    """
    check_mask(mask, sum(site.heads for site in sites))
    kept = kept_heads(sites, mask)
    rows = [
        {"name": site.name, "kind": site.kind, "layer": site.layer, "heads": site.heads, "kept": kept[site.name]}
        for site in sites
    ]
    head = json.dumps({"method": method, "heads": len(mask), "budget": int(mask.sum()), "sites": []}, indent=2)
    body = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    text = head.replace("[]", f"[\n{body}\n  ]")
    with replacing(path) as partial:
        partial.write_text(text + "\n", encoding="utf-8")


def load_mask(path: str | os.PathLike[str], sites: tuple[AttentionSite, ...]) -> Tensor:
    """Read a mask ``[heads]`` for a model with these sites, in any form that :func:`parse_mask` accepts.

    Raises:
        GateError: If the file cannot be read, is not a mask, or is the mask of another model.

    >>> import tempfile
    >>> from gates import find_attention
    >>> from transformers import BertConfig, BertModel
    >>> sites = find_attention(BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save_mask(f"{directory}/mask.json", torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1]), sites)
    ...     load_mask(f"{directory}/mask.json", sites)
    tensor([1., 0., 1., 1., 0., 0., 0., 1.])
    """
    return parse_mask(read_mask(path), sites, source=str(path))


def read_mask(path: str | os.PathLike[str]) -> Any:
    """Return the JSON content of a mask file. The check of its form needs no model."""
    if os.path.exists(path) and not os.path.isfile(path):  # reading might never end
        raise GateError(f"the mask file {str(path)!r} is not a regular file; write the mask to one")
    content = read_json(path, "mask file")
    if not content or not isinstance(content, (dict, list)) or (isinstance(content, list) and isinstance(content[0], dict)):
        many = " (the masks.json of a comparison has many masks)" * isinstance(content, list)
        raise GateError(
            f"{str(path)!r} is not a mask file{many}; expected the JSON of gates.save_mask, the kept heads by layer "
            '({"0": [1, 5], "1": []}), or rows of 0 and 1'
        )
    return content


def parse_mask(content: Any, sites: tuple[AttentionSite, ...], *, source: str) -> Tensor:
    """Return the mask ``[heads]`` in JSON content of one of three forms.

    ======================================== ====================================================================
    ``{"sites": [{"name", "heads", "kept"}]}`` The output of :func:`save_mask`.
    ``{"encoder.0": [1, 5], "encoder.1": []}`` The heads that each site keeps, by the site's name or label. In a model with
                                             one site per layer, the number of the layer also works.
    ``[[0, 1, 0, 0], [1, 1, 0, 1]]``         0 or 1 for every head: a row for each site in order, or one row for all.
    ======================================== ====================================================================

    ``source`` is the name of the file, for errors.
    """
    if isinstance(content, list):
        return _of_rows(content, sites, source)
    return _of_kept(_of_sites(content["sites"], sites, source) if "sites" in content else content, sites, source)


def _of_sites(rows: Any, sites: tuple[AttentionSite, ...], source: str) -> dict[str, list[int]]:
    try:
        heads = {str(row["name"]): int(row["heads"]) for row in rows}
        kept = {str(row["name"]): row["kept"] for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise GateError(f"{source!r} is not a mask file; expected sites with a name, heads and kept heads") from error
    expected = {site.name: site.heads for site in sites}
    if heads != expected:
        raise GateError(
            f"the mask file {source!r} is for {len(heads)} sites with {sum(heads.values())} heads, but this model has "
            f"{len(expected)} sites with {sum(expected.values())} heads of other names or sizes"
        )
    return kept


def _of_kept(kept: dict[str, Any], sites: tuple[AttentionSite, ...], source: str) -> Tensor:
    layers = [site.layer for site in sites]
    by_layer = {str(site.layer): site.name for site in sites} if len(set(layers)) == len(sites) else {}
    labels = site_labels(sites)
    by_label = {label: site.name for label, site in zip(labels, sites, strict=True)}
    names = by_layer | by_label | {site.name: site.name for site in sites}
    example = next(iter(by_layer), labels[0])
    heads: dict[str, Any] = {}
    for key, indices in kept.items():
        if key not in names:
            raise GateError(
                f"the mask file {source!r} names the layer {key!r}; this model has {len(sites)}, from {example!r} to "
                f"{str(sites[-1].layer) if by_layer else labels[-1]!r}"
            )
        if names[key] in heads:
            raise GateError(f"the mask file {source!r} names {names[key]!r} twice, once as {key!r}; name each layer once")
        heads[names[key]] = indices
    mask = []
    for site, label in zip(sites, labels, strict=True):
        if site.name not in heads:
            raise GateError(
                f"the mask file {source!r} lacks {label!r}; give the kept heads of each of {len(sites)} layers, [] for none"
            )
        mask.append(_row_of(heads[site.name], site, source))
    return torch.cat(mask)


def _row_of(indices: Any, site: AttentionSite, source: str) -> Tensor:
    if not isinstance(indices, list):
        raise GateError(f"the mask file {source!r} has {indices!r} for {site.name!r}; expected a list of head numbers")
    row = torch.zeros(site.heads)
    for head in indices:
        if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < site.heads:
            raise GateError(
                f"the mask file {source!r} keeps head {head!r} of {site.name!r}, which has heads 0 to {site.heads - 1}"
            )
        if row[head]:
            raise GateError(
                f"the mask file {source!r} keeps head {head} of {site.name!r} twice; name each head once, or give rows of 0 "
                "and 1"
            )
        row[head] = 1.0
    return row


def _of_rows(rows: list[Any], sites: tuple[AttentionSite, ...], source: str) -> Tensor:
    heads = [site.heads for site in sites]
    if not any(isinstance(row, list) for row in rows):
        rows, heads = [rows], [sum(heads)]
    sizes = [len(row) if isinstance(row, list) else 0 for row in rows]
    if sizes != heads:
        raise GateError(
            f"the mask file {source!r} has {_shape(sizes)}; expected {_shape(heads)}, 0 or 1 for each head, layer by layer"
        )
    values = [value for row in rows for value in row]
    for place, value in enumerate(values):
        if not isinstance(value, (int, float)) or value not in (0, 1):
            raise GateError(f"the mask file {source!r} has {value!r} for head {place} of the model; expected 0 or 1")
    return torch.tensor(values, dtype=torch.float32)


def _shape(sizes: Sequence[int]) -> str:
    """Return ``12 values``, ``2 rows of 4 values`` or ``2 rows of 4 and 3 values``."""
    values = f"{' and '.join(map(str, dict.fromkeys(sizes)))} values"
    return values if len(sizes) == 1 else f"{len(sizes)} rows of {values}"
