"""The report of comparisons and runs: its numbers, its sentences, and what it does with what is missing or hostile."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from scipy.stats import hypergeom

from gates.errors import GateError
from tests.training.report.fixture import METHODS, write_comparison, write_run, write_samples
from training.commands.table import run_command
from training.plotting import mask_agreement
from training.report import captions, figures
from training.report.contents import GateHistory, ReportData, Site
from training.report.page import make_section, write_report
from training.report.pictures import figures_for, frames_of, pictures_of, step_label
from training.report.reading import read_contents
from training.report.tables import experiments_table, statistics_table
from training.stats.numbers import NONE

main = partial(run_command, "report")

HOSTILE = ("<script>alert(1)</script>", 'quote" onload="alert(2)', "$\\frac$ & --> ]]>", "_underscore")


class Page(HTMLParser):
    """A page as far as tests look at it: tables by id, text, scripts, and every attribute."""

    def __init__(self, path):
        super().__init__()
        self.tables, self.text, self.attributes, self.tags = {}, "", [], []
        self._table, self._cell, self._silent = None, None, False
        self.feed(Path(path).read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attributes.items()]
        self._silent = tag in ("script", "style")
        if tag == "table":
            self._table = self.tables.setdefault(attributes.get("id", ""), {"names": [], "rows": []})
        elif tag == "tr" and self._table is not None:
            self._table["rows"].append([])
        elif tag == "th" and "data-name" in attributes:
            self._table["names"].append(attributes["data-name"])
        elif tag in ("td", "th") and self._table is not None:
            self._cell = {"text": "", "value": None}
            self._table["rows"][-1].append(self._cell)
        elif tag == "data":
            self._cell["value"] = attributes["value"]

    def handle_endtag(self, tag):
        if tag in ("td", "th", "small"):
            self._cell = None
        self._table = None if tag == "table" else self._table

    def handle_data(self, data):
        self.text += "" if self._silent else data
        if self._cell is not None:
            self._cell["text"] += data.strip()

    def table(self, name):
        """Rows of the table whose id ends in the name, as dictionaries of text and exact value."""
        found = next(table for key, table in self.tables.items() if key.endswith(f"-table-{name}"))
        return [dict(zip(found["names"], row, strict=True)) for row in found["rows"] if row]


def page_of(folder, tmp_path):
    """The page that the command writes of a directory."""
    assert main([str(folder), "--output", str(tmp_path / "report.html")]) == 0
    return Page(tmp_path / "report.html")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return write_comparison(tmp_path_factory.mktemp("comparison"))


@pytest.fixture(scope="module")
def report(comparison, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "report.html"
    assert main([str(comparison), "--output", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A single run with all its files; not to be changed."""
    return write_run(tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="module")
