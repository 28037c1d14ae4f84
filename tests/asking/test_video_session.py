"""A session answers as one call of `generate`: about one video or several, in a batch, in a conversation."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from clips import make_world, render_world, write_mp4
from qtsplus.asking import answers, session
from qtsplus.asking.question import Batch, prompt_inputs
from qtsplus.asking.session import MOST_TURNS, VideoSession
from qtsplus.live.stream import Stream
from tiny import chat_inputs

FRONT = make_world(10)
BACK = make_world(11)
THINGS = FRONT.objects + BACK.objects
QUESTIONS = [thing.question for thing in THINGS]
FIRST, SECOND, *_, LAST = QUESTIONS
SHORT = {"max_new_tokens": 8}


@pytest.fixture(scope="module")
def cameras(tmp_path_factory):
    """Two mp4 files."""
    folder = tmp_path_factory.mktemp("cameras")
    write_mp4(folder / "front.mp4", render_world(FRONT), 2)
    write_mp4(folder / "back.mp4", render_world(BACK), 2)
    return folder


@pytest.fixture(scope="module")
def both(loaded, cameras):
    """A session about both videos, in which nobody chats."""
    made = VideoSession(*loaded)
    made.add(cameras / "front.mp4")
    made.add(cameras / "back.mp4")
    return made


@pytest.fixture
def fresh(loaded, both):
    """A session about the same encoded videos, without a conversation."""
    made = VideoSession(*loaded)
    for name, video in both.videos.items():
        made.add(video, name)
    return made


@pytest.fixture
def stream(loaded):
    """A stream that has seen the first video."""
    made = Stream(*loaded)
    made.append(render_world(FRONT))
    return made


@pytest.fixture
def positions(loaded, monkeypatch):
    """Sets how many positions the model has."""

    def limit(most):
        monkeypatch.setattr(loaded[0].config.text_config, "max_position_embeddings", most)

    return limit


def one_shot(loaded, content, **options):
    """The answer, the kept indices and the logits of the prompt, from pixels through the chat template."""
    model, processor = loaded
    inputs = chat_inputs(processor, *content, **options)
    output = model.generate(**inputs, **SHORT, return_dict_in_generate=True)
    with torch.no_grad():
        logits = model(**inputs, logits_to_keep=1).logits
    new_ids = output.sequences[0, inputs["input_ids"].shape[1] :]
    text = processor.decode(new_ids, skip_special_tokens=True)
    return text.strip(), output.qtsplus.kept_indices[0], logits


def kept_of(answer):
    kept = [kept.flatten() for kept in answer.keep_maps.values()]
    return torch.cat(kept).nonzero()[:, 0]


def logits_of(made, question):
    inputs = prompt_inputs(made.processor, Batch(made.videos, [question]))
    with torch.no_grad():
        return made.model(**inputs, logits_to_keep=1).logits


def assert_is_one_shot(made, question, answer, expected):
    """A session's answer is the one from pixels: with the same text, tokens and logits."""
    text, kept, logits = expected
    assert answer.answer == text
    assert torch.equal(kept_of(answer), kept)
    assert torch.allclose(logits_of(made, question), logits, atol=1e-4)


def assert_same_tokens(answer, expected):
    assert answer.keep_maps.keys() == expected.keep_maps.keys()
    for name, kept in answer.keep_maps.items():
        assert torch.equal(kept, expected.keep_maps[name])


def assert_same(answer, expected):
    assert answer.answer == expected.answer
    assert answer.evidence == expected.evidence
    assert answer.rho == expected.rho
    assert_same_tokens(answer, expected)


# As one call of generate ----------------------------------------------------------------------------------------------


def as_file(frames, folder):
    write_mp4(folder / "video.mp4", frames, 2)
    return str(folder / "video.mp4")


def as_folder(frames, folder):
    for index, frame in enumerate(frames):
        Image.fromarray(frame).save(folder / f"{index}.png")
    return str(folder)


def as_array(frames, folder):
    return frames


def as_tensor(frames, folder):
    return torch.from_numpy(frames).permute(0, 3, 1, 2)


def as_pictures(frames, folder):
    return [Image.fromarray(frame) for frame in frames]


