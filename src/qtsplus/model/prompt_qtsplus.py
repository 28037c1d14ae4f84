"""A prompt from the call to the language model: what the call brings, the question in it, its rows as layout_qtsplus.py
lays them out, and how the kept tokens are spliced ([`splice`]).
"""

import inspect
import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling

from .methods_qtsplus import Method
from .selector_qtsplus import QTSplusOutput

if TYPE_CHECKING:
    from .layout_qtsplus import QTSplusBackboneMixin, VisualSpan

T = TypeVar("T", bound=Callable[..., Any])

TEXT, IMAGE, VIDEO = 0, 1, 2
MODALITIES = {IMAGE: "image", VIDEO: "video"}

Grid = tuple[int, int, int]  # (time, height, width)
Features = dict[int, list[torch.Tensor]]  # per modality, of each image or video of a batch [k, token_width]

# As Transformers names the key/value cache in calls and outputs: `cache` since 5.24.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"

# --- What a call brings beside its text ---
# Each of these arguments is named here alone: `forward` and `generate` take them as keywords, and hand them on.


@dataclass
class VisualInputs:
    """Images and videos, as the processor returns them."""

    pixel_values: torch.Tensor | None = None  # of all images
    image_grid_thw: torch.Tensor | None = None  # [images, 3]
    pixel_values_videos: torch.Tensor | None = None  # of all videos
    video_grid_thw: torch.Tensor | None = None  # [videos, 3]
    second_per_grid_ts: torch.Tensor | Sequence[float] | None = None  # [videos], seconds per temporal patch
    # Per video [k, d], as `encode_videos` returns them, in place of its pixels; on any device.
    video_features: Sequence[torch.Tensor] | None = None

    @property
    def given(self) -> bool:
        """Whether there is anything to look at."""
        return any(values is not None for values in (self.pixel_values, self.pixel_values_videos, self.video_features))


@dataclass
class SelectionInputs:
    """How one call selects; what is left out is as the configuration has it."""

    query_mask: torch.Tensor | None = None  # [B, S], 1 on the question's tokens; found in `input_ids` if None
    query_input_ids: torch.Tensor | None = None  # [B, L], a question that does not stand in the prompt
    query_attention_mask: torch.Tensor | None = None  # [B, L]
    retention: float | Sequence[float] | None = None  # the fraction to keep, in (0, 1]; for all rows, or for each
    max_visual_tokens: int | None = None  # the most tokens to keep
    selection: str | Method | None = None  # a name of `methods_qtsplus.METHODS`, or a function like those
    reencode: bool = True  # False hands the kept tokens on as they are (the paper's nREENC)


# Read once: a `forward` that is compiled cannot ask a dataclass for its fields.
_VISUAL, _SELECTION = (tuple(field.name for field in fields(kind)) for kind in (VisualInputs, SelectionInputs))
# What a class with a head hands on to its model as it is.
_STOCK = ("position_ids", "cache", "past_key_values", "use_cache", "mm_token_type_ids", "mm_encoder_outputs")
NAMES = _STOCK + _VISUAL + _SELECTION


def take_inputs(kwargs: dict[str, Any]) -> tuple[VisualInputs, SelectionInputs]:
    """Takes the arguments that are named here out of a call's `kwargs`."""
    visual = {name: kwargs.pop(name) for name in _VISUAL if name in kwargs}
    selection = {name: kwargs.pop(name) for name in _SELECTION if name in kwargs}
    return VisualInputs(**visual), SelectionInputs(**selection)


def take_cache(kwargs: dict[str, Any]) -> Cache | None:
    """Takes the key/value cache, by its old name or its new one, out of the keywords of a call."""
    given = [kwargs.pop(name, None) for name in ("cache", "past_key_values")]
    return next((cache for cache in given if cache is not None), None)


def names_inputs(forward: T) -> T:
    """
    Puts the arguments that are named here into the signature of a `forward` that takes them as `**kwargs`. What the
    signature does not name, the Trainer drops from a batch, and `generate` refuses.
    """
    signature = inspect.signature(forward)
    *stock, rest = signature.parameters.values()
    defaults = {name: None for name in NAMES} | {"reencode": True}
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in defaults.items()
        if name not in signature.parameters
    ]
    forward.__signature__ = signature.replace(parameters=[*stock, *named, rest])  # type: ignore[attr-defined]
    return forward


