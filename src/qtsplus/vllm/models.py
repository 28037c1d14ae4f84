"""vLLM's models with the selector between their vision tower and their language model.

A video's tokens are chosen where vLLM asks for its embeddings. Every row of those carries its position behind its
values, so what vLLM does with them (caching, prefill in chunks, batches) needs not know of the selection.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from cachetools import LRUCache  # which vLLM needs too
from torch import Tensor, nn
from vllm.config import CUDAGraphMode
from vllm.model_executor.models import qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_vl
from vllm.model_executor.models.utils import WeightsMapper
from vllm.multimodal import MULTIMODAL_REGISTRY

from ..asking.answers import Kept, shown_by
from ..hub.backbones import backbone_of
from ..model.encoding_qtsplus import attend_within
from ..model.layout_qtsplus import lay_out
from ..model.lm_attention_qtsplus import GroupAttention
from ..model.methods_qtsplus import add_method
from ..model.mixin_qtsplus import choose
from ..model.prompt_qtsplus import IMAGE, VIDEO, CompactPrompt, Layout, SelectionInputs, VisualInputs, pad_rows, splice
from ..model.selector_qtsplus import QTSplusOutput
from ..model.video_qtsplus import AboutVideo
from ..video.encoded import EncodedVideo
from .attention import Pieces, Unfinished, problem_with_attention, read_group, refuse_attention
from .processing import QTSplusMultiModalProcessor, read
from .worker import AGAIN, FRAMES, PIXELS, Budget

CACHE_GB = 4.0  # of main memory, for the features of videos that may be asked about again
CHOSEN_BYTES = 2**28  # of the model's memory, for tokens that were chosen before their request runs
TOGETHER = 2**15  # the most tokens of prompts that are chosen for at once
READ_TOGETHER = 2**10  # the most requests whose attention is read at the same time
BASES = 2**16  # requests whose bases of answers are kept: more than vLLM's own caches answer again

Item = dict[str, Any]  # a request's videos, see `processing.merged_item`


@dataclass(frozen=True)
class Choice:
    """The tokens of a request's videos that stay."""

    tokens: Tensor  # [n, token_width]
    kept_indices: Tensor  # [n] int64, into all of its visual tokens


@dataclass(frozen=True)
class Held:
    """The features of a video, kept while requests about it wait or run."""

    count: int  # of these requests
    features: Tensor  # [k, token_width]


def batches(items: list[Item], chosen: Container[str]) -> Iterator[list[Item]]:
    """
    The requests of a step that are chosen for together: by one method, questions about one video side by side, and no
    more than [`TOGETHER`], or one request.

    Args:
        chosen: keys of requests whose tokens are already chosen.
    """

    def kind(item: Item) -> tuple:
        settings = item["settings"]
        return settings["key"] in chosen, settings["selection"], settings.get("reencode", True)

    def order(item: Item) -> tuple:
        return kind(item), item["settings"]["hashes"]

    batch: list[Item] = []
    tokens = 0
    for item in sorted(items, key=order):
        tokens += len(item["prompt_ids"])
        if batch and (kind(item) != kind(batch[0]) or tokens > TOGETHER):
            yield batch
            batch = []
            tokens = len(item["prompt_ids"])
        batch.append(item)
    if batch:
        yield batch


