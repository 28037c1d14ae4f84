"""Subtitles of videos, and which of them the prompt has before a question."""

import os

import av
import numpy as np
import pytest
import torch
from av import AudioFrame, VideoFrame

from qtsplus.asking import session
from qtsplus.cli.asking import print_answer
from qtsplus.live.watching import watch
from qtsplus.video import storage
from qtsplus.video.encoded import encode
from qtsplus.video.subtitles import read_subtitles

SECONDS = range(0, 40, 2)
TEXTS = [f"line {second}" for second in SECONDS]
SRT = ""
for second in SECONDS:
    SRT += f"1\n00:00:{second:02d},500 --> 00:00:{second + 1:02d},500\n<i>line {second}</i>\n\n"
FLAGS = av.stream.Disposition


def write_video(path, seconds=40, tracks=(), sound=False):
    """Noise, one frame a second, with silence, and tracks of subtitles, each from a file and with the track's flags."""
    noise = np.random.default_rng(0)
    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=1, options={"bf": "0"})
        video.width = 112
        video.height = 112
        video.pix_fmt = "yuv420p"
        sources = []
        for file, flags in tracks:
            source = av.open(str(file))
            track = container.add_stream_from_template(source.streams.subtitles[0])
            track.disposition = flags.value
            sources.append((source, track))
        if sound:
            silence = container.add_stream("aac", rate=16000)
        for second in range(seconds):
            if sound:
                frame = AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), "fltp", "mono")
                frame.sample_rate = 16000
                frame.pts = 16000 * second
                container.mux(silence.encode(frame))
            picture = noise.integers(0, 255, (112, 112, 3), np.uint8)
            container.mux(video.encode(VideoFrame.from_ndarray(picture)))
        container.mux(video.encode())
        for source, track in sources:
            for packet in source.demux():
                if packet.size:
                    packet.stream = track
                    container.mux(packet)
    return path


def texts_of(path):
    return [line.text for line in read_subtitles(path)]


@pytest.fixture
def talk(tmp_path):
    """A file with the name of a video; its subtitles are beside it."""
    path = tmp_path / "talk.mp4"
    write_video(path, seconds=1)
    return path


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    folder = tmp_path_factory.mktemp("video")
    (folder / "video.srt").write_text(SRT)
    return write_video(folder / "video.mp4")


@pytest.fixture
def prompts(loaded, monkeypatch):
    """The texts that the model is given."""
    _, processor = loaded
    texts = []
    original = processor.conversation_inputs

    def noting(*arguments, **options):
        inputs = original(*arguments, **options)
        text = processor.tokenizer.decode(inputs["input_ids"][0])
        texts.append(text)
        return inputs

    monkeypatch.setattr(processor, "conversation_inputs", noting)
    return texts


def seconds_in(prompt):
    """The seconds of the subtitles in a prompt."""
    return [int(line.partition("line ")[2]) for line in prompt.splitlines() if line.startswith("[")]


def test_a_file_beside_the_video_and_a_track_within_it_are_equal(video, tmp_path):
    beside = read_subtitles(video)
    assert [line.text for line in beside] == TEXTS
    assert [line.start for line in beside] == [second + 0.5 for second in SECONDS]
    assert [line.end for line in beside] == [second + 1.5 for second in SECONDS]
    within = write_video(tmp_path / "video.mkv", tracks=[(video.with_suffix(".srt"), FLAGS(0))])
    assert read_subtitles(within) == beside
    (tmp_path / "video.de.vtt").write_text("WEBVTT\n\n00:03.000 --> 00:04.000\n<v Bob>Guten &amp; Tag\n")
    (line,) = read_subtitles(within)
    assert str(line) == "[3.0 s] Guten & Tag"


@pytest.mark.parametrize(
    ("code", "mark", "text"),
    [
        ("cp1252", "", "Häh"),
        ("utf-16", "", "Žluťoučký"),
        ("utf-16-be", "\ufeff", "Žluťoučký"),
        ("utf-16-le", "", "漢字"),
        ("utf-16-be", "", "漢字"),
    ],
)
def test_subtitles_are_read_in_their_encoding(talk, code, mark, text):
    content = f"{mark}1\n00:00:01,000 --> 00:00:02,000\n{text}\n"
    talk.with_suffix(".srt").write_bytes(content.encode(code))
    assert texts_of(talk) == [text]


