"""ConvPool-CNN-C: the archive of CIFAR-10, whitening, the norms, a run of seconds."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from fractions import Fraction

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from test_experiments import Silent

from experiments.cifar import data
from experiments.experiment import get
from experiments.images import Images
from experiments.norms import KINDS
from experiments.run import run

NAMES = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]


def batch(number, **changes):
    images = np.random.default_rng(number).integers(0, 256, (2, 3072), dtype=np.uint8)
    return {b"data": images, b"labels": [number, 9], b"filenames": [b"a.png", b"b.png"], **changes}


def write(folder, last=None, *, protocol=2):
    path = folder / data.ARCHIVE
    with tarfile.open(path, "w:gz") as archive:
        for number, name in enumerate(NAMES):
            text = pickle.dumps(batch(number), protocol) if last is None or number < 5 else last
            entry = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    return path


def of_python_2(entries):
    """The pickle as Python 2 wrote it: bytes and names of NumPy 1."""

    class Old(pickle._Pickler):
        dispatch = dict(pickle._Pickler.dispatch)  # noqa: RUF012

        def save_bytes(self, text):
            self.write(pickle.BINSTRING + len(text).to_bytes(4, "little") + text)
            self.memoize(text)

        dispatch[bytes] = save_bytes

    file = io.BytesIO()
    Old(file, 2).dump(entries)
    return file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


@pytest.mark.parametrize("last", [None, of_python_2(batch(5))])
def test_the_archive_is_read(tmp_path, last):
    write(tmp_path, last)
    images = data.cifar(tmp_path)
    want = [batch(number)[b"data"].reshape(2, 3, 32, 32) for number in range(6)]
    np.testing.assert_array_equal(images.train * np.float32(255), np.concatenate(want[:5]))
    np.testing.assert_array_equal(images.test * np.float32(255), want[5])
    assert images.train_classes.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert images.test_classes.tolist() == [5, 9]


class Calls:
    def __reduce__(self):
        return os.mkdir, ("called",)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (pickle.dumps(batch(5, **{"more": Calls()}), 2), "names posix.mkdir, which is not loaded"),
        (pickle.dumps(batch(5, **{"more": Fraction(1, 2)}), 2), "names fractions.Fraction"),
        (pickle.dumps(batch(5), 5), "the operation .*, which plain values of protocol 2 do not need"),
        (pickle.dumps({**batch(5), b"data": np.zeros((2, 3072))}, 2), "dtype 'f8', not uint8"),
        (pickle.dumps({**batch(5), b"data": np.zeros((2, 3071), np.uint8)}, 2), "no image of 3072 bytes for"),
        (pickle.dumps({**batch(5), b"data": [1, 2]}, 2), "no image of 3072 bytes for each of 2 labels"),
        (pickle.dumps({**batch(5), b"labels": [1, 10]}, 2), "labels that are not from 0 to 9"),
        (pickle.dumps({**batch(5), b"labels": [1, 0.5]}, 2), "labels that are not from 0 to 9"),
        (pickle.dumps({b"data": 1}, 2), "no labels"),
        (pickle.dumps([1], 2), "no data"),
        (pickle.dumps(batch(5), 2)[:-9], "damaged"),
    ],
)
def test_an_archive_with_something_else_is_refused(tmp_path, monkeypatch, last, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, last)
    want = rf"cifar-10-python.tar.gz is damaged \(.*{'' if message == 'damaged' else message}"
    with pytest.raises(ValueError, match=want):
        data.cifar(tmp_path)
    assert os.listdir() == [data.ARCHIVE]


def test_a_damaged_or_missing_archive(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"cifar-10-python.tar.gz is missing, expected the archive of CIFAR-10"):
        data.cifar(tmp_path)
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:-99])
    with pytest.raises(ValueError, match=r"cifar-10-python.tar.gz is damaged \("):
        data.cifar(tmp_path)


@pytest.mark.parametrize("count", [6, 40])
def test_whitened_images_have_the_variance_1_along_every_axis(count):
    draw = np.random.default_rng(0)
    train = (draw.normal(size=(count, 12)) * np.arange(1, 13)).astype(np.float32).reshape(count, 3, 2, 2)
    white = data.whitened(Images(train, np.zeros(count), train + 1, np.zeros(count)), 1e-9)
    variances = np.linalg.eigvalsh(np.cov(white.train.reshape(count, -1).T, bias=True))
    np.testing.assert_allclose(variances[variances > 0.5], 1, atol=1e-3)
    assert (variances > 0.5).sum() == min(count - 1, 12)
    assert np.abs(white.train.mean(0)).max() < 1e-2


@pytest.mark.torch
def test_weight_normalisation_begins_with_sums_of_mean_0_and_variance_1():
    torch = pytest.importorskip("torch")
    from experiments.cifar.torch import begin_by_data, conv_pool_cnn_c

    torch.manual_seed(0)
    model, x = conv_pool_cnn_c("weight", 2, 0.5).eval(), torch.randn(20, 3, 32, 32)
    begin_by_data(model, x)
    for layer in model:
        y = layer(x)
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            axes = [axis for axis in range(y.ndim) if axis != 1]
            torch.testing.assert_close(y.mean(axes), torch.zeros(y.shape[1]), atol=1e-4, rtol=0)
            torch.testing.assert_close(y.std(axes, correction=0), torch.ones(y.shape[1]), atol=1e-3, rtol=0)
        x = y
    assert x.shape == (20, 10)


@pytest.mark.torch
def test_the_norms_of_images_are_over_the_axes_that_they_say():
    torch = pytest.importorskip("torch")
    from experiments.cifar.torch import ChannelNorm

    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    for axis in ((2, 3), 1):
        layers = [ChannelNorm(3, axis, kind) for kind in KINDS]
        layer, want = layers[0], x / (x.square().mean(axis, keepdim=True) + 1e-6).sqrt()
        for other in layers:  # with an eps of 1e-5 where it is not ours
            torch.testing.assert_close(other(x), want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer(x), want)
        layer.weight.data, layer.bias.data = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 2.0])
        scale, offset = (parameter.data[:, None, None] for parameter in (layer.weight, layer.bias))
        torch.testing.assert_close(layer(x).detach(), want * scale + offset)


@pytest.mark.slow
@pytest.mark.torch
def test_a_run(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr("experiments.figures.draw", lambda *_: None)
    experiment = get("cifar")
    options = experiment.options(steps=4, every=2, batch_size=4, width=2, images=20)
    result = run(experiment, options, experiment.norms, [1], None, tmp_path, Silent())
    assert {"training images": 20, "test images": 359}.items() <= result["facts"].items()
    sizes = {norm: row["parameters"] for norm, row in result["norms"].items()}
    channels = 3 * 2 + 6 * 4 + 10
    assert sizes == dict.fromkeys(sizes, sizes["none"] + 2 * channels) | {
        "none": sizes["none"], "weight": sizes["none"] + channels}  # fmt: skip
    assert all(np.isfinite(row["loss"]) for row in result["norms"].values())
    with pytest.raises(ValueError, match="batch_size is 21, expected at most 20, all of the data; take less"):
        experiment.open(experiment.options(batch_size=21, images=20), None)
