"""A request on its way to the engine: how many tokens its videos may keep, and what the engine needs to choose them.

vLLM counts the tokens of a prompt before it encodes anything. So a request's budget has to be a number here already:
one that the request states, or the model's own, for which worker.py asks the engine. And its videos, which share that
budget, become one item of the prompt.
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import Lock
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from transformers.video_utils import VideoMetadata
from vllm.multimodal import inputs as mm
from vllm.multimodal.cache import MultiModalProcessorOnlyCache
from vllm.multimodal.parse import VideoProcessorItems

from ..model.budget_qtsplus import kept_count
from ..model.methods_qtsplus import add_method, check_budget, find_method
from ..model.question_qtsplus import find_query_mask, question_token_ids
from . import SETTINGS
from .worker import PIXELS, prepare

BUDGET = {"retention", "max_visual_tokens"}
BY_QUESTION = ("qtsplus", "lm_attention")  # methods that compare tokens with the question
BLIND = ("all", "uniform", "temporal_redundancy", "diversity", "coverage")  # methods that never see the question


Fields = dict[str, Any]  # settings of a request, or facts about a video


def settings_of_request(defaults: Mapping, request: Fields) -> Fields:
    """The [`SETTINGS`] of a request, beside the server's `defaults` where it states none; a budget is one setting."""
    settings = {name: defaults[name] for name in SETTINGS if name in defaults}
    stated = {name: value for name, value in request.items() if value is not None}
    if stated.keys() & BUDGET or stated.get("selection") == "all":
        for name in BUDGET:
            settings.pop(name, None)
    return settings | stated


def check_settings(settings: Fields) -> None:
    """Raises `ValueError` for a budget out of range, or a selection that is unknown or not possible here."""
    selection = settings["selection"]
    find_method(selection)
    reencode = settings.get("reencode", True)
    if not isinstance(reencode, bool):
        raise ValueError(f"reencode={reencode!r}: expected true or false.")
    check_budget(selection, [settings.get("retention")], settings.get("max_visual_tokens"))


def count_kept(config, num_tokens: int, settings: Fields) -> int:
    """How many of `num_tokens` visual tokens stay, as the selector says; `ValueError` if there is no budget."""
    if settings["selection"] == "all":
        return num_tokens
    retention = settings.get("retention")
    most = settings.get("max_visual_tokens")
    if retention is None and most is None:
        raise ValueError(
            "This vLLM was not started by qtsplus serve, so the model's own budget cannot be asked: give retention or "
            'max_visual_tokens, with the request as mm_processor_kwargs (such as {"retention": 0.1}) or for all '
            "requests as --mm-processor-kwargs at the server's start."
        )
    cap = int(min(config.n_max, most or config.n_max))
    return kept_count(retention or 1.0, num_tokens, cap)  # a cap alone is the budget


