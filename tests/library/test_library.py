"""A library: a folder of videos is encoded once, and every question searches all of them as one memory."""

import json
import re
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


def only_there(name):
    """An object of one of the videos whose name no other video has."""
    others = set()
    for other, world in LIBRARY.items():
        if other != name:
            others |= {item.name for item in world.objects}
    for item in LIBRARY[name].objects:
        if item.name not in others:
            return item
    raise ValueError(name)


def question_about(item):
    return f"What is in the {item.name}?"


def assert_within(moment, item):
    """A moment is one at which a player shows the item."""
    assert item.appears_at <= moment.start
    assert moment.end <= item.vanishes_at


def qtsplus(*arguments, **more):
    words = [str(argument) for argument in arguments]
    return CliRunner().invoke(app, words, **more)


def printed(*arguments, **more):
    """What a command that succeeds prints, as JSON."""
    result = qtsplus(*arguments, "--json", **more)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


# --- Ranking ---


def joint_choice(library, question):
    """What the selector says of all tokens at once: log-relevance `[M]`, and the tokens that it keeps."""
    model = library.model
    words = torch.tensor(library.processor.text_ids(question))
    features = [library.video(name).features for name in library.names]
    tokens = sum(len(part) for part in features)
    with torch.no_grad():
        _, chosen = model.model.qtsplus(
            [features],
            [model.get_input_embeddings()(words)],
            [torch.zeros(3, tokens, dtype=torch.long)],
            retention=0.1,
            selection="qtsplus",
        )
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
    joint, kept = joint_choice(changed, QUESTION)
    scorer, pieces = changed.rank(QUESTION)
    parts = []
    peaks = {}
    for name in changed.names:
        relevance = scorer.relevance(changed.video(name).features)
        peaks[name] = float(relevance.max())
        parts.append(relevance)
    streamed = torch.cat(parts)
    torch.testing.assert_close(streamed, joint, atol=1e-4, rtol=0)
    assert torch.equal(top_n(streamed, len(kept)), kept)
    assert [piece.name for piece in pieces] == sorted(peaks, key=peaks.get, reverse=True)


def test_several_scoring_layers_are_refused(library, videos, tmp_path):
    model = deepcopy(library.model)
    layers = model.model.qtsplus.scoring_layers
    layers.append(deepcopy(layers[0]))
    reason = "2 scoring layers; a library and a standing question need one"
    with pytest.raises(ValueError, match=reason):
        Library(library.folder, model, library.processor)
    with pytest.raises(ValueError, match=reason):
        index(videos, tmp_path / "library", model, library.processor)


@pytest.mark.parametrize("name", LIBRARY)
def test_find_names_the_file_the_seconds_and_the_place(library, name):
    item = only_there(name)
    best, *others = library.find(question_about(item))
    assert best.name == name
    assert_within(best, item)
    left, top, right, bottom = best.pixels
    x, y = item.start
    assert left <= x
    assert x <= right
    assert top <= y
    assert y <= bottom
    for other in others:
        assert best.weight >= other.weight


def test_find_names_as_many_moments_as_were_asked_for(library):
    assert len(library.find(QUESTION, top=1.0)) == 1
    assert {moment.name for moment in library.find(QUESTION, top=100)} == set(LIBRARY)


@pytest.mark.parametrize("count", [0, -1])
def test_numbers_below_one_are_refused(library, count):
    with pytest.raises(ValueError, match="expected a "):
        library.find(QUESTION, top=count)
    with pytest.raises(ValueError, match="expected a "):
        library.ask(QUESTION, pieces=count)


# --- Some of a library ---


def alone_with(name, library, folder):
    """A library of one of the videos."""
    videos = folder / "videos"
    videos.mkdir()
    shutil.copy(Path(library.index.made["videos"], name), videos)
    index(videos, folder / "alone", library.model, library.processor)
    return Library(folder / "alone", library.model, library.processor)


def test_some_videos_are_a_library_of_their_own(library, tmp_path):
    """What the others hold changes nothing: neither which moments there are, nor their weights."""
    expected = alone_with("b.mp4", library, tmp_path).find(QUESTION, 3)
    found = library.find(QUESTION, 3, ("b.mp4", "b.mp4"))
    for own, other in zip(found, expected, strict=True):
        assert replace(own, weight=0) == replace(other, weight=0)
        assert own.weight == pytest.approx(other.weight)


WRONG_NAMES = [
    [],
    ["d.mp4"],
    "b.mp4",
    ["b.mp4", "../b.mp4"],
    5,
    [["b.mp4"]],
]


@pytest.mark.parametrize("names", WRONG_NAMES, ids=str)
def test_names_of_other_videos_are_refused(library, names):
    with pytest.raises(ValueError, match=re.escape(f"names={names!r}; expected a list of names")):
        library.find(QUESTION, names=names)


def steps_of(pieces):
    return {(piece.first, piece.last) for piece in pieces}


