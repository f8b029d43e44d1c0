"""Count the words and constructions that the project's style forbids, in docstrings, comments, messages, help and pages.

Call it by ``python -m tools.language [PATH ...] [--list]``.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PATHS = ("gates", "training", "tools", "docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")
MAX_WORDS = 25

PRIVATE_WORDS = {
    "told": r"told",
    "asked": r"asked",
    "said": r"said",
    "nobody": r"nobody",
    "so many": r"so (?:many|much)",
    "of which": r"of (?:which|whom)",
    "anew": r"anew",
    "beside": r"beside",
    "leave away": r"(?:leave|leaves|leaving|left) (?:\w+ )?away",
    "goes on": r"(?:go|goes|going|went|gone) on(?! to\b)",
    "what it": r"what (?:it|they|he|she|one|a|an|the|is|are|was|were|has|have|had)",
    "course": r"(?<!of )course",
    "looks": r"looks(?! (?:for|up|like|at)\b)",
    "began with": r"began with",
    "claimed": r"claimed",
    "priced": r"priced",
}
"""Words and phrases that readers stumble over, as regular expressions."""

PRIVATE_NAMES = {
    "told",
    "asked",
    "said",
    "nobody",
    "anew",
    "beside",
    "looks",
    "finding",
    "planned",
    "priced",
    "claimed",
    "rests",
}
"""Words that no name of a function, class, argument or variable contains."""

VERBS = frozenset(Path(__file__).with_name("verbs.txt").read_text(encoding="utf-8").split())
"""First words of docstrings of functions and methods."""

ENTRY = re.compile(r"^(\s*)(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?: (.*)$")
SECTION = re.compile(r"^\s*(Args|Arguments|Attributes|Raises|Returns|Yields):\s*$")


@dataclass(frozen=True)
class Text:
    """A text that a person reads, and the line on which it begins.

    With ``verb_first`` it has to begin with an imperative verb. With ``has_sections`` it is a docstring.
    """

    path: Path
    line: int
    body: str
    verb_first: bool = False
    has_sections: bool = False


@dataclass(frozen=True)
class Match:
    """A place that breaks a rule."""

    path: Path
    line: int
    rule: str
    quote: str


def python_texts(path: Path, source: str) -> Iterator[Text]:
    """Yield the docstrings, messages and comments of a module. A message is a string of at least three words."""
    docstrings = set()
    tree = ast.parse(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)} - {
        id(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
            docstrings.add(node.body[0].value)  # type: ignore[attr-defined]
            public = not node.name.startswith("_") and not is_property
            yield Text(path, node.body[0].lineno, ast.get_docstring(node) or "", public, has_sections=True)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            if node.value not in docstrings:
                docstrings.add(node.value)
                yield Text(path, node.lineno, node.value.value, has_sections=True)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            if id(node) not in parts and len(node.value.split()) >= 3:
                yield Text(path, node.lineno, node.value)
        elif isinstance(node, ast.JoinedStr) and id(node) not in parts:
            body = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
            if len(body.split()) >= 3:
                yield Text(path, node.lineno, body)
    yield from _comments(path, source)


def _comments(path: Path, source: str) -> Iterator[Text]:
    """Yield comments; comments alone on consecutive lines are one text."""
    block: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        body = re.sub(r"#\s*(?:type: ignore|noqa|fmt:|pragma).*", "", token.string).lstrip("#! ")
        alone = not token.line[: token.start[1]].strip()
        if block and not (alone and token.start[0] == last + 1):
            yield Text(path, begin, "\n".join(block))
            block = []
        begin = begin if block else token.start[0]
        block.append(body)
        last = token.start[0] if alone else 0
    if block:
        yield Text(path, begin, "\n".join(block))


def page_texts(path: Path, source: str) -> Iterator[Text]:
    """Yield the paragraphs and list items of a Markdown page, without code, tables, headings and comments."""
    hidden = re.compile(r"^(```|~~~).*?^\1|<!--.*?-->", re.DOTALL | re.MULTILINE)
    source = hidden.sub(lambda match: "\n" * match.group().count("\n"), source)  # line numbers stay right
    block: list[str] = []
    begin = 1
    for number, line in enumerate([*source.split("\n"), ""], start=1):
        ends = not line.strip() or re.match(r"\s*(\||#|[-*+] |\d+\. |:::|!!!|<)", line)
        if ends and block:
            yield Text(path, begin, "\n".join(block))
            block = []
        if line.strip() and not re.match(r"\s*(\||#|:::|!!!|<)", line):
            begin = begin if block else number
            block.append(line)


def names(path: Path, source: str) -> Iterator[Match]:
    """Yield definitions whose name contains a private word."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                pass
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case _:
                continue
        if PRIVATE_NAMES & set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")):
            yield Match(path, node.lineno, "private name", name)


