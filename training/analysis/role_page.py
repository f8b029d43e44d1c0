"""One page that needs nothing else: the map of roles, what was found, and the attention of any head in some sentences."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Sequence
from importlib import resources
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from training.analysis.role_maps import Shown
from training.report.attention import as_text
from training.report.page import POLICY


def role_page(figure: Figure, sentences: Sequence[str], attention: dict[str, Any]) -> str:
    """The page; it loads nothing, and no script but its own runs.

    Args:
        figure: the map of roles.
        sentences: what was found.
        attention: of the heads, see :func:`attention_of`.
    """
    environment = Environment(loader=PackageLoader("training.report", "template"), autoescape=True, undefined=StrictUndefined)
    assets = resources.files("training.report") / "template"
    own, view, script = ((assets / name).read_text(encoding="utf-8") for name in ("roles.css", "attention.css", "attention.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return environment.get_template("roles.html").render(
        name="this model",
        policy=POLICY.format(digest=digest),
        style=Markup(own + view),
        script=Markup(script),
        picture=base64.b64encode(picture.getvalue()).decode(),
        sentences=sentences,
        attention=as_text(attention),
    )


def attention_of(table: pd.DataFrame, shown: Sequence[Shown], places: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Weights in whole percent, with names of heads, roles and tokens.

    Args:
        table: of roles, a row for each head.
        shown: sentences with their attention.
        places: of every head the number of its site, and its number there.
    """
    rows = list(zip(table["site"], table["head"], table["kind"], table["roles"], places, strict=True))
    specialised = table["specialised"].to_numpy()
    return {
        "heads": [
            {"name": f"{site}.{head}", "kind": kind, "roles": roles, "site": place[0], "head": place[1]}
            for site, head, kind, roles, place in rows
        ],
        "first": int(specialised.argmax()),
        "sentences": [
            {
                "name": " ".join(next(iter(one.tokens.values()))[0])[:80],
                "tokens": one.tokens,
                "weights": [(100 * weights).round().int().tolist() for weights in one.weights],
            }
            for one in shown
        ],
    }
