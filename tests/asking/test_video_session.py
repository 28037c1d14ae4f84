"""A session answers as one call of `generate`: about one video or several, in a batch, in a conversation."""

from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from clips import make_world, render_world, write_mp4
from qtsplus.asking import answers, session
from qtsplus.asking.choice import Choice
from qtsplus.asking.question import Question, prompt_inputs
from qtsplus.asking.session import VideoSession, encode
from qtsplus.live.stream import Stream
from qtsplus.video import storage

WORLDS = [make_world(10 + index) for index in range(2)]
SHORT = {"max_new_tokens": 8}


@pytest.fixture(scope="module")
def cameras(tmp_path_factory):
    """Two mp4 files."""
    folder = tmp_path_factory.mktemp("cameras")
    for name, world in zip(("front", "back"), WORLDS, strict=True):
        write_mp4(folder / f"{name}.mp4", render_world(world), 2)
    return folder


@pytest.fixture(scope="module")
def both(loaded, cameras):
    made = VideoSession(*loaded)
    for name in ("front", "back"):
        made.add(cameras / f"{name}.mp4")
    return made


@pytest.fixture
def fresh(loaded, both):
    """A session about the same encoded videos, without a conversation."""
    made = VideoSession(*loaded)
    for name, video in both.videos.items():
        made.add(video, name)
    return made


QUESTIONS = [thing.question for world in WORLDS for thing in world.objects]


