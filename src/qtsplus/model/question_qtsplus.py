"""The question of a prompt: which of its tokens a user asked with, and the ids of a question that is given apart."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Span = tuple[int, int]  # the place of its first token, and the one behind its last
Spans = list[Span]

_TOKEN_IDS = (
    "user_turn_token_ids",
    "turn_end_token_id",
    "special_token_ids",
    "video_token_id",
    "frame_text_token_ids",
    "tool_response_token_ids",
)


def find_query_mask(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    user_turn_token_ids: Sequence[int],
    turn_end_token_id: int,
    special_token_ids: Sequence[int],
    video_token_id: int | None = None,
    frame_text_token_ids: Sequence[int] = (),
    tool_response_token_ids: Sequence[Sequence[int]] = (),
    question_turns: Sequence[int | None] | None = None,
) -> Tensor:
    """
    Marks the question in a chat prompt: the text of the last turn that a user wrote, without its header, special and
    vision tokens. `[B, S]` int64, 1 on the question's tokens; a row without such a turn is all 0.

    Many chat templates write a tool's response as a turn of the user. Where the roles of the messages are known,
    `question_turns` tells them apart. Token ids alone cannot always do so, see [`_written_by_users`].

    Args:
        input_ids, attention_mask: `[B, S]`, of prompts made with the chat template.
        user_turn_token_ids: the ids that open a user's turn; the one token after them (the line break) is skipped.
        turn_end_token_id: the id that closes a turn.
        special_token_ids: ids that are never part of a question.
        video_token_id, frame_text_token_ids: the placeholder of a video, and the ids that open the text in front of
            every frame ("Frame1: ", "<0.5 seconds>"), which is no part of a question either.
        tool_response_token_ids: the ids that begin and that end a tool's response; none if templates do not mark it.
        question_turns: per row the index of the question among all turns that are written as a user's, from the end if
            it is negative; `None` for a row in which no user wrote.
    """
    ids_on_host = input_ids.cpu()
    eligible = ~torch.isin(ids_on_host, ids_on_host.new_tensor(special_token_ids))
    if attention_mask is not None:
        eligible &= attention_mask.bool().cpu()

    mask = torch.zeros_like(ids_on_host)
    for row, ids in enumerate(ids_on_host):
        turns = find_user_turns(ids, user_turn_token_ids, turn_end_token_id)
        question: int | None = -1
        if question_turns is not None:
            question = question_turns[row]
        elif tool_response_token_ids:
            turns = _written_by_users(ids, turns, user_turn_token_ids, turn_end_token_id, tool_response_token_ids)
        if question is None or not -len(turns) <= question < len(turns):
            continue
        start, stop = turns[question]
        mask_of_turn = mask[row, start:stop]
        mask_of_turn.copy_(eligible[row, start:stop])
        # Some templates also write the line break of the header behind a video or an image.
        is_break = ids[start:stop] == ids[start - 1]
        is_behind_special = ~eligible[row, start - 1 : stop - 1]
        mask_of_turn[is_break & is_behind_special] = 0
        if frame_text_token_ids:
            text = ids[start:stop].tolist()
            for first, last in _frame_texts(text, video_token_id, frame_text_token_ids, int(ids[start - 1])):
                mask_of_turn[first:last] = 0
    return mask.to(input_ids.device)


def question_token_ids(config) -> dict:
    """The ids by which [`find_query_mask`] finds the question, as a model's configuration has them."""
    return {name: getattr(config, name) for name in _TOKEN_IDS if hasattr(config, name)}


def find_places(ids: Tensor, pattern: Sequence[int]) -> list[int]:
    """The indices in `ids` `[S]`, on the host, at which the pattern begins."""
    if len(ids) < len(pattern):
        return []
    begins = (ids.unfold(0, len(pattern), 1) == ids.new_tensor(pattern)).all(-1)
    return begins.nonzero()[:, 0].tolist()


def find_user_turns(
    ids: Tensor,
    header: Sequence[int],
    turn_end: int,
) -> Spans:
    """
    `(start, stop)` of the text of every turn that is written as a user's. A text may hold the ids of a header and of an
    end: it goes on to the last end before another turn begins.
    """
    length = len(ids)
    begins = find_places(ids, header[:1]) + [length]
    ends = find_places(ids, [turn_end]) + [length]
    turns = []
    stop = 0
    for place in find_places(ids, header):
        if place < stop:
            continue
        start = min(place + len(header) + 1, length)  # behind the line break
        stop = ends[bisect_left(ends, start)]
        if stop < length:
            next_begin = begins[bisect_left(begins, stop)]
            stop = ends[bisect_left(ends, next_begin) - 1]
        turns.append((start, stop))
    return turns


