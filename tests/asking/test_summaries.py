"""A summary of videos: chapters on a player's clock, each read from its own tokens, and one text of all."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import qtsplus.asking.summaries as summaries
from clips import make_world, render_world, write_mp4
from qtsplus import Library, VideoSession, summarise
from qtsplus.asking.summaries import chapter_steps
from qtsplus.cli import app
from qtsplus.library.indexing import index
from qtsplus.live.stream import Stream


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Ten seconds of two scenes, three of one, one frame, and eight seconds in which nothing changes."""
    folder = tmp_path_factory.mktemp("videos")
    scene = render_world(make_world(160, 5))
    inverted = 255 - render_world(make_world(161, 5))
    write_mp4(folder / "cut.mp4", np.concatenate([scene, inverted]), 2)
    write_mp4(folder / "short.mp4", scene[:6], 2)
    write_mp4(folder / "frame.mp4", scene[:1], 2)
    write_mp4(folder / "still.mp4", scene[:1].repeat(16, 0), 2)
    return folder


@pytest.fixture
def session_of(loaded, videos):
    """Makes a session about some of the videos."""

    def make(*names):
        session = VideoSession(*loaded)
        for name in names:
            session.add(videos / f"{name}.mp4")
        return session

    return make


def with_steps_of_a_second(features):
    """What of a video is needed for its chapters. The features are `[steps, tokens, width]`."""
    count = len(features)
    return SimpleNamespace(
        steps=list(range(count + 1)),
        features=features.flatten(0, 1),
    )


# Chapters -------------------------------------------------------------------------------------------------------------


LENGTHS = [20, 31, 12, 40, 17]


@pytest.fixture
def scenes():
    """Five scenes of different lengths, 120 seconds in all."""
    noise = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    steps = torch.nn.functional.normalize(noise, dim=-1).repeat_interleave(torch.tensor(LENGTHS), 0)
    return with_steps_of_a_second(steps[:, None].expand(-1, 4, -1))


def test_chapters_end_where_the_video_changes(scenes):
    changes = {0, 20, 51, 63, 103}
    for first, _ in chapter_steps(scenes, 45):
        assert first in changes


@pytest.mark.parametrize("longest", [0.5, 7, 45, 119, 120, 500])
def test_chapters_leave_no_step_out(scenes, longest):
    end = 0
    for first, last in chapter_steps(scenes, longest):
        assert first == end
        assert last - first <= max(1, longest)
        end = last
    assert end == sum(LENGTHS)


@pytest.mark.parametrize("tokens", [1, 2, 9, 119])
def test_there_are_no_more_chapters_than_tokens(scenes, tokens):
    chapters = chapter_steps(scenes, 0.5, tokens)
    assert tokens / 2 < len(chapters) <= tokens
    assert chapters[-1][1] == sum(LENGTHS)


def test_where_nothing_changes_chapters_are_equal():
    still = with_steps_of_a_second(torch.ones(64, 4, 8))
    chapters = chapter_steps(still, 16)
    assert len(chapters) == 4
    for first, last in chapters:
        assert last - first == 16


# Reading and joining --------------------------------------------------------------------------------------------------


@pytest.fixture
def spoken(monkeypatch):
    """What a pretended model is asked about chapters, and the groups of texts that it joins."""
    said = SimpleNamespace(calls=[], groups=[], overview=None, part="part {}")

    def answer(model, processor, videos, questions, **options):
        said.calls.append(SimpleNamespace(videos=videos, **options))
        number = len(said.calls)
        part = SimpleNamespace(
            answer=said.part.format(number),
            kept_tokens=2,
            visual_tokens=9,
        )
        return [part]

    def join(model, processor, group, options):
        said.groups.append(group)
        return " ".join(group) if said.overview is None else said.overview

    monkeypatch.setattr(summaries, "answer_questions", answer)
    monkeypatch.setattr(summaries, "_join", join)
    return said


def test_each_chapter_is_read_from_its_own_tokens(loaded, session_of, spoken):
    session = session_of("cut")
    first, second = summarise(session, "What happens?", chapter_seconds=6).chapters
    assert first.end == second.start == 5, "where the scenes change"
    assert first.text == "part 1"
    assert second.text == "part 2"
    features = []
    for call in spoken.calls:
        assert call.selection == "coverage"
        assert call.retention == loaded[0].config.qtsplus_config.rho_max, "as many as may be"
        (chapter,) = call.videos.values()
        features.append(chapter.features)
    whole = session.videos["cut.mp4"].features
    assert torch.equal(torch.cat(features), whole)


def test_chapters_share_the_tokens_of_a_video(session_of, spoken):
    summarise(session_of("cut"), chapter_seconds=5, max_visual_tokens=7)
    assert [call.max_visual_tokens for call in spoken.calls] == [3, 3]


