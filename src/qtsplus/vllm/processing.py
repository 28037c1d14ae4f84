"""A request on its way to the engine: how many tokens its videos may keep, and what the engine needs to choose them.

vLLM counts the tokens of a prompt before it encodes anything. So a request's budget has to be a number here already:
the request states it, or worker.py asks the engine for the model's own. All videos of a request share the budget, so
they become one item of the prompt.
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
    """
    The [`SETTINGS`] of a request. Those that it does not state come from the server's `defaults`, but no budget does if
    the request states any.
    """
    settings = {name: defaults[name] for name in SETTINGS if name in defaults}
    stated = {name: value for name, value in request.items() if value is not None}
    if stated.keys() & BUDGET or stated.get("selection") == "all":
        for name in BUDGET:
            settings.pop(name, None)
    return settings | stated


def check_settings(settings: Fields) -> None:
    """Raises `ValueError` for a budget out of range, an unknown selection, or a `reencode` that is not a boolean."""
    selection = settings["selection"]
    find_method(selection)
    reencode = settings.get("reencode", True)
    if not isinstance(reencode, bool):
        raise ValueError(f"reencode={reencode!r}: expected true or false.")
    check_budget(selection, [settings.get("retention")], settings.get("max_visual_tokens"))


def count_kept(config, num_tokens: int, settings: Fields) -> int:
    """How many of `num_tokens` visual tokens the selector will keep; `ValueError` if no budget is stated."""
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
    return kept_count(retention or 1.0, num_tokens, cap)  # without a retention, the cap is the budget


class QTSplusMultiModalProcessor:
    """
    A mixin for vLLM's processors, which stands before vLLM's class among the bases. vLLM's class works as if nothing
    were selected. It never sees the question, so its cache of processed videos serves every question about a video.

    `qtsplus serve` connects the processor to the engine. `call_engine(method, args)` calls a method of its workers, and
    `release(key)` says that a request is over, by the hash of its video item. Then a video's frames are sent once.
    """

    info: Any
    call_engine: Callable[..., Any] | None = None
    release: Callable[[str], None]

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        defaults = self._defaults
        add_method(defaults.get("selection"))  # may be a function of the operator's own
        self._settings({})  # wrong defaults are an error at the start, not with every request
        # vLLM's own cache drops the data of videos that the engine has seen, but our merged item still needs them.
        self._processed = MultiModalProcessorOnlyCache(self.info.ctx.model_config)
        self._processing = Lock()
        self._sending = Lock()  # for the question that sends frames

    @property
    def _defaults(self) -> Mapping:
        return self.info.ctx.model_config.get_multimodal_config().mm_processor_kwargs or {}

    def _settings(self, request: Fields) -> Fields:
        """The settings of a request. What it does not state comes from the server, then the model. They are checked."""
        settings = {"selection": self.info.get_hf_config().qtsplus_config.selection}
        settings.update(settings_of_request(self._defaults, request))
        check_settings(settings)
        return settings

    def get_dummy_inputs(self, *args, **kwargs):
        """The input with which vLLM measures its memory. It has no question to select by, so it keeps all tokens."""
        dummy = super().get_dummy_inputs(*args, **kwargs)  # type: ignore[misc]
        return replace(dummy, hf_processor_mm_kwargs={"selection": "all"})

    def _apply_hf_processor_main(self, mm_items, hf_kwargs):
        """As vLLM's, with the [`_facts`] of each video, and the seconds of its steps, which most of vLLM's drop."""
        items = mm_items.get("video")
        if not isinstance(items, VideoProcessorItems):  # none, or embeddings
            return super()._apply_hf_processor_main(mm_items, hf_kwargs)  # type: ignore[misc]
        step = self.info.get_hf_config().vision_config.temporal_patch_size
        stock_videos = []
        facts = []
        for frames, description in items.get_all():
            metadata = dict(description)
            count = metadata["total_num_frames"]
            # Only videos that `Media` of server.py has read have a mark.
            if metadata.pop("mark", None) is None and len(frames) < count:
                warnings.warn(
                    f"vLLM or its caller took {len(frames)} of the {count} frames of a video, and not those that "
                    'qtsplus ask looks at; media_io_kwargs={"video": {"num_frames": ...}} says how many vLLM takes.',
                    stacklevel=2,
                )
            about = metadata.pop("about", {})
            stock_videos.append((frames, metadata))
            facts.append(_facts(frames, metadata, about, step))
        stock_items = dict(mm_items, video=VideoProcessorItems(stock_videos, items.metadata))
        processed = super()._apply_hf_processor_main(type(mm_items)(stock_items), hf_kwargs)  # type: ignore[misc]
        if facts:
            processed["facts"] = [as_bytes(of_video) for of_video in facts]
            seconds = [of_video["step"] for of_video in facts]
            processed.setdefault("second_per_grid_ts", torch.tensor(seconds))
        return processed

    def _get_mm_fields_config(self, hf_inputs, hf_processor_mm_kwargs):
        fields = dict(super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs))  # type: ignore[misc]
        for name in ("second_per_grid_ts", "facts"):
            fields[name] = mm.MultiModalFieldConfig.batched("video", keep_on_cpu=True)
        return fields

    def apply(self, inputs, timing_ctx):
        """As vLLM's, with a placeholder for each visual token that will be kept; `ValueError` for bad requests."""
        request = dict(inputs.hf_processor_mm_kwargs)
        unknown = sorted(request.keys() - SETTINGS)
        if unknown:  # such as a frame size, which nothing would limit, or a misspelt budget
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
        with self._processing:  # one request at a time; what follows may wait for the engine
            processed = super().apply(stock, timing_ctx)  # type: ignore[misc]
        if not processed["mm_placeholders"].get("video"):
            return processed
        return self._shorten(processed, settings)

    def _check_media(self, inputs) -> None:
        """Raises `ValueError` for media that did not come as URLs, and for placeholders without media."""
        for kind, items in inputs.mm_data_items.items():
            for item in items.get_all():
                # `image_pil` passes on names of files too, and the processor would read any file.
                is_unread = kind == "image" and isinstance(item, (str, list, dict))
                if item is None or is_unread:
                    raise ValueError(f"A request's {kind} has no {kind}_url: expected one.")
        config = self.info.get_hf_config()
        placeholders = {"image": config.image_token_id, "video": config.video_token_id}
        counts = inputs.mm_data_items.get_all_counts()
        for kind, placeholder in placeholders.items():
            count = counts.get(kind, 0)
            if inputs.prompt.count(placeholder) != count:
                raise ValueError(f"A text holds <|{kind}_pad|>, or the {kind} was truncated: leave it out.")

    def _shorten(self, processed, settings: Fields):
        """The processed request with one item for all its videos, which has a placeholder for each kept token."""
        config = self.info.get_hf_config()
        placeholder = config.video_token_id  # read once, since a configuration is slow
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

        # Where the choice ignores the question, so does the key. vLLM then prefills a prompt up to its videos once.
        states_fraction = selection == "all" or settings.get("retention") is not None
        ignores_question = selection in BLIND and states_fraction
        prefix = ids[:stop]
        key = digest(prefix if ignores_question else ids, hashes, settings)
        settings["key"] = key
        settings["prefix"] = digest(prefix, hashes["video"])
        settings["hashes"] = hashes["video"]
        settings["facts"] = [from_bytes(video["facts"].data) for video in items["video"]]
        item = merged_item(items, prompt, mask)
        replaced = ids[start:stop]
        num_tokens = replaced.count(placeholder)
        if self.call_engine is None:
            kept = count_kept(config.qtsplus_config, num_tokens, settings)
        else:
            item["settings"] = element(as_bytes(settings))
            kept = prepare(self.call_engine, item, self._sending)
            del item[PIXELS]
            finalize(item, self.release, key).atexit = False  # the item lives as long as its request
        texts = [token for token in replaced if token != placeholder]  # such as the times of frames
        length = kept + len(texts)
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
            prompt_token_ids=ids[:start] + [placeholder] * kept + texts + ids[stop:],
            mm_kwargs=mm.MultiModalKwargsItems(dict(items, video=[item])),
            mm_hashes=dict(hashes, video=[key]),
            mm_placeholders=placeholders,
        )


