"""A library: a folder of videos is encoded once, and every question searches all of them as one memory."""

import json
import shlex
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from clips import LIBRARY, make_world, render_world, write_mp4
from qtsplus.asking import ranking
from qtsplus.asking.ranking import Piece
from qtsplus.asking.session import VideoSession
from qtsplus.cli import app
from qtsplus.library.indexing import index
from qtsplus.library.library import Library
from qtsplus.model.methods_qtsplus import top_n

QUESTION = "What is in the red circle?"
pytestmark = pytest.mark.usefixtures("cache")


def only_there(name):
    """An object of one of the videos whose name no other video has."""
    others = set()
    for other, world in LIBRARY.items():
        if other != name:
            others |= {item.name for item in world.objects}
    return next(item for item in LIBRARY[name].objects if item.name not in others)


# --- Ranking ---


def joint_log_relevance(library, question):
    """What the selector says of all tokens at once, `[M]`."""
    model = library.model
    words = torch.tensor(library.processor.text_ids(question))
    features = [library.stored(name).features for name in library.names]
    positions = torch.zeros(3, sum(map(len, features)), dtype=torch.long)
    query = model.get_input_embeddings()(words)
    with torch.no_grad():
        _, chosen = model.model.qtsplus([features], [query], [positions], retention=0.1, selection="qtsplus")
    return chosen.log_relevance[0], chosen.kept_indices[0]


@pytest.mark.parametrize("reduction", ["sum", "max", "mean"])
def test_ranking_video_by_video_is_one_selection_over_all(library, monkeypatch, reduction):
    model = deepcopy(library.model)
    selector = model.model.qtsplus
    monkeypatch.setattr(selector.config, "reduction", reduction)
    monkeypatch.setattr(ranking, "CHUNK", 50)  # no divisor of a video
    (layer,) = selector.scoring_layers
    with torch.no_grad():
        layer.kv_norm.weight.mul_(torch.linspace(0.5, 1.5, 128))
        layer.k_proj.bias.add_(1)
    changed = Library(library.folder, model, library.processor)
    joint, kept = joint_log_relevance(changed, QUESTION)
    scorer, pieces = changed.rank(QUESTION)
    streamed = torch.cat([scorer.relevance(changed.stored(name).features) for name in changed.names])
    torch.testing.assert_close(streamed, joint, atol=1e-4, rtol=0)
    assert top_n(streamed, len(kept)).tolist() == kept.tolist()
    lengths = [len(changed.stored(name).features) for name in changed.names]
    peaks = {}
    for name, part in zip(changed.names, joint.split(lengths), strict=True):
        peaks[name] = float(part.max())
    best_first = sorted(peaks, key=peaks.get, reverse=True)
    assert [piece.name for piece in pieces] == best_first


def test_several_scoring_layers_are_refused(library, videos, tmp_path):
    model = deepcopy(library.model)
    layers = model.model.qtsplus.scoring_layers
    layers.append(deepcopy(layers[0]))
    with pytest.raises(ValueError, match="2 scoring layers; a library and a standing question need"):
        Library(library.folder, model, library.processor)
    with pytest.raises(ValueError, match="2 scoring layers"):
        index(videos, tmp_path / "library", model, library.processor)


@pytest.mark.parametrize("name", LIBRARY)
def test_find_names_the_file_the_seconds_and_the_place(library, name):
    item = only_there(name)
    best, *others = library.find(f"What is in the {item.name}?")
    assert best.name == name
    assert item.appears_at <= best.start < best.end <= item.vanishes_at
    left, top, right, bottom = best.pixels
    x, y = item.start
    assert left <= x <= right
    assert top <= y <= bottom
    assert all(best.weight >= other.weight for other in others)


def test_find_names_as_many_moments_as_were_asked_for(library):
    assert len(library.find(QUESTION, top=1)) == 1
    assert {moment.name for moment in library.find(QUESTION, top=100)} == set(LIBRARY)


@pytest.mark.parametrize("question", ["", "  "])
def test_an_empty_question_is_refused(library, question):
    with pytest.raises(ValueError, match="question is empty"):
        library.find(question)


# --- Asking ---


