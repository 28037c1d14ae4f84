"""A tower learns to see, goes on where it was stopped, and a base is asked."""

import json

import numpy as np
import pytest
import torch

from benchmarks.open.asking import OpenTest
from benchmarks.teaching.seeing import STATE, draw_batch, patches, teach_to_see
from benchmarks.world.open_model import make_open_model
from benchmarks.world.open_sets import build_open
from benchmarks.world.scene import CELL
from qtsplus.hub.files import hub_configs
from qtsplus.training.models import make_config, make_model, make_processor

BASE = hub_configs() / "qtsplus-tiny"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    make_open_model(folder)
    return folder


def weights(folder):
    return make_model(None, str(folder), {"selection": "all"}).state_dict()


def test_clips_reach_the_tower_as_the_video_processor_gives_them(start):
    processor = make_processor(None, str(start), make_config(None, str(start)))
    frames, labels = draw_batch(32, 3)
    by_processor = processor.video_processor(
        videos=[torch.from_numpy(clip).movedim(-1, 1) for clip in frames], do_sample_frames=False, return_tensors="pt"
    )
    torch.testing.assert_close(patches(frames, processor), by_processor["pixel_values_videos"])
    assert len(labels) == 3 * frames.shape[2] * frames.shape[3] // CELL**2


def test_only_the_tower_and_the_words_learn_and_a_stopped_run_goes_on(start, tmp_path, capsys):
    before = weights(start)
    model, _ = make_open_model(tmp_path)
    teach_to_see(tmp_path, 2, count=2, every=1, few=1)
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in said] == [1, 2] and all(0 <= line["shape"] <= 100 for line in said)
    after = weights(tmp_path)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(".visual." in name for name in changed)
    assert {name for name in changed if ".visual." not in name} <= {
        "model.language_model.embed_tokens.weight",
        "lm_head.weight",
    }
    assert torch.load(tmp_path / STATE, weights_only=True)["step"] == 2
    teach_to_see(tmp_path, 3, count=2, every=1)
    assert [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()] == [3]


def test_the_shipped_model_answers_wherever_things_are(tmp_path):
    """A few videos each; benchmarks/results/open.md has what it answers in more."""
    processor = make_processor(None, str(BASE), make_config(None, str(BASE), {}))
    model = make_model(None, str(BASE), {}).eval()
    for variant in ("shift5", "portrait"):
        path = build_open(tmp_path / variant, "test", 3, 8, variant=variant)
        assert np.mean(OpenTest(model, processor, path).ask(model, selection="all").right) > 0.75
    assert (BASE / "model.safetensors").stat().st_size < 8e6