@pytest.mark.parametrize("kind", [as_file, as_folder, as_array, as_tensor, as_pictures])
def test_a_session_of_one_video_is_one_shot(loaded, tmp_path, kind):
    video = kind(render_world(FRONT), tmp_path)
    options = {} if kind == as_file else {"fps": 2}
    question = FIRST
    made = VideoSession(*loaded)
    made.add(video, **options)
    answer = made.ask(question, **SHORT)
    content = [{"type": "video", "video": video}, {"type": "text", "text": question}]
    assert_is_one_shot(made, question, answer, one_shot(loaded, content, **options))
    assert answer.kept_tokens == len(kept_of(answer))
    for place in answer.evidence:
        cells = [round(168 * side) for side in place.box]
        assert place.pixels == tuple(cells), "cells are 28 of 168 pixels"

    alone = session.ask(*loaded, video, question, **options, **SHORT)
    assert alone.answer == answer.answer
    assert torch.equal(alone.keep_map, answer.keep_map)


def things_of_one_video():
    """The things that only one of the videos shows, each with the name of the video."""
    names_in_front = {thing.name for thing in FRONT.objects}
    names_in_back = {thing.name for thing in BACK.objects}
    for thing in FRONT.objects:
        if thing.name not in names_in_back:
            yield "front.mp4", thing
    for thing in BACK.objects:
        if thing.name not in names_in_front:
            yield "back.mp4", thing


def test_evidence_names_the_video_whatever_the_order(loaded, both):
    turned = VideoSession(*loaded)
    for name in ("back.mp4", "front.mp4"):
        turned.add(both.videos[name], name)
    right = 0
    for name, thing in things_of_one_video():
        for made in (both, turned):
            answer = made.ask(thing.question, **SHORT)
            if answer.answer == thing.mark:
                assert answer.evidence[0].name == name
                right += 1
    assert right >= 8


@pytest.mark.parametrize("name", ["front.mp4", "back.mp4"])
def test_a_question_about_some_of_the_videos(both, name):
    answer = both.ask(FIRST, [name], **SHORT)
    assert list(answer.keep_maps) == [name]
    assert {place.name for place in answer.evidence} == {name}


@pytest.mark.parametrize("names", [["left.mp4"], ["back.mp4", "back.mp4"], [], "back.mp4"])
def test_a_question_about_an_unknown_video_or_one_twice_is_refused(both, names):
    message = f"Got the names {names!r}; expected a list of some of the videos ['front.mp4', 'back.mp4'], each once."
    with pytest.raises(ValueError, match=re.escape(message)):
        both.ask(FIRST, names)


@pytest.mark.parametrize("batch_size", [3, 16])
def test_many_questions_are_each_question(both, batch_size):
    questions = [*QUESTIONS, "What?", f"Is this {'very ' * 40}long?"]
    together = both.ask_many(iter(questions), batch_size=batch_size, **SHORT)
    for question, answer in zip(questions, together, strict=True):
        assert_same(answer, both.ask(question, **SHORT))


def test_a_second_question_asks_no_vision_tower(loaded, both, monkeypatch):
    monkeypatch.setattr(type(loaded[0]), "encode_videos", None)
    assert both.ask(SECOND, **SHORT).answer
    _, answer = both.ask_many(QUESTIONS[:2], retention=0.1, **SHORT)
    assert answer.rho == pytest.approx(0.1)


def test_a_batch_projects_the_keys_of_its_videos_once(both):
    projected = []
    (layer,) = both.model.model.qtsplus.scoring_layers

    def count(module, inputs, output):
        projected.append(len(inputs[0]))

    hook = layer.k_proj.register_forward_hook(count)
    both.ask_many(QUESTIONS[:3], **SHORT)
    hook.remove()
    tokens = sum(len(video.features) for video in both.videos.values())
    assert sum(projected) == tokens + 1, "one more is the null token's"


# Names ----------------------------------------------------------------------------------------------------------------