def run_report(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "report.html"
    assert main([str(run), "--output", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def pictures(comparison):
    """Of the comparison, by name; not to be changed."""
    return figures_for(comparison)


@pytest.fixture
def copied(comparison, tmp_path):
    """A copy of the comparison, to be changed."""
    return Path(shutil.copytree(comparison, tmp_path / "run"))


@pytest.fixture
def tables(copied):
    """The tables of the comparison alone, without the files that most pictures are drawn from, which take the time."""
    for path in copied.iterdir():
        if path.name not in ("comparison.csv", "summary.csv", "metrics.json"):
            path.unlink()
    return copied


@pytest.mark.integration
def test_the_cells_are_those_of_comparison_csv_to_the_last_digit(comparison, report):
    table, rows = pd.read_csv(comparison / "comparison.csv"), Page(report).table("experiments")
    assert len(rows) == len(table) == 42
    for (_, expected), row in zip(table.iterrows(), rows, strict=True):
        assert [row[name]["text"] for name in ("method", "stage")] == [expected["method"], expected["stage"]]
        for name in ("seed", "budget", "test_accuracy", "test_f1", "test_loss", "select_accuracy", "steps", "seconds"):
            assert float(row[name]["value"]) == expected[name]
        assert row["test_accuracy"]["text"] == f"{100 * expected['test_accuracy']:.2f}"


@pytest.mark.integration
def test_the_means_and_intervals_are_those_of_summary_csv(comparison, report):
    page = Page(report)
    summary = pd.read_csv(comparison / "summary.csv")
    for (_, expected), row in zip(summary.iterrows(), page.table("results"), strict=True):
        for name in ("mean", "low", "high", "budget", "seeds", "std"):
            assert float(row[name]["value"]) == expected[name]
        dense = summary.query("method == 'dense'").set_index("stage")["mean"][expected["stage"]]
        if expected["method"] != "dense":
            assert float(row["against_dense"]["value"]) == expected["mean"] - dense
    for stage in ("post hoc", "retrained"):
        of_stage = summary[summary["stage"] == stage].set_index(["method", "budget"])["mean"]
        rows = {row["method"]["text"]: row for row in page.table(f"by_budget_{stage.replace(' ', '_')}")}
        shown = {
            (method, int(name.split(":")[1])): float(cell["value"])
            for method, row in rows.items()
            for name, cell in row.items()
            if cell["value"] is not None
        }
        assert shown == of_stage.to_dict()


@pytest.mark.integration
def test_the_page_needs_nothing_else(report):
    page = Page(report)
    linked = [
        value for _, name, value in page.attributes if name in ("src", "href", "srcset", "xlink:href", "poster", "action")
    ]
    assert linked
    # The address in the verdict may be a link to click on, never something to load.
    loaded = [value for value in linked if not value.startswith(("data:", "#"))]
    assert loaded == ["https://example.org/pixel.png"]
    assert ("a", "href", loaded[0]) in page.attributes
    assert not re.search(r"@import|url\((?!#)", report.read_text())
    assert page.tags.count("script") == 1
    assert report.stat().st_size < 1_000_000
    policy = next(value for _, name, value in page.attributes if name == "content" and "default-src" in value)
    assert policy.startswith("default-src 'none'")


@pytest.mark.integration
def test_pictures_have_files_and_a_caption_that_labels_them(pictures, report):
    assert set(pictures) == {
        "quality_post_hoc", "quality_retrained", "masks_2", "masks_4", "kept_learned", "values", "open_heads_learned_2",
        "open_heads_learned_4", "film_learned_2", "agreement_2", "agreement_4",
    }  # fmt: skip
    assert all(isinstance(figure, Figure) for figure in pictures.values())
    folder = report.parent / "figures"
    assert {path.stem for path in folder.glob("*.png")} == {path.stem for path in folder.glob("*.svg")} == set(pictures)
    shown = re.findall(r"<figure.*?</figure>", report.read_text(), flags=re.DOTALL)
    assert len(shown) == len(pictures)
    for one in shown:
        (label,) = re.findall(r'role="img" aria-labelledby="([^"]+)"', one)
        assert len(re.search(rf'<figcaption id="{label}">(.*?)</figcaption>', one)[1]) > 20


@pytest.mark.integration
def test_methods_with_the_same_gates_share_their_pictures(comparison, pictures):
    contents = read_contents(comparison)
    contents.histories |= {("learned+refit", budget): gates for (_, budget), gates in contents.histories.items()}
    found = {picture.name: picture for picture in pictures_of(contents)}
    assert set(found) == set(pictures)
    assert "The gates of learned and learned+refit, 2 " in found["film_learned_2"].caption


@pytest.mark.integration
def test_the_same_results_give_the_same_page(tables, tmp_path):
    pages = []
    for place in ("a", "b"):
        write_report([read_contents(tables)], tmp_path / place / "report.html")
        pages.append((tmp_path / place / "report.html").read_bytes())
    assert pages[0] == pages[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"select_lost": True}, ["on the selection split the pruned model is worse than the dense one"]),
        ({"value": 0.5}, ["the pruned model is not above the majority class, 50.00 %"]),
        ({"random": 0.92}, ["on the selection split the kept heads (91.00 %) are not above random heads (92.00 %)"]),
        (
            {"ratio": 1.01},
            ["the pruned model is less than 2 % faster on this device (batch 1, 16); it is smaller all the same"],
        ),
        ({"first": 0.9}, ["the pruned model is slower than the dense one on this device (0.90 x at batch 1)"]),
        ({"ratio": 1.01, "removed": 0}, ["the pruned model is less than 2 % faster on this device (batch 1, 16)"]),
    ],
)
def test_reasons_against_a_pruned_model(change, said, tmp_path):
    """The selection split decides, and the report says so too."""
    run = write_run(tmp_path)
    metrics = json.loads((run / "metrics.json").read_text()) | {"majority": {"accuracy": 0.5}}
    described = metrics["run"]
    described["random"] = change.get("random", 0.85)
    described["against_dense"] |= {name: change[name] for name in ("select_lost", "value") if name in change}
    if change.get("removed") == 0:
        described["cost"]["pruned_parameters"] = described["cost"]["dense_parameters"]
    for row in described["cost"]["latency"]:
        row["ratio"] = change.get("ratio", row["ratio"])
    described["cost"]["latency"][0]["ratio"] = change.get("first", described["cost"]["latency"][0]["ratio"])
    found = list(captions.warnings(metrics))
    assert any("smaller" in sentence for sentence in found) == ("ratio" in change and "removed" not in change)
    assert [sentence.startswith(start) for sentence, start in zip(found, said, strict=True)] == [True] * len(said)
    described["budget_search"] = {"budget": 2}  # whose user gave a loss
    advice = {"--model.budget" in "".join(found), "--model.max_loss" in "".join(captions.warnings(metrics))}
    assert advice == {"select_lost" in change}
    del described["budget_search"]
    (run / "metrics.json").write_text(json.dumps(metrics))
    shown = captions.outcome_of_run(read_contents(run))
    assert [f"warning: {sentence}" for sentence in found] == [text for text in shown if text.startswith("warning: ")]


