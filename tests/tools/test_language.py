"""Small texts with known faults."""

import pytest

from tools.language import examine

MODULE = '''
"""Rows of a table."""

ROWS = 3
"""What it holds."""  # nobody reads this


def told_twice(rows, seed):
    """The rows of the table.

    Args:
        rows: of a table, which
            is told.
        seed: The seed of the run.

    Raises:
        GateError: of no rule.
    """
    # A comment that has
    # so many words that one sentence ends only when thirty or more words of it have been read, which is too long for any
    # comment that a person reads while thinking of code.
    raise ValueError(f"{rows} goes on beside it")


def _private():
    """The docstring of a private function needs no verb."""
    return "told", "two told", 3
'''
PAGE = """# Told in a heading

A paragraph, `told` in code, and one that was
told.

- What is listed. An item that goes on.

| told | in a table |

```
told in an example
```
"""


def rules(path):
    return [(match.line, match.rule) for match in examine(path)]


def test_a_module(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(MODULE)
    assert sorted(rules(path)) == [
        (5, "nobody"),
        (5, "what it"),
        (8, "private name"),
        (9, "no verb first"),
        (12, 'argument begins with "of"'),
        (13, "told"),
        (19, "over 25 words"),
        (20, "so many"),
        (22, "beside"),
        (22, "goes on"),
    ]


def test_a_page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    assert sorted(rules(path)) == [(4, "told"), (6, "goes on"), (6, "what it")]


@pytest.mark.parametrize(
    "docstring",
    [
        "Return the rows.",
        "Load rows. The seed is fixed.",
        "Fine-tune the model on rows, in order.\n\n    Args:\n        rows: The rows, of any kind.",
    ],
)
def test_plain_texts_match_nothing(docstring, tmp_path):
    path = tmp_path / "plain.py"
    path.write_text(f'def rows(rows):\n    """{docstring}"""\n\n\n@property\ndef size():\n    """The size."""\n')
    assert examine(path) == []


def test_a_sentence_ends_at_its_list_item_or_argument(tmp_path):
    path = tmp_path / "page.md"
    words = "word " * 15
    path.write_text(f"- {words}\n- {words}\n\n{words}\n\n{words}\n")
    assert rules(path) == []
    path.write_text(f"{words}\n{words}\n")
    assert rules(path) == [(1, "over 25 words")]