def alone_with_ids() -> ValueError:
    """What is said of images or videos beside something in place of a prompt's ids."""
    return ValueError("Images and videos come with input_ids alone: leave out inputs_embeds and mm_encoder_outputs.")


# --- The question ---


def find_query_mask(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    user_turn_token_ids: Sequence[int],
    turn_end_token_id: int,
    special_token_ids: Sequence[int],
    video_token_id: int | None = None,
    frame_text_token_ids: Sequence[int] = (),
    tool_response_token_ids: Sequence[Sequence[int]] = (),
    question_turns: Sequence[int | None] | None = None,
) -> torch.Tensor:
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
        question_turns: per row the index of the question among all turns that are written as a user's; `None` for a
            row in which no user wrote.
    """
    special = torch.tensor(special_token_ids, device=input_ids.device)
    eligible = ~torch.isin(input_ids, special)
    if attention_mask is not None:
        eligible &= attention_mask.bool()

    mask = torch.zeros_like(input_ids)
    for row, ids in enumerate(input_ids):
        turns = _find_user_turns(ids, user_turn_token_ids, turn_end_token_id)
        question: int | None = -1
        if question_turns is not None:
            question = question_turns[row]
        elif len(turns) > 1 and tool_response_token_ids:
            turns = _written_by_users(ids, turns, user_turn_token_ids, turn_end_token_id, tool_response_token_ids)
        if question is None or not -1 <= question < len(turns) or not turns:
            continue
        start, stop = turns[question]
        mask[row, start:stop] = eligible[row, start:stop].long()
        if frame_text_token_ids:
            text = ids[start:stop].tolist()
            for first, last in _frame_texts(text, video_token_id, frame_text_token_ids):
                mask[row, start + first : start + last] = 0
    return mask


def question_token_ids(config: Any) -> dict[str, Any]:
    """The ids by which [`find_query_mask`] finds the question, as a model's configuration has them."""
    return {
        "user_turn_token_ids": config.user_turn_token_ids,
        "turn_end_token_id": config.turn_end_token_id,
        "special_token_ids": config.special_token_ids,
        "video_token_id": config.video_token_id,
        "frame_text_token_ids": getattr(config, "frame_text_token_ids", ()),
        "tool_response_token_ids": config.tool_response_token_ids,
    }


def find_places(ids: torch.Tensor, pattern: Sequence[int]) -> list[int]:
    """The indices in `ids` `[S]` at which the pattern begins."""
    if len(ids) < len(pattern):
        return []
    wanted = torch.tensor(list(pattern), device=ids.device)
    return (ids.unfold(0, len(pattern), 1) == wanted).all(-1).nonzero()[:, 0].tolist()


def _find_user_turns(ids: torch.Tensor, header: Sequence[int], turn_end: int) -> list[tuple[int, int]]:
    """`(start, stop)` of the text of every turn that is written as a user's."""
    ends = [*find_places(ids, [turn_end]), len(ids)]
    turns = []
    for place in find_places(ids, header):
        start = min(place + len(header) + 1, len(ids))
        turns.append((start, ends[bisect_left(ends, start)]))
    return turns


def _written_by_users(
    ids: torch.Tensor,
    turns: list[tuple[int, int]],
    header: Sequence[int],
    turn_end: int,
    tool_response_token_ids: Sequence[Sequence[int]],
) -> list[tuple[int, int]]:
    """
    The turns that a user wrote, as far as ids tell.

    A tool's turn begins with the ids that begin a response and ends with those that end one. A turn of a user inside of
    it is part of the response, if no other role's turn begins before its end. The first turn is always the user's,
    since a tool answers a request. So a later message of a user that is nothing but a response in its tags is taken for
    a tool's, and a turn of a user is taken for a user's if the response itself has ended before it.
    """
    opening, closing = tool_response_token_ids
    opened = set(find_places(ids, opening))
    response_ends = [place + len(closing) for place in find_places(ids, [*closing, turn_end])]
    written = set(find_places(ids, header))
    others = [place for place in find_places(ids, header[:1]) if place not in written]

    users = turns[:1]
    response_end = 0
    for start, stop in turns[1:]:
        if start < response_end:
            continue
        next_end = bisect_left(response_ends, start)
        next_other = bisect_left(others, start)
        if start in opened and next_end < len(response_ends):
            crossed = next_other < len(others) and others[next_other] < response_ends[next_end]
            if not crossed:
                response_end = response_ends[next_end]
                continue
        users.append((start, stop))
    return users


