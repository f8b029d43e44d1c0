"""README and documentation: links lead somewhere, commands parse, names exist, tables and pictures are those of the files."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

import gates
from gates.errors import GateError
from tests.models import script
from tools import docs_tables
from training.commands import table
from training.comparison.methods import MODIFIERS, NAMES, PARAMETERS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
WITH_COMMANDS = [*PAGES, ROOT / "notebooks" / "results" / "README.md"]
RUN_WHOLE = {"library.md", "extending.md"}
"""Pages whose snippets and commands a test of their own runs, in a folder with the files that they name."""
PROGRAMS = ("python", "head-gates", "make", "pip", "wandb", "vllm", "lm_eval")
"""What a page may tell its reader to run."""


def name_of(page):
    return str(page.relative_to(ROOT))


def parsed(page):
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def blocks(page, language):
    """Contents of the fenced blocks of a language."""
    return [token.content for token in parsed(page) if token.type == "fence" and token.info.split()[:1] == [language]]


def anchors(page):
    """Ids of the headings of a page, as both GitHub and the site make them."""
    tokens = parsed(page)
    titles = [tokens[index + 1].content for index, token in enumerate(tokens) if token.type == "heading_open"]
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower())) for title in titles}


def targets(page):
    """Where the links and pictures of a page lead."""
    inline = [child for token in parsed(page) for child in token.children or []]
    return [token.attrs.get("href") or token.attrs["src"] for token in inline if token.type in ("link_open", "image")]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page):
    wrong = []
    for target in targets(page):
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        if not re.match(r"https?://", target) and (not there.is_file() or (anchor and anchor not in anchors(there))):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_exist(page):
    """In README and documentation; the changelog names what was."""
    named = re.findall(r"`((?:gates|training|tools|configs|notebooks|tests|docs)/[\w./]*)`", page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []


def calls(page, folder):
    """Every command of a page's shell snippets as words. A shell runs the snippets with programs that only note how they were
    called, so that variables, loops and continued lines are as in the reader's shell."""
    for program in PROGRAMS:
        path = folder / program
        path.write_text('#!/bin/bash\nprintf "%q " "${0##*/}" "$@" >> "$CALLS"\necho >> "$CALLS"\n')
        path.chmod(0o755)
    script = "\n".join(["set -eu", "source() { :; }", *blocks(page, "bash")])
    noted = folder / "calls"
    noted.touch()
    environment = {"PATH": str(folder), "CALLS": str(noted)}
    done = subprocess.run(["/bin/bash", "-c", script], env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in noted.read_text().splitlines()]


def parse(command, arguments):
    """Let a command of this project read its line, and do nothing; what follows two dashes goes to runs, and is read too."""
    line = table.read(command, arguments)
    if line.rest:
        table.read("fit", line.rest)


@pytest.mark.parametrize("page", [page for page in WITH_COMMANDS if page.name not in RUN_WHOLE], ids=name_of)
def test_commands_parse(page, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    makefile = (ROOT / "Makefile").read_text()
    for call in calls(page, tmp_path):
        match call:
            case ["python", "-m", "training", command, *arguments] | ["head-gates", command, *arguments]:
                if command != "--help":
                    parse(command, arguments)
            case ["python", "-m", "training.fit", *arguments]:
                parse("fit", arguments)
            case ["python", "-m", "tools.docs_tables", *arguments]:
                docs_tables.parser_of().parse_args(arguments)
            case ["python", "-m", module, *_] if module.startswith("tools."):
                assert (ROOT / module.replace(".", "/") / "__main__.py").is_file()
            case ["python", script, *_]:
                assert (ROOT / script).is_file()
            case ["make", target]:
                assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
            case ["pip", "install", "lm_eval[hf]"] | ["lm_eval", "--model", "hf", *_]:
                pass
            case ["pip", "install", what]:
                assert what == "." or re.fullmatch(r"\.\[(.*)\]", what)[1] in extras
            case ["wandb", *_] | ["vllm", "serve", _]:
                pass
            case _:
                pytest.fail(f"{name_of(page)} has the command {shlex.join(call)}")


def test_a_wrong_command_would_be_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```bash\nWHERE=a\nfor SEED in 1 2; do\n  head-gates report $WHERE$SEED --uot b.html\ndone\n```\n")
    found = calls(page, tmp_path)
    assert found == [["head-gates", "report", f"a{seed}", "--uot", "b.html"] for seed in (1, 2)]
    with pytest.raises(GateError, match="--uot"):
        parse("report", found[0][2:])


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in {*RUN_WHOLE, "README.md"}], ids=name_of)
def test_snippets_that_are_not_run_say_why(page):
    """The README's are run by its own test."""
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"<!-- not run: \w[^\n]* -->\n```python", text)) == len(blocks(page, "python"))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name in RUN_WHOLE], ids=name_of)
def test_pages_with_a_test_of_their_own_have_one(page):
    others = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    assert any(page.name in path.read_text(encoding="utf-8") for path in others)


