"""Subtitles of films, and what of them stands in front of a question."""

import os

import av
import numpy as np
import pytest
from av import AudioFrame, VideoFrame

from qtsplus.asking import session
from qtsplus.cli.asking import print_answer
from qtsplus.live.watching import watch
from qtsplus.video import storage
from qtsplus.video import subtitles as reader
from qtsplus.video.subtitles import read_subtitles

LINES = [(second, f"line {second}") for second in range(0, 40, 2)]
SRT = "".join(
    f"{n}\n00:00:{at:02d},500 --> 00:00:{at + 1:02d},500\n<i>{text}</i>\n\n" for n, (at, text) in enumerate(LINES)
)


def write_film(path, seconds=40, subtitles=None, sound=False):
    """Noise, one frame a second, a track of subtitles, and one of silence."""
    noise = np.random.default_rng(0)
    with av.open(str(path), "w") as film:
        video = film.add_stream("libx264", rate=1, options={"bf": "0"})
        video.width = video.height = 112
        video.pix_fmt = "yuv420p"
        texts = None if subtitles is None else av.open(str(subtitles))
        track = None if texts is None else film.add_stream_from_template(texts.streams.subtitles[0])
        silence = film.add_stream("aac", rate=16000) if sound else None
        for second in range(seconds):
            if silence is not None:
                frame = AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), "fltp", "mono")
                frame.sample_rate, frame.pts = 16000, 16000 * second
                film.mux(silence.encode(frame))
            film.mux(video.encode(VideoFrame.from_ndarray(noise.integers(0, 255, (112, 112, 3), np.uint8))))
        film.mux(video.encode())
        for packet in texts.demux(texts.streams.subtitles[0]) if texts is not None else ():
            if packet.size:
                packet.stream = track
                film.mux(packet)
    return path


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    folder = tmp_path_factory.mktemp("film")
    (folder / "film.srt").write_text(SRT)
    return write_film(folder / "film.mp4")


def prompt_of(loaded, monkeypatch, *arguments, **options):
    """The text that the model is given, and the answer."""
    model, processor = loaded
    prompts, original = [], processor.conversation_inputs

    def noting(*given, **keywords):
        inputs = original(*given, **keywords)
        prompts.append(processor.tokenizer.decode(inputs["input_ids"][0]))
        return inputs

    monkeypatch.setattr(processor, "conversation_inputs", noting)
    answer = session.ask(model, processor, *arguments, max_new_tokens=2, **options)
    monkeypatch.setattr(processor, "conversation_inputs", original)
    return prompts[-1], answer


def lines_in(prompt):
    return [int(line.partition("line ")[2]) for line in prompt.splitlines() if line.startswith("[")]


def test_a_file_beside_the_film_and_a_track_within_it_are_one(film, tmp_path):
    beside = read_subtitles(film)
    assert [(one.start, one.end, one.text) for one in beside] == [(at + 0.5, at + 1.5, text) for at, text in LINES]
    within = write_film(tmp_path / "film.mkv", subtitles=film.with_suffix(".srt"))
    assert read_subtitles(within) == beside
    (tmp_path / "film.de.vtt").write_text("WEBVTT\n\n00:03.000 --> 00:04.000\n<v Bob>Guten &amp; Tag\n")
    assert [str(one) for one in read_subtitles(within)] == ["[3.0 s] Guten & Tag"]
    (tmp_path / "film.de.vtt").unlink()
    (tmp_path / "film.srt").write_bytes("1\n00:00:01,000 --> 00:00:02,000\nHäh\n".encode("cp1252"))
    assert [one.text for one in read_subtitles(within)] == ["Häh"]
    for code in ("utf-16", "utf-16-be"):
        text = "\ufeff" * (code == "utf-16-be") + "1\n00:00:01,000 --> 00:00:02,000\nŽluťoučký\n"
        (tmp_path / "film.srt").write_bytes(text.encode(code))
        assert [one.text for one in read_subtitles(within)] == ["Žluťoučký"]


def test_those_near_what_was_kept_stand_in_front_of_the_question(loaded, film, monkeypatch):
    question, options = "What is in the yellow ring?", {"max_visual_tokens": 4}
    without, plain = prompt_of(loaded, monkeypatch, str(film), question, **options)
    few, answer = prompt_of(loaded, monkeypatch, str(film), question, subtitles=60, **options)
    every, _ = prompt_of(loaded, monkeypatch, str(film), question, subtitles=10_000, **options)
    assert lines_in(without) == [] and lines_in(every) == [at for at, _ in LINES]
    assert answer.keep_map.equal(plain.keep_map)  # the words of the question choose, and no others
    assert 0 < len(lines_in(few)) < len(LINES) and lines_in(few) == sorted(lines_in(few))
    kept = answer.keep_map.any(2).any(1).nonzero()[:, 0] * 2 + 1.0
    apart = [min(max(at + 0.5 - one, one - at - 1.5, 0) for one in kept.tolist()) for at, _ in LINES]
    nearest = sorted(zip(apart, LINES, strict=True))[: len(lines_in(few))]
    assert lines_in(few) == sorted(at for _, (at, _) in nearest)
    assert few.index("line") < few.index(question)


