"""The report in a browser: headless Chromium, from a file, without a network."""

import json
from functools import partial

import pytest

from tests.training.report.fixture import write_comparison
from training.commands.table import run_command

pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.integration
main = partial(run_command, "report")

TABLE = "fixture-table-results"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A comparison with its report."""
    folder = write_comparison(tmp_path_factory.mktemp("comparison"))
    assert main([str(folder), "--output", str(folder / "report.html")]) == 0
    return folder


@pytest.fixture
def page(browser, folder):
    """The report, freshly loaded, as wide as a desktop, in light colours."""
    show(browser, width=1200)
    browser.get((folder / "report.html").as_uri())
    return browser


def show(browser, *, width, scheme="light"):
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})


def column(browser, table, name):
    """Method, exact value and shown text of a column, from top to bottom, as the browser has them."""
    return browser.execute_script(
        """
        const table = document.getElementById(arguments[0]);
        const index = [...table.tHead.rows[0].cells].findIndex((cell) => cell.dataset.name === arguments[1]);
        return [...table.tBodies[0].rows].map((row) => {
          const cell = row.cells[index], data = cell.querySelector("data");
          return [row.cells[0].textContent, data ? Number(data.value) : null, (data || cell).textContent.trim()];
        });
        """,
        table,
        name,
    )


def title(browser, table, name):
    return browser.find_element("css selector", f"#{table} th[data-name='{name}'] button")


def open_all(browser):
    browser.execute_script("document.querySelectorAll('details').forEach((details) => { details.open = true; })")


def test_it_opens_without_errors_and_asks_no_network_for_anything(browser, folder):
    browser.get_log("performance")
    browser.get((folder / "report.html").as_uri())
    open_all(browser)
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert any(url.startswith("file:") for url in asked)
    assert all(url.startswith(("file:", "data:")) for url in asked)
    assert browser.title == "Attention heads: fixture"  # the script in the verdict did not run


@pytest.mark.parametrize("key", [None, Keys.ENTER, Keys.SPACE])
def test_a_title_sorts_by_click_and_by_key(page, key):
    open_all(page)
    before = column(page, TABLE, "mean")
    button = title(page, TABLE, "mean")

    def state():
        return button.find_element("xpath", "..").get_attribute("aria-sort")

    def press():
        button.click() if key is None else button.send_keys(key)

    assert state() is None
    press()
    assert state() == "descending"
    assert column(page, TABLE, "mean") == sorted(before, key=lambda row: -row[1])
    press()
    assert state() == "ascending"
    assert column(page, TABLE, "mean") == sorted(before, key=lambda row: row[1])
    title(page, TABLE, "method").click()
    assert [row[0] for row in column(page, TABLE, "method")] == sorted(row[0] for row in before)
    assert state() is None


def test_numbers_sort_as_numbers_and_what_is_missing_comes_last(page):
    open_all(page)
    title(page, "fixture-table-experiments", "seconds").click()
    values = [row[1] for row in column(page, "fixture-table-experiments", "seconds")]
    assert values == sorted(values, reverse=True)  # 140.25 before 60.25 before 0.5; as text 60.25 would be first
    table = "fixture-table-by_budget_retrained"  # the dense model has a mean with all heads only
    for _ in range(2):
        title(page, table, "mean:2").click()
        assert column(page, table, "mean:2")[-1][:2] == ["dense", None]


@pytest.mark.parametrize("width", [360, 768, 1200])
def test_nothing_is_wider_than_the_screen(page, width):
    show(page, width=width)
    open_all(page)
    inner, client, needed = page.execute_script(
        "const root = document.documentElement; return [innerWidth, root.clientWidth, root.scrollWidth]"
    )
    assert inner == width  # a page that is too wide would be zoomed out
    assert needed <= client
    wide = page.execute_script(
        """
        return [...document.querySelectorAll("figure, p, pre, .scroll, .verdict, img, dl, h2")]
          .filter((element) => element.getBoundingClientRect().right > innerWidth + 1 && !element.closest(".scroll"))
          .map((element) => element.outerHTML.slice(0, 80));
        """
    )
    assert wide == []


def test_dark_mode_turns_page_and_pictures(page):
    colours = """
        const svg = document.querySelector("#fixture-figure-quality_retrained svg text");
        const body = getComputedStyle(document.body);
        return [body.backgroundColor, body.color, getComputedStyle(svg).fill];
    """

    def brightness():
        return [sum(map(int, colour[4:-1].split(","))) for colour in page.execute_script(colours)]

    ground, ink, in_picture = brightness()
    assert ground > 700
    assert ink == in_picture < 150
    show(page, width=1200, scheme="dark")
    ground, ink, in_picture = brightness()
    assert ground < 100
    assert ink == in_picture > 600