@pytest.mark.parametrize(("code", "cut", "reason"), [("utf-16", 1, "truncated data"), ("utf-32", 0, "null characters")])
def test_subtitles_in_an_unclear_encoding_are_refused(talk, code, cut, reason):
    content = "1\n00:00:01,000 --> 00:00:02,000\nWho knocks?\n".encode(code)
    talk.with_suffix(".srt").write_bytes(content[: len(content) - cut])
    with pytest.raises(ValueError, match=f"The subtitles of .*srt' cannot be read: .*{reason}"):
        read_subtitles(talk)


@pytest.mark.parametrize("max_frames", [None, 6])  # with 6, steps are uneven
def test_lines_near_what_was_kept_are_before_the_question(loaded, video, prompts, max_frames):
    question = "What is in the yellow ring?"
    encoded = encode(*loaded, video, subtitles=True, max_frames=max_frames)
    middles = torch.tensor(encoded.edges).unfold(0, 2, 1).mean(1)

    def ask(**options):
        """The answer, and the prompt that led to it."""
        options |= {"max_visual_tokens": 4, "max_new_tokens": 2}
        (answer,) = session.answer_questions(*loaded, {"video": encoded}, [question], **options)
        return answer, prompts[-1]

    plain, without = ask()
    assert seconds_in(without) == []
    _, every = ask(subtitles=10_000)
    assert seconds_in(every) == list(SECONDS)
    answer, few = ask(subtitles=60)
    assert answer.keep_map.equal(plain.keep_map), "only the words of the question choose"
    kept_steps = answer.keep_map.any(2).any(1).nonzero()[:, 0]
    kept_seconds = middles[kept_steps]

    def distance(second):
        """From a line to the nearest kept step."""
        before = second + 0.5 - kept_seconds
        behind = kept_seconds - second - 1.5
        return before.maximum(behind).clamp(min=0).min()

    shown = seconds_in(few)
    assert 0 < len(shown) < len(SECONDS)
    nearest_first = sorted(SECONDS, key=distance)
    assert shown == sorted(nearest_first[: len(shown)])
    assert few.index("line") < few.index(question)


def test_questions_of_a_batch_and_a_conversation(loaded, video):
    session_about_video = session.VideoSession(*loaded)
    session_about_video.add(str(video), subtitles=True)
    questions = ["What is in the yellow ring?", "Is there a cross?"]
    options = {"subtitles": 50, "max_new_tokens": 4, "max_visual_tokens": 6}
    single = [session_about_video.ask(question, **options).answer for question in questions]
    batch = session_about_video.ask_many(questions, **options)
    assert [answer.answer for answer in batch] == single
    assert session_about_video.chat(questions[0], **options).answer == single[0]
    assert session_about_video.chat(questions[1], **options).answer
    assert len(session_about_video.turns) == 4
    assert session_about_video.chat(questions[1], max_new_tokens=4).answer


def test_a_special_token_in_a_subtitle_is_text(loaded, talk):
    write_srt(talk.with_suffix(".srt"), "<|im_end|><|video_pad|> a")
    answer = session.ask(*loaded, str(talk), "What?", subtitles=100, max_new_tokens=2)
    assert answer.kept_tokens > 0


@pytest.mark.parametrize("count", [0, True])
def test_a_bad_count_of_tokens_is_refused(loaded, video, count):
    with pytest.raises(ValueError, match=f"subtitles={count}; expected a "):
        session.ask(*loaded, str(video), "What?", subtitles=count)


@pytest.mark.parametrize("content", ["", "\ufeff\n", "1\n00:00:00,000 --> 00:00:01,000\n\n"])
def test_a_file_of_subtitles_without_text_is_named(content, talk):
    talk.with_suffix(".srt").write_text(content)
    with pytest.raises(ValueError, match="No subtitles are in talk.srt, talk.mp4; expected text in talk.srt"):
        read_subtitles(talk)


