"""Images with a class each: folders, data sets of the hub, sizes, and what is refused."""

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from gates.errors import GateError
from training.config import Source
from training.config.data import Images
from training.data.image_folders import open_image
from training.data.images import ImagesData

MODEL = {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
VIT = MODEL | {"patch_size": 4}


def write_images(folder, classes=("blue", "red"), rows=4, size=(10, 12)):
    """Images of one colour each, with some noise; the folder's path."""
    random = np.random.default_rng(0)
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for row in range(rows):
            pixels = random.integers(0, 100, (*size, 3), dtype=np.uint8)
            pixels[..., number % 3] += 120
            Image.fromarray(pixels).save(folder / name / f"{row}.png")
    return str(folder)


def opened(tmp_path, backbone=None, stated=None, **more):
    """Of the folders ``train`` and ``test``."""
    for name in ("train", "test"):
        if not (tmp_path / name).exists():
            write_images(tmp_path / name)
    size = {"image_size": 8} if backbone is None else {}
    data = ImagesData(Images(train_folder=str(tmp_path / "train"), test_folder=str(tmp_path / "test"), **size, **more))
    data.build(backbone, stated)
    return data


def save_vit(folder, processor_size=8):
    ViTForImageClassification(ViTConfig(**VIT, image_size=8)).save_pretrained(folder)
    ViTImageProcessor(size={"height": processor_size, "width": processor_size}).save_pretrained(folder)
    return str(folder)


def test_a_batch_has_the_pixels_of_the_files(tmp_path):
    data = opened(tmp_path, select_fraction=0.25)
    assert data.labels == ["blue", "red"]
    assert [data.splits[name].num_rows for name in ("train", "select", "test")] == [6, 2, 8]
    batch = data.collate("test")([data.splits["test"][0], data.splits["test"][5]])
    assert batch["pixel_values"].shape == (2, 3, 8, 8)
    assert batch["labels"].tolist() == [0, 1]
    image = Image.open(tmp_path / "test" / "red" / "1.png")
    torch.testing.assert_close(batch["pixel_values"][1], data.images(images=[image], return_tensors="pt")["pixel_values"][0])


def test_what_has_no_three_colours_is_given_them(tmp_path):
    opened(tmp_path)
    Image.new("L", (9, 9), 50).save(tmp_path / "train" / "red" / "grey.png")
    Image.new("RGBA", (9, 9)).save(tmp_path / "train" / "red" / "clear.png")
    (tmp_path / "train" / "red" / "notes.txt").write_text("not an image")
    data = opened(tmp_path)
    assert data.notices == ["1 files in the train folder are left out: their endings are not those of images"]
    assert sum(len(batch["labels"]) for batch in data.val_dataloader()) == 1
    assert next(iter(data.score_dataloader()))["pixel_values"].shape[1:] == (3, 8, 8)


@pytest.mark.parametrize("ending", ["png", "tiff"])
def test_grey_values_of_16_bits_keep_their_order(tmp_path, ending):
    grey = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    Image.fromarray(grey).save(file := tmp_path / f"deep.{ending}")
    found = np.asarray(open_image(file.read_bytes(), "deep"))
    assert (found == np.arange(256).reshape(16, 16, 1)).all()


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_an_image_whose_white_nobody_knows_is_refused(tmp_path, kind):
    Image.fromarray(np.ones((4, 4), dtype=kind)).save(file := tmp_path / "wide.tiff")
    with pytest.raises(GateError, match=r"the image wide holds .*, whose black and white are unknown; save it with 8 or 16"):
        open_image(file.read_bytes(), "wide")


def test_the_fingerprint_is_of_contents(tmp_path):
    before = opened(tmp_path).fingerprint()
    assert opened(tmp_path).fingerprint() == before
    Image.new("RGB", (5, 5)).save(tmp_path / "test" / "red" / "0.png")
    assert opened(tmp_path).fingerprint() != before


def test_the_processor_of_a_pretrained_model_is_used(tmp_path):
    data = opened(tmp_path, save_vit(tmp_path / "vit"), ["RED", "blue"])
    assert data.labels == ["red", "blue"]
    model = data.task.build(Source(str(tmp_path / "vit")), data.processor)
    assert model(**data.task.model_inputs(model, next(iter(data.test_dataloader())))).logits.shape == (8, 2)
    with pytest.raises(GateError, match="image_size is 8, but a pretrained model has its own size"):
        ImagesData(Images(train_folder="a", test_folder="b", image_size=8)).build(str(tmp_path / "vit"))


def test_sizes_that_do_not_fit_are_refused(tmp_path):
    data = opened(tmp_path, save_vit(tmp_path / "vit", 16))
    with pytest.raises(GateError, match="sees images of 8 x 8 pixels, and they have 16 x 16; correct its preprocessor_config"):
        data.task.build(Source(str(tmp_path / "vit")), data.processor)
    data = opened(tmp_path)
    with pytest.raises(
        GateError, match=r"the new model sees images of 16 x 16 pixels, and they have 8 x 8; set --data.image_size"
    ):
        data.task.build(Source(from_scratch=VIT | {"image_size": 16}), data.processor)
    with pytest.raises(GateError, match="takes no images; give one such as vit"):
        data.task.build(Source(from_scratch=MODEL | {"model_type": "bert"}), data.processor)


@pytest.mark.parametrize("damage", [lambda whole: whole[:100], lambda whole: b"", lambda whole: b"<html>"])
def test_a_broken_image_is_named(tmp_path, damage):
    opened(tmp_path)
    file = tmp_path / "test" / "red" / "2.png"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(GateError, match=r"the image '.*red/2.png' cannot be read"):
        opened(tmp_path)


def test_hub_data_are_taken_as_they_are_stored(tmp_path):
    write_images(tmp_path / "train", rows=2)
    files = [str(path) for path in sorted((tmp_path / "train").rglob("*.png"))]
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["sky", "rose"])})
    rows = datasets.Dataset.from_dict({"img": files, "label": [0, 0, 1, 1]}, features=features)
    found = ImagesData(Images(dataset="some"))._columns_of("train", rows)
    assert found["class"][:] == ["sky", "sky", "rose", "rose"]
    assert found[0]["image"]["path"] == files[0]
    with pytest.raises(GateError, match="the train split has no column 'picture' for the image"):
        ImagesData(Images(dataset="some", image_column="picture"))._columns_of("train", rows)
