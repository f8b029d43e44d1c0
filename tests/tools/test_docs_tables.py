"""Tables in documents, and stored comparisons that are written again."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from tests.training.commands.test_summary import run
from tests.training.report.fixture import differences_of
from tools.docs_tables import main

RESULTS = Path(__file__).parents[2] / "notebooks" / "results"


def test_a_page_gets_its_tables_and_keeps_the_rest(tmp_path):
    run(tmp_path / "a", 0, [("his", "post hoc", 18, 0.8), ("random", "post hoc", 18, 0.6), ("his", "retrained", 18, 0.9)])
    page, link = tmp_path / "README.md", tmp_path / "link.md"
    command = "<!-- python -m training summary a --stage 'post hoc' --methods random,his -->"
    page.write_bytes(f"before\r\n{command}\r\nstale\r\n<!-- end -->\r\nafter <!-- end -->\r\n".encode())
    link.symlink_to(page)
    main([str(link)])
    first = page.read_bytes().decode()
    assert first.index("| method, post hoc | 18 heads |") < first.index("| random | 60.0 |") < first.index("| his | 80.0 |")
    assert not {"retrained", "stale"} & set(first.split())
    assert first.startswith(f"before\r\n{command}\n")
    assert first.endswith("<!-- end -->\r\nafter <!-- end -->\r\n")
    main([str(page)])
    assert (page.read_bytes().decode(), link.is_symlink()) == (first, True)


def test_a_table_of_tasks_has_a_row_per_comparison_and_the_methods_by_heads(tmp_path, capsys):
    for name, shift in (("a", 0), ("b", 0.1)):
        rows = [
            ("dense", "post hoc", 36, 0.9),
            ("his", "post hoc", 18, 0.8),
            ("random", "post hoc", 18, 0.6),
            ("his", "post hoc", 9, 0.5),
        ]
        run(tmp_path / name, 0, [(*row, value - shift) for *row, value in rows])
        about = {"main_metric": "accuracy", "budgets_by_kind": {}}
        (tmp_path / name / "metrics.json").write_text(json.dumps(about))
    tasks = [f"{tmp_path / name}={title}" for name, title in (("a", "One"), ("b", "Two"))]
    main(["--tasks", *tasks, "--methods", "random,his"])
    header, _, one, two = capsys.readouterr().out.splitlines()
    assert header == "| task | dense, 36 heads | random, 18 heads | his, 18 heads | his, 9 heads |"
    assert (one, two) == ("| One | 90.0 | 60.0 | 80.0 | 50.0 |", "| Two | 80.0 | 50.0 | 70.0 | 40.0 |")
    page = tmp_path / "page.md"
    page.write_text("<!-- python -m tools.docs_tables --methods random --tasks a=One -->\n<!-- end -->\n")
    main([str(page)])
    assert "| One | 90.0 | 60.0 |" in page.read_text()
    with pytest.raises(SystemExit, match="2"):
        main(["--tasks", f"{tmp_path / 'a'}=One", "--methods", "shapley"])
    assert "has none of the methods shapley" in capsys.readouterr().err


def test_the_best_of_three_is_chosen_in_each_seed_on_the_selection_split(tmp_path, capsys):
    """By the metric, and among equals by the loss; other methods do not count."""
    columns = ["seed", "method", "select_accuracy", "select_loss", "test_accuracy"]
    rows = [
        (0, "learned+refit", 0.8, 0.5, 0.1),
        (0, "obs+refit", 0.8, 0.4, 0.7),  # kept in seed 0
        (0, "his+refit", 0.7, 0.1, 0.9),
        (0, "hies+refit", 0.9, 0.1, 0.2),
        (1, "learned+refit", 0.9, 0.5, 0.5),  # kept in seed 1
        (1, "obs+refit", 0.8, 0.4, 0.9),
        (1, "his+refit", 0.7, 0.1, 0.9),
    ]
    (tmp_path / "a").mkdir()
    table = pd.DataFrame(rows, columns=columns).assign(stage="post hoc", budget=18, heads=18)
    table.to_csv(tmp_path / "a" / "comparison.csv", index=False)
    about = {"main_metric": "accuracy", "budgets_by_kind": {}}
    (tmp_path / "a" / "metrics.json").write_text(json.dumps(about))
    main(["--tasks", f"{tmp_path / 'a'}=One", "--methods", "best of three"])
    assert capsys.readouterr().out.splitlines()[-1] == "| One | 60.0 ± 14.1 |"


@pytest.mark.parametrize("command", ["nowhere", "a --stage 'post hoc", "a --nonsense", "a --verdict --methods his", ""])
def test_a_page_with_a_wrong_command_or_without_a_table_stays(command, tmp_path, capsys):
    page = tmp_path / "page.md"
    text = f"<!-- python -m training summary {command} -->\nold\n<!-- end -->\n" if command else "old"
    page.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        main([str(page)])
    assert page.read_text() == text
    assert "page.md" in capsys.readouterr().err


@pytest.mark.parametrize("source", sorted(path.parent for path in RESULTS.glob("*/comparison.csv")), ids=lambda path: path.name)
def test_the_published_verdicts_are_those_of_the_code(source, tmp_path):
    folder = shutil.copytree(source, tmp_path / source.name)
    for file in ("verdict.md", "summary.csv"):
        (folder / file).unlink()
    main(["--rewrite", str(folder)])
    for file in ("verdict.md", "summary.csv"):
        assert (folder / file).read_bytes() == (source / file).read_bytes()


def test_the_verdict_of_a_comparison_is_written_again(tmp_path, capsys):
    rows = [(seed, method, 8 if method == "dense" else 4, mean + 0.01 * seed * (method == "his"))
            for seed in range(3) for method, mean in (("dense", 0.9), ("learned", 0.8), ("his", 0.7))]  # fmt: skip
    table = pd.DataFrame(rows, columns=["seed", "method", "budget", "test_accuracy"]).assign(stage="retrained", heads=4)
    table.to_csv(tmp_path / "comparison.csv", index=False)
    differences_of(table).to_csv(tmp_path / "statistics.csv", index=False)
    about = {"main_metric": "accuracy", "ours": ["learned"], "budgets_by_kind": {"4": {"encoder": 2}}, "unit": "head"}
    (tmp_path / "metrics.json").write_text(json.dumps(about))
    main(["--rewrite", str(tmp_path)])
    text = (tmp_path / "verdict.md").read_text()
    assert "Behind in every seed: his (-9.0, from -8.0 to -10.0)." in text
    table.iloc[:-1].to_csv(tmp_path / "comparison.csv", index=False)
    with pytest.raises(SystemExit, match="2"):
        main(["--rewrite", str(tmp_path)])
    assert "has lost rows" in capsys.readouterr().err
    assert (tmp_path / "verdict.md").read_text() == text
