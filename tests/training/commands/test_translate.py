import io

from rich.console import Console

from training.commands.translate import score, show


def shown(found, reference):
    console = Console(file=io.StringIO(), width=200)
    show(console, found, score(found, reference, samples=20), "13a")
    return console.file.getvalue()


def test_p_values_are_said_to_be_of_these_systems_alone():
    reference = ["a dog runs over the field", "it rains on the house today", "she reads a long book"]
    found = {"dense": reference, "pruned": ["a dog walks over the field", "it rains on the house", "she reads a book"]}
    said = "p: paired bootstrap over these sentences, for these systems alone; other seeds of theirs may differ."
    assert said in shown(found, reference)
    assert "paired bootstrap" not in shown({"dense": reference}, reference)