class QTSplusMultiModalProcessor:
    """
    In front of a backbone's processor for vLLM, which does its work as if nothing were selected, and never hears of the
    question: so its cache of processed videos serves every question about one.

    Where the workers of vLLM are connected, `call_engine(method, args)` calls a method of theirs, and `release(key)`
    says that a request is over, by the hash of its video item. Then a video's frames travel to the engine once.
    """

    info: Any
    call_engine: Callable[..., Any] | None = None
    release: Callable[[str], None]

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        defaults = self._defaults
        add_method(defaults.get("selection"))  # which the operator names
        self._settings({})  # or every request would be refused
        # vLLM's own would leave out of a request what the engine has seen already. An item of ours is new each time.
        self._processed = MultiModalProcessorOnlyCache(self.info.ctx.model_config)
        self._one = Lock()
        self._turn = Lock()

    @property
    def _defaults(self) -> Mapping:
        return self.info.ctx.model_config.get_multimodal_config().mm_processor_kwargs or {}

    def _settings(self, request: Fields) -> Fields:
        """The settings of a request, or of the server or the model where it states none; [`check_settings`] raises."""
        settings = {"selection": self.info.get_hf_config().qtsplus_config.selection}
        settings.update(settings_of_request(self._defaults, request))
        check_settings(settings)
        return settings

    def get_dummy_inputs(self, *args, **kwargs):
        """The input by which vLLM measures its memory has no question."""
        dummy = super().get_dummy_inputs(*args, **kwargs)  # type: ignore[misc]
        return replace(dummy, hf_processor_mm_kwargs={"selection": "all"})

    def _apply_hf_processor_main(self, mm_items, hf_kwargs):
        """As vLLM's, with the seconds of a temporal patch, which it drops for most backbones, and what is `told`."""
        items = mm_items.get("video")
        if not isinstance(items, VideoProcessorItems):  # none, or embeddings
            return super()._apply_hf_processor_main(mm_items, hf_kwargs)  # type: ignore[misc]
        step = self.info.get_hf_config().vision_config.temporal_patch_size
        plain = []
        told = []
        for frames, about in items.get_all():
            known = dict(about)
            count = known["total_num_frames"]
            if known.pop("mark", None) is None and len(frames) < count:
                warnings.warn(
                    f"vLLM or its caller took {len(frames)} of the {count} frames of a video, and not those that "
                    'qtsplus ask looks at; media_io_kwargs={"video": {"num_frames": ...}} says how many vLLM takes.',
                    stacklevel=2,
                )
            beside = known.pop("about", {})
            plain.append((frames, known))
            told.append(_told(frames, known, beside, step))
        plain_items = dict(mm_items, video=VideoProcessorItems(plain, items.metadata))
        processed = super()._apply_hf_processor_main(type(mm_items)(plain_items), hf_kwargs)  # type: ignore[misc]
        if told:
            processed["told"] = [as_bytes(of_video) for of_video in told]
            seconds = [of_video["step"] for of_video in told]
            processed.setdefault("second_per_grid_ts", torch.tensor(seconds))
        return processed

    def _get_mm_fields_config(self, hf_inputs, hf_processor_mm_kwargs):
        fields = dict(super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs))  # type: ignore[misc]
        for name in ("second_per_grid_ts", "told"):
            fields[name] = mm.MultiModalFieldConfig.batched("video", keep_on_cpu=True)
        return fields

    def apply(self, inputs, timing_ctx):
        """As vLLM's, with the request's videos shortened to what may stay of them; `ValueError` for bad requests."""
        request = dict(inputs.hf_processor_mm_kwargs)
        unknown = sorted(request.keys() - SETTINGS)
        if unknown:  # such as a size that nobody bounds, or a misspelt budget
            names = ", ".join(unknown)
            raise ValueError(f"mm_processor_kwargs has {names}; expected {', '.join(SETTINGS)}.")
        settings = self._settings(request)
        self._check_media(inputs)
        stock = replace(
            inputs,
            hf_processor_mm_kwargs={},
            mm_uuid_items=marks_of(inputs.mm_data_items),
            cache=inputs.cache and self._processed,
        )
        with self._one:  # while others wait for their budget
            processed = super().apply(stock, timing_ctx)  # type: ignore[misc]
        if not processed["mm_placeholders"].get("video"):
            return processed
        return self._shorten(processed, settings)

    def _check_media(self, inputs) -> None:
        """Raises `ValueError` for media that were not given by an address, and for placeholders without media."""
        for kind, items in inputs.mm_data_items.items():
            for item in items.get_all():
                # `image_pil` would have the processor read any file.
                is_no_image = kind == "image" and isinstance(item, (str, list, dict))
                if item is None or is_no_image:
                    raise ValueError(f"A request's {kind} came as no {kind}_url: expected one.")
        config = self.info.get_hf_config()
        placeholders = {"image": config.image_token_id, "video": config.video_token_id}
        counts = inputs.mm_data_items.get_all_counts()
        for kind, placeholder in placeholders.items():
            count = counts.get(kind, 0)
            if inputs.prompt.count(placeholder) != count:
                raise ValueError(f"A text holds <|{kind}_pad|>, or the {kind} was truncated: leave it out.")

    def _shorten(self, processed, settings: Fields):
        """The processed request with one item for all its videos, of as many placeholders as will be kept."""
        config = self.info.get_hf_config()
        placeholder = config.video_token_id  # which is slow to ask for once a token
        ids = processed["prompt_token_ids"]
        items = processed["mm_kwargs"]
        selection = settings["selection"]
        hashes = processed["mm_hashes"]
        videos = processed["mm_placeholders"]["video"]
        images = processed["mm_placeholders"].get("image", [])
        last = videos[-1]
        start = videos[0].offset
        stop = last.offset + last.length
        prompt = torch.tensor(ids)
        mask = find_query_mask(prompt[None], None, **question_token_ids(config))
        mask = mask[0].bool()
        if any(start < image.offset < stop for image in images):
            raise ValueError("An image stands between two videos: put images in front of the videos or behind them.")
        if selection == "lm_attention" and images:
            raise ValueError(
                "selection='lm_attention' takes no images in vLLM, whose features are not known when tokens are "
                "chosen: leave out the images, or take another selection, such as 'qtsplus' or 'diversity'."
            )
        if selection in BY_QUESTION and not mask.any():
            raise ValueError(
                "The last turn that a user wrote has no text to select by: expected a question beside the video."
            )

        # Requests that choose alike have one key: vLLM then computes the prompt up to the end of the video once.
        states_fraction = selection == "all" or settings.get("retention") is not None
        chooses_alike = selection in BLIND and states_fraction
        front = ids[:stop]
        key = digest(front if chooses_alike else ids, hashes, settings)
        settings["key"] = key
        settings["front"] = digest(front, hashes["video"])
        settings["hashes"] = hashes["video"]
        settings["told"] = [of_bytes(video["told"].data) for video in items["video"]]
        item = merged_item(items, prompt, mask)
        replaced = ids[start:stop]
        num_tokens = replaced.count(placeholder)
        if self.call_engine is None:
            kept = count_kept(config.qtsplus_config, num_tokens, settings)
        else:
            item["settings"] = element(as_bytes(settings))
            kept = prepare(self.call_engine, item, self._turn)
            del item[PIXELS]
            finalize(item, self.release, key).atexit = False  # lives as long as its request
        between = [token for token in replaced if token != placeholder]  # text that is part of the item
        length = kept + len(between)
        settings.update(start=start, stop=stop, length=length)
        if selection != "all":
            settings["retention"] = kept / num_tokens
            settings["max_visual_tokens"] = None
        item["settings"] = element(as_bytes(settings))

        placeholders = {"video": [mm.PlaceholderRange(offset=start, length=length)]}
        if images:
            shift = length - len(replaced)
            placeholders["image"] = [
                replace(image, offset=image.offset + shift) if image.offset >= stop else image for image in images
            ]
        return dict(
            processed,
            prompt_token_ids=ids[:start] + [placeholder] * kept + between + ids[stop:],
            mm_kwargs=mm.MultiModalKwargsItems(dict(items, video=[item])),
            mm_hashes=dict(hashes, video=[key]),
            mm_placeholders=placeholders,
        )


