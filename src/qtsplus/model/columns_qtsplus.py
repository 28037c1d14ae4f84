"""Translates columns of the caller's prompt to and from the shortened prompt, which the model reads and caches."""

from dataclasses import dataclass, replace
from functools import cache as cached

import torch
from torch import Tensor, nn

from .prompt_qtsplus import CompactPrompt
from .question_qtsplus import find_query_mask


@dataclass(frozen=True)
class KeptColumns:
    """
    Which columns of the caller's prompts are in the shortened ones.

    Example: a prompt has two words, four visual tokens and two more words. Selection kept two of the visual tokens:

        the caller's column    0  1  2  3  4  5  6  7     length = 8
        token                  a  b  v  v  v  v  c  d
        columns                0  1     3     5  6  7     -1 on padding
        places                 0  1 -1  2 -1  3  4  5

    Args:
        columns: `[B, S']`, for each column of the shortened prompts its column in the caller's; -1 on padding.
        length: S, how many columns the caller's prompts have.
    """

    columns: Tensor
    length: int

    @property
    def is_real(self) -> Tensor:
        """`[B, S']`, False on padding."""
        return self.columns >= 0

    @property
    def is_whole(self) -> bool:
        """Whether the shortened prompts have all of the caller's columns, in the same places."""
        if self.columns.shape[1] != self.length:
            return False
        is_in_place = self.columns == torch.arange(self.length, device=self.columns.device)
        return bool((is_in_place | ~self.is_real).all())

    def places(self) -> Tensor:
        """`[B, S]`, where each of the caller's columns is in the shortened prompt; -1 for dropped columns."""
        rows, width = self.columns.shape
        places = self.columns.new_full((rows, self.length + 1), -1)
        numbers = torch.arange(width, device=self.columns.device).expand(rows, -1)
        targets = self.columns % (self.length + 1)  # of padding the extra last column, which is cut off
        return places.scatter(1, targets, numbers)[:, : self.length]

    def shorten(self, values: Tensor) -> Tensor:
        """`[B, S]` -> `[B, S']`; padding has any value."""
        return values.gather(1, self.columns.clamp(min=0))

    def take_states(
        self,
        states: Tensor,
        wanted: slice | Tensor,
        attention_mask: Tensor | None,
    ) -> Tensor:
        """`[B, S', d]` -> `[B, K, d]`, the states of the K caller's columns that are `wanted`."""
        if isinstance(wanted, slice) and -wanted.start > self.length:
            raise ValueError(f"logits_to_keep={-wanted.start}: expected at most the prompt's {self.length} columns.")
        places = self.places()[:, wanted]
        is_gone = places < 0
        if attention_mask is not None:
            is_gone &= attention_mask.bool()[:, wanted]
        if is_gone.any():
            raise ValueError(
                "logits_to_keep names a visual token that was not kept: expected columns of text. "
                "output.qtsplus.columns says which columns are left."
            )
        index = places.clamp(min=0)[..., None]
        return states.gather(1, index.expand(-1, -1, states.shape[-1]))


# --- Decoding behind a shortened prompt ---


