"""QTSplus for ms-swift 4.6: `swift sft` and `swift infer` take a QTSplus folder with this file, and need no `qtsplus`.

    FPS=1 FPS_MAX_FRAMES=64 swift sft --external_plugins recipes/ms_swift.py --model FOLDER --dataset train.jsonl \
        --tuner_type full --freeze_aligner false

The selector is ms-swift's aligner: `--freeze_aligner false` trains it, its scores only if its `gate` lets the answers
teach them (docs/training.md). A row has `messages` and `videos`, as for other models. `FPS`, `FPS_MIN_FRAMES` and
`FPS_MAX_FRAMES` choose the frames; their size is that of the folder's processor.
"""

import torch
from swift.model import ModelLoader, ModelMeta, MultiModelKeys, register_model, register_model_arch
from swift.template import Template, TemplateMeta, register_template
from swift.utils import get_env_args
from transformers import AutoModelForImageTextToText

BACKBONES = ("Qwen2_5_VL", "Qwen2VL", "Qwen3VL", "Qwen3_5", "InternVL", "LlavaOnevision")
QUERY = "{{QUERY}}"  # where ms-swift puts a question
TEXT = ("input_ids", "attention_mask", "query_mask", "mm_token_type_ids")  # what a processor makes of text


class QTSplusLoader(ModelLoader):
    """The class that the folder names."""

    def get_model(self, *args, **kwargs):
        self.auto_model_cls = AutoModelForImageTextToText
        return super().get_model(*args, **kwargs)


class QTSplusTemplate(Template):
    """The turns of the folder's own chat template, and videos and images by its own processor."""

    def init_processor(self, processor) -> None:
        if processor is not None and not self._processor_inited:
            start, turn = _render(processor, {"type": "text", "text": QUERY})
            self.template_meta.prefix = [start]
            self.template_meta.prompt = [f"{processor.user_turn}\n{turn}"]
        super().init_processor(processor)

    def init_env_args(self) -> None:
        super().init_env_args()
        rates = {"fps": ("fps", float), "min_frames": ("fps_min_frames", int), "max_frames": ("fps_max_frames", int)}
        values = {name: get_env_args(variable, kind, None) for name, (variable, kind) in rates.items()}
        self.frames = {name: value for name, value in values.items() if value is not None}

    def replace_tag(self, media_type, index, inputs):
        """The placeholders of one video or image, as token ids; what the model sees of it goes to `inputs.media`."""
        name = f"{media_type}s"
        _, turn = _render(self.processor, {"type": media_type}, {"type": "text", "text": QUERY})
        settings = self.frames if media_type == "video" else {}
        media = {name: [getattr(inputs, name)[index]], **settings}
        media = self.processor(text=turn.partition(QUERY)[0], return_tensors="pt", **media)
        inputs.media.append({name: media[name] for name in media if name not in TEXT})
        return [media["input_ids"][0].tolist()]

    def _encode(self, inputs):
        inputs.media = []
        encoded = super()._encode(inputs)
        return {**encoded, "media": inputs.media}

    def _data_collator_mm_data(self, batch):
        media = [part for row in batch for part in row["media"]]
        names = dict.fromkeys(name for part in media for name in part)
        return {name: torch.cat([torch.as_tensor(part[name]) for part in media if name in part]) for name in names}

    def _data_collator(self, batch, **kwargs):
        collated = super()._data_collator(batch, **kwargs)
        return {**collated, "prompt_labels": collated["labels"]} if "labels" in collated else collated

    def compute_sft_loss(self, model, inputs, num_items_in_batch=None, trainer=None):
        """The model's own loss. It wants the labels of the whole prompt, of which ms-swift has cut the front off."""
        labels = inputs.pop("prompt_labels")
        if "labels" in inputs:
            inputs["labels"] = labels
            inputs.pop("logits_to_keep", None)
        outputs = super().compute_sft_loss(model, inputs, num_items_in_batch, trainer)
        if "labels" in inputs and outputs.qtsplus is not None:  # those of the logits, for ms-swift's accuracy
            columns = outputs.qtsplus.columns
            inputs["labels"] = labels.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, -100)
        return outputs


def _render(processor, *content) -> tuple[str, str]:
    """What the chat template writes in front of a user's turn, and from its content to where the answer begins."""
    turn = [{"role": "user", "content": list(content)}]
    rendered = processor.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    start, _, rest = rendered.partition(f"{processor.user_turn}\n")
    return start, rest


register_model_arch(
    MultiModelKeys(
        "qtsplus",
        language_model=["model.language_model", "lm_head"],
        aligner=["model.qtsplus"],
        vision_tower=["model.visual", "model.vision_tower", "model.multi_modal_projector"],
    )
)
register_template(
    TemplateMeta(
        "qtsplus",
        prefix=[],
        prompt=[QUERY],
        chat_sep=["<|im_end|>\n"],
        suffix=["<|im_end|>"],
        system_prefix=["<|im_start|>system\n{{SYSTEM}}<|im_end|>\n"],
        template_cls=QTSplusTemplate,
    )
)
register_model(
    ModelMeta(
        "qtsplus",
        [],
        QTSplusLoader,
        template="qtsplus",
        model_arch="qtsplus",
        architectures=[f"{name}QTSplusForConditionalGeneration" for name in BACKBONES],
        is_multimodal=True,
    )
)