def marks_of(mm_items) -> dict[str, list]:
    """
    The `mark`s by which vLLM's cache knows the videos of a request, so that it need not hash their frames. A client's
    `uuid` is not used, since two clients may give the same one to different videos.
    """
    videos = mm_items.get("video")
    if not isinstance(videos, VideoProcessorItems):
        return {}
    return {"video": [description.get("mark") for _, description in videos.get_all()]}


def _facts(frames, metadata: Fields, about: Fields, frames_per_step: int) -> Fields:
    """What the engine must know of a video: `metadata`, the seconds of a `step`, and the fields of an `AboutVideo`."""
    height, width = frames[0].shape[:2]
    fields = {"height": height, "width": width, **metadata}
    fields.pop("do_sample_frames", None)
    complete = VideoMetadata(**fields)
    return {
        "metadata": dict(vars(complete)),
        "step": frames_per_step / complete.sampled_fps,
        "about": about,
    }


def merged_item(items, ids: Tensor, mask: Tensor) -> mm.MultiModalKwargsItem:
    """
    All videos of a request as one item, with what the engine needs to choose among their tokens: the full prompt `[S]`,
    and a mask of the question in it `[S]`. Its `settings`, as JSON, are added before it goes to the engine.
    """
    videos = [item.get_data() for item in items["video"]]
    image_grids = [image["image_grid_thw"].data.tolist() for image in items.get("image", [])]
    fields = {
        PIXELS: [video[PIXELS] for video in videos],  # in a list, which vLLM does not copy into a batch
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
    """A field of an item. It stays on the CPU until the model takes it."""
    return mm.MultiModalFieldElem(data, mm.MultiModalBatchedField(keep_on_cpu=True))


def as_bytes(fields) -> Tensor:
    """The fields as JSON in a tensor, since an item holds only tensors."""
    return torch.frombuffer(bytearray(json.dumps(fields).encode()), dtype=torch.uint8)


def from_bytes(content: Tensor):
    return json.loads(content.numpy().tobytes())


def decode_item(item: Fields) -> Fields:
    """The data of an item of [`merged_item`], with its settings as a dictionary."""
    item = dict(item)
    item["settings"] = from_bytes(item["settings"])
    return item
