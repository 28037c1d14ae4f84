"""Encoding images and videos in chunks, so that memory does not grow with a video beyond its features."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from .backbone_qtsplus import QTSplusBackboneMixin
from .prompt_qtsplus import IMAGE, MODALITIES, VIDEO
from .repeats_qtsplus import Repeats

# Encoded at a time without gradients: enough rows to fill a GPU, and a few hundred MB of activations in bfloat16.
PATCHES_PER_CHUNK = 16384
# Few rows fill a CPU, and their memory is used again. The C library maps what is larger than 32 MB anew each time: the
# page faults, and caches that hold nothing, cost a third of the vision tower's time.
PATCHES_PER_CHUNK_ON_CPU = 2048


class QTSplusEncodingMixin(QTSplusBackboneMixin):
    """Pixels, or features that were encoded before, to the features of every image and video, with their checks."""

    device: Any
    training: bool

    @torch.no_grad()
    def encode_videos(
        self,
        pixel_values_videos: torch.Tensor,
        video_grid_thw: torch.Tensor,
        *,
        frames_per_chunk: int | None = None,
        device: torch.device | str | None = None,
        repeats: Repeats | None = None,
    ) -> list[torch.Tensor]:
        """
        Encodes videos once, for any number of questions: `forward` and `generate` take what this returns as
        `video_features=`, in the place of `pixel_values_videos`. Without gradients; to train the encoder, pass pixels.

        The vision tower looks at each temporal patch by itself, so chunks change nothing but the memory in use.

        Args:
            pixel_values_videos, video_grid_thw: as the processor returns them; they may stay on the CPU, from where
                one chunk at a time is moved.
            frames_per_chunk: encode at most this many frames at a time, but at least one temporal patch; about
                16,384 patches at a time if `None`, and 2,048 on a CPU.
            device: where the features shall live, such as `"cpu"`; the model's if `None`.
            repeats: when a step in time repeats the one before and is not encoded again, see [`Repeats`]; where it
                equals it if `None`. One that is passed to several calls remembers the last step of each for the next.

        Returns:
            per video `[k, token_width]`, all its visual tokens.

        Raises:
            ValueError: pixels and grids that do not fit each other, or that are not finite; no frame per chunk.
        """
        self.check_grids(VIDEO, pixel_values_videos, video_grid_thw)
        if pixel_values_videos is None:
            raise ValueError("encode_videos got no videos: pass pixel_values_videos and video_grid_thw.")
        if self.device.type != "meta":  # as where weights wait on disk; what brings them in brings the pixels too
            video_grid_thw = video_grid_thw.to(self.device)
        return self.encode(VIDEO, pixel_values_videos, video_grid_thw, frames_per_chunk, device, repeats)

    def check_grids(
        self,
        modality: int,
        pixels: torch.Tensor | None,
        grid_thw: torch.Tensor | None,
        features: Sequence[torch.Tensor] | None = None,
    ) -> list[tuple[int, int, int]]:
        """
        The grids of all images or videos in tokens.

        Raises:
            ValueError: pixels, features and grids that do not fit each other.
        """
        name = MODALITIES[modality]
        if pixels is not None and features is not None:
            raise ValueError(f"Got {name} pixels and {name}_features: pass one of them.")
        if (pixels is None and features is None) != (grid_thw is None):
            values = "pixel values" if features is None else "features"
            given, missing = (values, "grid_thw") if grid_thw is None else ("grid_thw", values)
            raise ValueError(
                f"The {name}s came with {given} but without {missing}: pass all that the processor returned."
            )
        if grid_thw is None:
            return []
        if bool((grid_thw < 1).any()):
            raise ValueError(
                f"{name}_grid_thw {grid_thw.tolist()}: an empty {name}; expected at least 1 x 1 x 1 patches."
            )
        patches = sum(self.pixel_rows(grid_thw))
        if pixels is not None and len(pixels) != patches:
            raise ValueError(
                f"{len(pixels)} rows of {name} pixels: expected {patches}, the patches of {name}_grid_thw."
            )
        return self.merged_grid(grid_thw, modality)

    def encode(
        self,
        modality: int,
        pixels: torch.Tensor | None,
        grid_thw: torch.Tensor | None,
        frames_per_chunk: int | None = None,
        device: torch.device | str | None = None,
        repeats: Repeats | None = None,
    ) -> list[torch.Tensor]:
        """`[k, token_width]` features of each image or video; none without pixels."""
        if pixels is None or grid_thw is None:
            return []
        if repeats is None:
            repeats = Repeats(None if modality == IMAGE else 0.0)
        grids, patches = grid_thw.tolist(), self.pixel_rows(grid_thw)
        steps = [rows.unflatten(0, (t, -1)) for rows, (t, _, _) in zip(pixels.split(patches), grids, strict=True)]
        sources = [repeats.sources(own, size) for own, (_, *size) in zip(steps, grids, strict=True)]
        features = self._encode_sources(modality, grid_thw, steps, sources, frames_per_chunk, device)
        filled = [repeats.fill(features.get(index), own) for index, own in enumerate(sources)]
        repeats.let_go()
        return filled

    def _encode_sources(
        self,
        modality: int,
        grid_thw: torch.Tensor,
        steps: Sequence[torch.Tensor],
        sources: Sequence[list[int]],
        frames_per_chunk: int | None,
        device: torch.device | str | None,
    ) -> dict[int, torch.Tensor]:
        """
        Features of the images and videos that have steps of their own to encode; those of other steps are empty.

        Args:
            steps: of each the pixels, `[t, rows, ...]`.
            sources: of each what [`Repeats.sources`] says.
        """
        lengths = [t * h * w for t, h, w in self.merged_grid(grid_thw, modality)]
        waiting = [[index for index, source in enumerate(own) if source == index] for own in sources]
        grid_waiting = grid_thw.clone()
        grid_waiting[:, 0] = grid_thw.new_tensor([len(own) for own in waiting])
        features: dict[int, torch.Tensor] = {}
        for chunk in self._chunks(modality, grid_waiting, frames_per_chunk):
            places = []
            for index, (count, _, _) in chunk:
                places.append(waiting[index][:count])
                waiting[index] = waiting[index][count:]
            grid = grid_thw.new_tensor([piece for _, piece in chunk])
            indices = [index for index, _ in chunk]
            own_pixels = [_at(steps[index], place).flatten(0, 1) for index, place in zip(indices, places, strict=True)]
            rows = own_pixels[0] if len(own_pixels) == 1 else torch.cat(own_pixels)
            encoded = self.encode_pixels(modality, rows.to(grid.device), grid)
            for index, place, piece, own in zip(indices, places, encoded, own_pixels, strict=True):
                _check_finite(piece, own, f"{MODALITIES[modality]} {index}")
                if len(piece) == lengths[index]:
                    features[index] = piece.to(device or piece.device)
                    continue
                if index not in features:
                    # Filled piece by piece: joining the pieces afterwards would hold them twice.
                    features[index] = piece.new_empty(lengths[index], piece.shape[-1], device=device or piece.device)
                steps_of_all = features[index].unflatten(0, (len(sources[index]), -1))
                steps_of_all[place] = piece.unflatten(0, (len(place), -1)).to(steps_of_all.device)
        return features

    def _chunks(self, modality: int, grid_thw: torch.Tensor, frames_per_chunk: int | None) -> Iterable:
        """What is encoded at a time; see [`chunk_grids`]."""
        grids = grid_thw.tolist()
        if frames_per_chunk is not None:
            if isinstance(frames_per_chunk, bool) or frames_per_chunk != int(frames_per_chunk) or frames_per_chunk < 1:
                raise ValueError(f"frames_per_chunk={frames_per_chunk!r}: expected a whole number, at least 1.")
            frames = getattr(self.config.vision_config, "temporal_patch_size", 1)
            return chunk_grids(grids, frames_per_chunk, [frames] * len(grids))
        if self.training and torch.is_grad_enabled():
            # Gradients would keep every chunk's activations, and ranks that share weights must call them equally often.
            return [[(index, grid) for index, grid in enumerate(grids) if grid[0]]]
        capacity = PATCHES_PER_CHUNK_ON_CPU if self.device.type == "cpu" else PATCHES_PER_CHUNK
        patches = [rows * self.patches_per_row for rows in self.pixel_rows(grid_thw)]
        if modality == IMAGE:  # its crops belong together
            whole = chunk_grids([(1, h, w) for _, h, w in grids], capacity, patches)
            return [[(index, grids[index]) for index, _ in chunk] for chunk in whole]
        return chunk_grids(
            grids, capacity, [count // max(t, 1) for count, (t, _, _) in zip(patches, grids, strict=True)]
        )

    def check_features(
        self, modality: int, features: Sequence[torch.Tensor], grids, places: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """`[k, token_width]` features that the caller had encoded; with `places` `[k]`, of these tokens alone."""
        name = MODALITIES[modality]
        if len(features) != len(grids):
            raise ValueError(f"{len(features)} {name}_features: expected one per {name} ({len(grids)}).")
        dtype, width = self.get_input_embeddings().weight.dtype, self.token_width
        for index, (tokens, (t, h, w)) in enumerate(zip(features, grids, strict=True)):
            count, of_what = t * h * w, f"merged tokens of its grid, {t} x {h} x {w}"
            if places is not None:
                count, of_what = len(places[index]), f"tokens of its {name}_places"
            if tokens.shape != (count, width):
                raise ValueError(
                    f"{name}_features {index} has shape {tuple(tokens.shape)}: expected {(count, width)}, the "
                    f"{of_what}, by the model's width."
                )
            if not _is_finite(tokens):
                raise ValueError(f"NaN or infinity in {name}_features {index}: expected finite numbers.")
        return [tokens.to(dtype) for tokens in features]

    def no_features(self, device: torch.device) -> torch.Tensor:
        """`[0, token_width]`, of a row without anything to look at."""
        embedding = self.get_input_embeddings()
        return torch.empty(0, self.token_width, device=device, dtype=embedding.weight.dtype)


def chunk_grids(
    grids: Sequence[Sequence[int]], capacity: int, costs: Sequence[int]
) -> Iterator[list[tuple[int, list[int]]]]:
    """
    Cuts images and videos along time, in order, into chunks of bounded cost.

    Args:
        grids: (time, height, width) of each.
        capacity: the most that a chunk may cost; a step in time that costs more is a chunk by itself.
        costs: of one step in time of each.

    Returns:
        per chunk its pieces, each the index of an image or video and the piece's own grid.
    """
    chunk: list[tuple[int, list[int]]] = []
    room = capacity
    for index, ((left, height, width), cost) in enumerate(zip(grids, costs, strict=True)):
        while left:
            fits = min(left, max(room // cost, 0 if chunk else 1))
            if not fits:
                yield chunk
                chunk, room = [], capacity
                continue
            chunk.append((index, [fits, height, width]))
            left, room = left - fits, room - fits * cost
    if chunk:
        yield chunk


def _at(steps: torch.Tensor, places: list[int]) -> torch.Tensor:
    """The steps at places in order; a view where they lie one behind the other."""
    first, last = places[0], places[-1]
    return steps[first : last + 1] if last - first + 1 == len(places) else steps[places]


def _check_finite(features: torch.Tensor, pixels: torch.Tensor, name: str) -> None:
    if not _is_finite(features):
        blame = "its features (the weights or the dtype overflow)" if _is_finite(pixels) else "its pixel values"
        raise ValueError(f"NaN or infinity in {blame} of {name}: expected finite numbers.")


def _is_finite(values: torch.Tensor) -> bool:
    """By the extremes, which unlike a sum in float32 need no wider copy of 16-bit values."""
    return bool(torch.stack(values.detach().aminmax()).isfinite().all())


__all__ = ["PATCHES_PER_CHUNK", "QTSplusEncodingMixin", "chunk_grids"]