def _written_by_users(
    ids: Tensor,
    turns: Spans,
    header: Sequence[int],
    turn_end: int,
    tool_response_token_ids: Sequence[Sequence[int]],
) -> Spans:
    """
    The turns that a user wrote, as far as ids tell.

    A tool's turn begins with the ids that begin a response and ends with those that end one. A response may hold whole
    turns of a user, which then end once more often than they begin. The first turn is the user's, since a tool answers
    a request, unless two turns of other roles are in front of it. So a later message of a user that is nothing but a
    response in its tags is taken for a tool's, and a turn of a user is taken for a user's if the response itself has
    ended before it.
    """
    opening, closing = tool_response_token_ids
    opened = set(find_places(ids, opening))
    response_ends = _find_response_ends(ids, closing, turn_end)
    users: Spans = []
    response_end = 0
    for start, stop in turns:
        if start < response_end:
            continue
        num_turns = (ids[:start] == header[0]).sum()
        next_end = bisect_left(response_ends, start)
        if start in opened and next_end < len(response_ends) and (users or num_turns > 2):
            end = response_ends[next_end]
            response = ids[start:end]
            num_ends = (response == turn_end).sum()
            if end <= stop or num_ends > (response == header[0]).sum():
                response_end = end
                continue
        users.append((start, stop))
    return users


def _find_response_ends(
    ids: Tensor,
    closing: Sequence[int],
    turn_end: int,
) -> list[int]:
    """
    The ends of tools' responses, ascending: of those that end their turn. A line break may follow, as in Qwen3-Coder's
    template. Some vocabularies have one token for the last character of the tag and that line break, or for the first
    and what the response ends with.
    """
    behind_first = closing[1:] or closing
    ends = [place + len(behind_first) for place in find_places(ids, behind_first)]
    if len(closing) > 1:
        ends += [place + len(closing) for place in find_places(ids, closing[:-1])]
    turn_ends = set(find_places(ids, [turn_end]))
    return sorted(end for end in ends if not turn_ends.isdisjoint((end, end + 1)))


def _frame_texts(
    ids: list[int],
    video_token_id: int | None,
    openers: Sequence[int],
    line_break: int,
) -> Iterator[Span]:
    """`(start, stop)` of the text before each frame, which begins with the nearest opener and has at most 16 tokens."""
    for frame in range(1, len(ids)):
        is_first_token = ids[frame] == video_token_id and ids[frame - 1] != video_token_id
        if not is_first_token:
            continue
        opened = [place for place in range(max(frame - 16, 0), frame) if ids[place] in openers]
        if not opened:
            continue
        start = opened[-1]
        if ids[start - 1] == line_break and video_token_id in ids[max(start - 3, 0) : start]:
            start -= 1  # behind the frame before
        yield start, frame


def check_text(what: str, text: str) -> str:
    """The text; a `ValueError` for other values, and for text that has no bytes."""
    if not isinstance(text, str):
        raise ValueError(f"The {what} is {text!r}; expected a text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"The {what} {text!r} holds half a character (a lone surrogate); expected Unicode.") from error
    return text


def tokenize_query(tokenizer, query: str | list[str], like) -> dict:
    """
    The `query_input_ids` and `query_attention_mask` `[B, L]` of a question for all rows, or of one for each.

    Args:
        like: the `input_ids` of the call, or `None`; the result has tensors if that is one, or else lists.
    """
    rows = 1 if like is None else len(like)
    queries = query
    if isinstance(query, str):
        queries = [query] * rows
    if not isinstance(queries, (list, tuple)) or not queries:
        raise ValueError(f"query={query!r}: expected a question as a str, or a list with one for each row.")
    for row, question in enumerate(queries):
        if not check_text(f"query of row {row}", question).strip():
            raise ValueError(f"The query of row {row} is {question!r}; expected a question, a str that has tokens.")
    if like is not None and len(queries) != rows:
        raise ValueError(f"Got {len(queries)} queries for {rows} rows of text; expected one per row, or a str.")
    tokens = tokenizer(
        queries,
        add_special_tokens=False,
        split_special_tokens=True,
        return_attention_mask=True,
        padding=True,
        padding_side="right",
        return_tensors="pt" if torch.is_tensor(like) else None,
    )
    return {"query_input_ids": tokens["input_ids"], "query_attention_mask": tokens["attention_mask"]}
