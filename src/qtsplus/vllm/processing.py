"""A request on its way to the engine: how many tokens its videos may keep, and what the engine needs to choose them.

vLLM counts the tokens of a prompt before it encodes anything. So a request's budget has to be a number here already:
one that the request states, or the model's own, for which worker.py asks the engine. And its videos, which share that
budget, become one item of the prompt.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import Lock
from typing import Any
from weakref import finalize

import torch
from transformers.video_utils import VideoMetadata
from vllm.multimodal import inputs as mm
from vllm.multimodal.cache import MultiModalProcessorOnlyCache
from vllm.multimodal.parse import VideoProcessorItems

from ..model.methods_qtsplus import METHODS, add_method, check_budget
from ..model.prompt_qtsplus import find_query_mask, question_token_ids
from ..model.selector_qtsplus import kept_count
from .worker import PIXELS, prepare

_KNOWN = {"do_sample_frames", *VideoMetadata.__dataclass_fields__}  # of what is said of a video, to vLLM
BUDGET = ("retention", "max_visual_tokens")
SETTINGS = (*BUDGET, "selection", "reencode")  # of a request's mm_processor_kwargs


def settings_of_request(defaults: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """What a request states of [`SETTINGS`], and what it leaves to the server's `defaults`: its budget as a whole."""
    stated = {name: value for name, value in request.items() if value is not None}
    left = {name: defaults[name] for name in SETTINGS if defaults.get(name) is not None}
    if set(BUDGET) & stated.keys() or stated.get("selection") == "all":
        left = {name: value for name, value in left.items() if name not in BUDGET}
    return {**left, **stated}


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a budget out of range, or a selection that is unknown or not possible here."""
    selection = settings["selection"]
    possible = sorted(set(METHODS) - {"lm_attention"})
    if not isinstance(selection, str) or selection not in possible:
        reason = " (vLLM does not give the language model's attention)" if selection == "lm_attention" else ""
        raise ValueError(f"selection={selection!r}: expected one of {', '.join(possible)} in vLLM{reason}.")
    if not isinstance(settings.get("reencode", True), bool):
        raise ValueError(f"reencode={settings['reencode']!r}: expected true or false.")
    check_budget(selection, [settings.get("retention")], 1, settings.get("max_visual_tokens"))


def count_kept(config: Any, num_tokens: int, settings: Mapping[str, Any]) -> int:
    """How many of `num_tokens` visual tokens stay, as the selector says; `ValueError` if there is no budget."""
    retention, most = settings.get("retention"), settings.get("max_visual_tokens")
    if settings["selection"] == "all":
        return num_tokens
    if retention is None and most is None:
        raise ValueError(
            "This vLLM was not started by qtsplus serve, so the model's own budget cannot be asked: give retention or "
            'max_visual_tokens, with the request as mm_processor_kwargs (such as {"retention": 0.1}) or for all '
            "requests as --mm-processor-kwargs at the server's start."
        )
    # A cap alone is the budget.
    return kept_count(1.0 if retention is None else retention, num_tokens, int(min(config.n_max, most or config.n_max)))


class QTSplusMultiModalProcessor:
    """
    In front of a backbone's processor for vLLM, which does its work as if nothing were selected, and never hears of the
    question: so its cache of processed videos serves every question about one.

    `call_engine(method, args)` calls a method of vLLM's workers, where they are connected, and `release(key)` says that
    a request is over; with both, a video's frames travel to the engine once.
    """

    info: Any
    call_engine: Callable[..., Any] | None = None
    release: Callable[[str], None] | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        add_method(self._defaults.get("selection"))  # which the operator names
        # vLLM's own would leave out of a request what the engine has seen already. An item of ours is new each time.
        self._processed = MultiModalProcessorOnlyCache(self.info.ctx.model_config)
        self._one, self._turns = Lock(), [Lock() for _ in range(64)]

    @property
    def _defaults(self) -> Mapping[str, Any]:
        return self.info.ctx.model_config.get_multimodal_config().mm_processor_kwargs or {}

    def get_dummy_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """What vLLM measures its memory with has no question."""
        dummy = super().get_dummy_inputs(*args, **kwargs)  # type: ignore[misc]
        return replace(dummy, hf_processor_mm_kwargs={"selection": "all"})

    def _get_mm_hashes(self, inputs: Any) -> Any:
        """As vLLM's, but videos with a `mark` go by it, and nobody reads their frames for every question."""
        videos = inputs.mm_data_items.get("video")
        if isinstance(videos, VideoProcessorItems):
            marks = [about.get("mark", one) for one, (_, about) in zip(videos.data, videos.get_all(), strict=True)]
            items = {**inputs.mm_data_items, "video": VideoProcessorItems(marks, videos.metadata)}
            inputs = replace(inputs, mm_data_items=type(inputs.mm_data_items)(items))
        return super()._get_mm_hashes(inputs)  # type: ignore[misc]

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, Any]) -> Any:
        """As vLLM's, with the seconds of a temporal patch, which it drops for most backbones, and what is `told`."""
        items, videos = mm_items.get("video"), list[Any]()
        if isinstance(items, VideoProcessorItems):  # and not embeddings
            videos = items.get_all()
            plain = [(frames, {name: about[name] for name in about.keys() & _KNOWN}) for frames, about in videos]
            mm_items = type(mm_items)({**mm_items, "video": VideoProcessorItems(plain, items.metadata)})
        processed = super()._apply_hf_processor_main(mm_items, hf_kwargs)  # type: ignore[misc]
        if videos:
            step = self.info.get_hf_config().vision_config.temporal_patch_size
            told = [self._told(frames, dict(about), step) for frames, about in videos]
            processed["told"] = list(map(as_bytes, told))
            if "second_per_grid_ts" not in processed:
                processed["second_per_grid_ts"] = torch.tensor([one["step"] for one in told])
        return processed

    @staticmethod
    def _told(frames: Any, about: dict[str, Any], step: int) -> dict[str, Any]:
        """What an answer about a video says of it: the frames that are looked at, their times, and their size."""
        metadata = VideoMetadata(**{name: about[name] for name in about.keys() & _KNOWN - {"do_sample_frames"}})
        indices, (height, width) = metadata.frames_indices or [0], frames[0].shape[:2]
        return {
            **{name: getattr(metadata, name) for name in ("fps", "total_num_frames", "frames_indices")},
            "step": step / metadata.sampled_fps,
            "size": [metadata.height or height, metadata.width or width],
            "start": about.get("start", indices[0] / (metadata.fps or 1)),
            "sound": about.get("sound", False),
            "warnings": about.get("warnings", []),
        }

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        fields = super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)  # type: ignore[misc]
        ours = ("second_per_grid_ts", "told")
        return {**fields, **dict.fromkeys(ours, mm.MultiModalFieldConfig.batched("video", keep_on_cpu=True))}

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        """As vLLM's, with the request's videos shortened to what may stay of them; `ValueError` for bad requests."""
        kwargs = dict(inputs.hf_processor_mm_kwargs)
        settings = settings_of_request(self._defaults, {name: kwargs.pop(name) for name in SETTINGS if name in kwargs})
        if kwargs:  # such as a size that nobody bounds, or a misspelt budget
            raise ValueError(f"mm_processor_kwargs has {', '.join(sorted(kwargs))}; expected {', '.join(SETTINGS)}.")
        for kind, items in inputs.mm_data_items.items():  # `image_pil` would have the processor read any file
            if any(one is None or (kind == "image" and isinstance(one, (str, list, dict))) for one in items.get_all()):
                raise ValueError(f"A request's {kind} came as no {kind}_url: expected one.")
        config, counts = self.info.get_hf_config(), inputs.mm_data_items.get_all_counts()
        for kind, placeholder in (("image", config.image_token_id), ("video", config.video_token_id)):
            if inputs.prompt.count(placeholder) != counts.get(kind, 0):
                raise ValueError(f"A text holds <|{kind}_pad|>, or the {kind} was truncated: leave it out.")
        # A uuid is what a client calls a video, and another client another one.
        more: dict[str, Any] = {"mm_uuid_items": None, "cache": inputs.cache and self._processed}
        stock = replace(inputs, hf_processor_mm_kwargs=kwargs, **more)
        with self._one:  # while others wait for their budget
            processed = super().apply(stock, timing_ctx)  # type: ignore[misc]
        return self._shorten(processed, settings) if processed["mm_placeholders"].get("video") else processed

    def _shorten(self, processed: Any, settings: dict[str, Any]) -> Any:
        config, ids = self.info.get_hf_config(), processed["prompt_token_ids"]
        placeholder = config.video_token_id  # which is slow to ask for once a token
        items, ranges = processed["mm_kwargs"], processed["mm_placeholders"]
        settings = {"selection": config.qtsplus_config.selection, **settings}
        videos, images = ranges["video"], ranges.get("image", [])
        start, stop = videos[0].offset, videos[-1].offset + videos[-1].length
        if any(start < image.offset < stop for image in images):
            raise ValueError("An image stands between two videos: put images in front of the videos or behind them.")
        if any(PIXELS not in video for video in items["video"]):
            raise ValueError("A video came encoded (video_embeds): expected its frames, or a file.")

        check_settings(settings)
        num_tokens = ids[start:stop].count(placeholder)
        prompt = torch.tensor(ids)
        mask = find_query_mask(prompt[None], None, **question_token_ids(config))[0].bool()
        fixed = settings["selection"] == "all" or settings.get("retention") is not None
        release = self.release
        call = None if fixed and not release else self.call_engine
        if (not fixed and call or settings["selection"] == "qtsplus") and not mask.any():
            raise ValueError(
                "The last turn that a user wrote has no text to select by: expected a question beside the video."
            )
        hashes = processed["mm_hashes"]
        settings["hashes"] = hashes["video"]
        stated = json.dumps([hashes, sorted(settings.items())]).encode()
        key = hashlib.sha256(prompt.numpy().tobytes() + stated).hexdigest()
        settings["told"] = [of_bytes(video["told"].data) for video in items["video"]]
        settings["key"], rho = key, settings.get("retention") or 1.0
        if call:
            turn = self._turns[hash(hashes["video"][0]) % len(self._turns)]
            own = prepare(call, merged_item(items, prompt, mask, settings), release is not None, turn)
            if not fixed:
                settings["max_visual_tokens"], rho = own
        kept = count_kept(config.qtsplus_config, num_tokens, settings)
        between = [one for one in ids[start:stop] if one != placeholder]  # text that is part of the item
        length = kept + len(between)

        settings |= {"start": start, "stop": stop, "length": length, "rho": rho}
        if settings["selection"] != "all":
            settings |= {"retention": kept / num_tokens, "max_visual_tokens": None}
        item = merged_item(items, prompt, mask, settings)
        if release:
            del item[PIXELS]
            finalize(item, release, key).atexit = False  # lives as long as its request
        shift = length - (stop - start)
        moved = [replace(image, offset=image.offset + shift * (image.offset >= stop)) for image in images]
        return {
            **processed,
            "prompt_token_ids": ids[:start] + [placeholder] * kept + between + ids[stop:],
            "mm_kwargs": mm.MultiModalKwargsItems({**items, "video": [item]}),
            "mm_hashes": {**hashes, "video": [key]},
            "mm_placeholders": {
                **({"image": moved} if images else {}),
                "video": [mm.PlaceholderRange(offset=start, length=length)],
            },
        }