def one_shot(loaded, content, query=None, **options):
    """The answer, the kept indices and the logits of the prompt, from pixels through the chat template."""
    model, processor = loaded
    more = {"processor_kwargs": {**options, **({} if query is None else {"query": query})}}
    chat = {"tokenize": True, "add_generation_prompt": True, "return_dict": True, "return_tensors": "pt", **more}
    inputs = processor.apply_chat_template([{"role": "user", "content": content}], **chat)
    output = model.generate(**inputs, **SHORT, return_dict_in_generate=True)
    with torch.no_grad():
        logits = model(**inputs, logits_to_keep=1).logits
    text = processor.decode(output.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    return text, output.qtsplus.kept_indices[0], logits


def kept_of(answer):
    return torch.cat([kept.flatten() for kept in answer.keep_maps.values()]).nonzero()[:, 0]


def logits_of(made, question):
    inputs = prompt_inputs(made.processor, [Question(made.videos, question)])
    with torch.no_grad():
        return made.model(**inputs, logits_to_keep=1).logits


def same(one, other):
    return (one.answer, one.evidence, one.rho) == (other.answer, other.evidence, other.rho) and all(
        torch.equal(kept, other.keep_maps[name]) for name, kept in one.keep_maps.items()
    )


# As one call of generate ----------------------------------------------------------------------------------------------


def as_file(frames, folder):
    write_mp4(folder / "film.mp4", frames, 2)
    return str(folder / "film.mp4"), {}


def as_folder(frames, folder):
    for index, frame in enumerate(frames):
        Image.fromarray(frame).save(folder / f"{index}.png")
    return str(folder), {"fps": 2}


KINDS = {
    "file": as_file,
    "folder": as_folder,
    "array": lambda frames, _: (frames, {"fps": 2}),
    "tensor": lambda frames, _: (torch.from_numpy(frames).permute(0, 3, 1, 2), {"fps": 2}),
    "pictures": lambda frames, _: ([Image.fromarray(frame) for frame in frames], {"fps": 2}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_of_one_video_is_one_shot(loaded, tmp_path, kind):
    video, options = KINDS[kind](render_world(WORLDS[0]), tmp_path)
    made, question = VideoSession(*loaded), QUESTIONS[0]
    name = made.add(video, **options)
    answer = made.ask(question, **SHORT)
    text, kept, logits = one_shot(
        loaded, [{"type": "video", "video": video}, {"type": "text", "text": question}], **options
    )
    assert answer.answer == text and torch.equal(kept_of(answer), kept) and answer.kept_tokens == len(kept)
    assert torch.allclose(logits_of(made, question), logits, atol=1e-4)
    alone = session.ask(*loaded, video, question, **options, **SHORT)
    assert alone.answer == text and torch.equal(alone.keep_map, answer.keep_maps[name])
    assert [one.pixels for one in alone.evidence] == [one.pixels for one in answer.evidence]
    for one in answer.evidence:
        assert one.pixels == tuple(round(168 * side) for side in one.box), "cells are 28 of 168 pixels"


def test_a_session_of_two_videos_is_one_shot(loaded, cameras, both):
    content = []
    for name in both.names:
        content += [{"type": "text", "text": f"{name}: "}, {"type": "video", "video": str(cameras / name)}]
    for question in QUESTIONS[::4]:
        answer = both.ask(question, **SHORT)
        text, kept, logits = one_shot(loaded, [*content, {"type": "text", "text": question}], query=question)
        assert answer.answer == text and torch.equal(kept_of(answer), kept)
        assert torch.allclose(logits_of(both, question), logits, atol=1e-4)


def test_evidence_names_the_video_whatever_the_order(loaded, both, cameras):
    turned = VideoSession(*loaded)
    for name in reversed(both.names):
        turned.add(cameras / name)
    named = []
    for name, world, other in zip(both.names, WORLDS, WORLDS[::-1], strict=True):
        for thing in world.objects:
            if thing.name in {one.name for one in other.objects}:
                continue  # the other camera shows one of that name too
            for made in (both, turned):
                answer = made.ask(thing.question, **SHORT)
                if answer.answer == thing.mark:
                    named.append(answer.evidence[0].name == name)
    assert len(named) >= 8 and all(named)


def test_a_question_about_some_of_the_videos(both):
    for name in both.names:
        answer = both.ask(QUESTIONS[0], [name], **SHORT)
        assert list(answer.keep_maps) == [name] and {one.name for one in answer.evidence} == {name}
        assert same(answer, both.ask(QUESTIONS[0], [name], **SHORT))
    with pytest.raises(ValueError, match=r"no video 'left.mp4'; expected some of front.mp4, back.mp4"):
        both.ask(QUESTIONS[0], ["left.mp4"])


def test_many_questions_are_each_question(both):
    asked = [*QUESTIONS, "What?", f"Is this {'very ' * 40}long?"]
    for batch_size in (3, 16):
        for question, answer in zip(asked, both.ask_many(asked, batch_size=batch_size, **SHORT), strict=True):
            assert same(answer, both.ask(question, **SHORT))


def test_a_second_question_asks_no_tower(loaded, both, monkeypatch):
    monkeypatch.setattr(type(loaded[0]), "encode_videos", None)
    assert both.ask(QUESTIONS[1], **SHORT).answer
    assert both.ask_many(QUESTIONS[:2], retention=0.1, **SHORT)[1].rho == pytest.approx(0.1)


def test_a_batch_projects_the_keys_of_its_videos_once(both):
    projected, layer = [], both.model.model.qtsplus.scoring_layers[-1]
    hook = layer.k_proj.register_forward_hook(lambda _, inputs, __: projected.append(len(inputs[0])))
    both.ask_many(QUESTIONS[:3], **SHORT)
    hook.remove()
    tokens = [len(video.features) for video in both.videos.values()]
    assert sum(projected) == sum(tokens) + 1, "and the null token's"


# Names ----------------------------------------------------------------------------------------------------------------


def test_names_are_unique(loaded, both, tiny_mp4):
    made, video = VideoSession(*loaded), both.videos["front.mp4"]
    with pytest.raises(ValueError, match="no video to ask about"):
        made.ask("What moves?")
    assert [made.add(video), made.add(video), made.add(video)] == ["front.mp4", "front.mp4 (2)", "front.mp4 (3)"]
    for name in ("front.mp4", " "):
        with pytest.raises(ValueError, match="is taken|is empty"):
            made.add(video, name)
    with pytest.raises(ValueError, match="Got fps for a video that was encoded before"):
        made.add(video, fps=2)
    made.remove("front.mp4 (2)")
    assert made.names == ["front.mp4", "front.mp4 (3)"]
    with pytest.raises(ValueError, match="no video 'front.mp4 \\(2\\)'"):
        made.remove("front.mp4 (2)")


@pytest.mark.parametrize("text", [None, 3, ["What?"], b"What?", "\ud800"], ids=repr)
def test_what_is_no_text_is_refused(fresh, text):
    names = fresh.names
    for call in (fresh.ask, fresh.chat, lambda question: fresh.ask_many([question])):
        with pytest.raises(ValueError, match="The question .*expected"):
            call(text)
    if text is not None:
        with pytest.raises(ValueError, match="The name .*expected"):
            fresh.add(fresh.videos["front.mp4"], text)
    assert fresh.names == names and not fresh.turns


@pytest.mark.parametrize(
    "call",
    [{"questions": "What?"}, {"batch_size": 0}, {"batch_size": -1}, {"num_return_sequences": 2}, {"num_beams": 2}],
    ids=str,
)
def test_what_would_lose_answers_is_refused(fresh, call):
    questions = call.pop("questions", [QUESTIONS[0]])
    with pytest.raises(ValueError, match="expected|one answer"):
        fresh.ask_many(questions, **call)
    if "batch_size" not in call and questions != "What?":
        with pytest.raises(ValueError, match="one answer"):
            fresh.chat(QUESTIONS[0], do_sample=True, **call)
        assert fresh.chat(QUESTIONS[0], **SHORT).answer


@pytest.mark.parametrize("where", ["the call", "the model"])
@pytest.mark.parametrize("settings", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}], ids=str)
def test_several_answers_in_a_configuration_are_refused_too(fresh, monkeypatch, where, settings):
    config, call = GenerationConfig(**settings), {}
    if where == "the model":
        monkeypatch.setattr(fresh.model, "generation_config", config)
    else:
        call = {"generation_config": config}
    with pytest.raises(ValueError, match="a question has one answer"):
        fresh.ask(QUESTIONS[0], **call)


def test_a_generation_configuration_says_how_long_an_answer_is(fresh, monkeypatch):
    lengths, generate = [], fresh.model.generate_from
    monkeypatch.setattr(
        fresh.model,
        "generate_from",
        lambda prompt, **call: lengths.append(call["max_new_tokens"]) or generate(prompt, **call),
    )
    config = GenerationConfig(max_new_tokens=3, eos_token_id=fresh.model.generation_config.eos_token_id)
    for call in ({"generation_config": config}, {"generation_config": config, "max_new_tokens": 2}, {}):
        fresh.ask(QUESTIONS[0], **call)
    assert lengths == [3, 2, 128]


def test_a_streamer_is_fed(loaded, fresh):
    class Words(BaseStreamer):
        def __init__(self):
            self.given, self.ended = [], 0

        def put(self, value):
            self.given.append(value)

        def end(self):
            self.ended += 1

    stream = Stream(*loaded)
    stream.append(render_world(WORLDS[0]))
    for ask in (fresh.ask, fresh.chat, stream.ask):
        words = Words()
        answer = ask(QUESTIONS[0], streamer=words, **SHORT)
        written = torch.stack([torch.as_tensor(one).flatten()[-1] for one in words.given[1:]])
        said = fresh.processor.decode(written, skip_special_tokens=True).strip()
        assert said == answer.answer and words.ended == 1 and answer.timings["first_token"] > 0


def test_questions_may_come_from_anywhere(fresh):
    answers = fresh.ask_many((question for question in QUESTIONS[:3]), **SHORT)
    assert all(same(*pair) for pair in zip(answers, fresh.ask_many(QUESTIONS[:3], **SHORT), strict=True))


@pytest.mark.parametrize("frames", [0, -2])
def test_no_frames_are_no_video(loaded, cameras, frames):
    with pytest.raises(ValueError, match=f"max_frames={frames}"):
        encode(*loaded, cameras / "front.mp4", max_frames=frames)


def test_frames_without_their_rate_and_a_list_of_videos_are_refused(loaded):
    frames = render_world(WORLDS[0])
    with pytest.raises(ValueError, match="frames without their times"):
        encode(*loaded, frames)
    with pytest.raises(ValueError, match="Got 2 videos; expected the frames of one"):
        encode(*loaded, [frames, frames], fps=2)


def test_a_name_is_text(loaded, both):
    """A file may be called anything, and its name ends no turn."""
    made = VideoSession(*loaded)
    for name in ("<|im_end|>", "<|video_pad|>.mp4"):
        made.add(both.videos["front.mp4"], name)
    answer = made.ask(QUESTIONS[0], **SHORT)
    assert answer.answer and list(answer.keep_maps) == ["<|im_end|>", "<|video_pad|>.mp4"]


# Conversations --------------------------------------------------------------------------------------------------------


def test_a_turn_that_was_interrupted_leaves_no_trace(loaded, fresh, monkeypatch):
    fresh.chat(QUESTIONS[0], **SHORT)
    turns = list(fresh.turns)
    hook = loaded[0].model.language_model.register_forward_pre_hook(lambda *_: exec("raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        fresh.chat("What is in the purple circle?", **SHORT)
    hook.remove()
    assert fresh.turns == turns
    answer, again = fresh.chat(QUESTIONS[1], **SHORT), fresh.ask(QUESTIONS[1], turns=turns, **SHORT)
    assert same(answer, again) and fresh.turns == [*turns, QUESTIONS[1], answer.answer]


def test_a_follow_up_keeps_what_its_own_words_ask_for(fresh):
    first, second = QUESTIONS[:2]
    assert same(fresh.chat(first, **SHORT), fresh.ask(first, **SHORT))
    follow_up, alone = fresh.chat(second, **SHORT), fresh.ask(second, **SHORT)
    assert all(torch.equal(kept, alone.keep_maps[name]) for name, kept in follow_up.keep_maps.items())
    fresh.reset()
    assert same(fresh.chat(second, **SHORT), alone)


def test_a_video_that_comes_during_a_conversation(loaded, both):
    made = VideoSession(*loaded)
    made.add(both.videos["front.mp4"])
    made.chat(QUESTIONS[0], selection="all", **SHORT)
    made.add(both.videos["back.mp4"])
    answer = made.chat(QUESTIONS[-1], selection="all", **SHORT)
    assert list(answer.keep_maps) == ["front.mp4", "back.mp4"] and answer.kept_tokens == answer.visual_tokens
    made.remove("front.mp4")
    assert list(made.chat(QUESTIONS[-1], selection="all", **SHORT).keep_maps) == ["back.mp4"]


@pytest.mark.parametrize("position_ids", ["original", "sequential"])
def test_the_oldest_turns_go_that_have_no_positions(loaded, fresh, monkeypatch, position_ids):
    """As few as will do; the answer is that of the turns that are left, and no token stands further than they say."""
    model, noted, reached, count = loaded[0], [], [], answers.positions_needed
    monkeypatch.setattr(model.config.qtsplus_config, "position_ids", position_ids)
    monkeypatch.setattr(answers, "positions_needed", lambda *call: noted.append(count(*call)) or noted[-1])
    turns = [text for number in range(5) for text in (QUESTIONS[number], "a mark\n" * (1 + 9 * number))]

    def ask(first, most=32768):
        noted.clear(), reached.clear()
        monkeypatch.setattr(model.config.text_config, "max_position_embeddings", most)
        choice = {"turns": turns[2 * first :], "retention": 0.1, **SHORT}
        (answer,) = answers.answer_questions(*loaded, fresh.videos, [QUESTIONS[-1]], **choice)
        return answer, noted[0]

    whole = [ask(first) for first in range(6)]
    hook = model.model.language_model.register_forward_pre_hook(
        lambda _, __, call: reached.append(int(call["position_ids"][-3:].max())), with_kwargs=True
    )
    for gone in range(1, 6):
        for most in (whole[gone][1], whole[gone - 1][1] - 1):
            answer, _ = ask(0, most)
            assert same(answer, whole[gone][0]) and answer.warnings[-1].endswith(f"the oldest questions: {gone}.")
            assert max(reached) < most
    hook.remove()
    with pytest.raises(
        ValueError, match=rf"takes {whole[5][1]} positions, and the model has {whole[5][1] - 1}: .* 8 for"
    ):
        ask(0, whole[5][1] - 1)


def test_a_long_conversation_goes_on(loaded, fresh, monkeypatch):
    monkeypatch.setattr(loaded[0].config.text_config, "max_position_embeddings", 160)
    gone = [bool(fresh.chat(question, selection="all", **SHORT).warnings) for question in QUESTIONS[:10]]
    assert gone == sorted(gone) and not gone[2] and gone[-1] and len(fresh.turns) == 20


def test_a_conversation_keeps_a_bounded_number_of_questions(fresh, monkeypatch):
    monkeypatch.setattr(session, "EARLIER", 2)
    warnings = [fresh.chat(question, **SHORT).warnings for question in QUESTIONS[:5]]
    assert fresh.turns[::2] == QUESTIONS[3:5] and fresh.left_out == 3
    kept = "A conversation keeps its last 2 questions. Left out, the oldest: "
    assert warnings == [[], [], [], [f"{kept}1."], [f"{kept}2."]]
    fresh.reset()
    assert fresh.chat(QUESTIONS[0], **SHORT).warnings == []


def test_what_has_no_positions_is_refused_on_every_way(loaded, cameras, fresh, monkeypatch):
    stream, film = Stream(*loaded), cameras / "front.mp4"
    stream.append(render_world(WORLDS[0]))
    question = f"{QUESTIONS[0]} {'word ' * 30}"
    ways = [fresh.ask, fresh.chat, lambda *call, **more: fresh.ask_many([*call, "What?"], **more), stream.ask]
    ways += [lambda *call, **more: session.ask(*loaded, film, *call, **more)]
    monkeypatch.setattr(loaded[0].config.text_config, "max_position_embeddings", 150)
    for ask in ways:
        with pytest.raises(ValueError, match=r"takes \d+ positions, and the model has 150: \d+ are for text, 60 for"):
            ask(question, max_new_tokens=60)
        with pytest.raises(ValueError, match="turns=.* expected a list of questions and their answers"):
            ask("What?", turns=["What?"]) if ask != fresh.chat else fresh.ask("What?", turns="no")
    assert not fresh.turns


def test_threads_talk_in_turn(loaded, fresh):
    """As if somebody had asked one after another."""
    with ThreadPoolExecutor(8) as threads:
        said = list(threads.map(lambda question: fresh.chat(question, **SHORT).answer, QUESTIONS[:8]))
    assert dict(zip(fresh.turns[::2], fresh.turns[1::2], strict=True)) == dict(zip(QUESTIONS[:8], said, strict=True))
    again, turns = VideoSession(*loaded), fresh.turns
    again.videos.update(fresh.videos)
    assert [again.chat(question, **SHORT).answer for question in turns[::2]] == turns[1::2]


# On disk --------------------------------------------------------------------------------------------------------------


def test_what_is_no_stored_video_is_named(loaded, both, tmp_path):
    made_by = storage.fingerprint(*loaded)
    with storage.saved_video(both.videos["front.mp4"], tmp_path / "video", made_by) as stored:
        pass
    whole = (tmp_path / "video").read_bytes()
    for name, content in (("cut", whole[:-1000]), ("empty", b""), ("text", b"no safetensors" * 9)):
        (tmp_path / name).write_bytes(content)
    save_file(load_file(tmp_path / "video"), tmp_path / "foreign")
    for name in ("missing", "cut", "empty", "text", "foreign"):
        with pytest.raises(ValueError, match=f"The stored video '.*{name}' cannot be used: .*; encode the video again"):
            storage.load_video(tmp_path / name, made_by, loaded[0])
    back = storage.load_video(tmp_path / "video", made_by, loaded[0], stored)
    assert torch.equal(back.features, both.videos["front.mp4"].features)
    assert back.about.metadata == both.videos["front.mp4"].about.metadata
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "empty", "foreign", "text", "video"]


# A player's clock -----------------------------------------------------------------------------------------------------


def write_at(path, frames, times):
    """Each frame at its time, in seconds."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=16)
        stream.height, stream.width, stream.pix_fmt, stream.options = *frames.shape[1:3], "yuv420p", {"crf": "10"}
        stream.time_base = stream.codec_context.time_base = Fraction(1, 16)
        for frame, time in zip(frames, times, strict=True):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            picture.pts, picture.time_base = round(16 * time), Fraction(1, 16)
            container.mux(stream.encode(picture))
        container.mux(stream.encode())


@pytest.mark.parametrize("late", [0.0, 3.0])
def test_evidence_of_a_variable_rate_is_on_the_players_clock(loaded, tmp_path, late):
    """Four frames a second at first and sixteen later: of the frames, most show the second half."""
    world, right, total = WORLDS[0], 0, 0
    times = [*np.arange(0, 4, 0.25), *np.arange(4, 8, 0.0625)]
    write_at(tmp_path / "film.mp4", render_world(world)[[int(2 * time) for time in times]], late + np.array(times))
    made = VideoSession(*loaded)
    made.add(tmp_path / "film.mp4")
    for thing in world.objects:
        answer = made.ask(thing.question, **SHORT)
        if answer.answer == thing.mark:
            seen = answer.evidence[0]
            total += 1
            right += seen.start - late < thing.vanishes_at and seen.end - late > thing.appears_at
            assert late <= answer.evidence[0].start < answer.evidence[0].end <= late + 8.1
    assert total >= 3 and right == total


def test_questions_about_videos_of_their_own_are_answered_as_alone(loaded, both):
    """One row about one video, one about two, one about another."""
    front, back = both.videos.values()
    choice = Choice(max_visual_tokens=7)
    questions = []
    for videos, text in zip(
        [{"front": front}, {"front": front, "back": back}, {"back": back}], QUESTIONS, strict=False
    ):
        questions.append(Question(videos, text, choice=choice))
    together = answers.answer_batch(*loaded, questions, **SHORT)
    for question, answer in zip(questions, together, strict=True):
        (alone,) = answers.answer_batch(*loaded, [question], **SHORT)
        assert same(answer, alone)
        assert list(answer.keep_maps) == list(question.videos)
        assert answer.video == alone.video
    with pytest.raises(ValueError, match="no video to ask about"):
        answers.answer_batch(*loaded, [questions[0], Question({}, QUESTIONS[1])])


@pytest.mark.parametrize("queries", ["ab", [1, 2], ["a"], iter(["a", "b"])], ids=str)
def test_queries_are_a_text_for_each_question(loaded, both, queries):
    with pytest.raises(ValueError, match="quer.*expected a "):
        answers.answer_questions(*loaded, both.videos, QUESTIONS[:2], queries=queries)