@pytest.mark.parametrize("page", [page for page in PAGES if docs_tables.TABLE.search(page.read_text())], ids=name_of)
def test_tables_are_those_of_the_files(page, tmp_path):
    copy = tmp_path / page.relative_to(ROOT)
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(page, copy)
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    docs_tables.update(copy)
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


@pytest.mark.integration
def test_pictures_are_those_of_the_files(tmp_path):
    script(DOCS / "pictures.py").write_pages(tmp_path)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert "tasks.svg" in drawn
    for name in drawn:
        assert (tmp_path / name).read_bytes() == (DOCS / "assets" / name).read_bytes(), f"run python docs/pictures.py: {name}"


@pytest.mark.parametrize("picture", sorted((DOCS / "assets").iterdir()), ids=lambda path: path.name)
def test_pictures_are_small_and_shown(picture):
    assert picture.stat().st_size < 100_000
    assert any(target.endswith(f"assets/{picture.name}") for page in PAGES for target in targets(page))


def test_every_method_is_described():
    page = (DOCS / "reference" / "methods.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w+-]+)`", page))
    assert {*NAMES, *(f"+{name}" for name in MODIFIERS)} - {"dense"} <= named
    for parameters in PARAMETERS.values():
        for name, values in parameters.items():
            assert f"`{name}={', '.join(str(value).lower() for value in values)}`" in page


def test_every_configuration_is_in_the_list_of_options():
    page = DOCS / "reference" / "options.md"
    named = set(re.findall(r"`configs/(\w+\.yaml)`", page.read_text(encoding="utf-8")))
    assert {path.name for path in (ROOT / "configs").glob("*.yaml")} <= named


def test_every_page_is_in_the_menu():
    text = re.sub(r"!!\S+", "", (ROOT / "mkdocs.yml").read_text())
    menu = re.findall(r"'([\w/]+\.md)'", str(yaml.safe_load(text)["nav"]))
    assert sorted(menu) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_the_pages_are_short():
    size = {page: len(page.read_bytes()) for page in DOCS.rglob("*.md")}
    assert sum(size.values()) <= 220_000
    assert size[DOCS / "results.md"] <= 30_000


@pytest.mark.integration
def test_the_site_builds_without_a_warning_and_loads_nothing(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "site" / "reference" / "api.html").read_text(encoding="utf-8")
    assert not re.search(r":\w+:<code>", reference)
    assert {name for name in gates.__all__ if f'id="gates.{name}"' not in reference} == set()
    options = (tmp_path / "site" / "reference" / "options.html").read_text(encoding="utf-8")
    assert "--model.min_steps" in options
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))  # with the page for what is not found
    for page in pages:
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"", page.read_text(encoding="utf-8"))
        assert [address for address in loaded if re.match(r"(https?:)?//", address)] == []