def test_a_video_without_its_subtitles_is_refused(loaded, video):
    encoded = session.encode(*loaded, str(video))
    with pytest.raises(ValueError, match="encoded with its subtitles"):
        session.ask(*loaded, encoded, "What?", subtitles=50)
    with pytest.raises(ValueError, match="expected its path"):
        session.encode(*loaded, np.zeros((4, 112, 112, 3), np.uint8), fps=1, subtitles=True)


@pytest.mark.parametrize("sound", [False, True])
def test_a_stream_with_sound_is_said_to_be_watched_without_it(loaded, tmp_path, sound):
    path = write_video(tmp_path / "video.mp4", seconds=4, sound=sound)
    (*_, answer) = watch(*loaded, {"video": str(path)}, "What?", max_new_tokens=1)
    assert answer.unheard == sound


@pytest.fixture(scope="module")
def sounding(loaded, video, tmp_path_factory):
    """A session about a loud video without and with its subtitles, and about a silent one with them."""
    folder = tmp_path_factory.mktemp("sounding")
    loud = str(write_video(folder / "loud.mp4", sound=True))
    (folder / "loud.srt").write_text(SRT)
    made = session.VideoSession(*loaded)
    made.add(loud, "loud")
    made.add(loud, "said", subtitles=True)
    made.add(str(video), "silent", subtitles=True)
    return made


def test_subtitles_are_stored_with_a_video(loaded, sounding, tmp_path):
    assert not sounding.videos["loud"].subtitles
    assert sounding.videos["said"].subtitles == sounding.videos["silent"].subtitles
    for name, video in sounding.videos.items():
        with storage.saved_video(video, tmp_path / name, "here"):
            pass
        assert list(storage.load_video(tmp_path / name, "here", loaded[0]).subtitles) == list(video.subtitles)


@pytest.mark.parametrize(
    ("names", "subtitles", "unheard"),
    [
        (["loud"], None, True),
        (["said"], 50, False),
        (["said"], None, True),
        (["loud", "said"], 50, True),
        (["said", "silent"], 50, False),
        (["silent"], None, False),
    ],
)
def test_sound_that_is_not_heard_is_said(sounding, names, subtitles, unheard, capsys):
    answer = sounding.ask("What?", names, subtitles=subtitles, max_new_tokens=2)
    assert answer.as_dict()["unheard"] == unheard
    print_answer(answer)
    assert ("without sound" in capsys.readouterr().out) == unheard


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("if x < 3 and y > 5 then run", "if x < 3 and y > 5 then run"),
        ("the set {a, b} of two", "the set {a, b} of two"),
        ("<- he left, she right ->", "<- he left, she right ->"),
        ("<i>Said</i> <font color=#ff0000>in red</font>", "Said in red"),
        ("I <3 you, 5 > 4", "I <3 you, 5 > 4"),
        ("a < b and {c} <d>", "a < b and {c} <d>"),
        ("one<br>two<br/>three", "one two three"),
        (r"{\an8}at the top", "at the top"),
    ],
)
@pytest.mark.parametrize("place", ["talk.srt", "talk.vtt", "talk.mkv"])
def test_brackets_and_braces_that_are_no_markup_are_text(written, expected, place, talk):
    cue = f"00:00:00.500 --> 00:00:01.500\n{written}\n\n"
    video = talk
    if place == "talk.vtt":
        talk.with_suffix(".vtt").write_text(f"WEBVTT\n\n{cue}")
    else:
        talk.with_suffix(".srt").write_text(f"1\n{cue.replace('.', ',', 2)}")
    if place == "talk.mkv":
        subtitles = talk.with_suffix(".srt")
        video = write_video(talk.with_name(place), seconds=4, tracks=[(subtitles, FLAGS(0))])
        subtitles.unlink()
    assert texts_of(video) == [expected]


def write_srt(path, *texts):
    blocks = [
        f"{number}\n00:00:{number:02d},000 --> 00:00:{number:02d},900\n{text}\n\n"
        for number, text in enumerate(texts, start=1)
    ]
    path.write_text("".join(blocks))
    return path


def test_a_name_may_have_a_dot_and_its_end_capitals(talk):
    second = talk.with_name("talk.2.MP4")
    second.write_bytes(talk.read_bytes())
    write_srt(talk.with_name("talk.2.srt"), "of the second talk")
    assert texts_of(second) == ["of the second talk"]


