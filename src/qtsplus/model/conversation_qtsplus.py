"""Conversations on their way to a prompt: which turn is the question, and texts in which no token is special."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

import torch
from torch import Tensor
from transformers import BatchFeature

from .question_qtsplus import find_user_turns

if TYPE_CHECKING:
    from .processor_mixin_qtsplus import QTSplusProcessorMixin

_BLANK = "\ue000"  # the place of a text in a rendered chat template; a character for private use
_BLANKS = "\u0120\u010a\u010d\u0109\u2581 "  # blanks and line breaks, as vocabularies write them
# Options of `apply_chat_template` that are off where a prompt is only written to find the question.
_TO_READ = {
    "tokenize": False,
    "return_dict": False,
    "add_generation_prompt": False,
    "continue_final_message": False,
    "return_assistant_tokens_mask": False,
}

# --- The question ---


class Question(NamedTuple):
    """Where the last message of a user is in a prompt."""

    turn: int | None = None  # the index of its turn as [`find_query_mask`] takes it; `None` if no turn has it
    surroundings: Sequence[str] = ()  # the template's words in that turn: before each text, and behind the last


def find_question(processor: "QTSplusProcessorMixin", messages: list, **kwargs) -> Question:
    """
    The question of a conversation. A mark is written in place of each text of a user's last message; the turn that has
    the mark is the question's. `kwargs` are those of `apply_chat_template`.
    """
    question = Question()
    of_users = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    mark = str(uuid4().int)
    marked = list(messages)
    for last in of_users[-1:]:
        marked[last] = _change_texts(messages[last], lambda text: mark)
    ids = _prompt_ids(processor, marked, **kwargs)
    token_ids = processor.turn_token_ids
    special = token_ids["special_token_ids"]
    turns = find_user_turns(
        torch.tensor(ids, device="cpu"),
        token_ids["user_turn_token_ids"],
        token_ids["turn_end_token_id"],
    )
    for index, (start, stop) in enumerate(turns):
        # A template may write the first word directly behind the header.
        words = "".join(_words(processor, [token for token in ids[start - 1 : stop] if token not in special]))
        if mark in words:
            if processor.tokenizer.truncation_side == "left":  # what it leaves of the turns is counted from the end
                index -= len(turns)
            question = Question(index, words.split(mark))
    return question


def _prompt_ids(processor: "QTSplusProcessorMixin", messages: list, **kwargs) -> list[int]:
    """The ids of messages as the chat template writes them, without an answer's header; `kwargs` are its own."""
    kwargs.update(_TO_READ)
    if not kwargs.get("sanitize_control_tokens"):
        return processor.prompt_ids(processor.apply_chat_template(messages, **kwargs))
    # Only the tokenizer tells a header of the template from one in a text.
    template = kwargs.pop("chat_template", None)
    templates = processor.chat_template
    if isinstance(templates, dict):
        template = templates.get(template or "default", template)
    kwargs.update(tokenize=True, return_tensors=None)
    return processor.tokenizer.apply_chat_template(messages, chat_template=template or templates, **kwargs)


def _words(processor: "QTSplusProcessorMixin", ids: list[int]) -> list[str]:
    """The tokens as the vocabulary writes them, without blanks and line breaks."""
    return [token.strip(_BLANKS) for token in processor.tokenizer.convert_ids_to_tokens(ids)]


def unmark_template(
    processor: "QTSplusProcessorMixin",
    ids: Tensor,
    mask: Tensor,
    surroundings: Sequence[str],
) -> None:
    """
    Takes the words of a template, and the blanks around them, out of the mask `[S]` of a turn, in place. A token that
    a text shares stays. So does all of a turn that does not hold these words.
    """
    places = mask.nonzero()[:, 0]
    tokens = _words(processor, ids[places].tolist())
    offsets = list(accumulate(map(len, tokens), initial=0))
    turn = "".join(tokens)
    first, *between, behind = surroundings
    if not turn.startswith(first[: len(turn)]):  # truncation may have cut it
        return
    begin = len(first)
    texts = []
    for words in between:
        end = turn.find(words, begin)
        if end < 0:
            end = len(turn)
        texts.append((begin, end))
        begin = end + len(words)
    texts.append((begin, len(turn.removesuffix(behind))))
    mask[places] = 0
    for begin, end in texts:
        mask[places[bisect_right(offsets, begin) - 1 : bisect_left(offsets, end)]] = 1


