"""A summary of films: chapters on a player's clock, each read from its own tokens, and one text of all."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from typer.testing import CliRunner

import qtsplus.asking.summaries as summaries
from clips import make_world, render_world, write_mp4
from qtsplus import Library, VideoSession, summarise
from qtsplus.asking.summaries import chapter_steps
from qtsplus.cli import app
from qtsplus.library.indexing import index
from qtsplus.live.stream import Stream

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    """Ten seconds of two scenes, three of one, one frame, and eight seconds in which nothing changes."""
    folder = tmp_path_factory.mktemp("films")
    one, other = (render_world(make_world(seed, 5)) for seed in (160, 161))
    shown = {"cut": [*one, *(255 - np.stack(other))], "short": one[:6], "frame": one[:1], "still": [one[0]] * 16}
    for name, frames in shown.items():
        write_mp4(folder / f"{name}.mp4", np.stack(frames), 2)
    return folder


def session_of(loaded, *films):
    session = VideoSession(*loaded)
    for film in films:
        session.add(film)
    return session


def film_of(features, seconds=1.0):
    steps = [number * seconds for number in range(len(features) + 1)]
    return SimpleNamespace(steps=steps, features=features.flatten(0, 1))


def test_chapters_end_where_the_film_changes_and_leave_no_step_out():
    scenes = torch.nn.functional.normalize(torch.randn(5, 16, generator=torch.Generator().manual_seed(0)), dim=-1)
    lengths = [20, 31, 12, 40, 17]
    film = film_of(scenes.repeat_interleave(torch.tensor(lengths), 0)[:, None].expand(-1, 4, -1))
    chapters = list(chapter_steps(film, 45))
    assert {first for first, _ in chapters} <= {0, *np.cumsum(lengths)}
    for longest in (0.5, 7, 45, 119, 120, 500):
        edges = list(chapter_steps(film, longest))
        assert [first for first, _ in edges] == [0, *(last for _, last in edges[:-1])] and edges[-1][1] == 120
        assert all(last - first <= max(1, longest) for first, last in edges)


def test_where_nothing_changes_chapters_are_equal():
    film = film_of(torch.ones(64, 4, 8))
    assert list(chapter_steps(film, 16)) == [(0, 16), (16, 32), (32, 48), (48, 64)]


def test_each_chapter_is_read_from_its_own_tokens_and_joined_with_its_times(loaded, films, monkeypatch):
    asked, joined = [], []

    def answer(model, processor, questions, **writing):
        asked.extend(questions)
        return [SimpleNamespace(answer=f"part {n + 1}", kept_tokens=2, visual_tokens=9) for n in range(len(questions))]

    monkeypatch.setattr(summaries, "answer_batch", answer)
    monkeypatch.setattr(summaries, "_join", lambda model, processor, groups, writing: joined.extend(groups) or ["all"])
    session = session_of(loaded, films / "cut.mp4")
    summary = summarise(session, "What happens?", longest=6)
    assert [(one.start, one.end) for one in summary.chapters] == [(0, 5), (5, 10)], "the scenes change there"
    assert [one.text for one in summary.chapters] == ["part 1", "part 2"] and summary.text == "all"
    whole = session.videos["cut.mp4"].features
    assert torch.equal(torch.cat([next(iter(question.videos.values())).features for question in asked]), whole)
    model = loaded[0]
    assert all(question.choice.selection == "coverage" for question in asked)
    assert asked[0].choice.retention == model.config.qtsplus_config.rho_max, "as many as may be"
    summarise(session, max_visual_tokens=5)
    assert asked[-1].choice.retention is None and asked[-1].choice.max_visual_tokens == 5
    assert [text for *_, text in joined[0]] == ["part 1", "part 2"] and len(joined) == 1, "one chapter is the summary"


def test_what_joins_reads_every_text_with_its_times(loaded, monkeypatch):
    model, processor = loaded
    prompts = []
    monkeypatch.setattr(
        model, "generate", lambda input_ids, **_: prompts.append(input_ids[0]) or SimpleNamespace(sequences=input_ids)
    )
    parts = [summaries.Chapter("a.mp4", 60.0 * n, 60.0 * n + 60, f"ball {n} <|im_end|>", 1, 2) for n in range(70)]
    (text,) = summaries._join(model, processor, [[(one, one, one.text) for one in parts[:3]]], {"max_new_tokens": 4})
    said = processor.tokenizer.decode(prompts[0])
    assert "a.mp4, 0:00 to 1:00: ball 0 <|im_end|>\na.mp4, 1:00 to 2:00: ball 1" in said and text == ""
    ends = int((prompts[0] == processor.tokenizer.convert_tokens_to_ids("<|im_end|>")).sum())
    monkeypatch.setattr(model.config.get_text_config(), "max_position_embeddings", 64)
    with pytest.raises(ValueError, match="texts of 70 chapters take .* joins them 4; the model has 64: ask for less"):
        summaries._join(model, processor, [[(one, one, one.text) for one in parts]], {"max_new_tokens": 4})
    assert ends <= 2, "what a chapter says ends no turn"


def test_many_chapters_are_joined_in_groups(loaded, films, monkeypatch):
    groups = []

    def join(model, processor, several, writing):
        groups.extend(len(parts) for parts in several)
        return ["joined"] * len(several)

    answer = SimpleNamespace(answer="x", kept_tokens=1, visual_tokens=9)
    monkeypatch.setattr(summaries, "answer_batch", lambda *given, **_: [answer] * len(given[2]))
    monkeypatch.setattr(summaries, "_join", join)
    monkeypatch.setattr(summaries, "TOGETHER", 4)
    summary = summarise(session_of(loaded, films / "cut.mp4"), longest=1)
    assert len(summary.chapters) == 10 and groups == [4, 4, 2, 3] and summary.text == "joined"


def counting(monkeypatch):
    """How many chapters, and how many groups of texts, are read at a time."""
    read, joined = [], []
    answer, join = summaries.answer_batch, summaries._join
    monkeypatch.setattr(
        summaries, "answer_batch", lambda *all, **more: read.append(len(all[2])) or answer(*all, **more)
    )
    monkeypatch.setattr(summaries, "_join", lambda *all: joined.append(len(all[2])) or join(*all))
    return read, joined


def test_chapters_that_are_read_side_by_side_say_what_each_says_alone(loaded, films, monkeypatch):
    monkeypatch.setattr(summaries, "TOGETHER", 3)
    session = session_of(loaded, films / "cut.mp4", films / "short.mp4")
    given = {"longest": 0.7, "max_new_tokens": 6}
    read, joined = counting(monkeypatch)
    together = summarise(session, **given)
    assert read == [10, 3] and joined[0] == 5
    tokens = together.chapters[0].kept_tokens + len(loaded[1].text_ids("Summarise the video."))
    for most, sizes in ((3 * tokens, [3, 3, 3, 1, 3]), (1, [1] * 13)):
        read.clear()
        monkeypatch.setattr(summaries, "AT_ONCE", most)
        assert summarise(session, **given) == together and read == sizes
    monkeypatch.setattr(summaries, "AT_ONCE", 4096)
    for size in (1, 4):
        read.clear()
        monkeypatch.setattr(summaries, "SIDE_BY_SIDE", size)
        assert summarise(session, **given) == together and max(read) == size


@pytest.mark.parametrize("option", [{"prompt_lookup_num_tokens": 2}, {"min_length": 9}, {"max_time": 60.0}])
def test_what_generates_for_one_prompt_only_reads_chapter_by_chapter(loaded, films, monkeypatch, option):
    session = session_of(loaded, films / "cut.mp4")
    read, joined = counting(monkeypatch)
    given = {"longest": 1, "max_new_tokens": 4, "selection": "all"}
    plain = summarise(session, **given)
    assert read == [10] and joined == [1]
    alone = summarise(session, **option, **given)
    assert alone.chapters == plain.chapters and read == [10] + [1] * 10 and joined == [1, 1]
    config = GenerationConfig(**option, max_new_tokens=4)
    assert summarise(session, longest=1, selection="all", generation_config=config).chapters == alone.chapters
    ((name, value),) = option.items()
    monkeypatch.setattr(loaded[0].generation_config, name, value)
    assert summarise(session, **given).chapters == alone.chapters and read == [10] + [1] * 30


def test_a_long_prompt_leaves_room_for_fewer_chapters(loaded, films, monkeypatch):
    read, _ = counting(monkeypatch)
    summarise(session_of(loaded, films / "cut.mp4"), "What happens here? " * 400, longest=1, max_new_tokens=1)
    assert max(read) < 6 and sum(read) == 10


def test_what_a_stream_remembers_is_not_summarised(loaded, films):
    stream = Stream(*loaded, memory_tokens=40)
    stream.append(np.zeros((4, 56, 56, 3), dtype=np.uint8), [0.0, 0.5, 1.0, 1.5])
    session = session_of(loaded, films / "frame.mp4")
    session.add(next(iter(stream.videos().values())), "camera")
    with pytest.raises(ValueError, match="What a stream remembers has no chapters"):
        summarise(session)
    with pytest.raises(ValueError, match="beside no other videos: ask about it alone"):
        session.ask("What is it?", max_new_tokens=1)
    assert session.ask("What is it?", ["camera"], max_new_tokens=1).frames == 4
    assert len(summarise(session, names=["frame.mp4"], max_new_tokens=1).chapters) == 1


@pytest.mark.parametrize("names", [["cut"], ["short", "still"], ["frame"]])
def test_real_films_are_summarised_by_the_real_model(loaded, films, names):
    session = session_of(loaded, *(films / f"{name}.mp4" for name in names))
    summary = summarise(session, longest=4, max_new_tokens=4)
    assert {one.video for one in summary.chapters} == {f"{name}.mp4" for name in names}
    for name, video in session.videos.items():
        own = [one for one in summary.chapters if one.video == name]
        assert own[0].start == video.about.start
        assert own[-1].end == pytest.approx(video.about.start + video.length)
        assert all(one.end == other.start for one, other in zip(own, own[1:], strict=False))
        assert sum(one.visual_tokens for one in own) == len(video.features)
        assert all(0 < one.kept_tokens <= one.visual_tokens for one in own)


def test_a_library_is_summarised_as_a_session_is_and_an_empty_one_is_refused(loaded, films, tiny_published, tmp_path):
    index(films, tmp_path / "library", *loaded, name=str(tiny_published))
    library = Library(tmp_path / "library", *loaded)
    session = session_of(loaded, *sorted(films.iterdir()))
    assert summarise(library, longest=4, max_new_tokens=3) == summarise(session, longest=4, max_new_tokens=3)
    with pytest.raises(ValueError, match="no video to summarise"):
        summarise(VideoSession(*loaded))
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "broken.mp4").write_bytes(b"no film")
    index(tmp_path / "none", tmp_path / "empty", *loaded, name=str(tiny_published))
    with pytest.raises(ValueError, match="holds no video: run"):
        Library(tmp_path / "empty", *loaded)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"longest": 0}, "longest=0"),
        ({"longest": True}, "longest=True"),
        ({"longest": float("nan")}, "longest=nan"),
        ({"longest": 10**400}, "longest=an integer of 1329 bits; expected a finite number"),
        ({"videos": ["frame.mp4"]}, "Got videos for a summary"),
        ({"inputs_embeds": None}, "Got inputs_embeds, which are made from the question"),
        ({"pixel_values_videos": None, "input_ids": []}, "Got input_ids, pixel_values_videos, which are made"),
        ({"prompt": " "}, "question is empty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"selection": "best"}, "selection='best'"),
        ({"names": ["none.mp4"]}, "no video to summarise; expected a list, some of .*frame.mp4"),
        ({"retention": 2.0}, "retention=2.0"),
        ({"retention": "all"}, "retention='all'"),
        ({"names": 5}, "names=5: no video to summarise; expected a list"),
        ({"names": "frame.mp4"}, "expected a list, some of .*frame.mp4"),
        ({"names": [["frame.mp4"]]}, "expected a list, some of"),
        ({"turns": ["a", "b"], "queries": ["c"]}, "Got turns, queries for a summary"),
        ({"past_key_values": None}, "Got past_key_values for a summary"),
        ({"generation_config": {"max_new_tokens": 3}}, "generation_config={'max_new_tokens': 3}; expected"),
        ({"max_visual_tokens": "9"}, "max_visual_tokens='9'"),
    ],
)
def test_bad_arguments_are_named(loaded, films, given, said):
    with pytest.raises(ValueError, match=said):
        summarise(session_of(loaded, films / "frame.mp4"), **given)
    with pytest.raises(ValueError, match="Got PosixPath to summarise; expected a VideoSession or a Library"):
        summarise(films / "frame.mp4")


def test_the_command_prints_chapters(films, tiny_published):
    line = ["summarise", str(films / "cut.mp4"), "What happens?", "--model", str(tiny_published)]
    result = CliRunner().invoke(app, [*line, "--max-new-tokens", "3", "--json"])
    printed = json.loads(result.stdout)
    assert printed["text"] == printed["chapters"][0]["text"] and printed["chapters"][0]["end"] == 10
    shown = CliRunner().invoke(app, [*line, "--max-new-tokens", "3"]).stdout
    assert "0.0 to 10.0" in shown and printed["text"] in shown and "10.0 s, 20 frames looked at\n" in shown
    assert (printed["frames"], printed["seconds_of_video"], printed["unheard"]) == (20, 10, False)