class QTSplusForVLLM:
    """
    In front of a model of vLLM's, with its selector as `qtsplus`.

    `hooks` is our Transformers model of the same backbone without a tower and a language model: it says where tokens
    stand, and the functions that select and splice take it as it is.
    """

    config: Any
    language_model: Any
    visual: Any
    hooks: Any

    def __init__(self, *, vllm_config, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        check_engine(vllm_config)
        defaults = vllm_config.model_config.get_multimodal_config().mm_processor_kwargs or {}
        self.problem_with_attention = problem_with_attention(self.config, vllm_config)
        if (defaults.get("selection") or self.config.qtsplus_config.selection) == "lm_attention":
            refuse_attention(self.problem_with_attention)
        if self.visual.device.type == "cpu":
            for part in self.visual.modules():
                if hasattr(part, "_forward_sdpa"):
                    part._forward_sdpa = lambda q, k, v, ends: attend_within(q[0], k[0], v[0], ends)[None]
        add_method(defaults.get("selection"))
        with torch.device("meta"):
            hooks = backbone_of(self.config.model_type).model.model_class(self.config)
        del hooks.visual, hooks.language_model
        hooks.get_input_embeddings = lambda: self.language_model.model.embed_tokens
        hooks.group_attention = self._group_attention
        self.qtsplus = hooks.qtsplus = hooks.build_selector(self.config)
        object.__setattr__(self, "hooks", hooks.eval())  # no part of the weights
        gigabytes = float(vllm_config.additional_config.get("qtsplus_cache_gb", CACHE_GB))
        # The features of videos, `[k, token_width]`, by their content and the settings of the processor.
        self.encoded: LRUCache = LRUCache(gigabytes * 2**30, getsizeof=lambda features: features.nbytes)
        # Fields of an `Answer`, by the hash of a video item.
        self.bases: LRUCache = LRUCache(BASES)
        # The `Choice` that was made when the budget was asked, by the same.
        self.chosen: LRUCache = LRUCache(CHOSEN_BYTES, getsizeof=lambda choice: choice.tokens.nbytes)
        # Of the videos of requests that wait or run, by the content of the video.
        self.held: dict[str, Held] = {}
        # What was read for requests whose attention is read group by group, by the hash of a video item.
        self.pieces: LRUCache = LRUCache(READ_TOGETHER)
        self.reading: Pieces | None = None  # of the request that is being prepared
        # Columns `[k]` of the next forward pass and their positions `[axes, k]`.
        self.moved: tuple[Tensor, Tensor] | None = None

    def load_weights(self, weights):
        self.encoded.clear()  # of other weights, where these replace them
        self.bases.clear()
        self.chosen.clear()
        return super().load_weights(weights)  # type: ignore[misc]

    def embed_multimodal(self, **kwargs):
        """Per video item `[length, token_width + positions]`; images as they are."""
        if "settings" not in kwargs:
            return super().embed_multimodal(**kwargs)  # type: ignore[misc]
        items = []
        for values in zip(*kwargs.values(), strict=True):
            fields = zip(kwargs, values, strict=True)
            items.append(read(dict(fields)))
        embedded: dict[int, Tensor] = {}
        for batch in batches(items, self.chosen):
            rows_of_batch = self._embed(batch)
            for item, rows in zip(batch, rows_of_batch, strict=True):
                embedded[id(item)] = rows
        return [embedded[id(item)] for item in items]

    def _embed(self, items: list[Item]) -> list[Tensor]:
        """Per item `[length, token_width + positions]`: its part of the shortened prompt, with each row's position."""
        hooks = self.hooks
        layout, choices = self._choose(items)
        layout = with_all_times(layout)
        tokens = [choice.tokens for choice in choices]
        kept = QTSplusOutput(kept_indices=tuple(choice.kept_indices for choice in choices))
        nothing = hooks.no_features(layout.mask.device)
        images = [nothing] * len(layout.grids[IMAGE])
        features = {IMAGE: images}
        prompt = splice(hooks, layout, features, tokens, kept, pad_left=False)
        language = hooks.language_axes(prompt.position_ids)
        embedded = []
        for row, item in enumerate(items):
            start = item["settings"]["start"]
            part = slice(start, start + item["settings"]["length"])
            ids = prompt.input_ids[row, part]
            rows = hooks.get_input_embeddings()(ids)
            missing = hooks.token_width - rows.shape[-1]
            rows = nn.functional.pad(rows, (0, missing))
            kept_tokens = prompt.features["video"][row].to(rows.dtype)
            rows[ids == self.config.video_token_id] = kept_tokens
            positions = language[:, row, part].T.int().contiguous()
            rows = torch.cat([rows, positions.view(rows.dtype)], dim=1)
            embedded.append(rows)
        return embedded

    def _basis(
        self,
        item: Item,
        features: list[Tensor],
        chosen,
        row: int,
    ) -> dict:
        """What an answer rests on: the fields of an `Answer`, whose videos are called by their numbers from 1."""
        config = self.config.qtsplus_config
        settings = item["settings"]
        videos = {}
        for index, told in enumerate(settings["told"]):
            name = str(index + 1)
            height, width = told["size"]
            metadata: Any = SimpleNamespace(**told, height=height, width=width)
            videos[name] = EncodedVideo(
                video=name,
                features=features[index],
                video_grid_thw=item["video_grid_thw"][index : index + 1].cpu(),
                seconds_per_step=told["step"],
                about=AboutVideo(metadata, **told["about"]),
                seconds=0.0,
            )
        kept = Kept.of(chosen, row)
        kept = replace(kept, rho=settings.get("rho", kept.rho))
        fields = shown_by(videos, kept, self.config.vision_config.spatial_merge_size, config).as_dict()
        for name in ("answer", "video", "timings"):
            del fields[name]
        return fields

    @torch.inference_mode()
    def prepare(self, item: Item, hold: bool) -> Budget | str:
        """
        Chooses the tokens of a request before it runs, so that an error costs this request alone. [`FRAMES`] where a
        video is not known here and its pixels are not in the item; [`AGAIN`] where attention was read for one more
        group of tokens, and others are left.

        Args:
            hold: keeps the features of its videos until [`release`], so that the request can come without pixels.
        """
        item = read(item)
        settings = item["settings"]
        key = settings["key"]
        needs_choice = settings["selection"] != "all" and key not in self.bases
        if hold or needs_choice:
            unknown = [video for video in settings["hashes"] if self._known(video) is None]
            if unknown and PIXELS not in item:
                return FRAMES
            features = self._encode(item)
        if needs_choice:
            pieces = self.pieces.pop(key, None) or Pieces(features)
            pieces.begin()
            self.reading = pieces
            try:
                _, (choice,) = self._choose([item])
            except Unfinished:
                self.pieces[key] = pieces
                return AGAIN
            finally:
                self.reading = None
            if choice.tokens.nbytes <= self.chosen.maxsize:
                self.chosen[key] = choice
        if hold:  # and nothing can fail any more
            for video, of_video in zip(settings["hashes"], features, strict=True):
                count = self.held[video].count if video in self.held else 0
                self.held[video] = Held(count + 1, of_video)
        if settings["selection"] == "all":
            return 0, 1.0
        basis = self.bases[key]
        return basis["kept_tokens"], basis["rho"]

    def release(self, videos: list[str]) -> None:
        """Ends one `hold` of [`prepare`]."""
        for video in videos:
            held = self.held.pop(video)
            if held.count > 1:
                self.held[video] = replace(held, count=held.count - 1)

    def _known(self, video: str) -> Tensor | None:
        """The features of a video `[k, token_width]`, where they are in the cache or held by another request."""
        features = self.encoded.get(video)
        if features is None and video in self.held:
            features = self.held[video].features
        return features

    def _group_attention(self, prompt: CompactPrompt, visual: Tensor, place: Tensor) -> GroupAttention:
        """In place of our Transformers model's, for `lm_attention`: in vLLM's own layers."""
        refuse_attention(self.problem_with_attention)
        read_this = partial(read_group, self.hooks, self.language_model.model.layers, prompt, visual, place)
        if self.reading is None:  # by a vLLM that was not started by qtsplus serve
            return read_this()
        return self.reading.next(read_this)

    def _choose(self, items: list[Item]) -> tuple[Layout, list[Choice]]:
        """The full prompts of requests of one of [`batches`], and the choice for each."""
        all_settings = [item["settings"] for item in items]
        first = all_settings[0]
        layout = self._lay_out(items, self.visual.device)
        choices = [self.chosen.pop(settings["key"], None) for settings in all_settings]
        if all(choices):
            return layout, choices
        features = [self._encode(item) for item in items]
        query_mask = pad_rows([item["query_mask"] for item in items], False, left=False)
        most = first.get("max_visual_tokens")
        selection = SelectionInputs(
            query_mask=query_mask.to(layout.mask.device),
            retention=[settings.get("retention") for settings in all_settings],
            max_visual_tokens=None if most is None else int(most),
            selection=first["selection"],
            reencode=first.get("reencode", True),
        )
        # Questions about one video share its tensor, and so its keys.
        videos = list(chain.from_iterable(features))
        selected, qtsplus = choose(self.hooks, layout, {VIDEO: videos}, selection)
        for row, item in enumerate(items):
            key = all_settings[row]["key"]
            if key not in self.bases:
                self.bases[key] = self._basis(item, features[row], qtsplus, row)
        kept = qtsplus.kept_indices or ()
        return layout, [Choice(*pair) for pair in zip(selected, kept, strict=True)]

    def _encode(self, item: Item) -> list[Tensor]:
        """Per video `[k, token_width]`; the vision tower sees those that are not known."""
        encoded = []
        for index, key in enumerate(item["settings"]["hashes"]):
            features = self._known(key)
            if features is None and self.reading is not None:
                features = self.reading.features[index]
            if features is None:
                video = slice(index, index + 1)
                embedded = super().embed_multimodal(  # type: ignore[misc]
                    pixel_values_videos=item[PIXELS][index].to(self.visual.device),
                    video_grid_thw=item["video_grid_thw"][video],
                    second_per_grid_ts=item["second_per_grid_ts"][video],
                )
                features = embedded[0].cpu()
                if features.nbytes <= self.encoded.maxsize:
                    self.encoded[key] = features
            encoded.append(features)
        return encoded

    def _lay_out(self, items: list[Item], device="cpu") -> Layout:
        """The full prompts of requests."""
        videos = torch.cat([item["video_grid_thw"] for item in items])
        images = torch.cat([item["image_grids"] for item in items])
        visual = VisualInputs(
            pixel_values=_no_pixels(images) if len(images) else None,
            image_grid_thw=images if len(images) else None,
            pixel_values_videos=_no_pixels(videos),
            video_grid_thw=videos,
            second_per_grid_ts=torch.cat([item["second_per_grid_ts"] for item in items]),
        )
        prompts = [item["prompt_ids"] for item in items]
        ids = pad_rows(prompts, 0, left=False)
        mask = pad_rows([torch.ones_like(prompt) for prompt in prompts], 0, left=False)
        return lay_out(self.hooks, visual, ids.to(device), mask.to(device))

    def get_mrope_input_positions(self, input_tokens, mm_features) -> tuple[Tensor, int]:
        """`[3, S]` of the shortened prompt, right outside of its video item, and what decoding adds to the count."""
        if self.config.qtsplus_config.position_ids == "sequential":
            return torch.arange(len(input_tokens)).expand(3, -1).clone(), 0
        videos = [feature for feature in mm_features if feature.modality == "video"]
        if not videos:
            return super().get_mrope_input_positions(input_tokens, mm_features)  # type: ignore[misc]
        item = read(videos[0].data.get_data())
        settings = item["settings"]
        first = videos[0].mm_position.offset
        length = settings["length"]
        full_length = settings["stop"] - settings["start"]  # of the item before it was shortened
        full = with_all_times(self._lay_out([item])).rows[0].language_positions
        full = full[:, settings["start"] - first :]  # vLLM may have truncated a prompt
        full = full[:, : full_length - length + len(input_tokens)]
        before = full[:, :first]
        after = full[:, first + full_length :]
        positions = torch.cat([before, full.new_zeros(3, length), after], dim=1)
        prompt_length = positions.shape[1]
        behind = int(full[:, -1].max()) + 1 - prompt_length
        answer = torch.arange(prompt_length, len(input_tokens)) + behind  # of a request that is taken up again
        return torch.cat([positions, answer.expand(3, -1)], dim=1), behind

    def embed_input_ids(self, input_ids, multimodal_embeddings=None, **kwargs):
        """As vLLM's; the positions behind the embeddings are kept for [`forward`]."""
        if multimodal_embeddings is not None and len(multimodal_embeddings):
            width = self.hooks.token_width
            lengths = [len(rows) for rows in multimodal_embeddings]
            all_columns = kwargs["is_multimodal"].nonzero()[:, 0]
            columns = []
            positions = []
            for of_item, rows in zip(all_columns.split(lengths), multimodal_embeddings, strict=True):
                if rows.shape[1] > width:
                    columns.append(of_item)
                    stored = rows[:, width:].contiguous()
                    positions.append(stored.view(torch.int32).T)
            if columns:
                self.moved = torch.cat(columns), torch.cat(positions, dim=1)
            multimodal_embeddings = [rows[:, :width] for rows in multimodal_embeddings]
        return super().embed_input_ids(input_ids, multimodal_embeddings, **kwargs)  # type: ignore[misc]

    def forward(self, input_ids, positions: Tensor, *args, **kwargs):
        """As vLLM's, with the positions of what was kept of videos."""
        if self.moved is not None:
            columns, moved = self.moved
            device = positions.device
            # In place: graphs that were captured read this very memory.
            positions[:, columns.to(device)] = moved.to(device, positions.dtype)
            self.moved = None
        return super().forward(input_ids, positions, *args, **kwargs)  # type: ignore[misc]


def with_all_times(layout: Layout) -> Layout:
    """The times of all frames stay in the prompts: where vLLM counts, nobody knows which frames keep a token."""
    rows = [replace(row, separators=row.separators[:, :0]) for row in layout.rows]
    return replace(layout, rows=rows)


def _no_pixels(grids: Tensor) -> Tensor:
    """As many patches as grids `[n, 3]` have, without memory: a layout only counts them."""
    return torch.empty(int(grids.prod(-1).sum()), device="meta")


def check_engine(vllm_config) -> None:
    """Raises `ValueError` for settings of the engine that would give wrong answers without an error."""
    graphs = vllm_config.compilation_config
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError("pipeline_parallel_size above 1: expected 1, since positions do not travel between stages.")
    if graphs.cudagraph_mode == CUDAGraphMode.FULL:
        raise ValueError("cudagraph_mode FULL: expected another, since our code runs in every prefill.")
    if getattr(graphs, "cudagraph_mm_encoder", False):
        raise ValueError("cudagraph_mm_encoder: expected false, since graphs of the tower would bypass the selector.")


def weight_names(stock) -> WeightsMapper:
    """The names of the weights of a vLLM model, with those of the selector."""
    fields = dict(vars(stock.hf_to_vllm_mapper))
    prefixes = {"model.qtsplus.": "qtsplus."}  # the first prefix that fits counts
    prefixes.update(fields["orig_to_new_prefix"])
    fields["orig_to_new_prefix"] = prefixes
    return WeightsMapper(orig_to_new_suffix={".rho_history": None}) | WeightsMapper(**fields)


class Qwen2_5_VLProcessor(QTSplusMultiModalProcessor, qwen2_5_vl.Qwen2_5_VLMultiModalProcessor):
    """Of Qwen2.5-VL, and of Qwen2-VL, whose own does not take the times of frames."""

    def _apply_hf_processor_main(self, mm_items, hf_kwargs):
        # vLLM has sampled the frames, and for these backbones does not tell the processor, which would sample them too.
        hf_kwargs = dict(hf_kwargs)
        hf_kwargs.setdefault("do_sample_frames", False)
        return super()._apply_hf_processor_main(mm_items, hf_kwargs)


class Qwen2VLInfo(qwen2_vl.Qwen2VLProcessingInfo):
    """Of Qwen2-VL, whose videos come with the times of their frames."""

    get_data_parser = qwen2_5_vl.Qwen2_5_VLProcessingInfo.get_data_parser


class Qwen3VLProcessor(QTSplusMultiModalProcessor, qwen3_vl.Qwen3VLMultiModalProcessor):
    """Of Qwen3-VL and Qwen3.5."""


@MULTIMODAL_REGISTRY.register_processor(
    Qwen2_5_VLProcessor,
    info=qwen2_5_vl.Qwen2_5_VLProcessingInfo,
    dummy_inputs=qwen2_5_vl.Qwen2_5_VLDummyInputsBuilder,
)
class Qwen2_5_VLQTSplusInVLLM(QTSplusForVLLM, qwen2_5_vl.Qwen2_5_VLForConditionalGeneration):
    """Qwen2.5-VL."""

    hf_to_vllm_mapper = weight_names(qwen2_5_vl.Qwen2_5_VLForConditionalGeneration)


@MULTIMODAL_REGISTRY.register_processor(
    Qwen2_5_VLProcessor,
    info=Qwen2VLInfo,
    dummy_inputs=qwen2_5_vl.Qwen2_5_VLDummyInputsBuilder,
)
class Qwen2VLQTSplusInVLLM(QTSplusForVLLM, qwen2_vl.Qwen2VLForConditionalGeneration):
    """Qwen2-VL."""

    hf_to_vllm_mapper = weight_names(qwen2_vl.Qwen2VLForConditionalGeneration)


@MULTIMODAL_REGISTRY.register_processor(
    Qwen3VLProcessor,
    info=qwen3_vl.Qwen3VLProcessingInfo,
    dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder,
)
class Qwen3VLQTSplusInVLLM(QTSplusForVLLM, qwen3_vl.Qwen3VLForConditionalGeneration):
    """Qwen3-VL; the levels of DeepStack stand behind a token's values, and go with it."""

    hf_to_vllm_mapper = weight_names(qwen3_vl.Qwen3VLForConditionalGeneration)


@MULTIMODAL_REGISTRY.register_processor(
    Qwen3VLProcessor,
    info=qwen3_5.Qwen3_5ProcessingInfo,
    dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder,
)
class Qwen3_5QTSplusInVLLM(QTSplusForVLLM, qwen3_5.Qwen3_5ForConditionalGeneration):
    """Qwen3.5."""

    hf_to_vllm_mapper = weight_names(qwen3_5.Qwen3_5ForConditionalGeneration)