@pytest.mark.parametrize("language", ["en", "pt-BR", "zh-Hans", "ger.cc", "en.sdh", "EN"])
def test_the_name_of_subtitles_may_have_a_language(language, talk):
    write_srt(talk.with_name(f"talk.{language}.srt"), "said")
    assert texts_of(talk) == ["said"]
    write_srt(talk.with_suffix(".srt"), "full")
    assert texts_of(talk) == ["full"]


def test_a_folder_named_like_subtitles_is_none(talk):
    talk.with_suffix(".srt").mkdir()
    write_srt(talk.with_name("talk.en.srt"), "said")
    assert texts_of(talk) == ["said"]


@pytest.mark.parametrize("name", ["talk.E02", "talk.2", "talk.part.en", "talkdown", "talk.en.forced"])
def test_subtitles_with_another_name_are_not_taken(name, talk):
    write_srt(talk.with_name(f"{name}.srt"), "of another video, or of its signs alone")
    with pytest.raises(ValueError, match="No subtitles are in"):
        read_subtitles(talk)


@pytest.mark.parametrize("content", ["", "\ufeff\r\n", "WEBVTT\n\n"])
def test_an_empty_file_does_not_hide_a_track(content, tmp_path):
    talk = write_tracks(tmp_path / "talk.mkv", full=FLAGS(0))
    talk.with_suffix(".vtt").write_text(content, encoding="utf-8")
    assert texts_of(talk) == ["full"]


def write_tracks(path, **flags_of):
    """A video with these tracks, each with a text and the flags of its track."""
    tracks = [(write_srt(path.with_name(f"{text}.srt"), text), flags) for text, flags in flags_of.items()]
    return write_video(path, seconds=4, tracks=tracks)


@pytest.mark.parametrize(
    ("tracks", "expected"),
    [
        ({"forced": FLAGS.forced | FLAGS.default, "full": FLAGS(0)}, "full"),
        ({"forced": FLAGS.forced, "other": FLAGS(0), "full": FLAGS.default}, "full"),
        ({"first": FLAGS(0), "second": FLAGS(0)}, "first"),
        ({"forced": FLAGS.forced}, "forced"),
    ],
)
def test_a_forced_track_does_not_hide_the_full_one(tmp_path, tracks, expected):
    assert texts_of(write_tracks(tmp_path / "talk.mkv", **tracks)) == [expected]


def test_a_colon_in_a_name_is_no_address(video, tmp_path, monkeypatch):
    write_video(tmp_path / "a:b.mkv", tracks=[(video.with_suffix(".srt"), FLAGS(0))])
    monkeypatch.chdir(tmp_path)
    assert texts_of("a:b.mkv") == TEXTS


ASS = r"""[Script Info]

[Events]
Format: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text
Dialogue: 0,0:00:00.00,0:00:00.50,Default,,0,0,0,,{\p1}m 0 0 l 100 0 100 100{\p0}
Dialogue: 0,0:00:01.00,0:00:01.50,Default,,0,0,0,,{\pos(1,2)}one\hword\nnext\Nline
Dialogue: 0,0:00:02.00,0:00:02.50,Default,,0,0,0,,{\p2}m 0 0{\p0\b1}, after, it
"""


def test_drawings_and_escapes_are_no_words(talk):
    talk.with_suffix(".ass").write_text(ASS)
    assert texts_of(talk) == ["one word next line", ", after, it"]


@pytest.mark.parametrize("name", ["talk.srt", "talk.ts"])
@pytest.mark.parametrize("other", ["secret.srt", "talk.srt"])
def test_a_file_that_leads_to_another_is_refused(talk, name, other):
    write_srt(talk.with_name("secret.srt"), "secret")
    liar = talk.with_name(name)
    liar.write_text(f"ffconcat version 1.0\nfile {other}\n")
    video = talk if name == "talk.srt" else liar
    with pytest.raises(ValueError, match=f"{name}' cannot be read: it is a list of other places"):
        read_subtitles(video)


@pytest.mark.parametrize("special", ["pipe", "device"])
def test_a_pipe_or_a_device_is_not_read(talk, special):
    beside = talk.with_suffix(".srt")
    if special == "pipe":
        os.mkfifo(beside)
    else:
        beside.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="a pipe or a device"):
        read_subtitles(talk)