@pytest.mark.integration
def test_the_page_opens_with_one_sentence_and_its_picture(comparison, report):
    """The sentence is about the middle budget, after training."""
    text, contents = report.read_text(), read_contents(comparison)
    opening = captions.opening(contents)
    rows = contents.summary[contents.summary["stage"] == "retrained"].set_index(["method", "budget"])["mean"]
    best = rows.xs(2, level="budget").idxmax()
    lost = 100 * (rows[best, 2] - rows["dense", 8])
    assert opening.startswith("Retrained with the mask, 2 heads of 8: ")
    assert f"{best} has the highest test accuracy, {100 * rows[best, 2]:.2f} % (95 % interval" in opening
    assert f"; against the dense model {lost:+.1f}; ahead of" in opening
    lead, verdict = text.index('<figure class="lead"'), text.index('<div class="verdict">')
    assert (
        lead < text.index(opening) < text.index("<svg") < text.rindex("<details>", 0, verdict) < verdict < text.index("<table")
    )
    assert text.count('id="fixture-figure-quality_retrained"') == 1


def test_the_opening_names_our_own_method_where_another_is_best():
    rows = [("retrained", "dense", 8, 0.9), ("retrained", "his", 4, 0.8), ("retrained", "learned", 4, 0.7)]
    summary = pd.DataFrame(rows, columns=["stage", "method", "budget", "mean"]).assign(seeds=1)
    contents = ReportData(Path("a"), "comparison", summary=summary, comparison=summary)
    said = captions.best_method(contents, "retrained")
    assert "his has the highest test accuracy, 80.00 %; against the dense model -10.0; learned has 70.00 % (one seed)." in said
    for seeds, p, words in (
        (1, 0.01, "significantly ahead of 1 of 1 other method for this one seed"),
        (3, np.nan, "ahead of 1 of 1 other method in every seed"),
        (5, 0.01, "significantly ahead of 1 of 1 other method"),
        (5, 0.05, "significantly ahead of none of 1 other method"),
    ):
        pair = {"stage": "retrained", "budget": 4, "method": "his", "rival": "learned", "seeds": seeds, "ahead": seeds}
        contents.statistics = pd.DataFrame([{**pair, "p_holm": p}])
        assert f"dense model -10.0; {words}; learned" in captions.best_method(contents, "retrained")
    contents.summary = summary[:0]
    assert captions.best_method(contents, "retrained") == "There are no results yet."


