"""A prompt on its way from the call to the language model: the arguments of the call, the prompt's rows as
layout_qtsplus.py lays them out, and how the kept tokens are spliced into it ([`splice`]).
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling

from .methods_qtsplus import Grid, MethodOrName, TensorSequence
from .question_qtsplus import find_query_mask, question_token_ids
from .selector_qtsplus import Fractions, QTSplusOutput

if TYPE_CHECKING:
    from .layout_qtsplus import QTSplusBackboneMixin, VisualSpan

T = TypeVar("T", bound=Callable[..., Any])

TEXT, IMAGE, VIDEO = 0, 1, 2
MODALITIES = {IMAGE: "image", VIDEO: "video"}

Grids = dict[int, list[Grid]]  # per modality, in tokens of every image or video of a batch
Features = dict[int, list[Tensor]]  # per modality, of each image or video of a batch [k, token_width]

# As Transformers names the key/value cache in calls and outputs: `cache` since 5.24.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"

# --- What a call brings beside its text ---
# Only this file names these arguments: `forward` and `generate` take them as keywords and pass them on.


@dataclass
class VisualInputs:
    """Images and videos, as the processor returns them."""

    pixel_values: Tensor | None = None  # of all images
    image_grid_thw: Tensor | None = None  # [images, 3]
    pixel_values_videos: Tensor | None = None  # of all videos
    video_grid_thw: Tensor | None = None  # [videos, 3]
    second_per_grid_ts: Tensor | Sequence[float] | None = None  # [videos], seconds per temporal patch
    # Per video [k, d], as `encode_videos` returns them, in place of its pixels; on any device.
    video_features: TensorSequence | None = None

    @property
    def given(self) -> bool:
        """Whether the call brings any image or video."""
        return self.pixel_values is not None or self.videos_given

    @property
    def videos_given(self) -> bool:
        return self.pixel_values_videos is not None or self.video_features is not None


@dataclass
class SelectionInputs:
    """How one call selects; the configuration decides what the call leaves out."""

    query_mask: Tensor | None = None  # [B, S], 1 on the question's tokens; found in `input_ids` if None
    query_input_ids: Tensor | None = None  # [B, L], a question that is not part of the prompt
    query_attention_mask: Tensor | None = None  # [B, L]
    retention: Fractions = None  # the fraction to keep, in (0, 1]; for all rows, or for each
    max_visual_tokens: int | None = None  # the most tokens to keep
    selection: MethodOrName | None = None  # a name of `methods_qtsplus.METHODS`, or such a function
    reencode: bool = True  # False passes the kept tokens on as they are (the paper's nREENC)


# The names are read once because a compiled `forward` cannot ask a dataclass for its fields.
_VISUAL = tuple(field.name for field in fields(VisualInputs))
_SELECTION = tuple(field.name for field in fields(SelectionInputs))
# A class with a head passes these on to its model unchanged.
_STOCK = ("position_ids", "cache", "past_key_values", "use_cache", "mm_token_type_ids", "mm_encoder_outputs")
NAMES = _STOCK + _VISUAL + _SELECTION


def take_inputs(kwargs: dict) -> tuple[VisualInputs, SelectionInputs]:
    """Takes the arguments that are named here out of a call's `kwargs`."""
    visual = {name: kwargs.pop(name) for name in _VISUAL if name in kwargs}
    selection = {name: kwargs.pop(name) for name in _SELECTION if name in kwargs}
    return VisualInputs(**visual), SelectionInputs(**selection)


def names_inputs(forward: T) -> T:
    """
    Puts the arguments that are named here into the signature of a `forward` that takes them as `**kwargs`. What the
    signature does not name, the Trainer drops from a batch, and `generate` refuses.
    """
    signature = inspect.signature(forward)
    parameters = list(signature.parameters.values())
    rest = parameters.pop()
    for name in NAMES:
        if name not in signature.parameters:
            default = True if name == "reencode" else None
            parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            parameters.append(parameter)
    parameters.append(rest)
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return forward


def alone_with_ids() -> ValueError:
    """The error for images or videos beside something that replaces a prompt's ids."""
    return ValueError(
        "Videos come with input_ids alone: leave out inputs_embeds and mm_encoder_outputs. Images may come with "
        "inputs_embeds instead of input_ids."
    )


# --- Its rows ---


