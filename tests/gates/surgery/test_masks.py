import json

import pytest
import torch

from gates.errors import GateError
from gates.sites import find_attention
from gates.surgery.masks import load_mask, save_mask
from tests.models import FAMILIES, build, random_mask


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mask_survives_its_file(name, tmp_path):
    sites, mask = find_attention(build(name)), random_mask(name)
    save_mask(tmp_path / "mask.json", mask, sites, method="his")
    assert torch.equal(load_mask(tmp_path / "mask.json", sites), mask)
    assert [path.name for path in tmp_path.iterdir()] == ["mask.json"]


def test_the_file_is_readable(tmp_path):
    sites = find_attention(build("marian"))
    save_mask(tmp_path / "mask.json", random_mask("marian"), sites, method="learned")
    text = (tmp_path / "mask.json").read_text()
    content = json.loads(text)
    assert content["method"] == "learned"
    assert content["heads"] == 32
    assert content["budget"] == int(random_mask("marian").sum())
    assert content["sites"][0] == {"name": sites[0].name, "kind": "encoder", "layer": 0, "heads": 4, "kept": []}
    assert sum(line.strip().startswith('{"name"') for line in text.splitlines()) == len(sites)


def test_files_that_do_not_fit_are_refused(tmp_path):
    path, sites = tmp_path / "mask.json", find_attention(build("bert"))
    with pytest.raises(GateError, match="cannot read"):
        load_mask(path, sites)
    path.write_text("not json")
    with pytest.raises(GateError, match="not a mask file"):
        load_mask(path, sites)
    save_mask(path, random_mask("marian"), find_attention(build("marian")))
    with pytest.raises(GateError, match="32 heads"):
        load_mask(path, sites)
    save_mask(path, random_mask("bert"), sites)
    path.write_text(path.read_text().replace("[0, 1, 2, 3]", "[0, 9]"))
    with pytest.raises(GateError, match="keeps head 9"):
        load_mask(path, sites)
