"""vLLM's models with the selector between their vision tower and their language model.

A video's tokens are chosen where vLLM asks for its embeddings. Every row of those carries its position behind its
values, so what vLLM does with them (caching, prefill in chunks, batches) needs not know of the selection.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from cachetools import LRUCache  # which vLLM needs too
from torch import nn
from vllm.config import CUDAGraphMode
from vllm.model_executor.models import qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_vl
from vllm.model_executor.models.utils import WeightsMapper
from vllm.multimodal import MULTIMODAL_REGISTRY

from ..asking.answers import Answer, calibrated_seen, shown_by
from ..hub.backbones import backbone_of
from ..model.encoding_qtsplus import attend_within
from ..model.layout_qtsplus import lay_out
from ..model.methods_qtsplus import add_method
from ..model.mixin_qtsplus import choose
from ..model.prompt_qtsplus import IMAGE, VIDEO, Layout, SelectionInputs, VisualInputs, pad_rows, splice
from ..model.selector_qtsplus import QTSplusOutput
from ..video.encoded import EncodedVideo
from .processing import QTSplusMultiModalProcessor, read
from .worker import PIXELS

CACHE_GB = 4.0  # of main memory, for the features of videos that may be asked about again
CHOSEN_BYTES = 2**28  # of the model's memory, for tokens that were chosen before their request runs
TOGETHER = 2**15  # tokens of prompts
BASES = 2**16  # requests of which it is known what their answers rest on: more than vLLM's own caches answer again


def batches(items: list[dict[str, Any]], chosen: Container[str]) -> Iterator[list[dict[str, Any]]]:
    """
    The requests of a step that are chosen for together: by one method, questions about one video side by side, and no
    more than [`TOGETHER`], or one request.

    Args:
        chosen: keys of requests for which it is known what stays.
    """

    def kind(item: dict[str, Any]) -> tuple[Any, ...]:
        settings = item["settings"]
        return settings["key"] in chosen, settings["selection"], settings.get("reencode", True)

    batch, tokens = list[dict[str, Any]](), 0
    for item in sorted(items, key=lambda item: (*kind(item), item["settings"]["hashes"])):
        tokens += len(item["prompt_ids"])
        if batch and (kind(item) != kind(batch[0]) or tokens > TOGETHER):
            yield batch
            batch, tokens = [], len(item["prompt_ids"])
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

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        check_engine(vllm_config)
        for part in self.visual.modules():
            if self.visual.device.type == "cpu" and hasattr(part, "_forward_sdpa"):
                part._forward_sdpa = lambda q, k, v, ends: attend_within(q[0], k[0], v[0], ends)[None]
        add_method((vllm_config.model_config.get_multimodal_config().mm_processor_kwargs or {}).get("selection"))
        with torch.device("meta"):
            hooks = backbone_of(self.config.model_type).model.model_class(self.config)
        del hooks.visual, hooks.language_model
        hooks.get_input_embeddings = lambda: self.language_model.model.embed_tokens
        self.qtsplus = hooks.qtsplus = hooks.build_selector(self.config)
        object.__setattr__(self, "hooks", hooks.eval())  # no part of the weights
        gigabytes = float(vllm_config.additional_config.get("qtsplus_cache_gb", CACHE_GB))
        # By content and settings of the processor what videos were encoded to, `[k, token_width]`.
        self.encoded: LRUCache = LRUCache(gigabytes * 2**30, getsizeof=lambda features: features.nbytes)
        # By the hashes of video items, fields of an `Answer`.
        self.bases: LRUCache = LRUCache(BASES)
        # By the same, what was chosen when the budget was asked.
        self.chosen: LRUCache = LRUCache(CHOSEN_BYTES, getsizeof=lambda choice: choice[0].nbytes)
        # By the same, how many requests wait or run, and the features of their videos.
        self.held: dict[str, tuple[Any, ...]] = {}
        self.moved: tuple[torch.Tensor, torch.Tensor] | None = None

    def load_weights(self, weights: Any) -> Any:
        self.encoded.clear()  # of other weights, where these replace them
        self.bases.clear()
        self.chosen.clear()
        return super().load_weights(weights)  # type: ignore[misc]

    def embed_multimodal(self, **kwargs: Any) -> Any:
        """Per video item `[length, token_width + positions]`; images as they are."""
        if "settings" not in kwargs:
            return super().embed_multimodal(**kwargs)  # type: ignore[misc]
        items = [read(dict(zip(kwargs, item, strict=True))) for item in zip(*kwargs.values(), strict=True)]
        embedded: dict[int, torch.Tensor] = {}
        for batch in batches(items, self.chosen):
            embedded |= zip(map(id, batch), self._embed(batch), strict=True)
        return [embedded[id(item)] for item in items]

    def _embed(self, items: list[dict[str, Any]]) -> list[torch.Tensor]:
        layout, choices = self._choose(items)
        tokens, kept = zip(*choices, strict=True)
        features = {IMAGE: [self.hooks.no_features(layout.mask.device)] * len(layout.grids[IMAGE])}
        prompt = splice(self.hooks, layout, features, tokens, QTSplusOutput(kept_indices=kept), pad_left=False)
        language = self.hooks.language_axes(prompt.position_ids)
        embedded = []
        for row, item in enumerate(items):
            start = item["settings"]["start"]
            part = slice(start, start + item["settings"]["length"])
            ids = prompt.input_ids[row, part]
            rows = self.hooks.get_input_embeddings()(ids)
            rows = nn.functional.pad(rows, (0, self.hooks.token_width - rows.shape[-1]))
            rows[ids == self.config.video_token_id] = prompt.features["video"][row].to(rows.dtype)
            positions = language[:, row, part].T.int().contiguous()
            embedded.append(torch.cat([rows, positions.view(rows.dtype)], dim=1))
        return embedded

    def _basis(self, item: dict[str, Any], features: Any, chosen: Any, row: int) -> dict[str, Any]:
        """What an answer rests on: the fields of an [`Answer`], whose videos are called by their numbers from 1."""
        settings, videos = item["settings"], {}
        for number, (told, encoded) in enumerate(zip(settings["told"], features, strict=True), start=1):
            height, width = told["size"]
            metadata = SimpleNamespace(**told, height=height, width=width)
            grid, step = item["video_grid_thw"][number - 1 : number].cpu(), [told["step"]]
            stated = {name: told[name] for name in ("start", "warnings", "sound")}
            videos[str(number)] = EncodedVideo(str(number), encoded, grid, step, metadata, 0.0, **stated)
        relevance = None if chosen.relevance is None else chosen.relevance[row]
        merge_size, config = self.config.vision_config.spatial_merge_size, self.config.qtsplus_config
        shown = shown_by(videos, chosen.kept_indices[row], relevance, merge_size, config)
        seen, seen_threshold = calibrated_seen(chosen, row, config)
        shown |= {"seen": seen, "seen_threshold": seen_threshold}
        shown |= {"unheard": any(video.sound for video in videos.values())}
        rho = settings.get("rho", float(chosen.rho[row]))
        fields = Answer(answer="", video="", rho=rho, timings={}, **shown).as_dict()
        return {name: fields[name] for name in fields.keys() - {"answer", "video", "timings"}}

    @torch.inference_mode()
    def prepare(self, item: dict[str, Any], hold: bool) -> tuple[int, float] | None:
        """
        How many tokens the model keeps of a request, at most its `max_visual_tokens`, and the fraction that it aims at;
        `None` where a video is not in the cache and its pixels are not in the item.

        Args:
            hold: keeps the features of its videos until [`release`], so that the request can come without pixels.
        """
        item = read(item)
        settings = item["settings"]
        key, own = settings["key"], settings["selection"] != "all" and settings.get("retention") is None
        known = PIXELS in item or all(self.encoded.get(one) is not None for one in settings["hashes"])
        if not known and (hold or key not in self.bases):
            return None
        features = self._encode(item) if hold else []
        if own and key not in self.bases:
            _, (choice,) = self._choose([item])
            if choice[0].nbytes <= self.chosen.maxsize:
                self.chosen[key] = choice
        if hold:  # and nothing can fail any more
            self.held[key] = self.held.get(key, (0,))[0] + 1, features
        return (self.bases[key]["kept_tokens"], self.bases[key]["rho"]) if own else (0, 1.0)

    def release(self, key: str) -> None:
        """Ends one `hold` of [`prepare`]."""
        count, features = self.held.pop(key)
        if count > 1:
            self.held[key] = count - 1, features

    def _choose(self, items: list[dict[str, Any]]) -> tuple[Layout, list[tuple[torch.Tensor, torch.Tensor]]]:
        """The full prompts of requests of one of [`batches`], and of each the tokens that stay and their indices."""
        asked = [item["settings"] for item in items]
        layout = self._lay_out(items, self.visual.device)
        choices = [self.chosen.pop(settings["key"], None) for settings in asked]
        if all(choices):
            return layout, choices
        features, most = list(map(self._encode, items)), asked[0].get("max_visual_tokens")
        selection = SelectionInputs(
            query_mask=pad_rows([item["query_mask"] for item in items], False, left=False).to(layout.mask.device),
            retention=[settings.get("retention") for settings in asked],
            max_visual_tokens=None if most is None else int(most),
            selection=asked[0]["selection"],
            reencode=asked[0].get("reencode", True),
        )
        # Questions about one video share its tensor, and so its keys.
        selected, qtsplus = choose(self.hooks, layout, {VIDEO: sum(features, [])}, selection)
        for row, settings in enumerate(asked):
            if settings["key"] not in self.bases:
                self.bases[settings["key"]] = self._basis(items[row], features[row], qtsplus, row)
        return layout, list(zip(selected, qtsplus.kept_indices or (), strict=True))

    def _encode(self, item: dict[str, Any]) -> list[torch.Tensor]:
        """Per video `[k, token_width]`; the tower sees those that are not in the cache."""
        grids, encoded = item["video_grid_thw"], []
        for index, key in enumerate(item["settings"]["hashes"]):
            known = self.encoded.get(key)
            if known is None and PIXELS not in item:
                known = self.held[item["settings"]["key"]][1][index]
            if known is None:
                one = slice(index, index + 1)
                known = (
                    super()
                    .embed_multimodal(  # type: ignore[misc]
                        pixel_values_videos=item[PIXELS][index].to(self.visual.device),
                        video_grid_thw=grids[one],
                        second_per_grid_ts=item["second_per_grid_ts"][one],
                    )[0]
                    .cpu()
                )
                if known.nbytes <= self.encoded.maxsize:
                    self.encoded[key] = known
            encoded.append(known)
        return encoded

    def _lay_out(self, items: list[dict[str, Any]], device: Any = "cpu") -> Layout:
        """The full prompts of requests."""
        videos, images = (torch.cat([item[name] for item in items]) for name in ("video_grid_thw", "image_grids"))
        pixels = [torch.empty(int(grids.prod(-1).sum()), device="meta") for grids in (videos, images)]
        visual = VisualInputs(
            pixel_values=pixels[1] if len(images) else None,
            image_grid_thw=images if len(images) else None,
            pixel_values_videos=pixels[0],
            video_grid_thw=videos,
            second_per_grid_ts=torch.cat([item["second_per_grid_ts"] for item in items]),
        )
        prompts = [item["prompt_ids"] for item in items]
        mask = pad_rows([torch.ones_like(ids) for ids in prompts], 0, left=False)
        layout = lay_out(self.hooks, visual, pad_rows(prompts, 0, left=False).to(device), mask.to(device))
        # Which frames will have kept tokens is not known where vLLM counts: the times of all of them stay.
        return replace(layout, rows=[replace(row, separators=row.separators[:, :0]) for row in layout.rows])

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: Any) -> tuple[torch.Tensor, int]:
        """`[3, S]` of the shortened prompt, right outside of its video item, and what decoding adds to the count."""
        if self.config.qtsplus_config.position_ids == "sequential":
            return torch.arange(len(input_tokens)).expand(3, -1).clone(), 0
        videos = [feature for feature in mm_features if feature.modality == "video"]
        if not videos:
            return super().get_mrope_input_positions(input_tokens, mm_features)  # type: ignore[misc]
        item, first = read(videos[0].data.get_data()), videos[0].mm_position.offset
        start, stop, length = (item["settings"][name] for name in ("start", "stop", "length"))
        full = self._lay_out([item]).rows[0].language_positions[:, start - first :]  # vLLM may have truncated a prompt
        full = full[:, : stop - start - length + len(input_tokens)]
        positions = torch.cat([full[:, :first], full.new_zeros(3, length), full[:, first + stop - start :]], dim=1)
        behind = int(full[:, -1].max()) + 1 - positions.shape[1]
        answer = torch.arange(positions.shape[1], len(input_tokens)) + behind  # of a request that is taken up again
        return torch.cat([positions, answer.expand(3, -1)], dim=1), behind

    def embed_input_ids(self, input_ids: torch.Tensor, multimodal_embeddings: Any = None, **kwargs: Any) -> Any:
        """As vLLM's; the positions behind the embeddings are kept for [`forward`]."""
        if multimodal_embeddings is not None and len(multimodal_embeddings):
            columns = kwargs["is_multimodal"].nonzero()[:, 0].split([len(rows) for rows in multimodal_embeddings])
            width = self.hooks.token_width
            pairs = zip(columns, multimodal_embeddings, strict=True)
            videos = [(at, rows[:, width:]) for at, rows in pairs if rows.shape[1] > width]
            if videos:
                positions = [behind.contiguous().view(torch.int32).T for _, behind in videos]
                self.moved = torch.cat([at for at, _ in videos]), torch.cat(positions, dim=1)
            multimodal_embeddings = [rows[:, :width] for rows in multimodal_embeddings]
        return super().embed_input_ids(input_ids, multimodal_embeddings, **kwargs)  # type: ignore[misc]

    def forward(self, input_ids: Any, positions: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, with the positions of what was kept of videos."""
        if self.moved is not None:
            columns, moved = self.moved
            # In place: graphs that were captured read this very memory.
            positions[:, columns.to(positions.device)] = moved.to(positions.device, positions.dtype)
            self.moved = None
        return super().forward(input_ids, positions, *args, **kwargs)  # type: ignore[misc]


def check_engine(vllm_config: Any) -> None:
    """Raises `ValueError` for what would be wrong in silence."""
    graphs = vllm_config.compilation_config
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError("pipeline_parallel_size above 1: expected 1, since positions do not travel between stages.")
    if graphs.cudagraph_mode == CUDAGraphMode.FULL:
        raise ValueError("cudagraph_mode FULL: expected another, since our code runs in every prefill.")
    if getattr(graphs, "cudagraph_mm_encoder", False):
        raise ValueError("cudagraph_mm_encoder: expected false, since graphs of the tower would bypass the selector.")


def weight_names(stock: Any) -> WeightsMapper:
    """The names of the weights of a vLLM model, with those of the selector."""
    mapper = stock.hf_to_vllm_mapper
    prefixes = {"model.qtsplus.": "qtsplus.", **mapper.orig_to_new_prefix}
    named = WeightsMapper(**{**vars(mapper), "orig_to_new_prefix": prefixes})
    return WeightsMapper(orig_to_new_suffix={".rho_history": None}) | named


class Qwen2_5_VLProcessor(QTSplusMultiModalProcessor, qwen2_5_vl.Qwen2_5_VLMultiModalProcessor):
    """Of Qwen2.5-VL, and of Qwen2-VL, whose own does not take the times of frames."""

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, Any]) -> Any:
        # vLLM has sampled the frames, and for these backbones does not tell the processor, which would sample them too.
        return super()._apply_hf_processor_main(mm_items, {"do_sample_frames": False, **hf_kwargs})


class Qwen2VLInfo(qwen2_vl.Qwen2VLProcessingInfo):
    """Of Qwen2-VL, whose videos come with the times of their frames."""

    get_data_parser = qwen2_5_vl.Qwen2_5_VLProcessingInfo.get_data_parser


class Qwen3VLProcessor(QTSplusMultiModalProcessor, qwen3_vl.Qwen3VLMultiModalProcessor):
    """Of Qwen3-VL and Qwen3.5."""


@MULTIMODAL_REGISTRY.register_processor(
    Qwen2_5_VLProcessor, info=qwen2_5_vl.Qwen2_5_VLProcessingInfo, dummy_inputs=qwen2_5_vl.Qwen2_5_VLDummyInputsBuilder
)
class Qwen2_5_VLQTSplusInVLLM(QTSplusForVLLM, qwen2_5_vl.Qwen2_5_VLForConditionalGeneration):
    """Qwen2.5-VL."""

    hf_to_vllm_mapper = weight_names(qwen2_5_vl.Qwen2_5_VLForConditionalGeneration)


@MULTIMODAL_REGISTRY.register_processor(
    Qwen2_5_VLProcessor, info=Qwen2VLInfo, dummy_inputs=qwen2_5_vl.Qwen2_5_VLDummyInputsBuilder
)
class Qwen2VLQTSplusInVLLM(QTSplusForVLLM, qwen2_vl.Qwen2VLForConditionalGeneration):
    """Qwen2-VL."""

    hf_to_vllm_mapper = weight_names(qwen2_vl.Qwen2VLForConditionalGeneration)


@MULTIMODAL_REGISTRY.register_processor(
    Qwen3VLProcessor, info=qwen3_vl.Qwen3VLProcessingInfo, dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder
)
class Qwen3VLQTSplusInVLLM(QTSplusForVLLM, qwen3_vl.Qwen3VLForConditionalGeneration):
    """Qwen3-VL; the levels of DeepStack stand behind a token's values, and go with it."""

    hf_to_vllm_mapper = weight_names(qwen3_vl.Qwen3VLForConditionalGeneration)


@MULTIMODAL_REGISTRY.register_processor(
    Qwen3VLProcessor, info=qwen3_5.Qwen3_5ProcessingInfo, dummy_inputs=qwen3_vl.Qwen3VLDummyInputsBuilder
)
class Qwen3_5QTSplusInVLLM(QTSplusForVLLM, qwen3_5.Qwen3_5ForConditionalGeneration):
    """Qwen3.5."""

    hf_to_vllm_mapper = weight_names(qwen3_5.Qwen3_5ForConditionalGeneration)