def test_names_are_unique(loaded, both):
    made = VideoSession(*loaded)
    video = both.videos["front.mp4"]
    names = [made.add(video) for _ in range(3)]
    assert names == ["front.mp4", "front.mp4 (2)", "front.mp4 (3)"]
    with pytest.raises(ValueError, match="is taken"):
        made.add(video, "front.mp4")
    made.remove("front.mp4 (2)")
    assert made.names == ["front.mp4", "front.mp4 (3)"]
    with pytest.raises(ValueError, match=r"names \['front.mp4 \(2\)'\]; expected"):
        made.remove("front.mp4 (2)")


def test_an_empty_name_and_options_without_effect_are_refused(fresh):
    video = fresh.videos["front.mp4"]
    with pytest.raises(ValueError, match="is empty"):
        fresh.add(video, " ")
    with pytest.raises(ValueError, match="Got fps for a video that was encoded before"):
        fresh.add(video, fps=2)


@pytest.mark.parametrize(
    ("video", "options", "message"),
    [
        (["front.mp4"], {}, "Got list of videos \\(1\\); expected a path that is not in a list"),
        (["front.mp4", "back.mp4"], {"fps": 1}, "Got list of videos \\(2\\); expected a path that is not in a list"),
        (None, {}, "Got a video of type NoneType; expected a path, or frames"),
        ("front.mp4", {"start": -1}, "Got start=-1; expected 0 or a finite number above 0"),
        ("front.mp4", {"end": 0}, "Got end=0; expected a finite number above 0"),
    ],
)
def test_a_session_says_what_a_video_is(fresh, video, options, message):
    with pytest.raises(ValueError, match=message):
        fresh.add(video, "new", **options)


def test_frames_may_be_of_a_short_type(fresh):
    frames = torch.as_tensor(render_world(FRONT))
    video = fresh.video(fresh.add(frames.bfloat16(), fps=2))
    assert video.about.metadata.height == frames.shape[1]


def test_a_session_without_a_video_is_refused(loaded):
    with pytest.raises(ValueError, match="no video to ask about"):
        VideoSession(*loaded).ask("What moves?")


def test_a_name_is_text(loaded, both):
    """A file may have any name, which ends no turn."""
    made = VideoSession(*loaded)
    names = ["<|im_end|>", "<|video_pad|>.mp4"]
    for name in names:
        made.add(both.videos["front.mp4"], name)
    answer = made.ask(FIRST, **SHORT)
    assert answer.answer
    assert list(answer.keep_maps) == names


# Refusals -------------------------------------------------------------------------------------------------------------


NO_TEXTS = [None, 3, ["What?"], b"What?", "\ud800"]


@pytest.mark.parametrize("text", NO_TEXTS, ids=repr)
def test_questions_have_to_be_text(fresh, text):
    with pytest.raises(ValueError, match="The question .*expected"):
        fresh.ask(text)
    with pytest.raises(ValueError, match="The question .*expected"):
        fresh.chat(text)
    assert not fresh.turns


@pytest.mark.parametrize("name", NO_TEXTS[1:], ids=repr)
def test_names_have_to_be_text(fresh, name):
    video = fresh.videos["front.mp4"]
    with pytest.raises(ValueError, match="The name .*expected"):
        fresh.add(video, name)
    assert fresh.names == ["front.mp4", "back.mp4"]


BAD_QUERIES = {
    "text": "ab",
    "numbers": [1, 2],
    "one": ["a"],
    "iterator": iter(["a", "b"]),
}


@pytest.mark.parametrize("queries", BAD_QUERIES.values(), ids=BAD_QUERIES)
def test_queries_are_a_text_for_each_question(loaded, both, queries):
    with pytest.raises(ValueError, match="quer.*expected a "):
        answers.answer_questions(*loaded, both.videos, QUESTIONS[:2], queries=queries)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_has_a_question(fresh, batch_size):
    with pytest.raises(ValueError, match=f"batch_size={batch_size}.*expected"):
        fresh.ask_many(QUESTIONS[:1], batch_size=batch_size)


def test_a_text_is_not_a_list_of_questions(fresh):
    with pytest.raises(ValueError, match="expected"):
        fresh.ask_many("What?")


SEVERAL_ANSWERS = [
    {"num_beams": 2},
    {"num_return_sequences": 2, "do_sample": True},
]