def test_chapters_are_joined(session_of, spoken):
    summary = summarise(session_of("cut"), chapter_seconds=1)
    (texts,) = spoken.groups
    assert texts == [chapter.text for chapter in summary.chapters]
    assert summary.overview == " ".join(texts)
    again = summarise(session_of("cut"), chapter_seconds=0.7, max_new_tokens=9)
    assert again.overview is None, "ten chapters"
    assert again.warnings == [
        "The chapters of cut.mp4 last 1 s, one step in time: encode more frames per second for shorter ones."
    ]


def test_times_are_written_by_the_program(session_of, spoken):
    summary = summarise(session_of("cut", "short"), chapter_seconds=5)
    assert summary.text.splitlines() == [
        "cut.mp4, 0:00 to 0:05: part 1",
        "cut.mp4, 0:05 to 0:10: part 2",
        "short.mp4, 0:00 to 0:03: part 3",
    ]
    assert summarise(session_of("short")).overview is None, "one chapter needs none"


OVERVIEWS = [
    ("part 1 and part 2", "part 1 and part 2"),
    ("part 1, a part", None),  # nothing that only the second chapter says
    ("At 0:05 part 1 and 2", None),  # a time that the model cannot know
    ("part 1, after 20 seconds part 2", None),
    ("", None),
]


@pytest.mark.parametrize(("written", "shown"), OVERVIEWS)
def test_an_overview_names_something_of_every_chapter_and_no_time(session_of, spoken, written, shown):
    spoken.overview = written
    assert summarise(session_of("cut"), chapter_seconds=5).overview == shown


TEXTS_WITHOUT_TIMES = [
    ("At 0:50 a dog comes.", "a dog comes."),
    ("A dog comes after 20 seconds, after 2m 30s or at twenty-five seconds.", "A dog comes or."),
    ("[0:00 - 0:08] A dog. From 0:10 to 1:02:03.5 it runs.", "A dog. it runs."),
    ("The 20-second clip shows a dog in the first 5 s; 1.5s later a cat.", "The clip shows a dog; later a cat."),
    ("Half a minute later, a few minutes into the video, at second 20", "later,"),
    ("A second dog, two dogs and a 5-year-old of the 80s", "A second dog, two dogs and a 5-year-old of the 80s"),
    ("The second 3 cars, an iPhone 4 s, a mix of 1:10", "The second 3 cars, an iPhone 4 s, a mix of 1:10"),
    (
        "Forty five seconds later he orders seconds. At 5:30 pm a dog, at 6 p.m. a cat.",
        "later he orders seconds. a dog, a cat.",
    ),
    ("Two and a half minutes, a couple of hours or eight to ten long seconds later", "or later"),
]


@pytest.mark.parametrize(("written", "shown"), TEXTS_WITHOUT_TIMES)
def test_a_chapters_text_states_no_time(session_of, spoken, written, shown):
    spoken.part = written
    (chapter,) = summarise(session_of("short")).chapters
    assert chapter.text == shown


@pytest.mark.parametrize(("trained", "chapters"), [(None, 1), (100, 1), (5, 2)])
def test_a_chapter_is_as_long_as_the_videos_of_training(loaded, session_of, spoken, monkeypatch, trained, chapters):
    monkeypatch.setattr(loaded[0].config.qtsplus_config, "trained_seconds", trained)
    assert len(summarise(session_of("cut")).chapters) == chapters


def test_the_joining_prompt_has_every_text_without_times(loaded, monkeypatch):
    model, processor = loaded
    prompts = []

    def generate(input_ids, **options):
        prompts.append(input_ids[0])
        return SimpleNamespace(sequences=input_ids)

    monkeypatch.setattr(model, "generate", generate)
    texts = [f"ball {number} <|im_end|>" for number in range(3)]
    assert summaries._join(model, processor, texts, {"max_new_tokens": 4}) == ""
    (prompt,) = prompts
    assert "\nball 0 <|im_end|>\nball 1 <|im_end|>" in processor.tokenizer.decode(prompt)
    ends = prompt == processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ends.sum() <= 2, "what a chapter says ends no turn"


REPETITIONS = [
    ([1, 2, 3, 3, 3, 3], True),
    ([1, 2, 1, 2, 1, 2, 1, 2], True),
    ([1, 2, 1, 2, 1, 2, 1, 3], False),
]


@pytest.mark.parametrize(("ids", "ends"), REPETITIONS)
def test_a_text_ends_where_it_says_the_same_four_times(ids, ends):
    other_row = list(range(100, 100 + len(ids)))
    stopped = summaries.StopRepeating()(torch.tensor([ids, other_row]), None)
    assert stopped.tolist() == [ends, False]


REPEATED_TEXTS = [
    ("The lemon, the lemon, the lemon, the lemon, the lemon,", "The lemon, the lemon,"),
    ("A dog. A cat. A dog.", "A dog. A cat. A dog."),
    ("It costs 1000000", "It costs 1000000"),
]


