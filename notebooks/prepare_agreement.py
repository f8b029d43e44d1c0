"""Make a classification task of Linzen et al. 2016's agreement sentences: is the verb that comes next singular or plural?

    python notebooks/prepare_agreement.py linzen_subj_agr_filtered.text.gz linzen_subj_agr_filtered.gold FOLDER

reads the part that Gulordava et al. 2018 published (https://github.com/facebookresearch/colorlessgreenRNNs) and writes
FOLDER/train.tsv, select.tsv and test.tsv with the columns ``sentence`` (the words before the verb) and ``label``. Sentences
are shuffled with a fixed seed: 5,000 to train on, 600 for every choice, the rest to test. A beginning that occurs in more
than one of them is kept in the first only.
"""

from __future__ import annotations

import gzip
import random
import sys
from pathlib import Path

TRAIN, SELECT = 5000, 600


def number(right: str, wrong: str) -> str:
    """Return whether the right form of a verb is its singular: that one ends in s, and of two that do it is the longer."""
    singular = max((right, wrong), key=lambda form: (form.endswith("s"), len(form)))
    return "singular" if right == singular else "plural"


def read(text: Path, gold: Path) -> list[tuple[str, str]]:
    """Return the words before each verb, and its number."""
    with gzip.open(text, "rt", encoding="utf-8") as lines:
        sentences = [line.split() for line in lines]
    rows = []
    for words, line in zip(sentences, gold.read_text(encoding="utf-8").splitlines(), strict=True):
        index, right, wrong, _ = line.split("\t")
        rows.append((" ".join(words[: int(index)]), number(right, wrong)))
    return rows


def main(text: str, gold: str, folder: str) -> None:
    rows = list(dict(read(Path(text), Path(gold))).items())
    random.Random(0).shuffle(rows)
    splits = {"train": rows[:TRAIN], "select": rows[TRAIN : TRAIN + SELECT], "test": rows[TRAIN + SELECT :]}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, chosen in splits.items():
        lines = ["sentence\tlabel", *("\t".join(row) for row in chosen)]
        (Path(folder) / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{name}: {len(chosen)} rows, {sum(label == 'singular' for _, label in chosen)} singular")


if __name__ == "__main__":
    main(*sys.argv[1:4])
