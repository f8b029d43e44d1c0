"""What can have happened to a file: makers of damaged content, each a function of the content and of a source of chance."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

Damage = Callable[[bytes, random.Random], bytes]


def cut_anywhere(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content) or 1)]


def flipped(content: bytes, draw: random.Random, bits: int = 3) -> bytes:
    changed = bytearray(content or b"\0")
    for _ in range(bits):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def zeroed(content: bytes, draw: random.Random) -> bytes:
    """A block that a disk has lost."""
    start = draw.randrange(len(content) or 1)
    return content[:start] + bytes(len(content[start : start + 512])) + content[start + 512 :]


def twice(content: bytes, draw: random.Random) -> bytes:
    return content + content


def other_digit(content: bytes, draw: random.Random) -> bytes:
    """One digit is another: nothing but a comparison with what was written can tell."""
    places = [place for place, byte in enumerate(content) if chr(byte).isdigit()]
    if not places:
        return content + b"7"
    place = draw.choice(places)
    digit = str((int(chr(content[place])) + draw.randrange(1, 10)) % 10)
    return content[:place] + digit.encode() + content[place + 1 :]


def longer_number(content: bytes, draw: random.Random) -> bytes:
    """A number has one digit more."""
    places = [place for place, byte in enumerate(content) if chr(byte).isdigit()]
    place = draw.choice(places) if places else len(content)
    return content[:place] + str(draw.randrange(1, 10)).encode() + content[place:]


def no_utf8(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content) or 1)
    return content[:place] + b"\xe9\xff" + content[place:]


def other_leaf(content: bytes, draw: random.Random) -> bytes:
    """Some value of JSON content is of another kind."""
    whole: Any = json.loads(content)
    places: list[tuple[Any, Any]] = []

    def collect(part: Any) -> None:
        for key in part if isinstance(part, dict) else range(len(part)):
            places.append((part, key))
            if isinstance(part[key], dict | list):
                collect(part[key])

    collect(whole)
    part, key = draw.choice(places)
    part[key] = draw.choice([None, "text", [], {}, -1, 1e308, True])
    return json.dumps(whole).encode()


def lost_key(content: bytes, draw: random.Random) -> bytes:
    whole = json.loads(content)
    part = whole if isinstance(whole, dict) else draw.choice([row for row in whole if isinstance(row, dict)] or [{"": 0}])
    del part[draw.choice(list(part))]
    return json.dumps(whole).encode()


def text_in_numbers(content: bytes, draw: random.Random) -> bytes:
    lines = content.decode().splitlines()
    number = draw.randrange(1, len(lines))
    lines[number] = ",".join("text" if cell[:1].isdigit() else cell for cell in lines[number].split(","))
    return ("\n".join(lines) + "\n").encode()


def lost_column(content: bytes, draw: random.Random) -> bytes:
    rows = [line.split(",") for line in content.decode().splitlines()]
    lost = draw.randrange(len(rows[0]))
    return ("\n".join(",".join(row[:lost] + row[lost + 1 :]) for row in rows) + "\n").encode()


def lost_row(content: bytes, draw: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    lost = draw.randrange(1, len(lines))
    return b"".join(lines[:lost] + lines[lost + 1 :])


GONE = "gone"
"""The damage that no content stands for."""
ANY: dict[str, Damage] = {
    "empty": lambda content, draw: b"",
    "cut": cut_anywhere,
    "one bit": lambda content, draw: flipped(content, draw, 1),
    "bits": flipped,
    "noise": lambda content, draw: draw.randbytes(len(content)),
    "zeros": lambda content, draw: bytes(len(content)),
    "a lost block": zeroed,
    "twice": twice,
    "packed": lambda content, draw: gzip.compress(content, mtime=0),
    "a page": lambda content, draw: b"<html><body>404 Not Found</body></html>\n",
}
TEXT: dict[str, Damage] = {
    "no UTF-8": no_utf8,
    "UTF-16": lambda content, draw: content.decode().encode("utf-16"),
    "digit": other_digit,
    "a digit more": longer_number,
}
JSON: dict[str, Damage] = {
    "brackets": lambda content, draw: b"[" * 20_000,
    "braces": lambda content, draw: b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    "a list": lambda content, draw: b"[]",
    "null": lambda content, draw: b"null",
    "infinite": lambda content, draw: b'{"a": Infinity}',
    "a leaf": other_leaf,
    "a key": lost_key,
}
TABLE: dict[str, Damage] = {
    "text": text_in_numbers,
    "lost column": lost_column,
    "lost row": lost_row,
    "header": lambda content, draw: content.splitlines(keepends=True)[0],
}
YAML: dict[str, Damage] = {
    "brackets": lambda content, draw: b"[" * 20_000,
    "laughs": lambda content, draw: (
        b"a: &a [x, x, x, x, x, x, x, x, x]\n"
        + b"".join(b"%c: &%c [%s]\n" % (c, c, b", ".join([b"*%c" % (c - 1)] * 9)) for c in range(98, 107))
    ),
    "a list": lambda content, draw: b"[]\n",
    "itself": lambda content, draw: b"a: &a [*a]\n",
}
DAMAGES: Mapping[str, Mapping[str, Damage]] = {
    ".json": ANY | TEXT | JSON,
    ".csv": ANY | TEXT | TABLE,
    ".yaml": ANY | TEXT | YAML,
    ".md": ANY | TEXT,
}
"""By the ending of a file; others know no more than :data:`ANY`."""


def damages(ending: str) -> dict[str, Damage | None]:
    """The damages of a file with an ending, by name; None for the one that it is gone."""
    return {GONE: None, **DAMAGES.get(ending, ANY)}