@dataclass
class PromptRow:
    """
    One row of the caller's prompt without its padding, `S_b` tokens. It is on the host, where nothing of it has to be
    waited for.

    Separators are tokens that are never scored: a separator stays if a candidate of its range is kept. Each column of
    `separators` has the place of the token, and the first and last + 1 of that range.
    """

    columns: Tensor  # [S_b], the places of its tokens in the caller's prompt
    ids: Tensor  # [S_b]
    spans: "list[VisualSpan]"
    positions: Tensor  # [3, S_b], (time, height, width) in the full prompt
    language_positions: Tensor  # [1 or 3, S_b], the positions in the form that the language model takes
    candidates: Tensor  # [M_b], the tokens among which the selector chooses
    separators: Tensor  # [3, K]

    def keep(self, kept_indices: Tensor) -> Tensor:
        """`[S_b]` bool: the tokens that stay when these of the candidates do."""
        is_kept = torch.zeros_like(self.candidates, dtype=torch.bool)
        is_kept[kept_indices] = True
        keep = torch.ones_like(self.columns, dtype=torch.bool)
        keep[self.candidates] = is_kept
        separators, first, stop = self.separators
        num_kept_before = nn.functional.pad(is_kept.cumsum(0), (1, 0))
        keep[separators] = num_kept_before[stop] > num_kept_before[first]
        return keep

    def only(self, present: Tensor) -> "PromptRow":
        """The row with only the candidates `present` `[k]`, ascending, and with the separators that stay with them."""
        keep = self.keep(present)
        place = keep.cumsum(0) - 1
        kept = keep.nonzero()[:, 0]
        separators, first, stop = self.separators[:, keep[self.separators[0]]]
        first = torch.searchsorted(present, first)
        stop = torch.searchsorted(present, stop)
        return replace(
            self,
            columns=self.columns[kept],
            ids=self.ids[kept],
            positions=self.positions[:, kept],
            language_positions=self.language_positions[:, kept],
            candidates=place[self.candidates[present]],
            separators=torch.stack([place[separators], first, stop]),
        )


