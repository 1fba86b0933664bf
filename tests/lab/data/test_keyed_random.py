"""Random numbers that are functions of what they are for, and the augmentation that is made from them."""

import pytest
import torch
from lab_helpers import batches_of, task_of

from pwlu.lab.data import keyed_random
from pwlu.lab.data.images import Images, in_memory

N = 20_000
NUMBERS = torch.arange(N)


@pytest.mark.parametrize("key", [(0,), (7, 3, 2), (-1, 2**62)])
@pytest.mark.parametrize("last", [0, 1, 2])
def test_draws_are_uniform(key, last):
    """Chi-square over 64 bins, of the numbers and of pairs of neighbours.

    What is uniform comes further than 5 standard deviations from the mean in one of some ten thousand cases; the keys are
    fixed, so that this is no matter of luck.
    """
    drawn = keyed_random.uniform(*key, NUMBERS, last)
    assert drawn.dtype == torch.float32
    assert 0 <= drawn.min() < drawn.max() < 1
    pairs = 8 * (drawn[:-1] * 8).long() + (drawn[1:] * 8).long()
    for bins in ((drawn * 64).long(), pairs):
        counts = torch.bincount(bins, minlength=64).double()
        expected = len(bins) / 64
        assert abs(((counts - expected) ** 2 / expected).sum() - 63) < 5 * (2 * 63) ** 0.5


def test_every_key_counts():
    """Another seed, epoch or purpose gives other numbers, which have nothing to do with the first."""
    first = keyed_random.uniform(1, 2, NUMBERS, 3)
    for keys in ((2, 2, NUMBERS, 3), (1, 3, NUMBERS, 3), (1, 2, NUMBERS, 4), (2, 1, NUMBERS, 3), (1, 2, NUMBERS + N, 3)):
        other = keyed_random.uniform(*keys)
        correlation = torch.corrcoef(torch.stack([first, other]))[0, 1]
        assert abs(correlation) < 5 / N**0.5
        assert (first != other).sum() > N - 10


def test_draws_are_splitmix64():
    """In Python's own integers, which have no sign and do not overflow."""

    def expected(*keys):
        mask, state = 2**64 - 1, 0
        for key in keys:
            state = ((state ^ (key & mask)) + 0x9E3779B97F4A7C15) & mask
            state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
            state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
            state ^= state >> 31
        return state >> 1

    for keys in ((0,), (1, 2, 3), (2**40, -5), (123, 0, 0, 99)):
        assert int(keyed_random.hash_keys(*keys)) == expected(*keys)
    found = keyed_random.hash_keys(5, torch.tensor([[1], [2]]), torch.tensor([3, 4, 5]))
    assert found.tolist() == [[expected(5, a, b) for b in (3, 4, 5)] for a in (1, 2)]


def test_draws_do_not_depend_on_the_batch_or_the_device(device):
    whole = keyed_random.uniform(4, 5, NUMBERS, 0)
    order = torch.randperm(N)
    parts = torch.cat([keyed_random.uniform(4, 5, part, 0) for part in order.split(777)])
    assert torch.equal(parts, whole[order])
    assert torch.equal(keyed_random.uniform(4, 5, NUMBERS.to(device), 0).cpu(), whole)
    assert torch.equal(keyed_random.generator(4, 5).get_state(), keyed_random.generator(4, 5).get_state())
    assert not torch.equal(keyed_random.generator(4, 5).get_state(), keyed_random.generator(5, 4).get_state())


# Augmentation.


def some_images(padding, flip, channels=3, height=6, width=5):
    """20 images without a black pixel."""
    images = torch.randint(1, 256, (20, channels, height, width), dtype=torch.uint8)
    mean, std = torch.zeros(channels), torch.ones(channels)
    return Images(images, torch.arange(20), 100 + torch.arange(20), mean, std, padding, flip)


def naive(data, index, keys):
    """One image, pixel by pixel: a crop of the image in a black frame, mirrored or not."""
    channels, height, width = data.images.shape[1:]
    pad = data.padding
    framed = torch.zeros(channels, height + 2 * pad, width + 2 * pad)
    framed[:, pad : pad + height, pad : pad + width] = data.images[index].float()
    down, right, mirrored = (keyed_random.uniform(*keys, int(data.numbers[index]), k).item() for k in range(3))
    top, left = int(down * (2 * pad + 1)), int(right * (2 * pad + 1))
    crop = framed[:, top : top + height, left : left + width]
    return crop.flip(-1) if data.flip and mirrored >= 0.5 else crop


@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("flip", [False, True])
def test_augmentation(padding, flip):
    data = some_images(padding, flip)
    plan = torch.randperm(20).split(7)
    for indices, (images, labels) in zip(plan, data.batches(plan, (3, 1, 2)), strict=True):
        assert torch.equal(labels, indices)
        for index, image in zip(indices, images, strict=True):
            assert torch.equal(image, naive(data, index, (3, 1, 2)))
        assert (images == 0).any() == bool(padding)


def test_augmentation_differs_between_epochs_and_seeds():
    data = some_images(2, True)
    everything = [torch.arange(20)]
    first, again, epoch, seed = (next(data.batches(everything, keys))[0] for keys in ((1, 1), (1, 1), (1, 2), (2, 1)))
    assert torch.equal(first, again)
    for other in (epoch, seed):
        assert (first != other).flatten(1).any(1).sum() > 15


def test_a_part_is_augmented_as_the_whole():
    """The draws belong to the image, not to its place in a part of the data set."""
    data, indices = some_images(2, True), torch.tensor([3, 5, 17])
    of_part = next(data.part(indices).batches([torch.arange(3)], (1, 1)))
    of_whole = next(data.batches([indices], (1, 1)))
    assert all(torch.equal(a, b) for a, b in zip(of_part, of_whole, strict=True))


def test_nothing_is_augmented_in_tests():
    task = task_of(augmentation="crop+flip")
    images, labels = (torch.cat(parts) for parts in zip(*task.test_batches(), strict=True))
    expected = (task.data.test.images.float() - task.data.test.mean) / task.data.test.std
    assert torch.equal(images, expected)
    assert torch.equal(labels, task.data.test.labels)


def test_training_images_are_augmented_as_the_recipe_says():
    """By at most an eighth of the height; digits are not mirrored; with none they come as they are."""
    digits, cifar_like = task_of().data.train, task_of(augmentation="crop+flip").data.train
    assert (digits.padding, digits.flip) == (1, False)
    assert (cifar_like.padding, cifar_like.flip) == (1, True)
    task = task_of(augmentation="none")
    ((images, labels),) = next(batches_of(task))
    originals, their_labels = next(task.data.train.batches([torch.arange(len(task.data.train))]))
    for image, label in zip(images, labels, strict=True):
        assert label in their_labels[(originals == image).flatten(1).all(1)]


def test_pixels_are_normalised():
    """Pixels are normalized per channel by the mean and standard deviation of the training pixels."""
    images = (
        torch.randint(0, 256, (30, 3, 5, 5), dtype=torch.uint8) // torch.tensor([1, 2, 3], dtype=torch.uint8)[:, None, None]
    )
    train, test = in_memory(images, torch.arange(30), images + 1, torch.arange(30), torch.device("cpu"), 0, False)
    x, _ = next(train.batches([torch.arange(30)]))
    pixels = x.double().movedim(1, 0).flatten(1)
    torch.testing.assert_close(pixels.mean(1), torch.zeros(3).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(pixels.std(1, correction=0), torch.ones(3).double(), rtol=0, atol=1e-6)
    assert torch.equal(test.mean, train.mean)  # those of the training pixels there too
    assert torch.equal(test.std, train.std)