@pytest.mark.parametrize("name", LIBRARY)
def test_ask_answers_from_the_right_file(library, name):
    item = only_there(name)
    answer = library.ask(f"What is in the {item.name}?", max_new_tokens=4)
    assert answer.answer.rstrip(".") == item.mark
    assert answer.evidence[0].name == answer.video == name


def test_ask_is_a_session_of_the_files_that_rank_first(library):
    answer = library.ask("What?", pieces=3, max_visual_tokens=20, max_new_tokens=4)
    session = VideoSession(library.model, library.processor)
    for name in library.names:
        session.add(library.stored(name), f"{name}, 0:00 to 0:06")
    wanted = session.ask("What?", max_visual_tokens=20, max_new_tokens=4)
    assert answer.answer == wanted.answer
    assert answer.kept_tokens == wanted.kept_tokens
    assert answer.rho == wanted.rho
    assert list(answer.keep_maps) == library.names
    assert answer.video == ", ".join(library.names)
    for keep_map, wanted_map in zip(answer.keep_maps.values(), wanted.keep_maps.values(), strict=True):
        assert torch.equal(keep_map, wanted_map)
    for interval in answer.evidence:
        assert interval.name in LIBRARY


def test_some_videos_are_a_library_of_their_own(library, tmp_path, loaded):
    """What the others hold changes nothing: neither which moments there are, nor their weights."""
    films = tmp_path / "films"
    films.mkdir()
    shutil.copy(Path(library.index.made["videos"], "b.mp4"), films)
    alone = Library(index(films, tmp_path / "alone", *loaded).folder, *loaded)
    expected = alone.find(QUESTION, 3)
    for names in (["b.mp4"], ("b.mp4", "b.mp4")):
        found = library.find(QUESTION, 3, names)
        for own, other in zip(found, expected, strict=True):
            assert replace(own, weight=0) == replace(other, weight=0)
            assert own.weight == pytest.approx(other.weight)
    assert library.ask(QUESTION, names=["b.mp4"], max_new_tokens=2).video == "b.mp4"
    for wrong in ([], ["d.mp4"], "b.mp4", ["b.mp4", "../b.mp4"]):
        with pytest.raises(ValueError, match="expected some of the library's videos"):
            library.find(QUESTION, names=wrong)


def test_a_pattern_names_some_videos(library, tiny_published):
    call = (library.folder, QUESTION, "--json", "--name", "more/*", "--model", tiny_published)
    answer = json.loads(qtsplus("ask", *call, "--max-new-tokens=2").stdout)
    found = json.loads(qtsplus("find", *call, "--moments=9").stdout)
    assert answer["video"] == "more/c.mp4"
    assert {moment["name"] for moment in found["moments"]} == {"more/c.mp4"}


@pytest.fixture
def in_pieces(library, monkeypatch):
    """The library, whose videos compete in pieces of two steps."""
    monkeypatch.setattr(ranking, "PIECE", 100)  # of 36 tokens a step
    return library


def test_a_long_video_competes_in_pieces_at_their_times(in_pieces):
    whole = in_pieces.stored("a.mp4")
    _, ranked = in_pieces.rank(QUESTION)
    pieces = [piece for piece in ranked if piece.name == "a.mp4"]
    pieces.sort(key=lambda piece: piece.first)
    assert [(piece.first, piece.last) for piece in pieces] == [(0, 2), (2, 4), (4, 6)]
    features = []
    frames = []
    for piece in pieces:
        part = piece.cut(whole)
        assert (part.about.start, part.length) == (piece.first, 2)
        features.append(part.features)
        frames += part.about.metadata.frames_indices
    assert torch.equal(torch.cat(features), whole.features)
    assert frames == whole.about.metadata.frames_indices