def test_a_window_says_which_steps_are_looked_at(library, monkeypatch):
    _, inside = library.rank(QUESTION, window=(2, 4))
    assert {piece.name for piece in inside} == set(LIBRARY)
    assert steps_of(inside) == {(2, 4)}
    for moment in library.find(QUESTION, 9, window=(2, 4)):
        assert moment.start >= 2
        assert moment.end <= 4
    monkeypatch.setattr(ranking, "PIECE", 72)  # two steps
    _, in_pieces = library.rank(QUESTION, window=(1, 6))
    assert steps_of(in_pieces) == {(1, 3), (3, 5), (5, 6)}
    with pytest.raises(ValueError, match="shows anything from second 60 to 70"):
        library.find(QUESTION, window=(60, 70))
    with pytest.raises(ValueError, match=r"window \(start, end\) is 5; expected a list"):
        library.find(QUESTION, window=5)


def test_what_is_shown_before_and_after_a_window_changes_nothing(library, monkeypatch):
    opened = Library(library.folder, library.model, library.processor)
    monkeypatch.setattr(opened, "_keys", lambda name: None)
    _, expected = opened.rank(QUESTION, window=(2, 4))
    changed = {}
    for name in opened.names:
        video = opened.video(name)
        features = video.features.clone()
        features[:72] = 1e3
        features[144:] = 1e3
        changed[name] = replace(video, features=features)
    monkeypatch.setattr(opened, "video", changed.__getitem__)
    _, again = opened.rank(QUESTION, window=(2, 4))
    assert again == expected


def test_a_pattern_and_a_window_limit_the_search(library, tiny_published):
    assert library.select("[ab].mp4") == ["a.mp4", "b.mp4"]
    call = [library.folder, QUESTION, "--name", "more/*", "--model", tiny_published]
    window = ["--start", 1, "--end", 4]
    assert printed("ask", *call, "--max-new-tokens", 2)["video"] == "more/c.mp4"
    found = printed("find", *call, *window, "--moments", 9)
    assert found["moments"]
    for moment in found["moments"]:
        assert moment["video"] == "more/c.mp4"
        assert moment["start"] >= 1
        assert moment["end"] <= 4


# --- Asking ---


def test_ask_is_a_session_of_the_files_that_rank_first(library):
    options = {"max_visual_tokens": 20, "max_new_tokens": 4}
    answer = library.ask("What?", pieces=3.0, **options)
    session = VideoSession(library.model, library.processor)
    for name in library.names:
        session.add(library.video(name), f"{name}, 0:00 to 0:06")
    expected = session.ask("What?", **options)
    assert answer.answer == expected.answer
    assert answer.kept_tokens == expected.kept_tokens
    assert answer.rho == expected.rho
    assert list(answer.keep_maps) == library.names
    assert answer.video == ", ".join(library.names)
    for name in library.names:
        kept = answer.keep_maps[name]
        assert torch.equal(kept, expected.keep_maps[f"{name}, 0:00 to 0:06"])
    for interval in answer.evidence:
        assert interval.name in LIBRARY


@pytest.fixture
def in_pieces(library, monkeypatch):
    """The library, whose videos compete in pieces of two steps."""
    monkeypatch.setattr(ranking, "PIECE", 100)  # of 36 tokens a step
    return library


def test_a_long_video_competes_in_pieces_at_their_times(in_pieces):
    whole = in_pieces.video("a.mp4")
    _, pieces = in_pieces.rank(QUESTION, ["a.mp4"])
    features = []
    frames = []
    begin = 0
    for piece in sorted(pieces):
        assert piece.first == begin
        assert piece.last == begin + 2
        begin = piece.last
        part = piece.cut(whole)
        assert part.about.start == piece.first
        assert part.length == 2
        features.append(part.features)
        frames += part.about.metadata.frames_indices
    assert torch.equal(torch.cat(features), whole.features)
    assert frames == whole.about.metadata.frames_indices