@pytest.mark.integration
def test_the_majority_class_is_a_row_and_a_dense_model_that_is_not_above_it_a_warning(tables, tmp_path):
    metrics = json.loads((tables / "metrics.json").read_text())
    for share, warned in ((0.55, False), (0.95, True)):
        (tables / "metrics.json").write_text(json.dumps(metrics | {"majority": {"accuracy": share, "f1": 0.3}}))
        page = page_of(tables, tmp_path)
        assert ("is not above the majority class" in page.text) == warned
        for name in ("results", "by_budget_retrained", "experiments"):
            assert page.table(name)[-1]["method"]["text"] == "majority class"
        assert float(page.table("results")[-1]["mean"]["value"]) == share
        assert float(page.table("experiments")[-1]["test_f1"]["value"]) == 0.3
        assert page.table("experiments")[-1]["seed"]["text"] == NONE


def test_the_strip_of_gates_begins_where_they_begin_to_move():
    gates = np.array([[1.0, 1.0]] * 5 + [[0.5, 1.0], [0.0, 1.0]])
    history = GateHistory((Site("encoder.0", 2),), np.arange(10, 80, 10), gates, (gates > 0).astype(float))
    assert frames_of(history) == [4, 5, 6]
    with_mask = history.ending_in(np.array([0.0, 1.0]))
    assert [step_label(with_mask, at) for at in frames_of(with_mask)] == ["step 50", "step 60", "step 70", "the mask"]


def test_the_table_of_tests_says_how_they_were_made(comparison):
    """Of few seeds it has no p values at all."""
    contents = read_contents(comparison)
    few = statistics_table(contents, contents.statistics)
    assert {"p", "p_holm", "low"}.isdisjoint(column.name for column in few.columns)
    assert {"difference", "ahead", "least", "most", "seeds"} <= {column.name for column in few.columns}
    assert "Of 2 to 4 seeds: not tested" in few.caption
    for seeds, words in ((1, "for this one seed"), (5, "Tested over seeds and test examples")):
        found = statistics_table(contents, contents.statistics.assign(seeds=seeds, p=0.01, p_holm=0.02))
        assert words in found.caption
        assert {"p", "p_holm"} <= {column.name for column in found.columns}


def test_where_heads_stay_is_told_by_kind_and_layer():
    sites = (Site("encoder.0", 2), Site("encoder.1", 2), Site("cross.0", 2))
    counts = np.array([[1, 1, 2], [0, 0.5, 1.5]])
    above, below, _ = figures.kept_by_site(sites, counts, ["4", "2"], axis="heads kept", title="title").axes
    assert [text.get_text() for text in below.get_xticklabels()] == ["4", "2"]
    drawn = {line.get_label(): line.get_ydata().tolist() for line in above.lines}
    assert drawn == {"encoder": [0.5, 0.125], "cross": [1, 0.75]}
    assert [text.get_text() for text in below.texts] == ["1", "0", "1", "0.5", "2", "1.5"]


