"""Trees that a parser makes of raw texts: a user's own function, or a pipeline of spaCy."""

import builtins
import sys

import pytest

from gates.errors import GateError
from training.data.trees import parse_texts

MODULE = '''
def chain(texts):
    """Every word depends on the one before."""
    sentences = []
    for text in texts:
        rows = [[str(n), word, "_", "_", "_", "_", str(n - 1), "dep" if n > 1 else "root", "_", "_"]
                for n, word in enumerate(text.split(), start=1)]
        sentences.append("\\n".join("\\t".join(row) for row in rows))
    return "\\n\\n".join(sentences)
def lines(texts): return list(texts)
def nothing(texts): return ""
def broken(texts): return "1\\tword"
def fails(texts): return texts[1000]
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the working directory; its name."""
    name = f"parsers_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield name
    sys.modules.pop(name, None)


def test_a_function_of_ones_own_gives_conllu(module):
    one, other = parse_texts(f"{module}:chain", ["she sleeps well", "so"])
    assert (one.words, one.heads, one.relations) == (["she", "sleeps", "well"], [-1, 0, 1], ["root", "dep", "dep"])
    assert (other.words, other.heads) == (["so"], [-1])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("lines", "returned list; expected its trees as one text in CoNLL-U"),
        ("nothing", "found no sentence; give texts in its language"),
        ("broken", "line 1 of the output of the parser '.*:broken' has 2 columns; expected the 10 of CoNLL-U"),
        ("fails", "failed: IndexError: list index out of range"),
        ("absent", "has no 'absent'; it has chain, lines, nothing, broken, fails"),
    ],
)
def test_what_is_wrong_with_it_is_told(module, function, message):
    with pytest.raises(GateError, match=message):
        parse_texts(f"{module}:{function}", ["she sleeps"])


def test_without_spacy_there_is_one_sentence(monkeypatch):
    real = builtins.__import__

    def without(name, *more, **how):
        if name == "spacy":
            raise ImportError(name)
        return real(name, *more, **how)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(GateError, match=r"'en_core_web_sm' needs spaCy, which is not installed; run pip install"):
        parse_texts("en_core_web_sm", ["she sleeps"])
