"""Complete pages of the site: link references in docstrings, such as ``:class:`gates.gating.head_gates.HeadGates```, and list
the options of commands."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

HELP = re.compile(r"<!-- help: (\w+) -->")
REFERENCE = re.compile(r":(?:class|func|meth|mod|data|attr):<code>~?([\w.]+)</code>")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page with the output of ``COMMAND --help-all`` in place of each ``<!-- help: COMMAND -->``."""

    def printed(match: re.Match[str]) -> str:
        command = [sys.executable, "-m", "training", match[1], "--help-all"]
        return f"```text\n{subprocess.run(command, capture_output=True, text=True, check=True).stdout}```"

    return HELP.sub(printed, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Return a page with references as links. A reference to a name that the page does not describe becomes the name alone."""

    def shown(match: re.Match[str]) -> str:
        name = match[1].rpartition(".")[2]
        if f'id="gates.{name}"' in html:
            return f'<a href="#gates.{name}"><code>{name}</code></a>'
        return f"<code>{match[1]}</code>"

    return REFERENCE.sub(shown, html)