def test_open_heads_are_counted_before_seeds_are_averaged_and_end_in_the_mask():
    sites = (Site("encoder.0", 2), Site("encoder.1", 3))
    is_open = np.array([[1, 1, 1, 1, 1], [1, 0.5, 0, 1, 0], [0.5, 0.5, 0, 1, 0]])
    history = GateHistory(sites, np.array([0, 10, 20]), is_open / 2, is_open, seeds=2)
    assert history.by_site().tolist() == [[2, 3], [1.5, 1], [1, 1]]
    ended = history.ending_in(np.array([0.0, 1, 0, 0, 0]))  # one of two gates that are open in the end is kept
    assert ended.steps.tolist() == [0, 10, 20, 30]
    assert ended.by_site()[-1].tolist() == [1, 0]


@pytest.mark.parametrize("is_dense_retrained", [True, False])
def test_a_retrained_row_of_a_run_is_compared_with_the_retrained_dense_model_if_there_is_one(is_dense_retrained):
    rows = [("dense", "post hoc", 0.9), ("learned", "post hoc", 0.8), ("learned", "retrained from dense", 0.95)]
    rows += [("dense", "retrained from dense", 0.97)] * is_dense_retrained
    table = pd.DataFrame(rows, columns=["method", "stage", "test_accuracy"]).assign(seed=0, heads=4)
    shown = experiments_table(ReportData(Path("a"), "run", comparison=table))
    place = [column.name for column in shown.columns].index("against_dense")
    expected = [NONE, "-10.0", "-2.0" if is_dense_retrained else "+5.0", *[NONE] * is_dense_retrained]
    assert [cells[place].text for cells in shown.rows] == expected


@pytest.mark.integration
def test_a_whole_run_has_all_pictures_and_nothing_is_missing(run, run_report):
    drawn = {path.stem for path in (run_report.parent / "figures").glob("*.svg")}
    assert drawn == {
        "quality", "curve", "masks_3", "values", "open_heads_learned_3", "film_learned_3", "agreement_3"
    }  # fmt: skip
    contents = read_contents(run)
    assert contents.missing == []
    masks = {entry["method"]: entry["mask"] for entry in json.loads((run / "masks.json").read_text())}
    assert {method: contents.kept(method, 3).values.tolist() for method in METHODS} == masks
    untrained = replace(contents, comparison=contents.comparison.query("stage == 'post hoc'"))
    for given, panels in ((contents, 2), (untrained, 1)):  # the caption describes the panels that there are
        curve = next(picture for picture in pictures_of(given) if picture.name == "curve")
        assert len(curve.figure.axes) == panels
        assert ("Right, the retrained models." in curve.caption) == (panels == 2)


def test_with_a_budget_per_kind_random_masks_keep_it_too():
    """Of 4 heads of the first kind 2 stay, of the other kind all: if two share i of the former, they share 2 + i of 6 - i."""
    masks = {"a": torch.tensor([1.0, 1, 0, 0, 1, 1]), "b": torch.tensor([0.0, 1, 1, 0, 1, 1])}
    of_kinds, of_all = (
        float(re.search(r"by chance: ([\d.]+)", mask_agreement(masks, kinds).axes[0].get_title())[1])
        for kinds in (torch.tensor([0, 0, 0, 0, 1, 1]), None)
    )
    assert of_kinds == pytest.approx(sum(hypergeom.pmf(i, 4, 2, 2) * (2 + i) / (6 - i) for i in range(3)), abs=0.005)
    assert of_all == pytest.approx(sum(hypergeom.pmf(i, 6, 4, 4) * i / (8 - i) for i in range(5)), abs=0.005)


def test_what_is_missing_is_said(copied):
    left = {
        "agreement.csv": lambda contents: contents.agreement is not None,
        "scores.csv": lambda contents: contents.scores is not None,
        "gates_over_time.csv": lambda contents: bool(contents.histories),
        "masks.json": lambda contents: bool(contents.masks),
    }
    for name in (*left, "config.yaml", "statistics.csv"):
        (copied / name).rename(copied / "aside")
        contents = read_contents(copied)
        assert name in " ".join(contents.missing)
        assert {other for other, is_left in left.items() if not is_left(contents)} == {name} & set(left)
        (copied / "aside").rename(copied / name)


