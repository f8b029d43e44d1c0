"""roles.html without a browser: every tag is closed, every head is there, and nothing is loaded."""

import json
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.training.analysis.models import make_translator
from tests.training.analysis.test_roles import texts_of, write_treebank
from training.analysis.model import observe_run
from training.analysis.role_measures import RoleFiles, read_texts
from training.analysis.roles import roles_of_heads

VOID = {"meta", "img", "br", "link", "input"}


class Page(HTMLParser):
    """Tags that are open, ids, addresses, and what the page holds of attention."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.addresses, self.attention = [], [], [], None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids += [given["id"]] if "id" in given else []
        self.addresses += [given[name] for name in ("src", "href", "action", "data") if name in given]
        if "data-attention" in given:
            self.attention = json.loads(given["data-attention"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


@pytest.mark.integration
def test_the_page_is_well_formed_and_holds_every_head(tmp_path):
    dense = make_translator()
    observed = observe_run(dense)
    finding = roles_of_heads(observed, read_texts(RoleFiles(write_treebank(tmp_path, texts_of(dense.data))), observed))
    page = Page(finding.pages["roles.html"])
    table = finding.tables["roles"]
    heads = page.attention["heads"]
    assert [head["name"] for head in heads] == (table["site"] + "." + table["head"].astype(str)).tolist()
    assert [head["roles"] for head in heads] == table["roles"].tolist()
    assert len(set(page.ids)) == len(page.ids)
    assert all(address.startswith("data:") for address in page.addresses)
    for sentence in page.attention["sentences"]:
        for head in heads:
            weights = np.array(sentence["weights"][head["site"]][head["head"]])
            queries, keys = sentence["tokens"][head["kind"]]
            assert weights.shape == (len(queries), len(keys))
            assert (abs(weights.sum(axis=1) - 100) <= len(keys) / 2 + 1).all()