def _frame_texts(ids: list[int], video_token_id: int | None, openers, longest: int = 16):
    """(start, stop) of the text in front of every frame; it ends with the one token that opens the frame's tokens."""
    frames = [i for i in range(1, len(ids)) if ids[i] == video_token_id != ids[i - 1]]
    for frame in frames:
        start = next((i for i in range(frame - 1, max(frame - longest, 0) - 1, -1) if ids[i] in openers), frame)
        if start < frame and video_token_id in ids[max(start - 3, 0) : start]:
            start -= 1  # the line break behind the frame before, or the token that closes it
        yield start, frame


def given_queries(selection: SelectionInputs, rows: int) -> list[torch.Tensor] | None:
    """Per row the ids of a question that does not stand in the prompt."""
    ids, mask = selection.query_input_ids, selection.query_attention_mask
    if ids is None:
        return None
    if len(ids) != rows:
        raise ValueError(f"{len(ids)} rows of query_input_ids: expected one per prompt ({rows}).")
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(f"query_attention_mask {tuple(mask.shape)}: expected query_input_ids' {tuple(ids.shape)}.")
    return list(ids) if mask is None else [row[kept.bool()] for row, kept in zip(ids, mask, strict=True)]


def tokenize_query(tokenizer: Any, query: str | list[str], rows: int | None, like: Any) -> dict[str, Any]:
    """The `query_input_ids` and `query_attention_mask` of a question for all rows, or of one for each."""
    queries = [query] * (rows or 1) if isinstance(query, str) else query
    if not isinstance(queries, (list, tuple)) or not queries:
        raise ValueError(f"query={query!r}: expected a question as a str, or a list with one for each row.")
    for row, one in enumerate(queries):
        if not isinstance(one, str):
            raise ValueError(f"The query of row {row} is {one!r}; expected a question as a str.")
        try:
            one.encode()
        except UnicodeEncodeError as error:
            reason = "holds half a character (a lone surrogate)"
            raise ValueError(f"The query of row {row}, {one!r}, {reason}; expected a question in Unicode.") from error
    if rows is not None and len(queries) != rows:
        raise ValueError(f"Got {len(queries)} queries for {rows} rows of text; expected one per row, or a str.")
    tokens = tokenizer(queries, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    for row, ids in enumerate(tokens):
        if not ids or not queries[row].strip():
            raise ValueError(f"The query {queries[row]!r} of row {row} has no token; expected a question.")
    length = max(map(len, tokens))
    padded = {
        "query_input_ids": [ids + [tokenizer.pad_token_id] * (length - len(ids)) for ids in tokens],
        "query_attention_mask": [[1] * len(ids) + [0] * (length - len(ids)) for ids in tokens],
    }
    return {name: torch.tensor(values) for name, values in padded.items()} if torch.is_tensor(like) else padded


# --- Its rows ---


@dataclass
class PromptRow:
    """
    One row of the caller's prompt without its padding, `S_b` tokens.

    Separators are tokens that are never scored and go with others: a token, and the first and last + 1 of the
    candidates of which one has to be kept for it to stay.
    """

    columns: torch.Tensor  # [S_b], the caller's
    types: torch.Tensor  # [S_b], TEXT, IMAGE or VIDEO
    spans: "list[VisualSpan]"
    positions: torch.Tensor  # [3, S_b], (time, height, width) in the full prompt
    language_positions: torch.Tensor  # [1 or 3, S_b], what the language model takes for them
    candidates: torch.Tensor  # [M_b], the tokens among which the selector chooses
    separators: torch.Tensor  # [3, K]

    def keep(self, kept_indices: torch.Tensor) -> torch.Tensor:
        """`[S_b]` bool: the tokens that stay when these of the candidates do."""
        is_kept = torch.zeros(len(self.candidates), dtype=torch.bool, device=self.columns.device)
        is_kept[kept_indices] = True
        keep, (separators, first, stop) = torch.ones_like(self.columns, dtype=torch.bool), self.separators
        keep[self.candidates] = is_kept
        before = nn.functional.pad(is_kept.cumsum(0), (1, 0))
        keep[separators] = before[stop] > before[first]
        return keep

    def only(self, present: torch.Tensor) -> "PromptRow":
        """The row without the candidates that are not among `present` `[k]`, and without what goes with them."""
        keep = self.keep(present)
        place = keep.cumsum(0) - 1
        separators, *candidates = self.separators[:, keep[self.separators[0]]]
        first, stop = (torch.searchsorted(present, bound) for bound in candidates)
        return replace(
            self,
            columns=self.columns[keep],
            types=self.types[keep],
            positions=self.positions[:, keep],
            language_positions=self.language_positions[:, keep],
            candidates=place[self.candidates[present]],
            separators=torch.stack([place[separators], first, stop]),
        )


@dataclass
class Layout:
    """The prompts of a batch: which token is whose, and where it stands."""

    input_ids: torch.Tensor  # [B, S]
    mask: torch.Tensor  # [B, S], 1 on real tokens
    rows: list[PromptRow]  # without their padding
    grids: dict[int, list[Grid]]  # per modality, in tokens of every image or video of the batch
    seconds: Any  # per video, seconds per temporal patch
    present: list[torch.Tensor] | None = None  # per video [k], ascending, which of its tokens are there; all if `None`

    def competing(self, row: PromptRow) -> "list[VisualSpan]":
        """The first span of each video of a row; their tokens compete for its budget."""
        return [span for span in row.spans if span.modality == VIDEO and not span.frame]

    def grids_of(self, span: "VisualSpan") -> list[Grid]:
        """
        The grid of a video; of a part of one in turn (steps, 1, tokens) for each run of steps in time that have the
        same places of the frame.
        """
        grid = self.grids[VIDEO][span.index]
        if self.present is None:
            return [grid]
        _, height, width = grid
        tokens = self.present[span.index]
        _, counts = torch.unique_consecutive(tokens // (height * width), return_counts=True)
        steps = [step.tolist() for step in (tokens % (height * width)).split(counts.tolist())]
        return [(len(list(run)), 1, len(step)) for step, run in itertools.groupby(steps)]

    def narrow(self, present: Sequence[torch.Tensor]) -> "Layout":
        """As if of each video only the tokens `present` `[k]`, ascending, had been kept; they stay at their places."""
        flags = [torch.zeros(t * h * w, dtype=torch.bool) for t, h, w in self.grids[VIDEO]]
        for flag, indices in zip(flags, present, strict=True):
            flag[indices] = True
        rows = []
        for row in self.rows:
            parts = [flags[span.index] for span in self.competing(row)]
            left = join(parts, torch.zeros(0, dtype=torch.bool)).nonzero()[:, 0]
            rows.append(row.only(left.to(row.columns.device)))
        return replace(self, rows=rows, present=list(present))


def find_questions(
    model: "QTSplusBackboneMixin", layout: Layout, query_mask: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """
    Per row `[S_b]` bool, which of its tokens are the question, by `query_mask` where there is one: `[B, S]`, or
    narrower where answers were put behind the prompts that it was made for.
    """
    shape = layout.input_ids.shape
    if query_mask is None or query_mask.shape != shape:
        found = find_query_mask(layout.input_ids, layout.mask, **question_token_ids(model.config))
        if query_mask is None:
            query_mask = found
        else:
            width = query_mask.shape[1]
            if len(query_mask) != shape[0] or width > shape[1] or bool(found[:, width:].any()):
                raise ValueError(f"query_mask {tuple(query_mask.shape)}: expected input_ids' shape, {tuple(shape)}.")
            query_mask = nn.functional.pad(query_mask, (0, shape[1] - width))
    return [question[row.columns] for question, row in zip(query_mask.bool(), layout.rows, strict=True)]


def query_embeds(model: "QTSplusBackboneMixin", layout: Layout, selection: SelectionInputs) -> list[torch.Tensor]:
    """Per row `[L_b, d]`, the embeddings of the question that is given apart, or else of the prompt's own."""
    questions, embed = find_questions(model, layout, selection.query_mask), model.get_input_embeddings()
    queries = given_queries(selection, len(layout.rows))
    if queries is None:
        rows = zip(layout.input_ids, layout.rows, questions, strict=True)
        queries = [ids[row.columns[question]] for ids, row, question in rows]
    return [embed(ids[None])[0] for ids in queries]  # NEFTune's hook and the like expect rows of ids


def text_positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Position among the real tokens, `[B, S]` -> `[B, S]`; 0 on padding."""
    return (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 0)


def lay_positions(order: torch.Tensor, language: torch.Tensor) -> torch.Tensor:
    """`position_ids` of the language model, from the order of the tokens `[B, S]` and `[rope_axes, B, S]`."""
    return language[0] if len(language) == 1 else torch.cat([order[None], language])


def pad_rows(rows: Sequence[torch.Tensor], value: int, left: bool) -> torch.Tensor:
    """Stacks `[..., n_b]` rows along a new first dimension, padded at one side of the last."""
    width = max(row.shape[-1] for row in rows)
    padded = []
    for row in rows:
        missing = width - row.shape[-1]
        padded.append(nn.functional.pad(row, (missing, 0) if left else (0, missing), value=value))
    return torch.stack(padded)


def join(parts: list[torch.Tensor], nothing: torch.Tensor) -> torch.Tensor:
    """Concatenates; one part is not copied."""
    if not parts:
        return nothing
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# --- Splicing ---


@dataclass
class SelectedFeatures(BaseModelOutputWithPooling):
    """Features that [`QTSplusModelMixin.shorten`] has selected; `pooler_output` has `[k_b, d]` for each row."""

    pooler_output: Any = None


@dataclass
class CompactPrompt:
    """What the language model sees, `[B, S']`."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    features: dict[str, list[torch.Tensor]]  # "image" and "video": per row [k, d], in place of its placeholders
    next_position: torch.Tensor  # [B], the first one after the prompt
    source_ids: torch.Tensor  # [B, S], the caller's prompt
    qtsplus: QTSplusOutput
    selected: dict[str, SelectedFeatures]  # the features as `mm_encoder_outputs`


def splice(
    model: "QTSplusBackboneMixin",
    layout: Layout,
    features: Features,
    selected: Sequence[torch.Tensor],
    qtsplus: QTSplusOutput,
    pad_left: bool | None = None,
) -> CompactPrompt:
    """
    The shortened prompts: what was no candidate, and of the candidates the kept ones.

    Args:
        features: per modality, of every image or video of the batch; of these only images are read.
        selected: per row `[n_b, token_width]`, the kept candidates.
        qtsplus: with the `kept_indices`; its `columns` are set.
        pad_left: pad on the left; `None` pads where the caller did, left if nowhere.
    """
    columns, positions = [], []
    # What stands in place of each row's placeholders, `[k, token_width]`.
    row_features: dict[str, list[torch.Tensor]] = {name: [] for name in MODALITIES.values()}
    for row, tokens, kept_indices in zip(layout.rows, selected, qtsplus.kept_indices or (), strict=True):
        keep = row.keep(kept_indices.to(row.columns.device))
        columns.append(row.columns[keep])
        positions.append(row.language_positions[:, keep])
        if any(span.line for span in row.spans):
            tokens = _with_line_ends(model, row, keep & (row.types == VIDEO), tokens)
        images = [features[IMAGE][span.index] for span in row.spans if span.modality == IMAGE]
        row_features[MODALITIES[IMAGE]].append(join(images, tokens[:0]))
        row_features[MODALITIES[VIDEO]].append(tokens)

    pad_left = bool(layout.mask[:, -1].all()) if pad_left is None else pad_left
    padded = pad_rows(columns, -1, pad_left)
    is_padding, source = padded < 0, padded.clamp(min=0)
    attention_mask = (~is_padding).long()
    order = text_positions(attention_mask)
    if model.config.qtsplus_config.position_ids == "sequential":
        language = order.expand(model.rope_axes, -1, -1)
        next_position = attention_mask.sum(-1)
    else:
        language = pad_rows(positions, 0, pad_left).transpose(0, 1)
        next_position = torch.stack([row.language_positions[:, -1].max() + 1 for row in layout.rows])
    qtsplus.columns = padded
    padding_id = model.config.text_config.pad_token_id or 0
    return CompactPrompt(
        input_ids=layout.input_ids.gather(1, source).masked_fill(is_padding, padding_id),
        attention_mask=attention_mask,
        position_ids=lay_positions(order, language),
        features=row_features,
        next_position=next_position,
        source_ids=layout.input_ids,
        qtsplus=qtsplus,
        selected={name: SelectedFeatures(pooler_output=tuple(rows)) for name, rows in row_features.items()},
    )


def _with_line_ends(model, row: PromptRow, keep: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The kept tokens `[k, d]` with the newlines that stay among them."""
    is_token = torch.zeros_like(keep)
    is_token[row.candidates] = True
    is_token = is_token[keep].to(tokens.device)
    if len(is_token) > len(tokens):
        spread = model.line_end.to(tokens.device, tokens.dtype).expand(len(is_token), -1).clone()
        spread[is_token] = tokens
        tokens = spread
    return tokens