def test_a_comparison_that_has_only_its_cells_is_a_page_too(tables, tmp_path):
    expected = pd.read_csv(tables / "summary.csv")
    for name in ("summary.csv", "metrics.json"):
        (tables / name).unlink()
    page = page_of(tables, tmp_path)
    assert len(page.table("experiments")) == 42
    assert [float(row["mean"]["value"]) for row in page.table("results")] == pytest.approx(expected["mean"].tolist())
    assert "Retrained with the mask, 2 heads of 8: " in page.text
    assert "There is no metrics.json" in page.text


@pytest.mark.integration
def test_names_that_look_like_code_stay_text(tmp_path):
    name = "</title><img src=x onerror=alert(3)>"
    folder = write_comparison(tmp_path / "run", methods=("learned", *HOSTILE), budgets=(4, 2), seeds=(0,), name=name)
    for part in ("scores.csv", "gates_over_time.csv", "masks.json"):  # of pictures, which take the time
        (folder / part).unlink()
    page = page_of(folder, tmp_path)
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    shown = {row["method"]["text"] for row in page.table("by_budget_retrained")}
    assert shown == {"dense", "learned", *HOSTILE}
    for method in HOSTILE:
        assert page.text.count(method) >= 6  # in tables, captions and pictures


def test_translations_stand_side_by_side_and_stay_text(tables, tmp_path):
    """The dense model, the first learned method and the best of its rivals in the mean, at the middle budget."""
    texts = [*HOSTILE, "NA", "", "tab\there", *["plain"] * 13]
    folder = write_samples(tables, **{"source": texts, "learned.retrained.2": texts})
    rivals = read_contents(folder).summary.query("stage == 'retrained' and budget == 2 and method in ('his', 'random')")
    best = rivals.loc[rivals["mean"].idxmax(), "method"]
    page = page_of(folder, tmp_path)
    rows = page.table("samples")
    assert list(rows[0]) == ["source", "reference", "dense.retrained.8", "learned.retrained.2", f"{best}.retrained.2"]
    for column in ("source", "learned.retrained.2"):
        assert [row[column]["text"] for row in rows] == texts[:6]
    assert f"the translations of dense, learned and {best} (retrained, at 2 heads)" in page.text
    assert page.text.count("nrefs:1|version:<b>") == 2
    assert page.tags.count("script") == 1
    assert "b" not in page.tags


@pytest.mark.integration
def test_several_directories_have_a_part_each(tables, tmp_path):
    out = tmp_path / "out" / "report.html"
    assert main([str(tables), str(tables), "--output", str(out)]) == 0
    html = out.read_text()
    assert re.findall(r'<article id="(\w+)">', html) == ["fixture", "fixture_2"]
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    for target in re.findall(r'(?:href="#|url\(#)([\w.-]+)', html):
        assert target in ids
    assert {path.name for path in (out.parent / "figures").iterdir()} == {"fixture", "fixture_2"}