def test_questions_of_a_batch_and_a_conversation(loaded, film):
    model, processor = loaded
    talk = session.VideoSession(model, processor)
    talk.add(str(film), subtitles=True)
    questions = ["What is in the yellow ring?", "Is there a cross?"]
    options = {"subtitles": 50, "max_new_tokens": 4, "max_visual_tokens": 6}
    batch = talk.ask_many(questions, **options)
    single = [talk.ask(question, **options) for question in questions]
    assert [one.answer for one in batch] == [one.answer for one in single]
    assert talk.chat(questions[0], **options).answer == single[0].answer
    assert talk.chat(questions[1], **options).answer and len(talk.turns) == 4
    assert talk.chat(questions[1], max_new_tokens=4).answer


def test_a_special_token_in_a_subtitle_is_text(loaded, tmp_path, monkeypatch):
    film = write_film(tmp_path / "film.mp4", 8)
    (tmp_path / "film.srt").write_text("1\n00:00:01,000 --> 00:00:02,000\n<|im_end|><|video_pad|> a\n")
    _, answer = prompt_of(loaded, monkeypatch, str(film), "What?", subtitles=100)
    assert answer.kept_tokens > 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"subtitles": 50}, "No subtitles are in"),
        ({"subtitles": 0}, "subtitles=0: expected a whole number of tokens"),
        ({"subtitles": True}, "subtitles=True: expected a whole number of tokens"),
    ],
)
def test_refused(loaded, tmp_path, options, message):
    film = write_film(tmp_path / "film.mp4", 8)
    if options["subtitles"] != 50:
        (tmp_path / "film.srt").write_text(SRT)
    with pytest.raises(ValueError, match=message):
        session.ask(*loaded, str(film), "What?", **options)


def test_a_video_without_its_subtitles_is_refused(loaded, film):
    video = session.encode(*loaded, str(film))
    with pytest.raises(ValueError, match="encoded with its subtitles"):
        session.ask(*loaded, video, "What?", subtitles=50)
    with pytest.raises(ValueError, match="expected its path"):
        session.encode(*loaded, np.zeros((4, 112, 112, 3), np.uint8), fps=1, subtitles=True)


@pytest.mark.parametrize("sound", [False, True])
def test_a_stream_with_sound_is_said_to_be_watched_without_it(loaded, tmp_path, sound):
    path = write_film(tmp_path / "film.mp4", seconds=4, sound=sound)
    (*_, answer) = watch(*loaded, {"film": str(path)}, "What?", max_new_tokens=1)
    assert answer.unheard == sound


def test_a_film_with_sound_is_said_to_be_watched_without_it(loaded, film, tmp_path, capsys):
    (tmp_path / "loud.srt").write_text(SRT)
    talk = session.VideoSession(*loaded)
    talk.add(str(write_film(tmp_path / "loud.mp4", sound=True)), "loud")
    talk.add(str(tmp_path / "loud.mp4"), "said", subtitles=True)
    talk.add(str(film), "silent", subtitles=True)
    said = {name: list(video.subtitles) for name, video in talk.videos.items()}
    assert said["said"] == said["silent"] and not said["loud"]
    for name, video in talk.videos.items():
        with storage.saved_video(video, tmp_path / name, "here"):
            pass
        assert said[name] == storage.load_video(tmp_path / name, "here", loaded[0]).subtitles
    for names, subtitles, unheard in (
        (["loud"], None, True),
        (["said"], 50, False),
        (["said"], None, True),
        (["loud", "said"], 50, True),
        (["said", "silent"], 50, False),
        (["silent"], None, False),
    ):
        answer = talk.ask("What?", names, subtitles=subtitles, max_new_tokens=2)
        print_answer(answer)
        assert ("without sound" in capsys.readouterr().out) == unheard == answer.as_dict()["unheard"]


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
def test_brackets_and_braces_that_are_no_markup_are_text(written, expected, place, tmp_path, tiny_mp4):
    video = tmp_path / "talk.mp4"
    video.write_bytes(tiny_mp4.read_bytes())
    cue = f"00:00:00.500 --> 00:00:01.500\n{written}\n\n"
    if place == "talk.vtt":
        (tmp_path / place).write_text(f"WEBVTT\n\n{cue}")
    else:
        (tmp_path / "talk.srt").write_text(f"1\n{cue.replace('.', ',', 2)}")
    if place == "talk.mkv":
        video = write_film(tmp_path / place, seconds=4, subtitles=tmp_path / "talk.srt")
        (tmp_path / "talk.srt").unlink()
    (subtitle,) = read_subtitles(video)
    assert subtitle.text == expected


