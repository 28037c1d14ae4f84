"""Fixtures that the tests share with those of the laboratory. Nothing here needs the network."""

import atexit
import functools
import gc
import os
import shutil
import signal
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="qtsplus-tests-")  # the user's own is left alone
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many processes as cores: their threads would wait for each other

from pathlib import Path

import pytest
import typer.testing
from hypothesis import HealthCheck, settings

from qtsplus.hub.files import hub_configs

atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# Where a shell runs the tests in the background they ignore Ctrl-C, and what they start would too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine fails no test, and the same examples are drawn everywhere.
settings.register_profile(
    "steady", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")

# To build the commands anew takes three quarters of what a refused command line does.
typer.testing._get_command = functools.cache(typer.testing._get_command)


def pytest_collection_finish():
    """Every Trainer collects garbage; to search PyTorch and Transformers too would take half of a short run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_processor():
    """The processor of `hub_configs/qtsplus-tiny`."""
    from qtsplus import Qwen2_5_VLQTSplusConfig
    from qtsplus.hub.loading import processor_of

    folder = hub_configs() / "qtsplus-tiny"
    return processor_of(folder, Qwen2_5_VLQTSplusConfig.from_pretrained(folder))


@pytest.fixture(scope="session")
def tiny_mp4(tmp_path_factory) -> Path:
    """A rendered H.264 clip: 4 s, 8 frames a second, 112 x 112 pixels."""
    from clips import render_clip

    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    render_clip(path, seconds=4, fps=8, size=(112, 112), seed=0)
    return path


@pytest.fixture(scope="session")
def tiny_published(tmp_path_factory) -> Path:
    """The Hub folder of qtsplus-tiny."""
    from qtsplus.hub.publish import assemble_folder

    return assemble_folder("qtsplus-tiny", tmp_path_factory.mktemp("hub") / "qtsplus-tiny")


@pytest.fixture(scope="session")
def tiny_stock(tiny_published, tmp_path_factory) -> Path:
    """The same as a stock Qwen2.5-VL."""
    from tiny import write_stock

    folder = tmp_path_factory.mktemp("stock") / "model"
    write_stock(tiny_published, folder)
    return folder


@pytest.fixture(scope="session")
def loaded(tiny_published):
    """The tiny model and its processor, for tests that change nothing but by `monkeypatch`."""
    from qtsplus.hub.loading import load

    return load(tiny_published, "cpu")


@pytest.fixture(scope="module")
def model():
    """A tiny random model."""
    from tiny import tiny_model

    return tiny_model()


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    """A folder of three films."""
    from clips import LIBRARY, render_world, write_mp4

    folder = tmp_path_factory.mktemp("videos")
    for name, world in LIBRARY.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_mp4(folder / name, render_world(world), 2)
    return folder


@pytest.fixture
def mine(videos, tmp_path) -> Path:
    """The same, which a test may change."""
    return Path(shutil.copytree(videos, tmp_path / "videos"))


@pytest.fixture(scope="module")
def library(videos, loaded, tiny_published, tmp_path_factory):
    """The library of those films."""
    from qtsplus.library.indexing import index
    from qtsplus.library.library import Library

    folder = tmp_path_factory.mktemp("library")
    index(videos, folder, *loaded, name=str(tiny_published))
    return Library(folder, *loaded)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, tiny_mp4, tiny_published) -> dict[str, str]:
    """What bad command lines are about, see `refusals.make_corpus`."""
    from refusals import make_corpus

    return make_corpus(tmp_path_factory.mktemp("corpus"), tiny_mp4, tiny_published)


@pytest.fixture(scope="module")
def shared_model(tiny_published):
    """Loads the good model once; any other is loaded as ever."""
    from qtsplus.hub import loading

    load, good = loading.load, loading.load(tiny_published, "cpu")

    def loaded(model, device=None, dtype="auto", **more):
        return good if (model, device) == (str(tiny_published), None) else load(model, device, dtype, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load", loaded)
        yield
