"""Images in tar shards: the same images and random draws as from one process, and what is said of damaged shards."""

import io
import itertools
import tarfile
from pathlib import Path

import pytest
import torch
from lab_helpers import add_member, same_state, task_of, train, train_until, without_times, write_images, write_shards
from PIL import Image
from safetensors.torch import load_file

from pwlu.lab.data import shards, sources
from pwlu.lab.data.shards import Shards, expand
from pwlu.lab.recipes.settings import UserError
from pwlu.lab.runs.processes import Processes
from pwlu.lab.runs.run_folder import RunFolder

SMALL = {"recipe": "imagenette/resnet18", "pixels": 32, "width": 0.125, "batch": 4, "workers": 0}


def task(patterns, processes=None, **changes):
    more = {} if processes is None else {"processes": processes}
    return task_of(**SMALL | {"data": patterns[0], "test_data": patterns[1]} | changes, **more)


def jpeg(grey=99):
    file = io.BytesIO()
    Image.new("RGB", (40, 40), (grey, grey, grey)).save(file, "JPEG")
    return file.getvalue()


def shard(path, *members):
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            add_member(tar, name, content)
    return str(path)


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("a.tar", ["a.tar"]),
        ("a-{08..11}.tar", ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]),
        ("a-{8..10}.tar", ["a-8.tar", "a-9.tar", "a-10.tar"]),
        ("{0..1}/{00..01}.tar", ["0/00.tar", "0/01.tar", "1/00.tar", "1/01.tar"]),
    ],
)
def test_patterns(pattern, paths):
    assert expand(pattern) == paths


def test_the_images_of_a_folder(tmp_path):
    """Each image once, with its label, and the bits that the folder gives."""
    folder = task_of(**SMALL, data=str(write_images(tmp_path / "images"))).data
    found = task(write_shards(tmp_path, tmp_path / "images")).data
    assert found.classes == ["0", "1", "2"]
    for ours, theirs in ((found.train, folder.train), (found.test, folder.test)):
        assert len(ours) == len(theirs)
        sets = []
        for images in (ours, theirs):
            read = images.batches([torch.arange(len(images))])
            sets.append(
                sorted((label.item(), image.double().sum().item()) for x, y in read for image, label in zip(x, y, strict=True))
            )
        assert sets[0] == sets[1]


def epochs_of(task, epochs=2):
    return [[batch for (batch,) in task.epoch(epoch)] for epoch in range(epochs)]