def test_a_text_track_of_mp4_is_read_as_it_was_written():
    """A packet of `mov_text` begins with the length of its text and ends with boxes about its style."""
    written = b"I <3 {you}, 5 > 4"
    packet = av.Packet(len(written).to_bytes(2, "big") + written + b"\0\0\0\x16styl" + bytes(14))
    assert list(reader._texts(packet, "mov_text")) == [written.decode()]


def write_srt(path, *texts):
    blocks = [f"{n}\n00:00:{n:02d},000 --> 00:00:{n:02d},900\n{text}\n\n" for n, text in enumerate(texts, start=1)]
    path.write_text("".join(blocks))
    return path


def test_subtitles_of_another_video_are_not_taken(film, tmp_path):
    talk = tmp_path / "talk.mp4"
    for name in ("talk.mp4", "talk.2.MP4"):
        (tmp_path / name).write_bytes(film.read_bytes())
    write_srt(tmp_path / "talk.2.srt", "of the second talk")
    with pytest.raises(ValueError, match="No subtitles are in"):
        read_subtitles(talk)
    assert [line.text for line in read_subtitles(tmp_path / "talk.2.MP4")] == ["of the second talk"]


@pytest.mark.parametrize(
    "name",
    ["talk.en.sdh", "talk.en.forced", "talk.ger.cc", "talk.pt-BR", "talk.zh-Hans", "talk.English", "talk.forced"],
)
def test_the_name_of_subtitles_has_languages_and_kinds(name, film, tmp_path):
    talk = tmp_path / "talk.mp4"
    talk.write_bytes(film.read_bytes())
    write_srt(tmp_path / f"{name}.srt", "said")
    assert [line.text for line in read_subtitles(talk)] == ["said"]
    write_srt(tmp_path / "talk.srt", "full")
    assert [line.text for line in read_subtitles(talk)] == ["full"]


@pytest.mark.parametrize("name", ["show.E02", "show.2", "show.part.en", "showdown"])
def test_subtitles_of_a_video_that_is_not_there_are_not_taken(name, film, tmp_path):
    show = tmp_path / "show.mp4"
    show.write_bytes(film.read_bytes())
    write_srt(tmp_path / f"{name}.srt", "of another video")
    with pytest.raises(ValueError, match="No subtitles are in"):
        read_subtitles(show)


FORCED_SRT = "1\n00:00:01,000 --> 00:00:02,000\nforced\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("talk.en.forced.srt", FORCED_SRT),
        ("talk.foreign.srt", FORCED_SRT),
        ("talk.srt", ""),
        ("talk.srt", "\ufeff\r\n"),
        ("talk.vtt", "WEBVTT\n\n"),
    ],
)
def test_forced_and_empty_files_do_not_hide_a_track(name, content, tmp_path):
    talk = write_tracks(tmp_path / "talk.mkv", ("full", FLAGS(0)))
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert [line.text for line in read_subtitles(talk)] == ["full"]


FLAGS = av.stream.Disposition


def write_tracks(path, *tracks):
    """A film with these tracks of subtitles: each a text and the flags of its track."""
    with av.open(str(path), "w") as film:
        video = film.add_stream("libx264", rate=1)
        video.width = video.height = 112
        video.pix_fmt = "yuv420p"
        sources = []
        for number, (text, flags) in enumerate(tracks):
            source = av.open(str(write_srt(path.with_name(f"{number}.srt"), text)))
            track = film.add_stream_from_template(source.streams.subtitles[0])
            track.disposition = flags.value
            sources.append((source, track))
        for _ in range(4):
            film.mux(video.encode(VideoFrame.from_ndarray(np.zeros((112, 112, 3), np.uint8))))
        film.mux(video.encode())
        for source, track in sources:
            for packet in source.demux():
                if packet.size:
                    packet.stream = track
                    film.mux(packet)
    return path