# --- Plain texts ---

TextIds = list[list[int]]  # the ids of each text of a conversation that is left blank


def plain_inputs(processor: "QTSplusProcessorMixin", conversations: Sequence[list[dict]], **kwargs) -> BatchFeature:
    """
    The inputs of conversations in which every text is plain text: `<|im_end|>` in it ends no turn, and
    `<|video_pad|>` is no placeholder. Text without special tokens gets the ids of `apply_chat_template`.

    Args:
        conversations: messages as `apply_chat_template` takes them; a video is only `{"type": "video"}`. Each ends
            where an answer begins.
        kwargs: as in a call, such as `query`, and `videos` or `video_grid_thw`.

    Returns:
        The model's inputs as tensors, padded; no `mm_token_type_ids`.
    """
    # Each text that holds special tokens is left blank in the prompt, and its ids take the place of the blank.
    prompts = []
    questions = []
    ids_of_texts = []
    for messages in conversations:
        texts: TextIds = []
        blanked = [_blank_texts(processor, message, texts) for message in messages]
        prompts.append(processor.apply_chat_template(blanked, tokenize=False, add_generation_prompt=True))
        questions.append(find_question(processor, blanked))
        ids_of_texts.append(texts)

    # The model does not need `mm_token_type_ids`.
    options = dict(padding=True, return_tensors="pt", return_mm_token_type_ids=False, **kwargs)
    if not any(ids_of_texts):
        return processor(text=prompts, questions=questions, **options)

    # A special token holds the place of such a text, so that its neighbours are tokenized separately from it.
    special = processor.tokenizer.convert_ids_to_tokens(processor.turn_token_ids["special_token_ids"])
    prompt = "".join(prompts)
    blank = next(token for token in special if token not in prompt)
    prompts = [prompt.replace(_BLANK, blank) for prompt in prompts]
    inputs = processor(text=prompts, **options)
    inputs.update(_fill_blanks(processor, inputs, blank, ids_of_texts))
    inputs["query_mask"] = processor.query_mask(inputs["input_ids"], questions)
    return inputs


def _blank_texts(
    processor: "QTSplusProcessorMixin",
    message: dict,
    texts: TextIds,
) -> dict:
    """A message with a blank for every text that holds special tokens; the ids of those texts go to `texts`."""

    def without(text: str) -> str:
        ids = processor.text_ids(text)
        if _BLANK not in text and ids == processor.prompt_ids(text):
            return text
        texts.append(ids)
        return _BLANK

    return _change_texts(message, without)


def _change_texts(message: dict, change: Callable[[str], str]) -> dict:
    """A message with other texts."""
    content = message.get("content") or []
    if isinstance(content, str):
        return {**message, "content": change(content)}
    parts = []
    for part in content:
        if isinstance(part.get("text"), str):
            part = {**part, "text": change(part["text"])}
        parts.append(part)
    return {**message, "content": parts}


def _fill_blanks(
    processor: "QTSplusProcessorMixin",
    inputs: BatchFeature,
    blank: str,
    ids_of_texts: list[TextIds],
) -> BatchFeature:
    """The `input_ids` and `attention_mask` of prompts with the ids of their texts in place of the blanks."""
    blank_id = processor.tokenizer.convert_tokens_to_ids(blank)
    rows = []
    for ids, mask, texts in zip(inputs["input_ids"], inputs["attention_mask"], ids_of_texts, strict=True):
        remaining = iter(texts)
        row: list[int] = []
        for token in ids[mask.bool()].tolist():
            row += next(remaining) if token == blank_id else [token]
        rows.append(row)
    return processor.tokenizer.pad({"input_ids": rows}, padding=True, return_tensors="pt")
