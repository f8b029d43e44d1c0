"""What the site does with references in docstrings, such as ``:class:`gates.gating.head_gates.HeadGates```."""

from __future__ import annotations

import re
from typing import Any

REFERENCE = re.compile(r":(?:class|func|meth|mod|data|attr):<code>~?([\w.]+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """A page with every reference as a link, if the page describes what it names, or else as the name alone."""

    def shown(match: re.Match[str]) -> str:
        name = match[1].rpartition(".")[2]
        if f'id="gates.{name}"' in html:
            return f'<a href="#gates.{name}"><code>{name}</code></a>'
        return f"<code>{match[1]}</code>"

    return REFERENCE.sub(shown, html)