def matches(text: Text) -> Iterator[Match]:
    """Yield the places of a text that break a rule."""
    plain = _without_code(text.body)
    for rule, pattern in PRIVATE_WORDS.items():
        for found in re.finditer(rf"\b(?:{pattern})\b", plain, re.IGNORECASE):
            line = text.line + plain.count("\n", 0, found.start())
            quote = plain[max(0, found.start() - 40) : found.end() + 40]
            yield Match(text.path, line, rule, " ".join(quote.split()))
    if text.verb_first and (words := plain.split()):
        first = re.sub(r"\W+$", "", words[0]).lower()
        if first not in VERBS:
            yield Match(text.path, text.line, "no verb first", " ".join(words[:8]))
    for offset, sentence in _sentences(plain, has_sections=text.has_sections):
        if re.match(r"of\b", sentence.removeprefix("ARGUMENT ")) and sentence.startswith("ARGUMENT "):
            yield Match(text.path, text.line + offset, 'argument begins with "of"', sentence.removeprefix("ARGUMENT ")[:80])
        if (count := len(sentence.removeprefix("ARGUMENT ").split())) > MAX_WORDS:
            yield Match(text.path, text.line + offset, f"over {MAX_WORDS} words", f"({count}) {sentence[:80]}")


def _without_code(body: str) -> str:
    """Replace quoted code by one word, and drop examples and literal blocks."""
    body = re.sub(r"(`+)(?!`)[^`]+?\1", lambda match: "X" + "\n" * match.group().count("\n"), body)
    lines = body.split("\n")
    return "\n".join("" if re.match(r"\s*(>>>|\.\.\. )|\s{4,}(python|pip|head-gates) ", line) else line for line in lines)


def _sentences(body: str, *, has_sections: bool) -> Iterator[tuple[int, str]]:
    """Yield the sentences of a text with their line; the first sentence of an argument's description begins with ARGUMENT.

    A semicolon ends a sentence too: error messages have the remedy after one.
    """
    paragraph: list[str] = []
    begin, section, indent = 0, "", None
    lines = [*body.split("\n"), ""]

    def flush() -> Iterator[tuple[int, str]]:
        for sentence in re.split(r"(?<=[.!?])[)\"'*]*\s+(?=[^a-z])|(?<=;)\s+", " ".join(paragraph)):
            if sentence.strip():
                yield begin, sentence.strip()
        paragraph.clear()

    for number, line in enumerate(lines):
        heading = SECTION.match(line) if has_sections else None
        entry = ENTRY.match(line) if section in ("Args", "Arguments", "Attributes", "Raises") else None
        if entry and indent is None:
            indent = len(entry[1])
        is_entry = entry is not None and len(entry[1]) == indent
        item = re.match(r"\s*(?:[-*+]|\d+\.)\s+(.*)", line)
        if not line.strip() or heading or is_entry or item:
            yield from flush()
        if heading:
            section, indent = heading[1], None
            continue
        if section and line.strip() and indent is not None and len(line) - len(line.lstrip()) < indent:
            section, indent = "", None
        if line.strip():
            begin = begin if paragraph else number
            if is_entry and entry:
                line = f"ARGUMENT {entry[3]}" if section != "Raises" else entry[3]
            elif item:
                line = item[1]
            paragraph.append(line.strip())
    yield from flush()


def examine(path: Path) -> list[Match]:
    """Return all places of a Python file or a Markdown page that break a rule, in the order of lines."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return [match for text in page_texts(path, source) for match in matches(text)]
    found = [match for text in python_texts(path, source) for match in matches(text)]
    return sorted([*found, *names(path, source)], key=lambda match: match.line)


def files_of(path: Path) -> list[Path]:
    """Return the Python files and Markdown pages of a folder, or the file itself."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in (".py", ".md") and ".venv" not in file.parts)


def table(path: Path, found: Sequence[Match]) -> str:
    """Return the counts of one path: a line for each rule that is broken."""
    counts = [*sorted(Counter(match.rule for match in found).items()), ("all", len(found))]
    width = max(len(rule) for rule, _ in counts)
    return "\n".join([str(path), *(f"{rule.ljust(width)}  {count}" for rule, count in counts)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one table for each path."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("paths", nargs="*", default=PATHS, metavar="PATH", help="files or folders (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print each place before the table")
    options = parser.parse_args(arguments)
    for number, path in enumerate(map(Path, options.paths)):
        if not path.exists():
            parser.error(f"{path} does not exist; expected a file or a folder")
        found = [match for file in files_of(path) for match in examine(file)]
        if options.list:
            sys.stdout.writelines(f"{match.path}:{match.line}: {match.rule}: {match.quote}\n" for match in found)
        print("\n" * bool(number) + table(path, found))


if __name__ == "__main__":
    main()