@pytest.mark.parametrize("source", ["folder", "shards"])
def test_workers_and_processes_do_not_change_random_numbers(tmp_path, monkeypatch, source):
    """0 and 2 workers, and 1 and 2 processes: the same bits in every step, and every image once per epoch."""
    patterns = write_shards(tmp_path)
    if source == "shards":  # read from files
        monkeypatch.setattr(sources, "IN_MEMORY", 0)
    if source == "folder":
        patterns = [str(tmp_path / "images"), None]
    alone = epochs_of(task(patterns))
    if source == "shards":  # for folders: test_datasets.py
        made = task(patterns, workers=2)
        for expected, found in zip(alone, epochs_of(made), strict=True):
            for ours, theirs in zip(expected, found, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        made.data.train.loader._iterator._shutdown_workers()  # left to the garbage collector, it takes torch 5 s per worker
    ranks = [task(patterns, Processes(rank, 2, torch.device("cpu"))) for rank in range(2)]
    shares = [epochs_of(rank) for rank in ranks]
    for epoch, expected in enumerate(alone):
        for step, batch in enumerate(expected):
            parts = [share[epoch][step] for share in shares]
            assert all(torch.equal(torch.cat(two), whole) for two, whole in zip(zip(*parts, strict=True), batch, strict=True))
    everything = torch.cat([ranks[0].order(0).flatten()])
    assert sorted(everything.tolist()) == list(range(12))


def test_how_images_are_divided_into_shards(tmp_path):
    """Into one, or unevenly with an empty one: the same batches, also on 2 and 3 ranks."""
    members = [((f"{n}.jpg", jpeg(20 * n)), (f"{n}.cls", b"%d" % (n % 3))) for n in range(12)]
    whole = shard(tmp_path / "whole.tar", *itertools.chain(*members))
    for number, (first, last) in enumerate([(0, 1), (1, 10), (10, 10), (10, 12)]):
        shard(tmp_path / f"uneven-{number}.tar", *itertools.chain(*members[first:last]))
    uneven = str(tmp_path / "uneven-{0..3}.tar")
    expected = epochs_of(task([whole, whole], batch=6))
    assert len(expected[0]) == 2
    for count in (1, 2, 3):
        made = [task([uneven, whole], Processes(rank, count, torch.device("cpu")), batch=6) for rank in range(count)]
        shares = [epochs_of(rank) for rank in made]
        for epoch, batches in enumerate(expected):
            for step, batch in enumerate(batches):
                parts = zip(*(share[epoch][step] for share in shares), strict=True)
                assert all(torch.equal(torch.cat(each), one) for each, one in zip(parts, batch, strict=True))


def test_stopped_in_the_middle_of_an_epoch(tmp_path):
    """The run goes on with the image that would have been next: the same bits."""
    patterns = write_shards(tmp_path)
    command = ["imagenette/resnet18", "--data", patterns[0], "--test-data", patterns[1], "--act", "relu", "--epochs", 1]
    command += ["--pixels", 32, "--width", 0.125, "--batch", 4, "--workers", 0, "--runs"]
    assert train(*command, tmp_path / "whole") == 0
    train_until(2, *command, tmp_path / "parts", checkpoints=True)
    (whole,), (parts,) = ((tmp_path / name).iterdir() for name in ("whole", "parts"))
    assert RunFolder(parts).checkpoints()[-1].name.startswith("step-00000002-")
    assert train("--resume", parts) == 0
    assert without_times(RunFolder(parts).metrics()) == without_times(RunFolder(whole).metrics())
    assert same_state(*(load_file(path / "model.safetensors") for path in (parts, whole)))


def test_few_open_files(tmp_path, monkeypatch):
    patterns = write_shards(tmp_path)
    expected = epochs_of(task(patterns))
    monkeypatch.setattr(shards, "_open", shards.lru_cache(1)(shards._OpenFile))
    for ours, theirs in zip(expected, epochs_of(task(patterns)), strict=True):
        assert all(torch.equal(a, b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True))
    assert shards._open.cache_info().currsize == 1


def test_a_stopped_run_continues_with_shards(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sources, "IN_MEMORY", 0)
    monkeypatch.setattr(sources, "_SAMPLE", 1)  # the first image
    patterns = write_shards(tmp_path)
    sizes = ("--pixels", 32, "--width", 0.125, "--batch", 4, "--epochs", 1, "--act", "relu", "--workers", 0)
    assert train("imagenette/resnet18", "--data", patterns[0], "--holdout", 3, "--runs", tmp_path / "runs", *sizes) == 0
    assert "on 3 held-out training images" in capsys.readouterr().out
    command = ("imagenette/resnet18", "--data", patterns[0], "--test-data", patterns[1], "--runs", tmp_path / "more", *sizes)
    second = patterns[1].replace("{000..001}", "001")
    whole = (tmp_path / "val-001.tar").read_bytes()
    shard(second, ("x.jpg", jpeg()[:300]), ("x.cls", b"0"))
    assert train(*command) == 2
    assert f"the image x.jpg in {second} cannot be read: " in capsys.readouterr().err
    (tmp_path / "val-001.tar").write_bytes(whole)
    (run,) = (tmp_path / "more").iterdir()
    assert train("--resume", run) == 0
    assert RunFolder(run).json("result.json")["measured_images"] == 6


def test_members_that_are_not_samples(tmp_path):
    """Other files, folders, a picture of labels, names of any length, and folders within the shard."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        add_member(tar, "README", b"about")
        add_member(tar, "notes.txt", b"about")
        folder = tarfile.TarInfo("some.folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        add_member(tar, "some.folder/" + "x" * 150 + ".JPEG", jpeg(7))
        add_member(tar, "some.folder/" + "x" * 150 + ".seg.png", b"no image")
        add_member(tar, "some.folder/" + "x" * 150 + ".cls", b" 4\n")
    found = Shards(str(path))
    assert (len(found), found.labels.tolist(), len(found.classes)) == (1, [4], 5)
    file, label = found.image(0)
    assert (file.read(), label) == (jpeg(7), 4)


def broken(path, how):
    """A shard that is wrong in this way."""
    right = [("a.jpg", jpeg()), ("a.cls", b"1")]
    members = {
        "no label": [*right, ("b.jpg", jpeg())],
        "no image": [("b.cls", b"1"), *right],
        "a name": [("a.jpg", jpeg()), ("a.cls", b"dog")],
        "twice": [*right, ("a.png", jpeg())],
        "two classes": [*right, ("a.CLS", b"2")],
        "empty": [],
        "header": [*right, ("b.jpg", jpeg()), ("b.cls", b"1")],
    }.get(how, right)
    shard(path, *members)
    if how == "cut":
        path.write_bytes(path.read_bytes()[:700])
    elif how == "cut between images":
        path.write_bytes(path.read_bytes()[:2560])
    elif how == "cut in a header":
        path.write_bytes(path.read_bytes()[:2700])
    elif how == "header":
        content = bytearray(path.read_bytes())
        content[2560:2570] = b"0123456789"  # of the third file
        path.write_bytes(content)
    elif how == "compressed":
        import gzip

        path.write_bytes(gzip.compress(path.read_bytes()))
    elif how == "text":
        path.write_text("no tar file" * 100)
    return str(path)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("no label", r"a\.tar has b without b\.cls\. Each image needs a file b\.cls right before or after it"),
        ("no image", r"a\.tar has b\.cls without an image"),
        ("a name", r"a\.cls in .*a\.tar must hold the number of a class, such as 7, not b'dog'"),
        ("two classes", r"a\.tar has two classes for a\. Give each image one file a\.cls"),
        ("twice", r"a\.tar has two images named a\. Give each image a different name"),
        ("empty", r"a\.tar: no images\. Expected NAME\.jpg and NAME\.cls in each tar file"),
        ("cut", r"a\.tar cannot be read as a tar file without compression: "),
        ("cut between images", r"cannot be read .*: it ends at byte 2,560, without the zeros that end a tar file\. Copy"),
        ("cut in a header", r"a\.tar cannot be read .*: it ends at byte 2,700, without the zeros that end a tar file\. Copy"),
        ("header", r"a\.tar cannot be read .*: the header at byte 2,560 is damaged\. Copy it again"),
        ("compressed", r"a\.tar cannot be read as a tar file without compression: .*\. Unpack it with gunzip"),
        ("text", r"a\.tar cannot be read as a tar file without compression: "),
    ],
)
def test_damaged_shards(tmp_path, how, text):
    with pytest.raises(UserError, match=text):
        Shards(broken(tmp_path / "a.tar", how))


def test_names_with_two_dots(tmp_path):
    """They belong to no sample, and the images were left out without a word. Beside an image, such a file is ignored."""
    shard(tmp_path / "a.tar", ("0.jpg", jpeg()), ("0.mask.png", b""), ("0.cls", b"0"))
    assert len(Shards(str(tmp_path / "a.tar"))) == 1
    shard(tmp_path / "b.tar", ("0.jpg", jpeg()), ("0.cls", b"0"), ("n1.001.jpg", jpeg()), ("n1.001.cls", b"1"))
    with pytest.raises(UserError, match=r"b\.tar holds n1\.001\.jpg, but the name of a sample ends at the first dot"):
        Shards(str(tmp_path / "b.tar"))


def test_links_and_sparse_files_are_refused(tmp_path):
    """Their bytes are elsewhere or fewer. Both files of an image as links were left out without a word."""
    for name, text in (("GNUTYPE_SPARSE", "sparse"), ("LNKTYPE", "link"), ("SYMTYPE", "link")):
        path = tmp_path / f"{text}.tar"
        shard(path, ("0.jpg", jpeg()), ("0.cls", b"0"))
        member = tarfile.TarInfo("1.jpg")
        member.type, member.linkname = getattr(tarfile, name), "0.jpg"
        with tarfile.open(path, "a") as tar:
            tar.addfile(member)
        with pytest.raises(UserError, match=rf"holds 1\.jpg as a {text}.* Pack the files themselves, without --sparse"):
            Shards(str(path))


def test_files_after_the_end_of_a_shard(tmp_path):
    """A header that became zeros ends the archive for tarfile, and so does the first of two archives in one file."""
    path = tmp_path / "a.tar"
    whole, damaged = (Path(broken(path, how)).read_bytes() for how in ("", "header"))
    for changed in (whole + whole, damaged[:2560] + bytes(512) + damaged[3072:]):
        path.write_bytes(changed)
        message = r"cannot be read .*: more data follows the zeros at byte [\d,]+ that end a tar file"
        with pytest.raises(UserError, match=message):
            Shards(str(path))


@pytest.mark.parametrize("number", [b"1000000", b"9" * 30, b"9" * 5000])
def test_numbers_that_are_no_classes(tmp_path, number):
    """A list of all classes must fit into memory."""
    with pytest.raises(UserError, match=r"a\.cls in .* must hold the number of a class, such as 7"):
        Shards(shard(tmp_path / "a.tar", ("a.jpg", jpeg()), ("a.cls", number)))


def test_bad_arguments(tmp_path):
    patterns = write_shards(tmp_path)
    folder = str(tmp_path / "images")
    expected = {
        (patterns[0], None, 0): "has training images only. Write --test-data 'NAME-{000..006}.tar' with the shards",
        (patterns[0], patterns[1], 2): "--holdout 2 measures on training images: leave out --test-data or --holdout",
        (folder, patterns[1], 0): f"--test-data is for shards, but --data {folder} is a folder",
        (patterns[0].replace("002", "004"), None, 3): "2 of 5 shards do not exist, the first is ",
        (patterns[0].replace("000..002", "2..0"), None, 3): "{2..0} of shards must begin with the smaller number. Write {0..2}",
        (patterns[0].replace("{000..002}", "*"), None, 3): "shards are named by a range of numbers, such as NAME-{000",
    }
    for (data, test_data, holdout), text in expected.items():
        with pytest.raises(UserError) as raised:
            task([data, test_data], holdout=holdout)
        assert text in str(raised.value)
    with pytest.raises(UserError, match="--test-data is for shards of images: leave it out"):
        task_of(test_data=patterns[1])


def test_other_classes_in_test_shards(tmp_path):
    """Fewer classes are accepted, more are refused."""
    patterns = write_shards(tmp_path)
    few, many = (shard(tmp_path / f"{label}.tar", ("a.jpg", jpeg()), ("a.cls", b"%d" % label)) for label in (1, 3))
    assert task([patterns[0], few]).data.classes == ["0", "1", "2"]
    with pytest.raises(UserError, match="must have the same classes, but only one of them has 3"):
        task([patterns[0], many])
