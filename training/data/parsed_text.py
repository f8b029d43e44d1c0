"""Trees of raw texts: from a pipeline of spaCy, an optional extra, or from a user's own parser that writes CoNLL-U."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gates.errors import GateError, first_line
from training.data.treebank import Tree, trees_in
from training.runs.own_code import own_function

NO_SPACY = (
    "the parser {parser!r} needs spaCy, which is not installed; install it with pip install spacy, or give a "
    "treebank with --conllu FILE"
)


def parse_texts(parser: str, texts: Sequence[str]) -> list[Tree]:
    """The sentences of some texts with their trees. They are as good as the parser, which is not gold.

    Args:
        parser: the name or folder of an installed pipeline of spaCy; or ``module:function``, a user's own function that takes
            the list of texts and gives their trees as one text in CoNLL-U.
        texts: in the language of the parser.

    Raises:
        GateError: if there is no such parser, or what it gives are no trees.
    """
    trees = _own_trees(parser, texts) if ":" in parser else _spacy_trees(parser, texts)
    if not trees:
        raise GateError(f"the parser {parser!r} found no sentence; give texts in its language")
    return trees


def _own_trees(parser: str, texts: Sequence[str]) -> list[Tree]:
    function = own_function(parser, "parser", "the list of texts")
    try:
        found = function(list(texts))
    except Exception as error:
        raise GateError(f"the parser {parser!r} failed: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(found, str):
        raise GateError(f"the parser {parser!r} gave {type(found).__name__}; expected its trees as one text in CoNLL-U")
    return trees_in(found.splitlines(), f"what the parser {parser!r} gave")


def _spacy_trees(parser: str, texts: Sequence[str]) -> list[Tree]:
    try:
        import spacy
    except ImportError as error:
        raise GateError(NO_SPACY.format(parser=parser)) from error
    try:
        pipeline = spacy.load(parser)
    except OSError as error:
        raise GateError(
            f"spaCy has no pipeline {parser!r} here; install one, such as with python -m spacy download en_core_web_sm, or "
            "give the folder of one"
        ) from error
    except (ValueError, ImportError) as error:
        reason = f"cannot be loaded by spaCy {spacy.__version__}: {first_line(error)}"
        raise GateError(f"the pipeline {parser!r} {reason}") from error
    trees = []
    for document in pipeline.pipe(texts):
        if not document.has_annotation("DEP"):
            raise GateError(f"the pipeline {parser!r} finds no dependencies; give one with a parser, such as en_core_web_sm")
        trees += [tree for sentence in document.sents if (tree := _tree(sentence)).words]
    return trees


def _tree(sentence: Any) -> Tree:
    """A sentence of spaCy without its white space, which counts as tokens there; what depends on white space depends on what
    that depends on."""
    kept = [token for token in sentence if not token.is_space]
    numbers = {token.i: number for number, token in enumerate(kept)}

    def head_of(token: Any) -> int:
        head = token.head
        while head.is_space and head.head.i != head.i:
            head = head.head
        return -1 if head.i == token.i else numbers.get(head.i, -1)

    heads = [head_of(token) for token in kept]
    relations = ["root" if head < 0 else token.dep_ for token, head in zip(kept, heads, strict=True)]
    return Tree([token.text for token in kept], heads, relations)