def test_an_answer_from_a_piece_is_about_the_whole_file(in_pieces):
    item = only_there("a.mp4")
    best = in_pieces.find(question_about(item))[0]
    answer = in_pieces.ask(question_about(item), max_new_tokens=4)
    for moment in (best, answer.evidence[0]):
        assert moment.name == "a.mp4"
        assert_within(moment, item)
    assert answer.keep_map.shape == (6, 6, 6)
    assert answer.keep_map.sum() == answer.kept_tokens
    kept_steps = answer.keep_map.nonzero()[:, 0].tolist()
    pieces_that_were_read = {step // 2 for step in kept_steps}
    second = int(answer.evidence[0].start)
    assert pieces_that_were_read == {second // 2}, "nothing is kept of the other pieces"


def test_several_pieces_of_a_video_are_read_together(in_pieces):
    answer = in_pieces.ask(QUESTION, pieces=3, names=["a.mp4"], max_new_tokens=1)
    assert answer.video == "a.mp4"
    assert answer.visual_tokens == 216
    assert len(answer.keep_map) == 6


def test_a_piece_that_is_the_whole_video_is_the_video(library):
    video = library.video("b.mp4")
    assert Piece("b.mp4", 0, 6).cut(video) is video


# --- The commands ---


def test_names_of_any_kind_are_shown_and_asked_about(tiny_published, tmp_path):
    """Brackets and colons are no styles, and bytes that are no text end nothing."""
    names = ["a [bold].mp4", ":smile:.mp4", "x[/y].mp4", "bad\udcff.mp4"]
    videos = tmp_path / "videos"
    (videos / "x[").mkdir(parents=True)
    for number, name in enumerate(names):
        frames = render_world(make_world(120 + number, 6))
        write_mp4(videos / name, frames, 2)
    folder = tmp_path / "library"
    assert qtsplus("index", videos, "--out", folder, "--model", tiny_published).exit_code == 0
    wide = {"COLUMNS": "150"}
    found = qtsplus("find", folder, QUESTION, "--moments", 10, "--model", tiny_published, env=wide)
    assert found.exit_code == 0
    for shown in ("a [bold].mp4", ":smile:.mp4", "x[/y].mp4", "bad\\udcff.mp4"):
        assert shown in found.stdout
    drawn = tmp_path / "drawn"
    options = ["--pieces", 4, "--evidence", drawn, "--model", tiny_published]
    asked = qtsplus("ask", folder, QUESTION, *options, env=wide)
    assert asked.exit_code == 0, asked.stderr
    answer = json.loads((drawn / "answer.json").read_text())
    assert len(answer["videos"]) == 4


def visible_names(folder):
    names = [path.name for path in folder.iterdir()]
    return {name for name in names if not name.startswith(".")}


def test_the_commands_need_the_videos_once(mine, tiny_published, tmp_path):
    (mine / "bad.mp4").write_bytes(b"no video")
    folder = tmp_path / "library"
    item = only_there("a.mp4")
    made = qtsplus("index", mine, "--out", folder, "--model", tiny_published)
    assert made.exit_code == 0, made.stderr
    assert made.stdout == f"Wrote {folder}, a library of 3 videos\n"
    assert "Encoding 3 of 4 videos: 648 tokens, 373.2 kB" in made.stderr
    assert "Left out bad.mp4: Cannot decode" in made.stderr

    (mine / "more/c.mp4").write_bytes(b"another video")
    drawn = tmp_path / "drawn"
    call = ["ask", folder, question_about(item), "--max-new-tokens", 4, "--model", tiny_published]
    asked = qtsplus(*call, "--pieces", 2, "--evidence", drawn, "--json")
    assert asked.exit_code == 0, asked.stderr
    content = json.loads((drawn / "answer.json").read_text())
    answer = json.loads(asked.stdout)
    assert content["evidence"] == answer["evidence"]
    names = [video["name"] for video in content["videos"]]
    assert names == ["a.mp4", "more/c.mp4"]
    assert visible_names(drawn) == {"answer.json", "frames-1.png"}, "c.mp4 was changed"
    assert "The file of more/c.mp4 is gone or was changed, so its frames are not drawn.\n" in asked.stderr

    shutil.rmtree(mine)
    found = printed("find", folder, question_about(item), "--moments", 2, "--model", tiny_published)
    best = found["moments"][0]
    assert best["video"] == "a.mp4"
    assert item.appears_at <= best["start"]
    assert best["end"] <= item.vanishes_at
    answer = printed(*call)
    assert answer["answer"].rstrip(".") == item.mark
    assert answer["evidence"][0]["video"] == "a.mp4"


def test_every_line_of_a_chat_searches_the_whole_library(library, tiny_published):
    items = {name: only_there(name) for name in LIBRARY}
    questions = [question_about(item) for item in items.values()]
    call = ["chat", library.folder, "--model", tiny_published, "--max-new-tokens", 4]
    result = qtsplus(*call, "--json", input="\n".join(questions))
    assert result.exit_code == 0, result.stderr
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(answers) == len(items)
    for answer, (name, item) in zip(answers, items.items(), strict=True):
        alone = library.ask(question_about(item), max_new_tokens=4)
        expected = alone.as_dict()
        assert alone.answer.rstrip(".") == item.mark
        assert alone.evidence[0].name == name
        assert answer["video"] == name
        for field in ("answer", "evidence", "kept_tokens"):
            assert answer[field] == expected[field]
    shown = qtsplus(*call, input=questions[1])
    assert shown.exit_code == 0
    assert "b.mp4, " in shown.stdout, "the file is named"


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
    places = {"library": library.folder, "videos": videos, "empty": tmp_path}
    line, reason = row.format(**places).split(" => ")
    words = shlex.split(line)
    result = qtsplus(*words, "--model", tiny_published)
    assert result.exit_code == 2, result.output
    assert reason in result.stderr.splitlines()[-1]


def test_a_run_in_which_nothing_could_be_encoded_fails(tiny_published, tmp_path):
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    result = qtsplus("index", tmp_path, "--out", tmp_path / "library", "--model", tiny_published)
    assert result.exit_code == 1
    assert "could be encoded" in result.stderr
    result = qtsplus("find", tmp_path / "library", QUESTION, "--model", tiny_published)
    assert result.exit_code == 2
    assert "holds no video: run" in result.stderr