@dataclass(frozen=True)
class CachedPrompt(KeptColumns):
    """
    Which columns of prompts with images or videos a key/value cache holds. The cache carries it, so that the caller's
    own decoding loop may pass masks and positions of either width. Column 8 was decoded; the step for column 9 may pass

        the full width      0  1  2  3  4  5  6  7 | 8  9     all `length` columns of the prompt, then the new ones
        the cached width    0  1     3     5  6  7 | 8  9     the kept columns of the prompt, then the new ones

    Args:
        rope_deltas: `[B, 1]`, the position of the first new token minus the number of tokens in the shortened prompt.
        ids: `[B, S']`, the shortened prompts, in which the question is found.
    """

    rope_deltas: Tensor
    ids: Tensor

    @classmethod
    def of(cls, prompt: CompactPrompt) -> "CachedPrompt":
        return cls(
            columns=prompt.qtsplus.columns,  # type: ignore[arg-type]
            length=prompt.source_ids.shape[1],
            rope_deltas=prompt.rope_deltas,
            ids=prompt.input_ids,
        )

    def keep_with(self, cache) -> None:
        """Stores this on a cache. Selecting or repeating rows of the cache then does the same to this."""
        if cache is None:
            return
        cache.qtsplus_prompt = self
        if not isinstance(cache, _CacheWithPrompt):
            cache.__class__ = _with_prompt(type(cache))  # type: ignore[arg-type]

    def of_rows(self, rows: int) -> "CachedPrompt":
        """This for a batch of `rows` rows. If there are more than prompts, each prompt is repeated, as for beams."""
        prompts = len(self.columns)
        if rows == prompts:
            return self
        if rows % prompts:
            raise ValueError(f"{rows} rows for a cache of {prompts} prompts: expected {prompts}, or a multiple of it.")
        indices = torch.arange(prompts, device=self.columns.device)
        return self.select(indices.repeat_interleave(rows // prompts))

    def select(self, indices: Tensor) -> "CachedPrompt":
        """This for some of the rows, given by their indices `[R]`."""
        indices = torch.as_tensor(indices, device=self.columns.device)
        return replace(
            self,
            columns=self.columns[indices],
            rope_deltas=self.rope_deltas[indices],
            ids=self.ids[indices],
        )

    def check_question(
        self,
        new_ids: Tensor,
        past_length: int,
        token_ids: dict,
    ) -> None:
        """
        Raises `ValueError` for ids `[B, new]` that continue the question, or ask another, where tokens were dropped.

        Args:
            past_length: how many columns are cached.
            token_ids: those of [`question_token_ids`].
        """
        if self.is_whole:
            return
        earlier = self.ids
        if past_length > earlier.shape[1]:  # an answer is cached behind the prompt, so that its last turn has ended
            earlier = nn.functional.pad(earlier, (0, 1), value=token_ids["turn_end_token_id"])
        ids = torch.cat([earlier, new_ids.to(earlier.device)], dim=1)
        is_question = find_query_mask(ids, None, **token_ids)
        if is_question[:, earlier.shape[1] :].any():
            raise ValueError(
                f"The cache holds {past_length} columns with the visual tokens that an earlier question chose, and the "
                "new ids continue it or ask another. Expected the whole conversation in one call without a cache, "
                "since each question chooses its own visual tokens."
            )

    def shorten_mask(
        self,
        mask: Tensor | None,
        past_length: int,
        new: int,
    ) -> Tensor | None:
        """
        The attention mask of one decoding step, `[B, past_length + new]`.

        Args:
            mask: the caller's, of the full width or the cached one; `None` hides only padding. A mask of another kind,
                such as a 4-dimensional one, is left as it is.
            past_length: how many columns are cached, at least those of the prompt.
            new: how many columns the step adds.
        """
        if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
            return mask
        rows, width = self.columns.shape
        since = past_length + new - width
        if past_length < width:
            raise ValueError(
                f"The cache holds {past_length} columns of a prompt of {width} with images or videos: expected all of "
                "them, or a new cache for another prompt."
            )
        if mask is None:
            if self.is_real.all():
                return None
            of_prompt = self.is_real.long()
            return nn.functional.pad(of_prompt, (0, since), value=1)
        mask = mask.to(self.columns.device)
        prompt_width = mask.shape[1] - since
        if len(mask) != rows or prompt_width not in (width, self.length):
            shape = tuple(mask.shape)
            cached_shape = (rows, past_length + new)
            full_shape = (rows, self.length + since)
            raise ValueError(
                f"attention_mask {shape} behind a cache of {past_length} columns: expected "
                f"{cached_shape}, or {full_shape} with all of the prompt's columns. "
                "output.qtsplus.columns says which of them are cached."
            )
        of_prompt, of_others = mask.split([prompt_width, since], dim=1)
        if prompt_width != width:
            of_prompt = self.shorten(of_prompt)
        of_prompt = of_prompt * self.is_real.to(mask.dtype)
        return torch.cat([of_prompt, of_others], dim=1)


class _CacheWithPrompt:
    """Mixed into the class of a cache: whatever changes the cache's rows changes those of its [`CachedPrompt`] too."""

    qtsplus_prompt: CachedPrompt | None = None
    layers: list

    def __reduce__(self):
        return _empty_cache, (type(self).__bases__[1],), vars(self)

    def reorder_cache(self, beam_idx):
        self._select_prompt(beam_idx)
        super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices):
        self._select_prompt(indices)
        super().batch_select_indices(indices)

    def _select_prompt(self, indices):
        """Selects rows of the prompt as of the cache, which has several for each prompt behind a beam search."""
        if self.qtsplus_prompt is None:
            return
        all_keys = [getattr(layer, "keys", None) for layer in self.layers]  # recurrent layers have none
        rows = next(len(keys) for keys in all_keys if keys is not None)
        self.qtsplus_prompt = self.qtsplus_prompt.of_rows(rows).select(indices)


@cached
def _with_prompt(kind):
    """A subclass of `kind`, a class of caches, that also carries a prompt. It has the same name as `kind`."""
    return type(kind.__name__, (_CacheWithPrompt, kind), {})


def _empty_cache(kind):
    """What pickle makes a cache of, since it cannot import the class that was made here."""
    return object.__new__(_with_prompt(kind))


def check_cache(cache) -> None:
    """Raises `ValueError` for anything but a key/value cache, such as the tuples of earlier Transformers versions."""
    if cache is None:
        return
    update = getattr(cache, "update", None)
    if isinstance(cache, dict) or not callable(update):
        kind = type(cache).__name__
        raise ValueError(
            f"The cache (past_key_values) is a {kind}: expected a Cache of Transformers, such as "
            "DynamicCache(config=model.config.get_text_config())."
        )