def merged_item(items: Any, ids: torch.Tensor, mask: torch.Tensor, settings: dict[str, Any]) -> mm.MultiModalKwargsItem:
    """
    All videos of a request as one item, with what the engine needs to choose among their tokens: the prompt with every
    placeholder `[S]`, its question `[S]`, and settings as JSON.
    """
    videos = [item.get_data() for item in items["video"]]
    images = [item["image_grid_thw"].data for item in items.get("image", [])]
    nothing = torch.zeros(0, 3, dtype=torch.long)
    fields: dict[str, Any] = {
        # A list, of which vLLM makes no copy for a batch.
        PIXELS: [video[PIXELS] for video in videos],
        "video_grid_thw": torch.stack([video["video_grid_thw"] for video in videos]),
        "second_per_grid_ts": torch.stack([torch.as_tensor(video["second_per_grid_ts"]) for video in videos]),
        "image_grids": torch.stack(images) if images else nothing,
        "prompt_ids": ids,
        "query_mask": mask,
        "settings": as_bytes(settings),
    }
    field = mm.MultiModalBatchedField(keep_on_cpu=True)
    return mm.MultiModalKwargsItem({name: mm.MultiModalFieldElem(data, field) for name, data in fields.items()})


def as_bytes(fields: Any) -> torch.Tensor:
    """JSON as a tensor, which is all that an item may hold."""
    return torch.frombuffer(bytearray(json.dumps(fields).encode()), dtype=torch.uint8)


def of_bytes(content: torch.Tensor) -> Any:
    return json.loads(content.numpy().tobytes())


def read(item: dict[str, Any]) -> dict[str, Any]:
    """The data of an item of [`merged_item`], with its settings as they were."""
    return {**item, "settings": of_bytes(item["settings"])}