def marks_of(mm_items) -> dict[str, list]:
    """
    The `mark`s by which vLLM knows the videos of a request, so that their frames are not read again. What clients call
    them does not count, since two may give the same uuid to different videos.
    """
    videos = mm_items.get("video")
    if not isinstance(videos, VideoProcessorItems):
        return {}
    marks = [about.get("mark") for _, about in videos.get_all()]
    return {"video": marks}


def _told(frames, known: Fields, beside: Fields, step: int) -> Fields:
    """The facts about a video for its answers: `metadata`, the seconds of a `step`, and `beside`, an `AboutVideo`'s."""
    height, width = frames[0].shape[:2]
    fields = {"height": height, "width": width, **known}
    fields.pop("do_sample_frames", None)
    metadata = VideoMetadata(**fields)
    return {
        "metadata": dict(vars(metadata)),
        "step": step / metadata.sampled_fps,
        "about": beside,
    }


def merged_item(items, ids: Tensor, mask: Tensor) -> mm.MultiModalKwargsItem:
    """
    All videos of a request as one item, with what the engine needs to choose among their tokens: the prompt with every
    placeholder `[S]` and its question `[S]`. Its `settings`, as JSON, are added before it goes to the engine.
    """
    videos = [item.get_data() for item in items["video"]]
    image_grids = [image["image_grid_thw"].data.tolist() for image in items.get("image", [])]
    fields = {
        PIXELS: [video[PIXELS] for video in videos],  # a list: vLLM does not copy it for a batch
        "video_grid_thw": torch.stack([video["video_grid_thw"] for video in videos]),
        "second_per_grid_ts": torch.stack([torch.as_tensor(video["second_per_grid_ts"]) for video in videos]),
        "image_grids": torch.tensor(image_grids, dtype=torch.long).view(-1, 3),
        "prompt_ids": ids,
        "query_mask": mask,
    }
    return mm.MultiModalKwargsItem({name: element(data) for name, data in fields.items()})


def digest(*stated) -> str:
    text = json.dumps(stated, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def element(data) -> mm.MultiModalFieldElem:
    """A field of an item, which is on the CPU until the model takes it."""
    return mm.MultiModalFieldElem(data, mm.MultiModalBatchedField(keep_on_cpu=True))


def as_bytes(fields) -> Tensor:
    """JSON as a tensor, which is all that an item may hold."""
    return torch.frombuffer(bytearray(json.dumps(fields).encode()), dtype=torch.uint8)


def of_bytes(content: Tensor):
    return json.loads(content.numpy().tobytes())


def read(item: Fields) -> Fields:
    """The data of an item of [`merged_item`], with its settings as they were."""
    item = dict(item)
    item["settings"] = of_bytes(item["settings"])
    return item
