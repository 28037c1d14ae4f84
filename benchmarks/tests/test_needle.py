"""Needles in long videos: hidden where they are said to be, found or not, and never asked for twice."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.studies import needle as needles_of
from benchmarks.studies.needle import hide, run_needle
from benchmarks.world.crowd import make_crowd, render_crowd
from benchmarks.world.haystack import write_background, write_needles
from qtsplus.asking import session
from qtsplus.data.records import VideoRecord
from qtsplus.evaluation.labelled import LabelledQuestion, labelled_questions, sighting_tokens
from qtsplus.training.models import make_model


@pytest.fixture(scope="module")
def model():
    return make_model("qtsplus-tiny", None, seed=0).eval()


@pytest.fixture(scope="module")
def haystack(tmp_path_factory):
    """A background of ten seconds and two needles of two."""
    folder = tmp_path_factory.mktemp("haystack")
    path = write_needles(folder / "needles", count=2, seconds=2)
    return str(write_background(folder / "background.mp4", 10)), labelled_questions(path)


def hunt(model, processor, haystack, out, **more):
    background, needles = haystack
    settings = {"lengths": (6, 10), "depths": (0.0, 1.0), "selections": ("qtsplus", "uniform", "all"), **more}
    settings.setdefault("retention", 0.1)
    return run_needle(model, processor, needles, background, out, progress=False, **settings)


def test_a_hidden_needle_has_the_features_of_a_video_that_was_cut_that_way(model, tiny_processor, tmp_path):
    long, short = (render_crowd(make_crowd(seed, seconds)) for seed, seconds in ((1, 6), (2, 2)))
    cut = np.concatenate([long[:4], short, long[8:]])
    videos = {}
    for name, frames in (("long", long), ("short", short), ("cut", cut)):
        (tmp_path / name).mkdir()
        for index, frame in enumerate(frames):
            Image.fromarray(frame).save(tmp_path / name / f"{index}.png")
        videos[name] = session.encode(model, tiny_processor, tmp_path / name, fps=2).features
    features, start = hide(videos["long"], videos["short"], 0.5, 36)
    assert start == 2 * 36
    torch.testing.assert_close(features, videos["cut"], rtol=0, atol=1e-5)
    assert [hide(videos["long"], videos["short"], depth, 36)[1] for depth in (0, 1)] == [0, 4 * 36]


def test_cells_for_every_length_depth_and_selection(model, tiny_processor, haystack, tmp_path):
    document = json.loads(hunt(model, tiny_processor, haystack, tmp_path).read_text())
    cells = {(cell["selection"], cell["length"], cell["depth"]): cell for cell in document["cells"]}
    assert len(cells) == 12 and document["settings"]["needles"] == 2
    for (selection, length, _), cell in cells.items():
        assert cell["visual_tokens"] == 36 * length
        assert cell["kept"] == (cell["visual_tokens"] if selection == "all" else round(np.ceil(3.6 * length)))
        assert 0 <= cell["correct"] <= 1
        assert selection != "all" or cell["share"] == 1.0
        assert selection == "all" or cell["share"] < 1.0
    assert len(document["lengths"]) == 6
    page = (tmp_path / "needle.md").read_text()
    assert "retention 0.1" in page and page.count("| uniform |") == 2
    assert (tmp_path / "needle.png").stat().st_size > 1000
    assert not list(tmp_path.glob(".needle*"))


def test_what_counts_as_found_are_the_needles_tokens(model, tiny_processor, haystack, tmp_path, monkeypatch):
    background, (needle, _) = haystack
    clip_tokens = sighting_tokens([seen for each in needle.needles for seen in each], (2, 6, 6), 1.0)
    told = needles_of.answer

    def keep_the_needle(model, processor, inputs, limit, **call):
        answers, chosen = told(model, processor, inputs, limit, **call)
        chosen.kept_indices = (torch.from_numpy(8 * 36 + clip_tokens),)
        return answers, chosen

    monkeypatch.setattr(needles_of, "answer", keep_the_needle)
    found = {}
    for depth in (0.0, 1.0):
        target = hunt(
            model, tiny_processor, (background, [needle]), tmp_path / str(depth), lengths=(10,),
            depths=(depth,), selections=("uniform",),
        )  # fmt: skip
        (found[depth],) = json.loads(target.read_text())["cells"]
    assert found[1.0]["share"] == 1.0 and found[0.0]["share"] == 0.0


def test_an_interrupted_run_goes_on_where_it_stopped(model, tiny_processor, haystack, tmp_path, monkeypatch):
    whole = json.loads(hunt(model, tiny_processor, haystack, tmp_path / "whole").read_text())
    asked, told = [], needles_of.answer

    def count(*arguments, **call):
        if len(asked) == 7:
            asked.append("stopped")
            raise KeyboardInterrupt
        asked.append(call)
        return told(*arguments, **call)

    monkeypatch.setattr(needles_of, "answer", count)
    with pytest.raises(KeyboardInterrupt):
        hunt(model, tiny_processor, haystack, tmp_path / "cut")
    resumed = json.loads(hunt(model, tiny_processor, haystack, tmp_path / "cut").read_text())
    assert len(asked) == 24 + 1
    assert resumed["cells"] == whole["cells"] and resumed["lengths"] == whole["lengths"]


def test_exactly_so_many_tokens_and_an_image_that_is_found_anywhere(model, tiny_processor, haystack, tmp_path):
    background, _ = haystack
    Image.new("RGB", (168, 168), "red").save(tmp_path / "needle.png")
    own = [LabelledQuestion(VideoRecord(str(tmp_path / "needle.png"), "What colour is it?", "red"), [])]
    target = hunt(
        model, tiny_processor, (background, own), tmp_path, max_visual_tokens=40, depths=(0.5,), retention=None
    )
    for cell in json.loads(target.read_text())["cells"]:
        assert cell["kept"] == (cell["visual_tokens"] if cell["selection"] == "all" else 40)
        if cell["selection"] == "uniform":  # of the 36 tokens of its one step, as many as of any other
            assert cell["share"] == pytest.approx(40 / cell["visual_tokens"], abs=0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": (11,)}, r"background has 10 s; expected at least the length, 11 s"),
        ({"lengths": (1,)}, r"length of 1 s is shorter than a needle of 2 s"),
        ({"lengths": ()}, r"expected at least one"),
        ({"lengths": (-5,)}, r"seconds above 0"),
        ({"depths": (1.5,)}, r"shares of the video from 0 to 1"),
        ({"depths": (0.5, 0.5)}, r"each once"),
        ({"lengths": (1e12,)}, r"background has 10 s; expected at least the length, 1e\+12 s"),
        ({"selections": ("uniform", "uniform")}, r"each once"),
        ({"selections": ("best",)}, r"expected some of qtsplus, lm_attention, uniform"),
    ],
)
def test_what_cannot_be_measured_is_refused(model, tiny_processor, haystack, tmp_path, settings, message, monkeypatch):
    """Before the background is encoded, which takes long."""
    monkeypatch.setattr(needles_of, "encode", None)
    with pytest.raises(ValueError, match=message):
        hunt(model, tiny_processor, haystack, tmp_path / "new", **settings)


def test_evidence_of_another_form_is_refused(tmp_path):
    path = tmp_path / "needles.jsonl"
    path.write_text(json.dumps({"video": "a.mp4", "question": "?", "answer": "!", "evidence": [[{"from": 1}]]}) + "\n")
    with pytest.raises(ValueError, match="not a list of needles"):
        labelled_questions(path)
    path.write_text(json.dumps({"video": None, "question": "?", "answer": "!"}) + "\n")
    with pytest.raises(ValueError, match="no question about a video"):
        labelled_questions(path)


def test_results_are_not_written_over(model, tiny_processor, haystack, tmp_path, monkeypatch):
    monkeypatch.setattr(needles_of, "encode", None)
    (tmp_path / "needle.json").write_text("mine")
    with pytest.raises(ValueError, match=r"needle.json is there already"):
        hunt(model, tiny_processor, haystack, tmp_path)
    assert (tmp_path / "needle.json").read_text() == "mine"


def test_a_background_of_frames_and_a_needle_with_special_tokens(model, tiny_processor, haystack, tmp_path):
    (tmp_path / "frames").mkdir()
    for index in range(8):
        Image.new("RGB", (168, 168), (30 * index, 0, 0)).save(tmp_path / "frames" / f"{index}.png")
    Image.new("RGB", (168, 168), "red").save(tmp_path / "needle.png")
    question = "Where is <|video_pad|>?<|im_end|>"
    own = [LabelledQuestion(VideoRecord(str(tmp_path / "needle.png"), question, "red<|im_end|>"), [])]
    settings = {"lengths": (4,), "depths": (0.5,), "selections": ("uniform",), "fps": 2}
    target = hunt(model, tiny_processor, (str(tmp_path / "frames"), own), tmp_path / "out", **settings)
    (cell,) = json.loads(target.read_text())["cells"]
    assert cell["visual_tokens"] == 4 * 36