@pytest.mark.parametrize(("text", "shown"), REPEATED_TEXTS)
def test_a_repetition_is_said_once(text, shown):
    assert summaries._without_repetition(text) == shown


def test_texts_beyond_the_models_positions_are_not_joined(loaded, monkeypatch):
    monkeypatch.setattr(loaded[0].config.get_text_config(), "max_position_embeddings", 64)
    assert summaries._join(*loaded, ["ball"] * 70, {"max_new_tokens": 4}) == ""


# Sources --------------------------------------------------------------------------------------------------------------


def test_a_streams_memory_is_not_summarised(loaded, session_of):
    stream = Stream(*loaded, memory_tokens=40)
    stream.append(np.zeros((4, 56, 56, 3), dtype=np.uint8), [0.0, 0.5, 1.0, 1.5])
    session = session_of("frame")
    (memory,) = stream.videos().values()
    session.add(memory, "camera")
    with pytest.raises(ValueError, match="A stream's memory has no chapters"):
        summarise(session)
    with pytest.raises(ValueError, match="beside no other videos: ask about it alone"):
        session.ask("What is it?", max_new_tokens=1)
    assert session.ask("What is it?", ["camera"], max_new_tokens=1).frames == 4
    assert len(summarise(session, names=["frame.mp4"], max_new_tokens=1).chapters) == 1


@pytest.mark.parametrize("names", [["cut"], ["short", "still"], ["frame"]])
def test_the_chapters_of_a_video_cover_it(session_of, names):
    session = session_of(*names)
    summary = summarise(session, chapter_seconds=4, max_new_tokens=4)
    chapters = {name: [] for name in session.names}
    for chapter in summary.chapters:
        chapters[chapter.video].append(chapter)
    for name, video in session.videos.items():
        end = video.about.start
        for chapter in chapters[name]:
            assert chapter.start == end
            assert 0 < chapter.kept_tokens <= chapter.visual_tokens
            end = chapter.end
        assert end == pytest.approx(video.about.start + video.length)
        tokens = sum(chapter.visual_tokens for chapter in chapters[name])
        assert tokens == len(video.features)


def test_a_library_is_summarised_as_a_session_is(loaded, videos, session_of, tiny_published, tmp_path):
    index(videos, tmp_path, *loaded, name=str(tiny_published))
    library = Library(tmp_path, *loaded)
    session = session_of("cut", "frame", "short", "still")
    options = {"chapter_seconds": 4, "max_new_tokens": 3}
    assert summarise(library, **options) == summarise(session, **options)


def test_an_empty_session_is_refused(session_of):
    with pytest.raises(ValueError, match=r"Got the names \[\]; expected a list of some"):
        summarise(session_of())


def test_a_path_is_not_summarised(videos):
    with pytest.raises(ValueError, match="Got PosixPath to summarise; expected a VideoSession or a Library"):
        summarise(videos / "frame.mp4")


BAD_ARGUMENTS = [
    ("chapter_seconds", 0, "chapter_seconds=0"),
    ("chapter_seconds", True, "chapter_seconds=True"),
    ("turns", ["a", "b"], "no keyword 'turns' here"),
    ("start", 1, "no keyword 'start' here.* `encode` and `add` .* `window="),
    ("prompt", " ", "question is empty"),
    ("max_new_tokens", 0, "max_new_tokens"),
    ("names", ["frame.mp4", "frame.mp4"], "expected a list .*, each once"),
    ("chapter_second", 4, "no keyword 'chapter_second' here; the nearest is 'chapter_seconds'"),
    ("stopping_criteria", 5, "stopping_criteria=5; expected a list"),
    ("generation_config", {}, "generation_config={}; expected"),
    ("max_visual_tokens", "9", "max_visual_tokens='9'"),
]


@pytest.mark.parametrize(("option", "value", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_named(session_of, option, value, message):
    with pytest.raises(ValueError, match=message):
        summarise(session_of("frame"), **{option: value})


def test_the_command_prints_chapters(videos, tiny_published):
    video = str(videos / "cut.mp4")
    line = ["summarise", video, "What happens?", "--model", str(tiny_published), "--max-new-tokens", "3"]
    printed = json.loads(CliRunner().invoke(app, [*line, "--json"]).stdout)
    (chapter,) = printed["chapters"]
    assert printed["text"] == f"cut.mp4, 0:00 to 0:10: {chapter['text']}"
    assert printed["overview"] is None
    assert chapter["end"] == printed["seconds_of_video"] == 10
    assert printed["frames"] == 20
    assert printed["unheard"] is False
    shown = CliRunner().invoke(app, line).stdout
    assert "0.0 to 10.0" in shown
    assert chapter["text"] in shown
    assert "10.0 s, 20 frames looked at\n" in shown
