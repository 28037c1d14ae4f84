"""vLLM's models with the selector between their vision tower and their language model.

Where vLLM asks for a video's embeddings it gets those of the kept tokens, each row with the token's position appended.
So its cache, its batches and its chunked prefill need not know of the selection.
"""

import logging
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from cachetools import LRUCache  # which vLLM needs too
from torch import Tensor, nn
from transformers.video_utils import VideoMetadata
from vllm.config import CUDAGraphMode
from vllm.model_executor.models import qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_vl
from vllm.model_executor.models.utils import WeightsMapper
from vllm.multimodal import MULTIMODAL_REGISTRY

from ..asking.answers import Kept, shown_by
from ..hub.backbones import backbone_of
from ..model.layout_qtsplus import lay_out
from ..model.lm_attention_qtsplus import GroupAttention
from ..model.methods_qtsplus import add_method
from ..model.mixin_qtsplus import choose
from ..model.prompt_qtsplus import IMAGE, VIDEO, CompactPrompt, Layout, VisualInputs, splice, take_inputs
from ..model.selector_qtsplus import QTSplusOutput
from ..model.video_qtsplus import AboutVideo
from ..video.encoded import EncodedVideo
from .attention import PrefixKeys, Preparation, Unfinished, check_attention, read_group
from .processing import QTSplusMultiModalProcessor, decode_item
from .worker import AGAIN, BUSY, METHOD_SECONDS, PIXELS, Frames, time_limit

logger = logging.getLogger(__name__)

CACHE_GB = 4.0  # of main memory, for chosen tokens and the features of videos that may be asked about again
CHUNK = 2048  # patches that are encoded in one call of the engine, at least a frame; other requests run between calls
LEAST_HELD = 2**30  # bytes of chosen tokens that unfinished requests may hold even if the cache is smaller

# The selector's weights have another name in vLLM. The first prefix that fits is used, so ours come before vLLM's.
SELECTOR_WEIGHTS = WeightsMapper(
    orig_to_new_prefix={"model.qtsplus.": "qtsplus."},
    orig_to_new_suffix={".rho_history": None},
)

Item = dict[str, Any]  # a request's videos, see `processing.merged_item`


@dataclass(frozen=True)
class Choice:
    """The tokens that are kept of a request's videos."""

    tokens: Tensor  # [n, token_width]
    kept_indices: Tensor  # [n] int64, into all visual tokens of the request
    basis: dict  # the evidence and counts that go with an answer, see `QTSplusForVLLM._basis`

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes


class QTSplusForVLLM:
    """
    A mixin for vLLM's models, which stands before vLLM's class among the bases. The selector is `qtsplus`.

    `hooks` is our Transformers model of the same backbone, without its vision tower and language model. It knows the
    layout of a prompt, and the functions that select and splice tokens in Transformers take it here too.
    """

    config: Any
    language_model: Any
    visual: Any
    hooks: Any

    def __init__(self, *, vllm_config, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        check_engine(vllm_config)
        defaults = vllm_config.model_config.get_multimodal_config().mm_processor_kwargs or {}
        selection = defaults.get("selection") or self.config.qtsplus_config.selection
        self.check_attention = partial(
            check_attention,
            self.config,
            adapters=vllm_config.lora_config is not None,
            processes=vllm_config.parallel_config.tensor_parallel_size,
        )
        if selection == "lm_attention":
            self.check_attention()
        add_method(defaults.get("selection"))
        with torch.device("meta"):
            hooks = backbone_of(self.config.model_type).model.model_class(self.config)
        del hooks.visual, hooks.language_model
        hooks.get_input_embeddings = lambda: self.language_model.model.embed_tokens
        hooks.group_attention = self._group_attention
        self.qtsplus = hooks.qtsplus = hooks.build_selector(self.config)
        object.__setattr__(self, "hooks", hooks.eval())  # past torch, which would register it as weights to load
        options = vllm_config.additional_config
        # Features of videos, `[k, token_width]`, by a hash of the video and the processor's settings. Choices of
        # finished requests, by the hash of their video item. With `keeps_prefix_keys` also the `PrefixKeys` of videos.
        self.cache: LRUCache = LRUCache(options.get("qtsplus_cache_gb", CACHE_GB) * 2**30, attrgetter("nbytes"))
        self.keeps_prefix_keys = options.get("qtsplus_keep_keys", False)
        # By the hash of a video item, the choices of requests that wait or run, and the number of these requests.
        self.held: dict[str, Choice] = {}
        self.users: Counter[str] = Counter()
        # Requests whose choice takes several calls of the engine and is not finished, by the hash of their video item.
        self.preparations: dict[str, Preparation] = {}
        self.current: Preparation | None = None  # of the request that was prepared last
        # For each video item in the next forward pass: columns `[k]`, and the positions of their tokens `[axes, k]`.
        self.kept_positions: list[tuple[Tensor, Tensor]] = []

    def embed_multimodal(self, **kwargs):
        """Per video item `[length, token_width + positions]`; images as they are."""
        if "settings" not in kwargs:
            return super().embed_multimodal(**kwargs)  # type: ignore[misc]
        items = [dict(zip(kwargs, values, strict=True)) for values in zip(*kwargs.values(), strict=True)]
        return [self._embed(decode_item(item)) for item in items]

    def _embed(self, item: Item) -> Tensor:
        """`[length, token_width + positions]`: the item's part of the shortened prompt, with each row's position."""
        hooks = self.hooks
        settings = item["settings"]
        device = self.visual.device
        layout = self._lay_out(item, device)
        choice = self.find_choice(settings["key"])
        if choice is None:
            if PIXELS not in item:
                # Nobody reads the answer of a request whose tokens were released, but an error would end the engine.
                logger.error("A request ran after its tokens were released; its answer is void.")
                return hooks.no_features(device).new_zeros(settings["length"], hooks.token_width)
            # Only a vLLM that was not started by qtsplus serve gets here. All pixels are there, so nothing is missing.
            encoded: list[Tensor] = []
            next(self._encode(item, encoded))
            choice = self._choose(item, encoded)
        layout = with_all_times(layout)
        tokens = choice.tokens.to(device)
        kept = QTSplusOutput(kept_indices=(choice.kept_indices,))
        nothing = hooks.no_features(device)
        features = {IMAGE: [nothing] * len(layout.grids[IMAGE])}
        prompt = splice(hooks, layout, features, [tokens], kept, pad_left=False)
        start = settings["start"]
        part = slice(start, start + settings["length"])
        ids = prompt.input_ids[0, part]
        rows = hooks.get_input_embeddings()(ids)
        rows = nn.functional.pad(rows, (0, hooks.token_width - rows.shape[-1]))
        is_kept = ids == self.config.video_token_id
        kept_tokens = prompt.features["video"][0]
        rows[is_kept] = kept_tokens.to(rows.dtype)
        positions = hooks.language_axes(prompt.position_ids)[:, 0, part].T.int()
        return torch.cat([rows, positions.contiguous().view(rows.dtype)], dim=1)

    def _basis(self, item: Item, chosen: QTSplusOutput) -> dict:
        """The evidence and counts that go with an answer: fields of an `Answer`. Its videos are named "1", "2", ..."""
        settings = item["settings"]
        grids = item["video_grid_thw"].cpu().split(1)
        videos = {}
        for number, facts in enumerate(settings["facts"], start=1):
            name = str(number)
            videos[name] = EncodedVideo(
                video=name,
                features=torch.empty(0),
                video_grid_thw=grids[number - 1],
                seconds_per_step=facts["step"],
                about=AboutVideo(VideoMetadata(**facts["metadata"]), **facts["about"]),
                seconds=0.0,
            )
        merge_size = self.config.vision_config.spatial_merge_size
        fields = shown_by(videos, Kept.of(chosen, 0), merge_size, self.config.qtsplus_config).as_dict()
        for name in ("answer", "video", "timings"):
            del fields[name]
        return fields

    @torch.inference_mode()
    def prepare(self, item: Item) -> int | Frames | str:
        """
        Chooses the tokens of a request before it runs, so that an error costs this request alone.

        The tokens are held until [`release`], since the request itself comes without pixels. The choice may take
        several calls, so that other requests run in between. The first looks up what is known. Each further one encodes
        one chunk of frames or reads one group of tokens.

        Returns:
            The number of chosen tokens. Before it is known: [`BUSY`] if other requests hold too much memory, the
            [`Frames`] that the next call must bring, or [`AGAIN`] if groups are left to read.
        """
        item = decode_item(item)
        settings = item["settings"]
        key = settings["key"]
        preparation = self.preparations.pop(key, None)
        choice = self.find_choice(key)
        held_bytes = sum(held.nbytes for held in self.held.values())
        if preparation is None and held_bytes >= max(self.cache.maxsize, LEAST_HELD):
            return BUSY
        if choice is None:
            may_read = preparation is not None and PIXELS not in item
            if preparation is None:
                preparation = Preparation(settings["prefix"])
                preparation.encoding = self._encode(item, preparation.features)
            missing_frames = preparation.encoding.send(item.get(PIXELS))
            if missing_frames is not None:
                self.preparations[key] = preparation
                return missing_frames
            preparation.begin(may_read)
            self.current = preparation
            # A name with a colon is a function of the operator's own, which may hang.
            limit = time_limit(METHOD_SECONDS) if ":" in settings["selection"] else nullcontext()
            try:
                with limit:
                    choice = self._choose(item, preparation.features)
            except Unfinished:
                self.preparations[key] = preparation
                return AGAIN
        self.held[key] = choice
        self.users[key] += 1
        # Held choices count towards the limit of the cache.
        while self.cache and self.cache.currsize + held_bytes + choice.nbytes > self.cache.maxsize:
            self.cache.popitem()
        return len(choice.kept_indices)

    def release(self, key: str) -> None:
        """One request less needs the tokens that [`prepare`] holds. After the last one they go into the cache."""
        self.users[key] -= 1
        if self.users[key] == 0:
            del self.users[key]
            self._remember(key, self.held.pop(key))

    def find_choice(self, key: str) -> Choice | None:
        """The choice that was made for a request, if it is held or cached, by the hash of its video item."""
        return self.held.get(key) or self.cache.get(key)

    def _remember(self, key: str, value: Tensor | Choice) -> None:
        if value.nbytes <= self.cache.maxsize:
            self.cache[key] = value

    def _group_attention(self, prompt: CompactPrompt, visual: Tensor, place: Tensor) -> GroupAttention:
        """For `lm_attention`: replaces the method of `hooks`, and reads the attention in vLLM's own layers."""
        self.check_attention()
        read = partial(read_group, self.hooks, self.language_model.model.layers, prompt, visual, place)
        preparation = self.current
        if preparation is None:  # in a vLLM that was not started by qtsplus serve
            return read()
        if self.keeps_prefix_keys:
            read = partial(self._read_with_cache, preparation, read)
        return preparation.next(read)

    def _read_with_cache(self, preparation: Preparation, read: Callable) -> GroupAttention:
        """The attention to the next group, whose prefix passes the layers only for the first question about a video."""
        number = len(preparation.attentions)
        key = (preparation.prefix, number)
        prefix_keys = self.cache.get(key) or PrefixKeys()
        attention = read(prefix_keys)
        # All groups of a video so far fit into half of the cache, so that they do not replace each other there.
        if (number + 1) * prefix_keys.nbytes <= self.cache.maxsize / 2:
            self.cache[key] = prefix_keys
        return attention

    def _choose(self, item: Item, features: list[Tensor]) -> Choice:
        """Chooses among the features of a request's videos, `[k, token_width]` each."""
        settings = item["settings"]
        layout = self._lay_out(item, self.visual.device)
        _, selection = take_inputs(dict(settings, query_mask=item["query_mask"][None]))
        (tokens,), qtsplus = choose(self.hooks, layout, {VIDEO: features}, selection)
        (kept_indices,) = qtsplus.kept_indices or ()
        basis = self._basis(item, qtsplus)
        return Choice(tokens.cpu(), kept_indices, basis)

    def _encode(self, item: Item, encoded: list[Tensor]) -> Generator:
        """
        Appends the features of each video, `[k, token_width]`, to `encoded`. If the item has no pixels, it yields the
        [`Frames`] that it needs next, and their pixels are sent to it. When all videos are encoded it yields `None`.
        """
        pixels = item.get(PIXELS)
        for index, video in enumerate(item["settings"]["hashes"]):
            features = self.cache.get(video)
            time, height, width = item["video_grid_thw"][index].tolist()
            frame_size = height * width
            chunk_size = max(1, CHUNK // frame_size) * frame_size
            start = 0
            chunks = []
            while features is None:
                stop = start + chunk_size
                frames = pixels[index][start:stop] if pixels else (yield [index, start, stop])
                if frames is None:  # none were sent, but another question's frames may have been encoded meanwhile
                    features = self.cache.get(video)
                    continue
                (tokens,) = super().embed_multimodal(  # type: ignore[misc]
                    pixel_values_videos=frames.to(self.visual.device),
                    video_grid_thw=torch.tensor([[len(frames) // frame_size, height, width]]),
                )
                chunks.append(tokens.cpu())
                start = stop
                if start >= time * frame_size:
                    features = torch.cat(chunks)
                    self._remember(video, features)
            encoded.append(features)
        while True:
            yield None

    def _lay_out(self, item: Item, device="cpu") -> Layout:
        """The layout of a request's prompt before tokens are left out."""
        images = item["image_grids"]
        patches = int(images.prod(-1).sum())
        visual = VisualInputs(
            pixel_values=torch.empty(patches, device="meta"),  # of images; only their number is used
            image_grid_thw=images,
            video_grid_thw=item["video_grid_thw"],
            video_features=(),
            second_per_grid_ts=item["second_per_grid_ts"],
        )
        ids = item["prompt_ids"][None].to(device)
        return lay_out(self.hooks, visual, ids, torch.ones_like(ids))

    def get_mrope_input_positions(self, input_tokens, mm_features) -> tuple[Tensor, int]:
        """
        The positions `[3, S]` of the shortened prompt, and the offset of decoding: a token's position minus its index.
        Positions inside the video item do not matter, since [`forward`] replaces them.
        """
        count = len(input_tokens)
        if self.config.qtsplus_config.position_ids == "sequential":
            return torch.arange(count).expand(3, -1).clone(), 0
        videos = [feature for feature in mm_features if feature.modality == "video"]
        if not videos:
            return super().get_mrope_input_positions(input_tokens, mm_features)  # type: ignore[misc]
        (video,) = videos
        item = decode_item(video.data.get_data())
        settings = item["settings"]
        truncated = settings["start"] - video.mm_position.offset  # tokens that vLLM took from the prompt's beginning
        layout = with_all_times(self._lay_out(item))
        full = layout.rows[0].language_positions
        before = full[:, truncated : settings["start"] + settings["length"]]  # up to the end of the shortened item
        after = full[:, settings["stop"] :]
        positions = torch.cat([before, after], dim=1)[:, :count]
        prompt_length = positions.shape[1]
        last = int(positions[:, -1].max())
        offset = last + 1 - prompt_length
        # An interrupted request that is continued comes with its answer so far.
        answer = torch.arange(prompt_length, count) + offset
        return torch.cat([positions, answer.expand(3, -1)], dim=1), offset

    def embed_input_ids(self, input_ids, multimodal_embeddings=None, **kwargs):
        """As vLLM's; takes the positions off the rows of videos, and keeps them for [`forward`]."""
        if multimodal_embeddings is not None and len(multimodal_embeddings):
            width = self.hooks.token_width
            lengths = [len(rows) for rows in multimodal_embeddings]
            all_columns = kwargs["is_multimodal"].nonzero()[:, 0]
            self.kept_positions = []
            for columns, rows in zip(all_columns.split(lengths), multimodal_embeddings, strict=True):
                if rows.shape[1] > width:
                    positions = rows[:, width:].contiguous().view(torch.int32)
                    self.kept_positions.append((columns, positions.T))
            multimodal_embeddings = [rows[:, :width] for rows in multimodal_embeddings]
        return super().embed_input_ids(input_ids, multimodal_embeddings, **kwargs)  # type: ignore[misc]

    def forward(self, input_ids, positions: Tensor, *args, **kwargs):
        """As vLLM's, with the original positions of the kept tokens."""
        for columns, kept_positions in self.kept_positions:
            columns = columns.to(positions.device)
            # In place, since captured CUDA graphs read this memory.
            positions[:, columns] = kept_positions.to(positions)
        self.kept_positions = []
        return super().forward(input_ids, positions, *args, **kwargs)  # type: ignore[misc]


def with_all_times(layout: Layout) -> Layout:
    """Keeps the times of all frames in the prompts. vLLM counts tokens before it is known which frames keep one."""
    rows = [replace(row, separators=row.separators[:, :0]) for row in layout.rows]
    return replace(layout, rows=rows)


def check_engine(vllm_config) -> None:
    """Raises `ValueError` for settings of the engine that would give wrong answers without an error."""
    graphs = vllm_config.compilation_config
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_index > 0:
        raise ValueError("data_parallel_size above 1: expected 1, and a server for each GPU behind a proxy.")
    if parallel.pipeline_parallel_size > 1:
        raise ValueError("pipeline_parallel_size above 1: expected 1, since positions do not travel between stages.")
    if graphs.cudagraph_mode == CUDAGraphMode.FULL:
        raise ValueError("cudagraph_mode FULL: expected another, since our code runs in every prefill.")
    if getattr(graphs, "cudagraph_mm_encoder", False):
        raise ValueError("cudagraph_mm_encoder: expected false, since graphs of the encoder would bypass the selector.")


class Qwen2_5_VLProcessor(QTSplusMultiModalProcessor, qwen2_5_vl.Qwen2_5_VLMultiModalProcessor):
    """The processor of Qwen2.5-VL, and of Qwen2-VL, whose own processor in vLLM does not take the times of frames."""

    def _apply_hf_processor_main(self, mm_items, hf_kwargs):
        # vLLM has sampled the frames. For these backbones it does not say so, and the processor would sample again.
        return super()._apply_hf_processor_main(mm_items, dict(hf_kwargs, do_sample_frames=False))


class Qwen2VLInfo(qwen2_vl.Qwen2VLProcessingInfo):
    """As vLLM's for Qwen2-VL, but videos come with the times of their frames."""

    get_data_parser = qwen2_5_vl.Qwen2_5_VLProcessingInfo.get_data_parser


class Qwen3VLProcessor(QTSplusMultiModalProcessor, qwen3_vl.Qwen3VLMultiModalProcessor):
    """The processor of Qwen3-VL and Qwen3.5."""


@MULTIMODAL_REGISTRY.register_processor(
    Qwen2_5_VLProcessor,
    info=qwen2_5_vl.Qwen2_5_VLProcessingInfo,
    dummy_inputs=qwen2_5_vl.Qwen2_5_VLDummyInputsBuilder,
)
class Qwen2_5_VLQTSplusInVLLM(QTSplusForVLLM, qwen2_5_vl.Qwen2_5_VLForConditionalGeneration):
    """Qwen2.5-VL."""

    hf_to_vllm_mapper = SELECTOR_WEIGHTS | qwen2_5_vl.Qwen2_5_VLForConditionalGeneration.hf_to_vllm_mapper


@MULTIMODAL_REGISTRY.register_processor(
    Qwen2_5_VLProcessor,
    info=Qwen2VLInfo,
    dummy_inputs=qwen2_5_vl.Qwen2_5_VLDummyInputsBuilder,
)
class Qwen2VLQTSplusInVLLM(QTSplusForVLLM, qwen2_vl.Qwen2VLForConditionalGeneration):
    """Qwen2-VL."""

    hf_to_vllm_mapper = SELECTOR_WEIGHTS | qwen2_vl.Qwen2VLForConditionalGeneration.hf_to_vllm_mapper


@MULTIMODAL_REGISTRY.register_processor(
    Qwen3VLProcessor,
    info=qwen3_vl.Qwen3VLProcessingInfo,
    dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder,
)
class Qwen3VLQTSplusInVLLM(QTSplusForVLLM, qwen3_vl.Qwen3VLForConditionalGeneration):
    """Qwen3-VL. A token's values end with its DeepStack features, so they are kept with it."""

    hf_to_vllm_mapper = SELECTOR_WEIGHTS | qwen3_vl.Qwen3VLForConditionalGeneration.hf_to_vllm_mapper


@MULTIMODAL_REGISTRY.register_processor(
    Qwen3VLProcessor,
    info=qwen3_5.Qwen3_5ProcessingInfo,
    dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder,
)
class Qwen3_5QTSplusInVLLM(QTSplusForVLLM, qwen3_5.Qwen3_5ForConditionalGeneration):
    """Qwen3.5."""

    hf_to_vllm_mapper = SELECTOR_WEIGHTS | qwen3_5.Qwen3_5ForConditionalGeneration.hf_to_vllm_mapper