def test_an_answer_from_a_piece_is_about_the_whole_file(in_pieces):
    item = only_there("a.mp4")
    question = f"What is in the {item.name}?"
    best = in_pieces.find(question)[0]
    answer = in_pieces.ask(question, max_new_tokens=4)
    for moment in (best, answer.evidence[0]):
        assert moment.name == "a.mp4"
        assert item.appears_at <= moment.start < moment.end <= item.vanishes_at
    assert answer.keep_map.shape == (6, 6, 6)
    assert answer.keep_map.sum() == answer.kept_tokens
    kept_steps = answer.keep_map.nonzero()[:, 0].tolist()
    (piece_that_was_read,) = {step // 2 for step in kept_steps}
    assert piece_that_was_read == int(answer.evidence[0].start) // 2, "nothing is kept of the other pieces"


def test_several_pieces_of_a_video_are_read_together(in_pieces):
    answer = in_pieces.ask(QUESTION, pieces=3, names=["a.mp4"], max_new_tokens=1)
    assert answer.video == "a.mp4"
    assert answer.visual_tokens == 216
    assert len(answer.keep_map) == 6


def test_a_piece_that_is_the_whole_video_is_the_video(library):
    video = library.stored("b.mp4")
    assert Piece("b.mp4", 0, 6).cut(video) is video


@pytest.mark.parametrize("call", [{"top": 0}, {"top": -1}, {"pieces": 0}, {"pieces": -1}])
def test_numbers_below_one_are_refused(library, call):
    method = library.find if "top" in call else library.ask
    with pytest.raises(ValueError, match="expected a whole number of"):
        method(QUESTION, **call)


# --- The commands ---


def test_names_of_any_kind_are_shown_and_asked_about(videos, tiny_published, tmp_path):
    """Brackets and colons are no styles, and bytes that are no text end nothing."""
    names = ["a [bold].mp4", ":smile:.mp4", "x[/y].mp4", "bad\udcff.mp4"]
    (tmp_path / "films" / "x[").mkdir(parents=True)
    for number, name in enumerate(names):
        write_mp4(tmp_path / "films" / name, render_world(make_world(120 + number, 6)), 2)
    wide = {"env": {"COLUMNS": "150"}}
    folder = tmp_path / "library"
    assert qtsplus("index", tmp_path / "films", "--out", folder, "--model", tiny_published).exit_code == 0
    found = qtsplus("find", folder, QUESTION, "--moments", 10, **wide)
    assert found.exit_code == 0
    assert all(name in found.stdout for name in [*names[:3], "bad\\xff.mp4"])
    asked = qtsplus("ask", folder, QUESTION, "--pieces", 4, "--evidence", tmp_path / "drawn", **wide)
    assert asked.exit_code == 0, asked.stderr
    assert len(json.loads((tmp_path / "drawn/answer.json").read_text())["videos"]) == 4


def qtsplus(*arguments, **more):
    return CliRunner().invoke(app, list(map(str, arguments)), **more)


def test_the_commands_need_the_videos_once(mine, tiny_published, tmp_path):
    (mine / "bad.mp4").write_bytes(b"no video")
    folder = tmp_path / "library"
    item = only_there("a.mp4")
    question = f"What is in the {item.name}?"
    made = qtsplus("index", mine, "--out", folder, "--model", tiny_published)
    assert made.exit_code == 0, made.stderr
    assert made.stdout == f"Wrote {folder}, a library of 3 videos\n"
    assert "Encoding 3 of 4 videos: 648 tokens, 373 kB" in made.stderr
    assert "Left out bad.mp4: Cannot decode" in made.stderr

    (mine / "more/c.mp4").write_bytes(b"another film")
    call = ["ask", folder, question, "--max-new-tokens", 4, "--pieces", 2, "--evidence", tmp_path / "drawn", "--json"]
    asked = qtsplus(*call)
    assert asked.exit_code == 0, asked.stderr
    drawn = json.loads((tmp_path / "drawn/answer.json").read_text())
    assert drawn["evidence"] == json.loads(asked.stdout)["evidence"]
    assert [one["name"] for one in drawn["videos"]] == ["a.mp4", "more/c.mp4"]
    left = {path.name for path in (tmp_path / "drawn").iterdir() if path.name[0] != "."}
    assert left == {"answer.json", "frames-1.png"}, "c.mp4 was changed"
    assert "The file of more/c.mp4 is gone or was changed, so its frames are not drawn.\n" in asked.stderr

    shutil.rmtree(mine)
    moments = json.loads(qtsplus("find", folder, question, "--json", "--moments", 2).stdout)["moments"]
    assert len(moments) == 2
    assert moments[0]["name"] == "a.mp4"
    assert item.appears_at <= moments[0]["start"] < moments[0]["end"] <= item.vanishes_at
    answer = json.loads(qtsplus("ask", folder, question, "--json", "--max-new-tokens", 4).stdout)
    assert answer["answer"].rstrip(".") == item.mark
    assert answer["evidence"][0]["video"] == "a.mp4"
    asked = qtsplus(*call)
    assert asked.exit_code == 0
    assert asked.stderr.count("so its frames are not drawn") == 2, asked.stderr
    left = {path.name for path in (tmp_path / "drawn").iterdir() if path.name[0] != "."}
    assert left == {"answer.json"}


def test_every_line_of_a_chat_searches_the_whole_library(library, tiny_published, tmp_path):
    items = [only_there(name) for name in LIBRARY]
    questions = [f"What is in the {item.name}?" for item in items]
    lines = [*questions, f"/evidence {tmp_path / 'drawn'}"]
    call = ["chat", str(library.folder), "--model", str(tiny_published), "--max-new-tokens", "4"]
    result = CliRunner().invoke(app, [*call, "--json"], input="\n".join(lines))
    assert result.exit_code == 0, result.stderr
    answers = map(json.loads, result.stdout.splitlines())
    for answer, question, item, name in zip(answers, questions, items, LIBRARY, strict=True):
        alone = library.ask(question, max_new_tokens=4)
        assert answer["answer"] == alone.answer
        assert alone.answer.rstrip(".") == item.mark
        assert answer["video"] == name
        assert answer["evidence"] == alone.as_dict()["evidence"]
        assert answer["kept_tokens"] == alone.kept_tokens
    assert (tmp_path / "drawn/frames.png").is_file()
    result = CliRunner().invoke(app, call, input=questions[1])
    assert result.exit_code == 0
    assert "b.mp4, " in result.stdout, "the file is named"


BAD_LINES = """
find {empty} Who? => is not a library; make one of a folder of videos with `qtsplus index`
find {library} " " => empty
find {library} Who? --name door/* => is like --name 'door/*', but for example 'a.mp4'
find {library} Who? --end 0 => No video shows anything
summarise {videos}/a.mp4 --name * => --name is about a library
summarise {library} --name door/* => is like --name 'door/*', but for example 'a.mp4'
summarise {library} --start 1 => --start is about a video
summarise {videos}/a.mp4 " " => empty
ask {empty} Who? --name * => --name is about a library
ask {library} Who? --name door/* => is like --name 'door/*', but for example 'a.mp4'
ask {library} Who? --fps 2 => --fps is about a video
ask {library} Who? --end 0 => Got end=0.0; expected a finite number above 0
ask {library} Who? --dry-run => --dry-run is about a video
ask {videos}/a.mp4 Who? --dry-run --evidence {empty}/x => --evidence has no effect
ask {library} Who? --evidence {videos} => holds files that an earlier run did not write
ask {library} " " => empty
ask {videos}/a.mp4 Who? --pieces 2 => --pieces is about a library
ask {library} Who? --retention 2 => --retention is 2
chat {library} {videos}/a.mp4 => is a library, which is asked alone
chat {videos}/a.mp4 {library} --fps 2 => {library} is a library, which is asked alone
chat {library} --fps 2 => --fps is about a video
index {empty} --out {empty}/library => There is no video in
index {videos} --out {empty}/library --fps 0 => Got fps=0.0; expected a finite number above 0
index {videos} --out {videos}/a.mp4 => is a file; expected a folder
"""


@pytest.mark.parametrize("row", BAD_LINES.strip().splitlines())
def test_bad_command_lines_end_in_one_line(library, videos, tiny_published, tmp_path, row):
    line, reason = row.format(library=library.folder, videos=videos, empty=tmp_path).split(" => ")
    result = qtsplus(*shlex.split(line), "--model", tiny_published)
    assert result.exit_code == 2, result.output
    assert reason in result.stderr.splitlines()[-1]


def test_a_run_in_which_nothing_could_be_encoded_fails(tiny_published, tmp_path):
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    result = qtsplus("index", tmp_path, "--out", tmp_path / "library", "--model", tiny_published)
    assert result.exit_code == 1
    assert "could be encoded" in result.stderr
    result = qtsplus("find", tmp_path / "library", QUESTION)
    assert result.exit_code == 2
    assert "holds no video: run" in result.stderr
