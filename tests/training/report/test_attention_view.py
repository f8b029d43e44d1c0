"""The view of any head's attention: what a page keeps of it, and the view itself in a browser."""

import json
from functools import partial

import matplotlib.figure
import pandas as pd
import pytest
import torch

from gates.errors import GateError
from tests.training.report.fixture import write_comparison
from tests.training.report.test_role_pictures import write_roles
from training.analysis.role_measures import Shown
from training.analysis.roles import attention_of, role_page
from training.commands.table import run_command
from training.report.reading import ATTENTION, as_text, read_attention

main = partial(run_command, "report")
TOKENS = [["[CLS]", "<b>cats</b>", "sleep"], ["dogs", "bark"]]


def attention(roles):
    """Of a table with two layers of four heads: in the first sentence head 1 of layer 1 looks at the token before, all others
    look at all tokens alike."""
    shown = []
    for tokens in TOKENS:
        size = len(tokens)
        weights = [torch.full((4, size, size), 1 / size) for _ in range(2)]
        weights[1][1] = torch.eye(size).roll(-1, 1)
        shown.append(Shown({"encoder": (tokens, tokens)}, weights))
    return attention_of(roles, shown, [(layer, head) for layer in range(2) for head in range(4)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A comparison with roles and attention beside them, and its report."""
    folder = write_comparison(tmp_path_factory.mktemp("attention") / "comparison")
    for name in ("gates_over_time.csv", "scores.csv", "agreement.csv", "masks.json", "summary.csv", "comparison.csv"):
        (folder / name).unlink()  # of pictures, which take the time
    found = attention(pd.read_csv(write_roles(folder / "roles.csv"), keep_default_na=False))
    (folder / ATTENTION).write_text(as_text(found))
    (folder / "roles.html").write_text(role_page(matplotlib.figure.Figure(), ["A sentence & more."], found))
    assert main([str(folder), "--output", str(folder / "report.html")]) == 0
    return folder


def test_a_report_has_the_attention_that_lies_beside_the_roles(folder, tmp_path):
    assert 'class="attention"' in (folder / "report.html").read_text()
    assert read_attention(tmp_path) is None
    (tmp_path / "roles.csv").write_bytes((folder / "roles.csv").read_bytes())
    assert main([str(folder), "--roles", str(tmp_path / "roles.csv"), "--output", str(tmp_path / "report.html")]) == 0
    assert 'class="attention"' not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    "damage",
    [
        lambda found: found.pop("sentences"),
        lambda found: found.update(first=8),
        lambda found: found["heads"][0].update(kind="other"),
        lambda found: found["heads"][0].update(site=2),
        lambda found: found["sentences"][0]["weights"][0][0].pop(),
        lambda found: found["sentences"][0]["tokens"].pop("encoder"),
    ],
)
def test_damaged_attention_is_one_sentence(folder, tmp_path, damage):
    found = json.loads((folder / ATTENTION).read_text())
    damage(found)
    (tmp_path / ATTENTION).write_text(json.dumps(found))
    with pytest.raises(GateError, match=r"as the attention of heads: it is damaged .*; find the roles again with"):
        read_attention(tmp_path)


# -- in a browser --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["roles.html", "report.html"])
def view(browser, folder, request):
    """The view, freshly loaded, with what the page asked for and complained of."""
    browser.get_log("performance"), browser.get_log("browser")
    browser.get((folder / request.param).as_uri())
    return browser.find_element("css selector", ".attention")


def choose(view, number, value):
    select = view.find_elements("css selector", "select")[number]
    select.find_element("css selector", f"option[value='{value}']").click()


def columns(view):
    """The tokens that attend and those that are attended to, and how strongly the latter are coloured."""
    asking, asked = view.find_elements("css selector", ".tokens")
    cells = asked.find_elements("xpath", "./*")
    weights = [int(cell.get_attribute("title").removesuffix(" %")) for cell in cells]
    return [made.text for made in asking.find_elements("xpath", "./*")], [cell.text for cell in cells], weights


def said(view):
    return view.find_element("css selector", "[aria-live]").text


def test_it_shows_the_first_specialised_head_without_a_network_and_without_errors(view, browser):
    assert view.is_displayed()
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    assert all(url.startswith(("file:", "data:", "chrome")) for url in asked), asked  # the browser opens a tab of its own
    heads = [option.text for option in view.find_elements("css selector", "select")[1].find_elements("tag name", "option")]
    assert heads[:3] == ["encoder.0.0: syntactic", "encoder.0.1: syntactic, coreference", "encoder.0.2: none"]
    queries, keys, weights = columns(view)
    assert queries == keys == TOKENS[0]  # markup in a token is text
    assert weights == [33, 33, 33]
    assert said(view) == "[CLS] attends most to [CLS] (33 %). syntactic"


def test_a_head_and_a_sentence_are_chosen(view):
    choose(view, 1, 5)
    assert columns(view)[2] == [0, 0, 100]  # the first token looks round the corner
    choose(view, 0, 1)
    queries, _, weights = columns(view)
    assert queries == TOKENS[1]
    assert weights == [0, 100]
    assert said(view) == "dogs attends most to bark (100 %). none"


def test_tokens_are_pressed_and_reached_by_the_tab_key(view, browser):
    choose(view, 1, 5)
    buttons = view.find_elements("css selector", "button")
    buttons[1].click()
    assert columns(view)[2] == [100, 0, 0]
    assert [button.get_attribute("aria-pressed") for button in buttons] == ["false", "true", "false"]
    browser.execute_script("arguments[0].focus()", buttons[2])
    assert columns(view)[2] == [0, 100, 0]
    assert browser.execute_script("return [...arguments[0].querySelectorAll('button')].every((b) => b.tabIndex === 0)", view)
    cells = view.find_elements("css selector", ".tokens")[1].find_elements("xpath", "./*")
    shades = [cell.value_of_css_property("background-color") for cell in cells]
    assert shades[0] == shades[2] != shades[1]