@pytest.mark.parametrize("settings", SEVERAL_ANSWERS, ids=str)
def test_a_question_has_one_answer(fresh, monkeypatch, settings):
    config = GenerationConfig(**settings)
    reason = "a question has one answer"
    with pytest.raises(ValueError, match=reason):
        fresh.chat(FIRST, **settings)
    with pytest.raises(ValueError, match=reason):
        fresh.ask(FIRST, generation_config=config)
    monkeypatch.setattr(fresh.model, "generation_config", config)
    with pytest.raises(ValueError, match=reason):
        fresh.ask(FIRST)
    assert not fresh.turns


# Generation -----------------------------------------------------------------------------------------------------------


def test_a_generation_configuration_says_how_long_an_answer_is(fresh, monkeypatch):
    lengths = []
    generate = fresh.model.generate_from

    def noting(prompt, **options):
        lengths.append(options["max_new_tokens"])
        return generate(prompt, **options)

    monkeypatch.setattr(fresh.model, "generate_from", noting)
    config = GenerationConfig(max_new_tokens=3, eos_token_id=fresh.model.generation_config.eos_token_id)
    fresh.ask(FIRST, generation_config=config)
    fresh.ask(FIRST, generation_config=config, max_new_tokens=2)
    fresh.ask(FIRST)
    monkeypatch.setattr(fresh.model.generation_config, "max_new_tokens", 4)
    fresh.ask(FIRST)
    fresh.ask(FIRST, generation_config=config)
    assert lengths == [3, 2, 128, 4, 3]


def test_a_length_that_counts_the_prompt_is_refused(fresh):
    for settings in ({"max_length": 9, "max_new_tokens": 2}, {"generation_config": GenerationConfig(max_length=9)}):
        with pytest.raises(ValueError, match="max_length=9 counts the prompt.*: set max_new_tokens"):
            fresh.ask(FIRST, **settings)


class Words(BaseStreamer):
    """The tokens that a streamer was given, after the prompt."""

    def __init__(self):
        self.calls = []
        self.ended = 0

    def put(self, value):
        self.calls.append(torch.as_tensor(value).flatten())

    def end(self):
        self.ended += 1

    def text(self, processor):
        written = torch.cat(self.calls[1:])
        return processor.decode(written, skip_special_tokens=True).strip()


def test_a_streamer_is_fed(fresh, stream):
    for ask in (fresh.ask, fresh.chat, stream.ask):
        words = Words()
        answer = ask(FIRST, streamer=words, **SHORT)
        assert words.text(fresh.processor) == answer.answer
        assert words.ended == 1
        assert answer.timings["first_token"] > 0


# Conversations --------------------------------------------------------------------------------------------------------


def interrupt(*_):
    raise KeyboardInterrupt


def test_an_interrupted_turn_leaves_no_trace(loaded, fresh):
    fresh.chat(FIRST, **SHORT)
    turns = list(fresh.turns)
    hook = loaded[0].model.language_model.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        fresh.chat("What is in the purple circle?", **SHORT)
    hook.remove()
    assert fresh.turns == turns
    answer = fresh.chat(SECOND, **SHORT)
    assert_same(answer, fresh.ask(SECOND, turns=turns, **SHORT))
    assert fresh.turns == [*turns, SECOND, answer.answer]


def test_a_follow_up_keeps_what_its_own_words_ask_for(fresh):
    first, second = QUESTIONS[:2]
    alone = fresh.ask(second, **SHORT)
    assert_same(fresh.chat(first, **SHORT), fresh.ask(first, **SHORT))
    assert_same_tokens(fresh.chat(second, **SHORT), alone)
    fresh.reset()
    assert_same(fresh.chat(second, **SHORT), alone)


def test_a_video_that_comes_during_a_conversation(loaded, both):
    made = VideoSession(*loaded)
    made.add(both.videos["front.mp4"])
    made.chat(FIRST, selection="all", **SHORT)
    made.add(both.videos["back.mp4"])
    answer = made.chat(LAST, selection="all", **SHORT)
    assert list(answer.keep_maps) == ["front.mp4", "back.mp4"]
    assert answer.kept_tokens == answer.visual_tokens
    made.remove("front.mp4")
    answer = made.chat(LAST, selection="all", **SHORT)
    assert list(answer.keep_maps) == ["back.mp4"]


