"""The model that the crowded TinyWorld taught."""

from pathlib import Path

import pytest

from benchmarks.bases import CROWD


@pytest.fixture(scope="session")
def crowd_published(tmp_path_factory) -> Path:
    """The Hub folder of the model that the crowded TinyWorld taught."""
    from qtsplus.hub.publish import assemble_folder

    return assemble_folder(CROWD, tmp_path_factory.mktemp("hub") / "qtsplus-crowd")


@pytest.fixture(scope="session")
def crowd_processor(crowd_published):
    """The processor of that model."""
    from qtsplus.hub import loading

    return loading.load_processor(crowd_published)
