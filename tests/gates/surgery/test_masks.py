import json
import re

import pytest
import torch

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.surgery.masks import load_mask, save_mask
from tests.models import build, random_mask

SITES = find_attention(build("bert"))
"""Two of four heads each."""


@pytest.mark.parametrize("name", ["bert", "marian"])
def test_a_mask_survives_its_file(name, tmp_path):
    sites, mask = find_attention(build(name)), random_mask(name)
    save_mask(tmp_path / "mask.json", mask, sites, method="his")
    assert torch.equal(load_mask(tmp_path / "mask.json", sites), mask)
    assert [path.name for path in tmp_path.iterdir()] == ["mask.json"]


def test_values_between_are_no_mask_and_nothing_is_written(tmp_path):
    with pytest.raises(GateError, match=r"the mask has 0.3 for head 5; expected 0 \(removed\) or 1 \(kept\)"):
        save_mask(tmp_path / "mask.json", torch.tensor([1.0, 0, 1, 1, 0, 0.3, 0, 1]), SITES)
    assert not list(tmp_path.iterdir())


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


@pytest.mark.parametrize(
    "content",
    [
        {"0": [1], "1": [3, 0]},
        {"encoder.1": [0, 3], "encoder.0": [1]},
        {"bert.encoder.layer.0.attention": [1], "1": [0, 3]},
        [[0, 1, 0, 0], [1, 0, 0, 1]],
        [0, 1, 0, 0, 1, 0, 0, 1],
        [[False, True, False, False], [1.0, 0.0, 0.0, 1.0]],
    ],
)
def test_other_forms_say_the_same(content, tmp_path):
    (tmp_path / "mask.json").write_text(json.dumps(content))
    mask = load_mask(tmp_path / "mask.json", SITES)
    assert mask.tolist() == [0, 1, 0, 0, 1, 0, 0, 1]
    assert mask.dtype == torch.float32


def test_layers_of_several_kinds_are_called_by_their_labels(tmp_path):
    sites, mask = find_attention(build("marian")), random_mask("marian")
    kept = {site.label: part.nonzero().flatten().tolist() for site, part in zip(sites, mask.split(4), strict=True)}
    (tmp_path / "mask.json").write_text(json.dumps(kept))
    assert torch.equal(load_mask(tmp_path / "mask.json", sites), mask)
    (tmp_path / "mask.json").write_text('{"0": [1]}')
    with pytest.raises(GateError, match=r"names the layer '0'; this model has \d+, from 'encoder.0'"):
        load_mask(tmp_path / "mask.json", sites)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "is not a mask file; expected the JSON"),
        (3, "is not a mask file; expected the JSON"),
        ([{"seed": 0, "mask": [0, 1]}], "the masks.json of a comparison"),
        ({"sites": [{"name": "a"}]}, "expected sites with a name, heads and kept heads"),
        ({"0": [1], "1": [0], "2": []}, "names the layer '2'; this model has 2, from '0' to '1'"),
        ({"0": [1]}, "lacks 'encoder.1'"),
        ({"0": [1], "1": 3}, "has 3 for 'bert.encoder.layer.1.attention'; expected a list"),
        ({"0": [1], "1": [4]}, "keeps head 4 of 'bert.encoder.layer.1.attention', which has heads 0 to 3"),
        ({"0": [-1], "1": []}, "keeps head -1"),
        ({"0": [True], "1": []}, "keeps head True"),
        ({"0": [0, 1, 0, 0], "1": []}, "keeps head 0 of 'bert.encoder.layer.0.attention' twice"),
        ({"0": [1], "encoder.0": [1], "1": []}, "names 'bert.encoder.layer.0.attention' twice, once as 'encoder.0'"),
        ([[0, 1, 0, 0], [1, 0, 0]], "has 2 rows of 4 and 3 values; expected 2 rows of 4 values"),
        ([[0, 1, 0, 0]], "has 4 values; expected 2 rows of 4 values"),
        ([[0, 1, 0, 0], 1], "has 2 rows of 4 and 0 values"),
        ([0, 1, 0], "has 3 values; expected 8 values"),
        ([0, 1, 0, 0, 1, 0, 0, 2], "has 2 for head 7 of the model; expected 0 or 1"),
        ([0, 1, 0, 0, 1, 0, 0, "1"], "has '1' for head 7 of the model"),
    ],
)
def test_content_that_is_no_mask_of_the_model_is_refused(content, said, tmp_path):
    (tmp_path / "mask.json").write_text(json.dumps(content))
    with pytest.raises(GateError, match=re.escape(said)):
        load_mask(tmp_path / "mask.json", SITES)


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