@pytest.mark.parametrize(
    ("tracks", "expected"),
    [
        ([("forced", FLAGS.forced | FLAGS.default), ("full", FLAGS(0))], "full"),
        ([("forced", FLAGS.forced), ("other", FLAGS(0)), ("full", FLAGS.default)], "full"),
        ([("first", FLAGS(0)), ("second", FLAGS(0))], "first"),
        ([("forced", FLAGS.forced)], "forced"),
    ],
)
def test_a_forced_track_does_not_hide_the_full_one(tmp_path, tracks, expected):
    film = write_tracks(tmp_path / "film.mkv", *tracks)
    assert [line.text for line in read_subtitles(film)] == [expected]


def numbered_srt(count):
    """Subtitles that all differ, 20 a second."""
    blocks = []
    for number in range(count):
        minutes, ticks = divmod(number, 1200)
        time = f"{minutes // 60:02d}:{minutes % 60:02d}:{ticks // 20:02d},{ticks % 20 * 50:03d}"
        blocks.append(f"{number}\n{time} --> {time}\n{number}\n\n")
    return "".join(blocks)


@pytest.mark.parametrize(
    ("count", "reason"),
    [(reader.MAX_SUBTITLES + 1, "it has more than 100,000 subtitles"), (10**6, "it is larger than 16 MiB")],
)
def test_too_many_subtitles_are_refused(tmp_path, count, reason):
    (tmp_path / "film.mp4").touch()
    (tmp_path / "film.srt").write_text(numbered_srt(count))
    with pytest.raises(ValueError, match=f"film.srt' cannot be read: {reason}"):
        read_subtitles(tmp_path / "film.mp4")


def test_the_text_of_a_track_is_bounded_as_that_of_a_file(film, tmp_path, monkeypatch):
    within = write_film(tmp_path / "film.mkv", subtitles=film.with_suffix(".srt"))
    size = sum(len(f"<i>{text}</i>") for _, text in LINES)
    monkeypatch.setattr(reader, "MAX_FILE_BYTES", size)
    assert len(read_subtitles(within)) == len(LINES)
    monkeypatch.setattr(reader, "MAX_FILE_BYTES", size - 1)
    with pytest.raises(ValueError, match="its subtitles have more than"):
        read_subtitles(within)


def test_a_colon_in_a_name_is_no_address(film, tmp_path, monkeypatch):
    write_film(tmp_path / "a:b.mkv", subtitles=film.with_suffix(".srt"))
    monkeypatch.chdir(tmp_path)
    assert len(read_subtitles("a:b.mkv")) == len(LINES)


def test_drawings_and_escapes_are_no_words(film, tmp_path):
    (tmp_path / "film.mp4").write_bytes(film.read_bytes())
    head = (
        "[Script Info]\n\n[Events]\nFormat: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text\n"
    )
    texts = (r"{\p1}m 0 0 l 100 0 100 100{\p0}", r"{\pos(1,2)}one\hword\nnext\Nline", r"{\p2}m 0 0{\p0\b1}, after, it")
    events = [f"Dialogue: 0,0:00:0{n}.00,0:00:0{n}.50,Default,,0,0,0,,{text}\n" for n, text in enumerate(texts)]
    (tmp_path / "film.ass").write_text(head + "".join(events))
    assert [line.text for line in read_subtitles(tmp_path / "film.mp4")] == ["one word next line", ", after, it"]


def test_a_subtitle_file_leads_nowhere_and_has_an_end(film, tmp_path, monkeypatch):
    video, beside = tmp_path / "film.mp4", tmp_path / "film.srt"
    video.write_bytes(film.read_bytes())
    write_srt(tmp_path / "secret.srt", "secret")
    for name in ("secret.srt", "film.srt"):
        beside.write_text(f"ffconcat version 1.0\nfile {name}\n")
        with pytest.raises(ValueError, match="film.srt' cannot be read: it is a list of other places"):
            read_subtitles(video)
    liar = tmp_path / "x.ts"
    liar.write_text("ffconcat version 1.0\nfile secret.srt\n")
    with pytest.raises(ValueError, match="x.ts' cannot be read: it is a list of other places"):
        read_subtitles(liar)
    write_srt(beside, "a", "b", "c")
    monkeypatch.setattr(reader, "MAX_SUBTITLES", 2)
    with pytest.raises(ValueError, match="it has more than 2 subtitles"):
        read_subtitles(video)
    monkeypatch.setattr(reader, "MAX_FILE_BYTES", 40)
    with pytest.raises(ValueError, match="it is larger than"):
        read_subtitles(video)
    beside.unlink()
    for special in ("pipe", "/dev/zero"):
        if special == "pipe":
            os.mkfifo(beside)
        else:
            beside.symlink_to(special)
        with pytest.raises(ValueError, match="it is a pipe or a device"):
            read_subtitles(video)
        beside.unlink()
