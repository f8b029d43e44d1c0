"""Short names of attention sites for tables, each unique in its model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gates.sites import KINDS, AttentionSite


def site_labels(sites: Sequence[AttentionSite]) -> tuple[str, ...]:
    """A name for each site: its label, such as ``encoder.3``, with as much of its path as tells it from sites of the same kind.

    Two stacks of one kind are told apart by the first word in which their paths differ (``text_model.encoder.3``,
    ``vision_model.encoder.3``), and layers in groups by all their numbers (``encoder.0.1``).

    Args:
        sites: all sites of a model.

    >>> from transformers import AltCLIPConfig, AltCLIPModel
    >>> from gates.sites import find_attention
    >>> size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    >>> config = AltCLIPConfig(text_config={**size, "vocab_size": 50, "project_dim": 8}, vision_config=size)
    >>> site_labels(find_attention(AltCLIPModel(config)))
    ('text_model.encoder.0', 'vision_model.encoder.0')
    """
    labels: dict[str, str] = {}
    for kind in KINDS:
        own = [site for site in sites if site.kind == kind]
        found = next(names for names in _ways(own) if len(set(names)) == len(own))
        labels.update(zip((site.name for site in own), found, strict=True))
    return tuple(labels[site.name] for site in sites)


def _ways(sites: Sequence[AttentionSite]) -> Iterator[list[str]]:
    """Names for sites of one kind, from the shortest to those that are surely unique."""
    shared = set.intersection(*(set(_words(site)) for site in sites)) if sites else set()
    for words, numbers in ((0, 1), (1, 1), (0, None), (1, None), (None, None)):
        yield [
            ".".join([*[word for word in _words(site) if word not in shared][:words], site.kind, *_numbers(site)[:numbers]])
            for site in sites
        ]
    yield [site.name for site in sites]


def _words(site: AttentionSite) -> list[str]:
    return [part for part in site.name.split(".") if not part.isdecimal()]


def _numbers(site: AttentionSite) -> list[str]:
    return [part for part in site.name.split(".") if part.isdecimal()] or [str(site.layer)]
