"""Mask files: which heads of which model are kept, in JSON that a person can read and edit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import Tensor

from gates.errors import GateError
from gates.files import replacing
from gates.sites import AttentionSite


def kept_heads(sites: tuple[AttentionSite, ...], mask: Tensor) -> dict[str, list[int]]:
    """The indices of the heads each site keeps under a flat mask ``[heads]``."""
    parts = mask.split([site.heads for site in sites])
    return {site.name: part.nonzero().flatten().tolist() for site, part in zip(sites, parts, strict=True)}


def save_mask(path: str | os.PathLike[str], mask: Tensor, sites: tuple[AttentionSite, ...], *, method: str = "") -> None:
    """Write a mask ``[heads]`` as JSON: for every site its kind, layer, head count and the heads it keeps.

    >>> import tempfile
    >>> from gates import find_attention
    >>> from transformers import BertConfig, BertModel
    >>> sites = find_attention(BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save_mask(f"{directory}/mask.json", torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1]), sites)
    ...     json.loads(Path(directory, "mask.json").read_text())["sites"][1]["kept"]
    [3]
    """
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
    """Read a mask ``[heads]`` for a model with these sites.

    Raises:
        GateError: if the file is not a mask, or the mask of a model with other attention.

    >>> import tempfile
    >>> from gates import find_attention
    >>> from transformers import BertConfig, BertModel
    >>> sites = find_attention(BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save_mask(f"{directory}/mask.json", torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1]), sites)
    ...     load_mask(f"{directory}/mask.json", sites)
    tensor([1., 0., 1., 1., 0., 0., 0., 1.])
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        kept = {site["name"]: (int(site["heads"]), [int(head) for head in site["kept"]]) for site in content["sites"]}
    except OSError as error:
        raise GateError(f"cannot read the mask file {str(path)!r}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise GateError(
            f"{str(path)!r} is not a mask file: expected JSON as gates.surgery.masks.save_mask writes it"
        ) from error
    expected = {site.name: site.heads for site in sites}
    if {name: heads for name, (heads, _) in kept.items()} != expected:
        raise GateError(
            f"the mask file {str(path)!r} is for {len(kept)} sites with {sum(h for h, _ in kept.values())} heads; this "
            f"model has {len(expected)} sites with {sum(expected.values())} heads of other names or sizes"
        )
    parts = []
    for site in sites:
        part = torch.zeros(site.heads)
        for head in kept[site.name][1]:
            if not 0 <= head < site.heads:
                raise GateError(
                    f"the mask file {str(path)!r} keeps head {head} of {site.name!r}, which has heads 0 to {site.heads - 1}"
                )
            part[head] = 1.0
        parts.append(part)
    return torch.cat(parts)
