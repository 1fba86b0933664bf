"""Image files of every kind, as classification and detection read them."""

import struct

import numpy as np
import pytest
import torch
from PIL import Image

from pwlu.lab.data import file_images
from pwlu.lab.data.image_file import UnreadableImage, read_image
from pwlu.lab.recipes.catalog import settings
from pwlu.lab.recipes.settings import UserError

GREY = np.arange(0, 256, dtype=np.uint8).reshape(8, 32)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "image"


def pixels(path):
    image = read_image(path)
    assert image.mode == "RGB"
    found = np.asarray(image)
    assert (found == found[..., :1]).all()
    return found[..., 0]


def test_grey_of_8_bits(path):
    Image.fromarray(GREY).save(path, "PNG")
    assert np.array_equal(pixels(path), GREY)


@pytest.mark.parametrize(("kind", "order", "mode"), [("PNG", "<", "I;16"), ("TIFF", "<", "I;16"), ("TIFF", ">", "I;16B")])
def test_grey_of_16_bits(path, kind, order, mode):
    """257 k is k, and so is what lies below the next one."""
    for more in (0, 256):
        values = (GREY.astype(np.uint32) * 257 + more).clip(max=65535)
        Image.fromarray(values.astype(f"{order}u2")).save(path, kind)
        with Image.open(path) as file:
            assert file.mode == mode
        assert np.array_equal(pixels(path), GREY)


def test_grey_of_16_bits_in_32(path):
    path.write_bytes(b"P5 32 8 65535\n" + (GREY.astype(np.uint16) * 257).astype(">u2").tobytes())
    with Image.open(path) as file:
        assert file.mode == "I"
    assert np.array_equal(pixels(path), GREY)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_numbers_of_unknown_range(path, dtype):
    Image.fromarray(GREY.astype(dtype)).save(path, "TIFF")
    with pytest.raises(UnreadableImage, match="its values have 32 bits and an unknown range: save it with 8 or 16 bits"):
        read_image(path)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_half_an_image(path, kind, dtype):
    Image.fromarray(GREY.astype(dtype)).save(path, kind)
    path.write_bytes(path.read_bytes()[:-150])
    with pytest.raises(UnreadableImage):
        read_image(path)


def test_an_image_at_a_fraction_of_a_byte(path):
    """A TIFF whose tag 273, where its numbers begin, is a floating-point number (type 11) instead of a whole one."""
    Image.fromarray(GREY.astype(np.uint16)).save(path, "TIFF")
    content = path.read_bytes()
    place = content.index(struct.pack("<H", 273), struct.unpack("<I", content[4:8])[0])
    path.write_bytes(content[: place + 2] + struct.pack("<H", 11) + content[place + 4 :])
    with pytest.raises(UnreadableImage, match="cannot be interpreted as an integer"):
        read_image(path)


def test_no_image(path):
    with pytest.raises(UnreadableImage, match="No such file"):
        read_image(path)
    path.write_text("no image")
    with pytest.raises(UnreadableImage, match="cannot identify image file"):
        read_image(path)
    with pytest.raises(UnreadableImage):
        read_image(f"{path}\0")


def test_a_camera_that_was_turned(path):
    """COCO's annotations refer to the pixels as the file stores them."""
    exif = Image.Exif()
    exif[0x112] = 6  # a quarter turn
    Image.fromarray(GREY).save(path, "PNG", exif=exif)
    assert np.array_equal(pixels(path), GREY)


# Classification.


@pytest.fixture
def root(tmp_path):
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir(parents=True)
        Image.fromarray(np.full((32, 32), 99 * 257, np.uint16)).save(tmp_path / part / "cat" / "0.png")
    return tmp_path


def batch(root):
    chosen = settings("imagenette/resnet18", data=str(root), pixels=32, augmentation="none", workers=0)
    train, _, _ = file_images.load_files(chosen, torch.device("cpu"))
    return next(train.batches([torch.tensor([0])]))


def test_images_of_classes(root):
    images, _ = batch(root)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (file_images.MEAN, file_images.STD))
    assert torch.allclose(images, ((99 / 255 - mean) / std).expand(1, 3, 32, 32), atol=1e-6)


def test_an_image_too_large_for_pillow(root, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    with pytest.raises(UserError, match=r"cat/0\.png cannot be read: Image size \(1024 pixels\) exceeds limit"):
        batch(root)
