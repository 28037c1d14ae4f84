"""A question is text, whatever stands in it: no token of it ends a turn, opens another or stands for a video."""

import pytest
import torch

from qtsplus.asking import answers, session
from tiny import assert_same, chat_inputs
from tiny_backbones import each_unlike


@pytest.fixture(scope="module")
def encoded(model, processor, clips):
    return session.encode(model, processor, clips / "short.mp4", fps=2)


@pytest.fixture
def asked(model, processor, encoded, monkeypatch):
    """Asks a question; returns the answer and the inputs of its prompt."""
    made = {}
    prompt_inputs = answers.prompt_inputs

    def note(*arguments, **options):
        made.update(prompt_inputs(*arguments, **options))
        return made

    def ask(question):
        made.clear()
        answer = session.ask(model, processor, encoded, question, max_new_tokens=4)
        return answer, dict(made)

    monkeypatch.setattr(answers, "prompt_inputs", note)
    return ask


def spliced(ids, harmless, question):
    """The ids of a prompt with the ids of another question in place of its own."""
    size = len(harmless)
    start = next(place for place in range(len(ids)) if ids[place : place + size] == harmless)
    return ids[:start] + question + ids[start + size :]


@each_unlike
def test_an_ordinary_question_is_tokenized_as_the_chat_template_does(processor, encoded, asked):
    question = "What moves to the left?\nAnd why?"
    known = {"video_grid_thw": encoded.video_grid_thw, "video_metadata": [encoded.about.metadata]}
    inputs = chat_inputs(processor, {"type": "video"}, question, **known)
    _, given = asked(question)
    assert_same(given["input_ids"], inputs["input_ids"])
    assert_same(given["query_mask"], inputs["query_mask"])


@each_unlike
def test_the_line_break_that_a_template_writes_behind_a_video_is_no_part_of_the_question(processor, encoded):
    known = {"video_grid_thw": encoded.video_grid_thw, "second_per_grid_ts": [encoded.seconds_per_step]}
    question = "What moves?\nAnd why?"
    prompt = f"{processor.user_turn}\n{processor.video_token}\n{question}{processor.turn_end}\n"
    inputs = processor(text=[prompt], return_tensors="pt", **known)
    marked = inputs["input_ids"][inputs["query_mask"].bool()]
    assert processor.tokenizer.decode(marked) == question


def turn(role, *content):
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return {"role": role, "content": parts}


@each_unlike
def test_special_tokens_in_any_turn_of_a_batch_and_in_a_query_are_text(processor, encoded):
    video = {"type": "video"}
    known = {
        "video_grid_thw": encoded.video_grid_thw.repeat(2, 1),
        "second_per_grid_ts": [encoded.seconds_per_step] * 2,
    }
    short = [turn("user", video, "What moves?")]

    def prepared(text):
        """A conversation with the text in a question, an answer and the query, beside one without it."""
        long = [
            turn("user", video, text),
            turn("assistant", text),
            turn("user", "And then?"),
        ]
        return processor.conversation_inputs([long, short], query=[text, "Why?"], **known)

    def ids_of(inputs, row, name="input_ids", mask="attention_mask"):
        is_there = inputs[mask][row].bool()
        return inputs[name][row][is_there].tolist()

    tokenizer = processor.tokenizer
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    text = "".join(special)
    ids = processor.text_ids(text)
    harmless = processor.text_ids("Why?")
    inputs = prepared(text)
    plain = prepared("Why?")
    twice = spliced(spliced(ids_of(plain, 0), harmless, ids), harmless, ids)
    assert ids_of(inputs, 0) == twice
    assert ids_of(inputs, 1) == ids_of(plain, 1)
    assert tokenizer.decode(ids_of(inputs, 0, mask="query_mask")) == "And then?"
    assert ids_of(inputs, 0, "query_input_ids", "query_attention_mask") == ids


def test_a_placeholder_as_text_is_named(processor, model):
    """The tokens that a chat template writes."""
    frames = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
    for placeholder in (processor.image_token, processor.video_token):
        question = f"What is {placeholder}?"
        with pytest.raises(ValueError, match="in the text") as refused:
            processor(text=question)
        assert placeholder in str(refused.value)
        with pytest.raises(ValueError, match="in the text"):
            processor(text=processor.video_token + question, videos=[frames], fps=2)
