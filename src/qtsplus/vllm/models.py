"""vLLM's models with the selector between their vision tower and their language model.

A video's tokens are chosen where vLLM asks for its embeddings. Every row of those carries its position behind its
values, so what vLLM does with them (caching, prefill in chunks, batches) needs not know of the selection.
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
from .attention import Front, Pieces, Unfinished, check_attention, read_group
from .processing import QTSplusMultiModalProcessor, read
from .worker import AGAIN, BUSY, METHOD_SECONDS, PIXELS, Frames, time_limit

logger = logging.getLogger(__name__)

CACHE_GB = 4.0  # of main memory, for chosen tokens and the features of videos that may be asked about again
CHUNK = 2048  # patches that the vision tower sees between tokens of other requests, or those of one frame
LEAST_HELD = 2**30  # bytes of chosen tokens that requests may hold where the cache is smaller

# The selector's weights have another name in vLLM. The first prefix that fits counts, so these come before vLLM's.
SELECTOR_WEIGHTS = WeightsMapper(
    orig_to_new_prefix={"model.qtsplus.": "qtsplus."},
    orig_to_new_suffix={".rho_history": None},
)

Item = dict[str, Any]  # a request's videos, see `processing.merged_item`


@dataclass(frozen=True)
class Choice:
    """The tokens of a request's videos that stay."""

    tokens: Tensor  # [n, token_width]
    kept_indices: Tensor  # [n] int64, into all of its visual tokens
    basis: dict  # what an answer rests on, see `QTSplusForVLLM._basis`

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes


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
        object.__setattr__(self, "hooks", hooks.eval())  # no part of the weights
        options = vllm_config.additional_config
        # The features of videos, `[k, token_width]`, by their content and the settings of the processor, and each
        # `Choice` of requests that are over, by the hash of the video item.
        self.cache: LRUCache = LRUCache(options.get("qtsplus_cache_gb", CACHE_GB) * 2**30, attrgetter("nbytes"))
        self.keeps_fronts = options.get("qtsplus_keep_keys", False)  # each `Front` of a video too
        # The `Choice` of requests that wait or run, and how many requests share it, by the same.
        self.held: dict[str, Choice] = {}
        self.holds: Counter[str] = Counter()
        # What was read for requests whose attention is read group by group, by the hash of a video item.
        self.pieces: dict[str, Pieces] = {}
        self.reading: Pieces | None = None  # of the request that is being prepared, or was last
        # Columns `[k]` of the next forward pass and their positions `[axes, k]`, of each video item.
        self.moved: list[tuple[Tensor, Tensor]] = []

    def embed_multimodal(self, **kwargs):
        """Per video item `[length, token_width + positions]`; images as they are."""
        if "settings" not in kwargs:
            return super().embed_multimodal(**kwargs)  # type: ignore[misc]
        items = [dict(zip(kwargs, values, strict=True)) for values in zip(*kwargs.values(), strict=True)]
        return [self._embed(read(item)) for item in items]

    def _embed(self, item: Item) -> Tensor:
        """`[length, token_width + positions]`: the item's part of the shortened prompt, with each row's position."""
        hooks = self.hooks
        settings = item["settings"]
        device = self.visual.device
        layout = self._lay_out(item, device)
        choice = self.find_choice(settings["key"])
        if choice is None:
            if PIXELS not in item:  # after the release: nobody reads the answer, and an error would end the engine
                logger.error("A request ran after its tokens were released; its answer is void.")
                return hooks.no_features(device).new_zeros(settings["length"], hooks.token_width)
            encoded: list[Tensor] = []  # in a vLLM that was not started by qtsplus serve
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
        """What an answer rests on: the fields of an `Answer`, whose videos are called by their numbers from 1."""
        settings = item["settings"]
        grids = item["video_grid_thw"].cpu().split(1)
        videos = {}
        for number, told in enumerate(settings["told"], start=1):
            name = str(number)
            videos[name] = EncodedVideo(
                video=name,
                features=torch.empty(0),
                video_grid_thw=grids[number - 1],
                seconds_per_step=told["step"],
                about=AboutVideo(VideoMetadata(**told["metadata"]), **told["about"]),
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
        Chooses the tokens of a request before it runs, so that an error costs this request alone, and keeps them until
        [`release`]: the request itself comes without pixels. Gives their number. [`BUSY`] where requests hold too much
        already, [`Frames`] that the next call has to bring where a video is not known here, [`AGAIN`] where groups of
        tokens are left to read. A call encodes one chunk of frames or reads one group, and a request's first neither.
        """
        item = read(item)
        settings = item["settings"]
        key = settings["key"]
        pieces = self.pieces.pop(key, None)
        choice = self.find_choice(key)
        held_bytes = sum(known.nbytes for known in self.held.values())
        if pieces is None and held_bytes >= max(self.cache.maxsize, LEAST_HELD):
            return BUSY
        if choice is None:
            may_read = pieces is not None and PIXELS not in item
            if pieces is None:
                pieces = Pieces(settings["front"])
                pieces.encoding = self._encode(item, pieces.features)
            missing = pieces.encoding.send(item.get(PIXELS))
            if missing is not None:
                self.pieces[key] = pieces
                return missing
            pieces.begin(may_read)
            self.reading = pieces
            limit = time_limit(METHOD_SECONDS) if ":" in settings["selection"] else nullcontext()  # the operator's own
            try:
                with limit:
                    choice = self._choose(item, pieces.features)
            except Unfinished:
                self.pieces[key] = pieces
                return AGAIN
        self.held[key] = choice
        self.holds[key] += 1
        while self.cache and self.cache.currsize + held_bytes + choice.nbytes > self.cache.maxsize:
            self.cache.popitem()  # what is held counts with it
        return len(choice.kept_indices)

    def release(self, key: str) -> None:
        """Ends what [`prepare`] keeps for one request: its tokens are in the cache from then on."""
        self.holds[key] -= 1
        if self.holds[key] == 0:
            del self.holds[key]
            self._remember(key, self.held.pop(key))

    def find_choice(self, key: str) -> Choice | None:
        """The choice that was made for a request, by the hash of its video item."""
        return self.held.get(key) or self.cache.get(key)

    def _remember(self, key: str, value: Tensor | Choice) -> None:
        if value.nbytes <= self.cache.maxsize:
            self.cache[key] = value

    def _group_attention(self, prompt: CompactPrompt, visual: Tensor, place: Tensor) -> GroupAttention:
        """In place of our Transformers model's, for `lm_attention`: in vLLM's own layers."""
        self.check_attention()
        read_this = partial(read_group, self.hooks, self.language_model.model.layers, prompt, visual, place)
        pieces = self.reading
        if pieces is None:  # by a vLLM that was not started by qtsplus serve
            return read_this()
        if self.keeps_fronts:
            read_this = partial(self._read_behind, pieces, read_this)
        return pieces.next(read_this)

    def _read_behind(self, pieces: Pieces, read_this: Callable) -> GroupAttention:
        """The attention to the next group; what is in front of its last visual token is read for one question only."""
        number = len(pieces.known)
        key = (pieces.front, number)
        front = self.cache.get(key) or Front()
        attention = read_this(front)
        # Half of the room is left for other things, and groups of one video do not drive each other out.
        if (number + 1) * front.nbytes <= self.cache.maxsize / 2:
            self.cache[key] = front
        return attention

    def _choose(self, item: Item, features: list[Tensor]) -> Choice:
        """The choice for a request among the features of its videos, per video `[k, token_width]`."""
        settings = item["settings"]
        layout = self._lay_out(item, self.visual.device)
        _, selection = take_inputs(dict(settings, query_mask=item["query_mask"][None]))
        (tokens,), qtsplus = choose(self.hooks, layout, {VIDEO: features}, selection)
        (kept_indices,) = qtsplus.kept_indices or ()
        basis = self._basis(item, qtsplus)
        return Choice(tokens.cpu(), kept_indices, basis)

    def _encode(self, item: Item, encoded: list[Tensor]) -> Generator:
        """
        Adds the features of each video, `[k, token_width]`. It gives the [`Frames`] that it misses, and takes them; it
        gives `None` at the end.
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
                if frames is None:  # another question may have brought them meanwhile
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
        """The full prompt of a request."""
        images = item["image_grids"]
        patches = int(images.prod(-1).sum())
        visual = VisualInputs(
            pixel_values=torch.empty(patches, device="meta"),  # they are counted, and no video's here
            image_grid_thw=images,
            video_grid_thw=item["video_grid_thw"],
            video_features=(),
            second_per_grid_ts=item["second_per_grid_ts"],
        )
        ids = item["prompt_ids"][None].to(device)
        return lay_out(self.hooks, visual, ids, torch.ones_like(ids))

    def get_mrope_input_positions(self, input_tokens, mm_features) -> tuple[Tensor, int]:
        """`[3, S]` of the shortened prompt, right outside of its video item, and what decoding adds to the count."""
        count = len(input_tokens)
        if self.config.qtsplus_config.position_ids == "sequential":
            return torch.arange(count).expand(3, -1).clone(), 0
        videos = [feature for feature in mm_features if feature.modality == "video"]
        if not videos:
            return super().get_mrope_input_positions(input_tokens, mm_features)  # type: ignore[misc]
        (video,) = videos
        item = read(video.data.get_data())
        settings = item["settings"]
        cut = settings["start"] - video.mm_position.offset  # vLLM may have truncated the prompt in front
        layout = with_all_times(self._lay_out(item))
        full = layout.rows[0].language_positions
        before = full[:, cut : settings["start"] + settings["length"]]  # [`forward`] sets those of the item
        after = full[:, settings["stop"] :]
        positions = torch.cat([before, after], dim=1)[:, :count]
        prompt_length = positions.shape[1]
        last = int(positions[:, -1].max())
        behind = last + 1 - prompt_length
        answer = torch.arange(prompt_length, count) + behind  # of a request that is taken up again
        return torch.cat([positions, answer.expand(3, -1)], dim=1), behind

    def embed_input_ids(self, input_ids, multimodal_embeddings=None, **kwargs):
        """As vLLM's; the positions behind the embeddings are kept for [`forward`]."""
        if multimodal_embeddings is not None and len(multimodal_embeddings):
            width = self.hooks.token_width
            lengths = [len(rows) for rows in multimodal_embeddings]
            all_columns = kwargs["is_multimodal"].nonzero()[:, 0]
            self.moved = []
            for of_item, rows in zip(all_columns.split(lengths), multimodal_embeddings, strict=True):
                if rows.shape[1] > width:
                    of_rows = rows[:, width:].contiguous().view(torch.int32)
                    self.moved.append((of_item, of_rows.T))
            multimodal_embeddings = [rows[:, :width] for rows in multimodal_embeddings]
        return super().embed_input_ids(input_ids, multimodal_embeddings, **kwargs)  # type: ignore[misc]

    def forward(self, input_ids, positions: Tensor, *args, **kwargs):
        """As vLLM's, with the positions of what was kept of videos."""
        for columns, moved in self.moved:
            columns = columns.to(positions.device)
            # In place: graphs that were captured read this very memory.
            positions[:, columns] = moved.to(positions)
        self.moved = []
        return super().forward(input_ids, positions, *args, **kwargs)  # type: ignore[misc]


def with_all_times(layout: Layout) -> Layout:
    """The times of all frames stay in the prompts: where vLLM counts, nobody knows which frames keep a token."""
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
        raise ValueError("cudagraph_mm_encoder: expected false, since graphs of the tower would bypass the selector.")


class Qwen2_5_VLProcessor(QTSplusMultiModalProcessor, qwen2_5_vl.Qwen2_5_VLMultiModalProcessor):
    """Of Qwen2.5-VL, and of Qwen2-VL, whose own does not take the times of frames."""

    def _apply_hf_processor_main(self, mm_items, hf_kwargs):
        # vLLM has sampled the frames, and for these backbones does not tell the processor, which would sample them too.
        return super()._apply_hf_processor_main(mm_items, dict(hf_kwargs, do_sample_frames=False))


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
    """Qwen3-VL; the levels of DeepStack stand behind a token's values, and go with it."""

    hf_to_vllm_mapper = SELECTOR_WEIGHTS | qwen3_vl.Qwen3VLForConditionalGeneration.hf_to_vllm_mapper


@MULTIMODAL_REGISTRY.register_processor(
    Qwen3VLProcessor,
    info=qwen3_5.Qwen3_5ProcessingInfo,
    dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder,
)
class Qwen3_5QTSplusInVLLM(QTSplusForVLLM, qwen3_5.Qwen3_5ForConditionalGeneration):
    """Qwen3.5."""

    hf_to_vllm_mapper = SELECTOR_WEIGHTS | qwen3_5.Qwen3_5ForConditionalGeneration.hf_to_vllm_mapper