TURNS = []
for number in range(5):
    TURNS += [QUESTIONS[number], "a mark\n" * (1 + 9 * number)]


@pytest.fixture
def reached(loaded):
    """The furthest position of each step of the language model."""
    positions = []

    def note_positions(module, arguments, options):
        furthest = options["position_ids"][-3:].max()
        positions.append(int(furthest))

    language_model = loaded[0].model.language_model
    hook = language_model.register_forward_pre_hook(note_positions, with_kwargs=True)
    yield positions
    hook.remove()


@pytest.mark.parametrize("position_ids", ["original", "sequential"])
def test_the_oldest_turns_that_have_no_positions_are_left_out(fresh, positions, reached, monkeypatch, position_ids):
    """As few as will do. The answer is that of the other turns, and every token has a position that the model has."""
    monkeypatch.setattr(fresh.model.config.qtsplus_config, "position_ids", position_ids)

    def ask(turns):
        reached.clear()
        return fresh.ask(LAST, turns=turns, retention=0.1, **SHORT)

    expected = []
    needed = []  # positions without the oldest questions
    for gone in range(6):
        answer = ask(TURNS[2 * gone :])
        expected.append(answer)
        end_of_prompt = reached[0] + 1
        needed.append(end_of_prompt + SHORT["max_new_tokens"])
    for gone in range(1, 6):
        for most in (needed[gone], needed[gone - 1] - 1):
            positions(most)
            answer = ask(TURNS)
            assert_same(answer, expected[gone])
            assert answer.warnings[-1].endswith(f"were left out: {gone}.")
            assert max(reached) < most
    least = needed[5]
    positions(least - 1)
    with pytest.raises(ValueError, match=rf"takes {least} positions, and the model has {least - 1}: .* 8 for"):
        ask(TURNS)


def test_a_long_conversation_goes_on(fresh, positions):
    positions(160)
    warned = [bool(fresh.chat(question, selection="all", **SHORT).warnings) for question in QUESTIONS[:10]]
    assert warned == sorted(warned)
    assert not warned[2]
    assert warned[-1]
    assert len(fresh.turns) == 20
    fresh.turns = ["Who?", "A dog."] * MOST_TURNS
    fresh.chat("Where?", **SHORT)
    assert len(fresh.turns) == 2 * MOST_TURNS
    assert fresh.turns[-2] == "Where?"


@pytest.mark.parametrize("way", ["ask", "chat", "stream", "one_shot", "batch"])
def test_a_prompt_beyond_the_models_positions_is_refused(loaded, cameras, fresh, stream, positions, way):
    positions(150)

    def ask_once(question, **options):
        return session.ask(*loaded, cameras / "front.mp4", question, **options)

    def ask_batch(question, **options):
        return answers.answer_questions(*loaded, fresh.videos, ["Why?", question], **options)

    asks = {
        "ask": fresh.ask,
        "chat": fresh.chat,
        "stream": stream.ask,
        "one_shot": ask_once,
        "batch": ask_batch,
    }
    question = FIRST + " word" * 30
    with pytest.raises(ValueError, match=r"takes \d+ positions, and the model has 150: 1\d\d are for text, 60 for"):
        asks[way](question, max_new_tokens=60)
    assert not fresh.turns


def test_turns_are_questions_with_their_answers(fresh):
    with pytest.raises(ValueError, match="turns=.* expected a list of questions and their answers"):
        fresh.ask("What?", turns=["What?"])


def test_threads_talk_in_turn(fresh):
    """Their questions and answers are a conversation that one thread could have had."""

    def chat(question):
        return fresh.chat(question, **SHORT).answer

    asked = QUESTIONS[:8]
    with ThreadPoolExecutor(8) as threads:
        said = list(threads.map(chat, asked))
    questions = fresh.turns[::2]
    replies = fresh.turns[1::2]
    assert dict(zip(questions, replies, strict=True)) == dict(zip(asked, said, strict=True))
    fresh.reset()
    assert [chat(question) for question in questions] == replies
