"""CoNLL-U by the format's own meaning, and one sentence with file and line for what is none."""

import pytest

from gates.errors import GateError
from tests.training.data.texts import write
from training.data.trees import read_lines, read_treebank, relations_of


def row(number, form, head, relation, *, features="_"):
    return "\t".join([str(number), form, form, "X", "_", features, str(head), relation, "_", "_"])


GOOD = [row(1, "She", 2, "nsubj"), row(2, "sleeps", 0, "root"), row(3, ".", 2, "punct")]


def treebank(folder, *sentences, name="trees.conllu"):
    return write(folder / name, "".join("\n".join(lines) + "\n\n" for lines in sentences))


def test_words_heads_and_relations(tmp_path):
    (tree,) = read_treebank(treebank(tmp_path, ["# text = She sleeps.", *GOOD]))
    assert (tree.words, tree.heads, tree.relations) == (["She", "sleeps", "."], [1, -1, 1], ["nsubj", "root", "punct"])
    assert read_treebank(treebank(tmp_path, GOOD, GOOD, name="trees.conllu.gz")) == [tree, tree]


def test_tokens_of_several_words_empty_nodes_and_enhanced_dependencies(tmp_path):
    lines = [
        "\t".join(["1-2", "zum", *"________"]), row(1, "zu", 3, "case"), row(2, "dem", 3, "det"),
        row(3, "Haus", 0, "root")[:-3] + "0:root|2.1:dep\tSpaceAfter=No",
        "\t".join(["3.1", "nothing", *"_____", "_", "3:dep", "_"]),
    ]  # fmt: skip
    (tree,) = read_treebank(treebank(tmp_path, lines))
    assert (tree.words, tree.heads) == (["zu", "dem", "Haus"], [2, 2, -1])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD[0], row(3, "sleeps", 0, "root")], "line 2 of .* has the ID 3; expected 2"),
        (["x" + GOOD[0][1:]], "line 1 of .* is not CoNLL-U: .*'x' is not a valid ID"),
        ([GOOD[0].replace("\t2\t", "\tq\t")], "line 1 of .* is not CoNLL-U: .*'q'"),
        ([GOOD[0].replace("\t", "    ")], "line 1 of .* has 1 columns; expected the 10 of CoNLL-U"),
        (["# a", "\t".join(GOOD[0].split("\t")[:8])], "line 2 of .* has 8 columns"),
        ([row(1, "a", 5, "dep"), row(2, "b", 0, "root")], "line 1 of .* has the head 5; expected 0 to 2"),
        ([row(1, "a", 2, "dep"), row(2, "b", 1, "dep")], "the sentence at line 1 of .* has no root"),
        ([row(1, "a", 0, "root"), row(2, "b", 3, "dep"), row(3, "c", 2, "dep")], "line 2 of .* leads to a cycle"),
        ([row(1, "", 0, "root")], "line 1 of .* has no word in its second column"),
        ([row(1, "a", "_", "dep")], "line 1 of .* has no head or relation"),
        ([row(1, "a", 0, "_")], "line 1 of .* has no head or relation"),
        (["# only a comment"], "has no sentence; expected CoNLL-U"),
        (["\t".join(["1-2", "zum", *"________"])], "the sentence at line 1 of .* has no words"),
    ],
)
def test_what_is_no_treebank_is_told_with_its_line(tmp_path, lines, message):
    with pytest.raises(GateError, match=message):
        read_treebank(treebank(tmp_path, lines))


def test_relations_by_frequency_or_as_asked_for(tmp_path):
    trees = read_treebank(treebank(tmp_path, GOOD, GOOD, [row(1, "Go", 0, "root"), row(2, "home", 1, "advmod")]))
    assert relations_of(trees) == ["nsubj", "advmod"]
    assert relations_of(trees, ["advmod"]) == ["advmod"]
    assert relations_of(trees, ["punct"]) == ["punct"]  # left out only where nothing is asked for
    with pytest.raises(GateError, match="the treebank has no relation 'dobj'; it has advmod, nsubj, punct, root"):
        relations_of(trees, ["nsubj", "dobj"])


def test_lines_of_texts(tmp_path):
    (tmp_path / "texts.txt").write_text("one two\n\n three \n")
    assert read_lines(str(tmp_path / "texts.txt")) == ["one two", "three"]
    with pytest.raises(GateError, match="does not exist"):
        read_lines(str(tmp_path / "none.txt"))
