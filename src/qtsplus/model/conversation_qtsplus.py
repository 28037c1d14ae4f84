"""Conversations on their way to a prompt: which turn is the question, and texts in which no token is special."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from transformers import BatchFeature

from .question_qtsplus import find_user_turns

if TYPE_CHECKING:
    from .processor_mixin_qtsplus import QTSplusProcessorMixin

_BLANK = "\ue000"  # the place of a text in a rendered chat template; a character for private use
# Options of `apply_chat_template` that are off where a prompt is only written to count its turns.
_TO_COUNT = {
    "tokenize": False,
    "return_dict": False,
    "add_generation_prompt": False,
    "continue_final_message": False,
    "return_assistant_tokens_mask": False,
}

# --- The question ---


def question_turns(processor: "QTSplusProcessorMixin", conversation: list, *args, **kwargs) -> list[int | None]:
    """
    Per conversation, which of the turns that the chat template writes as a user's is the last message of a user, as
    [`find_query_mask`] takes it; `args` and `kwargs` are those of `apply_chat_template`.
    """
    is_one = isinstance(conversation[0], Mapping)
    turns: list[int | None] = []
    for messages in [conversation] if is_one else conversation:
        question = None
        for index, message in enumerate(messages):
            if message.get("role") == "user":
                question = index
        if question is None:
            turns.append(None)
        elif question == len(messages) - 1:
            turns.append(-1)
        else:
            turn = _count_user_turns(processor, messages[: question + 1], *args, **kwargs) - 1
            if processor.tokenizer.truncation_side == "left":  # turns at the beginning may be cut off
                turn -= _count_user_turns(processor, messages, *args, **kwargs)
            turns.append(turn)
    return turns


def _count_user_turns(processor: "QTSplusProcessorMixin", messages: list, *args, **kwargs) -> int:
    """How many turns are written as a user's in the prompt of these messages."""
    kwargs.update(zip(("chat_template", "tools", "documents"), args, strict=False))
    kwargs.update(_TO_COUNT)
    if kwargs.get("sanitize_control_tokens"):  # only the tokenizer tells a header of the template from one in a text
        template = kwargs.pop("chat_template", None) or processor.chat_template
        kwargs.update(tokenize=True, return_tensors=None)
        ids = processor.tokenizer.apply_chat_template(messages, chat_template=template, **kwargs)
    else:
        ids = processor.prompt_ids(processor.apply_chat_template(messages, **kwargs))
    token_ids = processor.query_token_ids
    turns = find_user_turns(torch.tensor(ids), token_ids["user_turn_token_ids"], token_ids["turn_end_token_id"])
    return len(turns)


# --- Plain texts ---


def plain_inputs(processor: "QTSplusProcessorMixin", conversations: Sequence[list[dict]], **kwargs) -> BatchFeature:
    """
    [`QTSplusProcessorMixin.conversation_inputs`]: each text that holds special tokens is left blank in the prompt, and
    its ids take the place of the blank.
    """
    prompts = []
    turns = []
    ids_of_texts: list[list[list[int]]] = []  # per conversation the ids of the texts that were left blank
    for messages in conversations:
        texts: list[list[int]] = []
        blanked = [_blank_texts(processor, message, texts) for message in messages]
        prompts.append(processor.apply_chat_template(blanked, tokenize=False, add_generation_prompt=True))
        turns += question_turns(processor, blanked)
        ids_of_texts.append(texts)

    # A special token holds the place of such a text, so that its neighbours are tokenized separately from it.
    candidates = [processor.tokenizer.pad_token]
    candidates += [token.content for token in processor.tokenizer.added_tokens_decoder.values() if token.special]
    written = "".join(prompts)
    blank = next(token for token in candidates if token not in written)
    prompts = [prompt.replace(_BLANK, blank) for prompt in prompts]
    inputs = processor(text=prompts, padding=True, return_tensors="pt", **kwargs)
    inputs.pop("mm_token_type_ids", None)  # the model does not need them
    if any(ids_of_texts):
        inputs.update(_fill_blanks(processor, inputs, blank, ids_of_texts))
    inputs["query_mask"] = processor.query_mask(inputs["input_ids"], turns)
    return inputs


def _blank_texts(
    processor: "QTSplusProcessorMixin",
    message: dict,
    texts: list[list[int]],
) -> dict:
    """A message with a blank for every text that holds special tokens; the ids of those texts go to `texts`."""

    def without(text: str) -> str:
        ids = processor.text_ids(text)
        if _BLANK not in text and ids == processor.prompt_ids(text):
            return text
        texts.append(ids)
        return _BLANK

    content = message["content"]
    if isinstance(content, str):
        return message | {"content": without(content)}
    parts = []
    for part in content:
        if "text" in part:
            part = part | {"text": without(part["text"])}
        parts.append(part)
    return message | {"content": parts}


def _fill_blanks(
    processor: "QTSplusProcessorMixin",
    inputs: BatchFeature,
    blank: str,
    ids_of_texts: list[list[list[int]]],
) -> BatchFeature:
    """The `input_ids` and `attention_mask` of prompts with the ids of their texts in place of the blanks."""
    blank_id = processor.tokenizer.convert_tokens_to_ids(blank)
    rows = []
    for ids, mask, texts in zip(inputs["input_ids"], inputs["attention_mask"], ids_of_texts, strict=True):
        remaining = iter(texts)
        row: list[int] = []
        for token in ids[mask.bool()].tolist():
            if token == blank_id:
                row.extend(next(remaining))
            else:
                row.append(token)
        rows.append(row)
    return processor.tokenizer.pad({"input_ids": rows}, padding=True, return_tensors="pt")