@dataclass
class Layout:
    """
    The prompts of a batch: the kind of each token, the image or video it belongs to, and its position. All but
    `source_ids` is on the host.
    """

    source_ids: Tensor  # [B, S], on the model's device
    input_ids: Tensor  # [B, S]
    mask: Tensor  # [B, S], 1 on real tokens
    rows: list[PromptRow]  # without their padding
    grids: Grids
    seconds: Any  # per video, seconds per temporal patch
    present: list[Tensor] | None = None  # per video [k], ascending, which of its tokens are there; all if `None`

    def competing(self, row: PromptRow) -> "list[VisualSpan]":
        """The first span of each video of a row; their tokens compete for its budget."""
        return [span for span in row.spans if span.modality == VIDEO and span.frame == 0]

    def grids_of(self, span: "VisualSpan") -> list[Grid]:
        """
        The grid of a video. If only a part of its tokens is present: `(1, 1, tokens)` for each step in time that has
        any.
        """
        grid = self.grids[VIDEO][span.index]
        if self.present is None:
            return [grid]
        tokens = self.present[span.index]
        per_step = grid[1] * grid[2]
        _, counts = torch.unique_consecutive(tokens // per_step, return_counts=True)
        return [(1, 1, count) for count in counts.tolist()]

    def narrow(self, present: TensorSequence) -> "Layout":
        """As if only the tokens `present` `[k]`, ascending, of each video had been kept; they keep their positions."""
        rows = []
        for row in self.rows:
            candidates = [row.columns[:0]]
            num_before = 0
            for span in self.competing(row):
                candidates.append(present[span.index].long().cpu() + num_before)
                num_before += math.prod(self.grids[VIDEO][span.index])
            rows.append(row.only(torch.cat(candidates)))
        return replace(self, rows=rows, present=list(present))


def given_queries(selection: SelectionInputs, rows: int) -> list[Tensor] | None:
    """Per row the ids of a question that is not part of the prompt, on the host."""
    ids = selection.query_input_ids
    mask = selection.query_attention_mask
    check_tensors(query_input_ids=ids, query_attention_mask=mask)
    if ids is None:
        if mask is not None:
            raise ValueError("query_attention_mask has no effect without query_input_ids: pass both, or neither.")
        return None
    if ids.ndim != 2 or len(ids) != rows or ids.is_floating_point():
        raise ValueError(f"query_input_ids {tuple(ids.shape)} of {ids.dtype}: expected [B, L] token ids, B={rows}.")
    if mask is None:
        return list(ids.cpu())
    check_shape("query_attention_mask", mask, "query_input_ids", ids)
    ids, is_real = torch.stack([ids, mask.to(ids)]).cpu()
    return list(map(torch.masked_select, ids, is_real.bool()))


def find_questions(
    model: "QTSplusBackboneMixin",
    layout: Layout,
    query_mask: Tensor | None,
) -> list[Tensor]:
    """
    Per row `[S_b]` bool on the host, which of its tokens are the question.

    Args:
        query_mask: `[B, S]`; found by the token ids if `None`.
    """
    ids = layout.input_ids
    if query_mask is None:
        query_mask = find_query_mask(ids, layout.mask, **question_token_ids(model.config))
    check_tensors(query_mask=query_mask)
    check_shape("query_mask", query_mask, "input_ids", ids)
    is_question = query_mask.cpu().bool()
    if (is_question > layout.mask).any():
        raise ValueError("query_mask marks padding: expected it to be padded on the same side as attention_mask.")
    return [of_row[row.columns] for row, of_row in zip(layout.rows, is_question, strict=True)]


def query_embeds(
    model: "QTSplusBackboneMixin",
    layout: Layout,
    selection: SelectionInputs,
) -> list[Tensor]:
    """Per row `[L_b, d]`, the embeddings of the question that is passed separately, or else of the prompt's own."""
    queries = given_queries(selection, len(layout.rows))
    if queries is None:
        questions = find_questions(model, layout, selection.query_mask)
        queries = [row.ids[question] for row, question in zip(layout.rows, questions, strict=True)]
    else:
        given = torch.cat(queries)
        is_outside = (given < 0) | (given >= model.config.text_config.vocab_size)
        if is_outside.any():
            raise ValueError(f"query_input_ids={given.tolist()}: expected token ids of the model's vocabulary.")
    embed = model.get_input_embeddings()
    device = layout.source_ids.device
    # NEFTune's hook and the like expect rows of ids.
    return [embed(ids[None].to(device, non_blocking=True))[0] for ids in queries]


def text_positions(attention_mask: Tensor) -> Tensor:
    """Position among the real tokens, `[B, S]` -> `[B, S]`; 0 on padding."""
    positions = attention_mask.long().cumsum(-1) - 1
    return positions.masked_fill(attention_mask == 0, 0)


def lay_positions(order: Tensor, language: Tensor) -> Tensor:
    """`position_ids` of the language model, from the order of the tokens `[B, S]` and `[rope_axes, B, S]`."""
    if len(language) == 1:
        return language[0]
    return torch.cat([order[None], language])


def check_tensors(**inputs: object) -> None:
    """Raises `ValueError` for inputs that are no tensors, such as the lists of a processor without `return_tensors`."""
    for name, value in inputs.items():
        if value is not None and not isinstance(value, Tensor):
            kind = type(value).__name__
            raise ValueError(f'{name} is a {kind}: expected a tensor, see return_tensors="pt".')


def check_grid(name: str, grid_thw: Tensor) -> Tensor:
    """The grids of images or videos on the host; `ValueError` unless they are `[N, 3]` whole numbers from 1 on."""
    check_tensors(**{name: grid_thw})
    grid_thw = grid_thw.cpu()
    if grid_thw.shape[1:] != (3,) or grid_thw.is_floating_point() or (grid_thw < 1).any():
        raise ValueError(
            f"{name}={grid_thw.tolist()}: expected whole numbers of patches, at least 1, in time, height and width of "
            "each, [N, 3]."
        )
    return grid_thw


def check_shape(
    name: str,
    tensor: Tensor,
    other_name: str,
    other: Tensor,
) -> None:
    """Raises `ValueError` for a tensor that has not the shape of another one."""
    if tensor.shape != other.shape:
        raise ValueError(f"{name} {tuple(tensor.shape)}: expected {other_name}' shape, {tuple(other.shape)}.")


def check_no_padding(input_ids: Tensor, pad_token_id: int | None) -> None:
    """Raises `ValueError` where rows `[B, S]` begin or end with different numbers of padding tokens."""
    if pad_token_id is None or len(input_ids) < 2:
        return
    is_padding = (input_ids == pad_token_id).long()
    for columns in (is_padding, is_padding.flip(1)):
        counts = columns.cumprod(1).sum(1)
        differs = counts != counts[0]
        if differs.any():
            raise ValueError(
                "The prompts are padded, but came without attention_mask: pass all that the processor returned, "
                "through your collator too."
            )


def pad_rows(
    rows: TensorSequence,
    value: int,
    left: bool,
) -> Tensor:
    """Stacks `[n_b, ...]` rows, and pads them with a value on the left or on the right."""
    return nn.utils.rnn.pad_sequence(
        list(rows),
        batch_first=True,
        padding_value=value,
        padding_side="left" if left else "right",
    )


# --- Splicing ---


@dataclass
class SelectedFeatures(BaseModelOutputWithPooling):
    """Features that [`QTSplusModelMixin.shorten`] has selected; `pooler_output` has `[k_b, d]` for each row."""

    pooler_output: Any = None


@dataclass
class CompactPrompt:
    """The shortened prompts `[B, S']` that the language model sees."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    features: dict[str, list[Tensor]]  # "image" and "video": per row [k, d], in place of its placeholders
    next_position: Tensor  # [B], the first one after the prompt, on the host
    rope_deltas: Tensor  # [B, 1], as a [`CachedPrompt`] has them
    source_ids: Tensor  # [B, S], the caller's prompt
    qtsplus: QTSplusOutput

    @property
    def selected(self) -> dict[str, SelectedFeatures]:
        """The features as `mm_encoder_outputs`."""
        return {name: SelectedFeatures(pooler_output=tuple(rows)) for name, rows in self.features.items()}


def splice(
    model: "QTSplusBackboneMixin",
    layout: Layout,
    features: Features,
    selected: TensorSequence,
    qtsplus: QTSplusOutput,
    pad_left: bool | None = None,
) -> CompactPrompt:
    """
    The shortened prompts: of the candidates only those that were kept, and everything else.

    Args:
        features: per modality, of every image or video of the batch; only the images' are read.
        selected: per row `[n_b, token_width]`, the kept candidates.
        qtsplus: with the `kept_indices`; its `columns` are set.
        pad_left: pad on the left; `None` pads where the caller did, left if nowhere.
    """
    columns = []
    positions = []
    image_features = []
    video_features = []
    for row, tokens, kept_indices in zip(layout.rows, selected, qtsplus.kept_indices or (), strict=True):
        keep = row.keep(kept_indices)
        columns.append(row.columns[keep])
        positions.append(row.language_positions.T[keep])
        images = [features[IMAGE][span.index] for span in row.spans if span.modality == IMAGE]
        image_features.append(torch.cat(images) if images else tokens[:0])
        if any(span.line for span in row.spans):
            # Newlines stay among the candidates.
            is_candidate = torch.zeros_like(keep).index_fill(0, row.candidates, True)
            is_candidate = is_candidate[keep & (model.token_types(row.ids) == VIDEO)]
            places = is_candidate.nonzero()[:, 0].to(tokens.device, non_blocking=True)
            line_end = model.line_end.to(tokens.device, tokens.dtype)
            tokens = line_end.expand(len(is_candidate), -1).index_copy(0, places, tokens)
        video_features.append(tokens)

    if pad_left is None:
        pad_left = bool(layout.mask[:, -1].all())
    kept_columns = pad_rows(columns, -1, pad_left)
    attention_mask = (kept_columns >= 0).long()
    num_tokens = attention_mask.sum(-1)
    order = text_positions(attention_mask)
    if model.config.qtsplus_config.position_ids == "sequential":
        language = order.expand(model.rope_axes, -1, -1)
        next_position = num_tokens
    else:
        language = pad_rows(positions, 0, pad_left).permute(2, 0, 1)
        next_position = torch.stack([row.language_positions[:, -1].max() for row in layout.rows]) + 1
    padding_id = model.config.text_config.pad_token_id or 0
    input_ids = layout.input_ids.gather(1, kept_columns.clamp(min=0))
    send = partial(Tensor.to, device=layout.source_ids.device, non_blocking=True)
    qtsplus.columns = send(kept_columns)
    spliced = {MODALITIES[VIDEO]: video_features}
    if features.get(IMAGE):
        spliced[MODALITIES[IMAGE]] = image_features
    return CompactPrompt(
        input_ids=send(input_ids.masked_fill(kept_columns < 0, padding_id)),
        attention_mask=send(attention_mask),
        position_ids=send(lay_positions(order, language)),
        features=spliced,
        next_position=next_position,
        rope_deltas=send(next_position - num_tokens)[:, None],
        source_ids=layout.source_ids,
        qtsplus=qtsplus,
    )