def test_a_directory_of_something_else_is_refused_in_one_sentence(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("nothing")
    for path in (tmp_path, tmp_path / "nowhere"):
        assert main([str(path), "--output", str(tmp_path / "report.html")]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {str(path)!r} holds neither a comparison nor a run")
        assert error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


PRUNED = (Site("encoder.0", 2), Site("encoder.1", 2), Site("cross.0", 2))


def of_encoder_heads(**more):
    """Budgets of 2 and 1 of 4 encoder heads; the 2 across stay whole."""
    kept = {("learned", 4): [[1, 0, 1, 0, 1, 1]], ("his", 4): [[1, 1, 0, 0, 1, 1]], ("learned", 3): [[0, 0, 0, 1, 1, 1]]}
    masks = {key: (PRUNED, np.array(mask)) for key, mask in kept.items()}
    return ReportData(Path("a"), "comparison", kinds={4: {"encoder": 2}, 3: {"encoder": 1}}, masks=masks, **more)


def test_masks_of_trained_weights_are_named():
    contents = of_encoder_heads()
    contents.searched_again.add(("his", 4))
    caption = next(picture.caption for picture in pictures_of(contents) if picture.name == "masks_4")
    assert caption.startswith("Masks of 4 of 6 heads (encoder 2). The masks of his are those of trained weights")


@pytest.mark.parametrize(
    ("kinds", "ticks", "title"),
    [
        ({4: {"encoder": 2}, 3: {"encoder": 1}}, ["1", "2"], "encoder heads kept (the others stay)"),
        ({4: {"encoder": 3, "cross": 1}, 3: {"encoder": 1}}, ["3", "4"], "heads kept"),
    ],
)
def test_budgets_are_named_by_the_kind_that_they_prune(kinds, ticks, title):
    rows = [("retrained", name, budget, 0.8) for name, budget in (("dense", 6), ("his", 4), ("his", 3))]
    summary = pd.DataFrame(rows, columns=["stage", "method", "budget", "mean"]).assign(seeds=1)
    contents = ReportData(Path("a"), "comparison", kinds=kinds, summary=summary, comparison=summary)
    axes = figures.quality_against_heads(contents, "retrained").axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ticks
    assert axes.get_xlabel() == title


def test_budgets_per_kind_are_read_from_metrics(tmp_path):
    folder = write_comparison(tmp_path / "a", methods=("learned",), kinds=("encoder", "cross"), budgets=(12, 10), seeds=(0,))
    metrics = json.loads((folder / "metrics.json").read_text())
    by_kind = {"12": {"encoder": 4}, "10": {"encoder": 2}}
    (folder / "metrics.json").write_text(json.dumps(metrics | {"budgets_by_kind": by_kind}))
    contents = read_contents(folder)
    assert contents.label(10) == "10 heads (encoder 2)"
    tables = ReportData(folder, "comparison", metrics=metrics, kinds=contents.kinds, comparison=contents.comparison)
    assert "12 (encoder 4), 10 (encoder 2)" in make_section(tables, "a")[0].subtitle
    (folder / "metrics.json").write_text(json.dumps(metrics | {"budgets_by_kind": {"ten": 1}}))
    with pytest.raises(GateError, match="budgets_by_kind in metrics"):
        read_contents(folder)


def test_where_gates_stay_open_as_their_price_rises(tmp_path):
    folder = write_comparison(tmp_path / "a", methods=("his",), budgets=(4,), seeds=(0,), kinds=("encoder", "cross"), layers=1)
    left = {"encoder 1e-05": (4, 3), "encoder 1": (1, 0), "encoder 0.1": (2, 1)}  # dearest in the middle
    rows = [
        {"seed": seed, "method": "lambda", "price": price, "open": a + b, "encoder.0": a, "cross.0": b}
        for seed in (0, 1)
        for price, (a, b) in left.items()
    ]
    pd.DataFrame(rows).to_csv(folder / "prices.csv", index=False)
    for name in ("scores.csv", "agreement.csv", "comparison.csv", "summary.csv"):
        (folder / name).unlink()
    found = {picture.name: picture for picture in pictures_of(read_contents(folder))}["prices_lambda"]
    below = found.figure.axes[1]
    assert [text.get_text() for text in below.get_xticklabels()] == ["encoder 1e-05", "encoder 0.1", "encoder 1"]
    assert [text.get_text() for text in below.texts] == ["4", "2", "1", "3", "1", "0"]
    pd.DataFrame(rows).drop(columns="cross.0").to_csv(folder / "prices.csv", index=False)
    with pytest.raises(GateError, match="has no column 'cross"):
        read_contents(folder)
