"""The tokenizer and processor of the tiny models, from sentences of our own."""

import itertools
import json
import os
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from qtsplus.model.processing_qtsplus import Qwen2_5_VLQTSplusProcessor

# Qwen2.5-VL's special tokens, in its order.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHAT_TEMPLATE = """\
{%- if messages[0].role != 'system' -%}
<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' or 'video' in part -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

TOKENIZER_CONFIG = {
    "tokenizer_class": "Qwen2Tokenizer",
    "processor_class": "Qwen2_5_VLQTSplusProcessor",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "unk_token": None,
    "bos_token": None,
    "extra_special_tokens": list(SPECIAL_TOKENS[1:]),
    "add_prefix_space": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 32768,
}

_PIXELS = {
    # Small frames: 4 to 36 visual tokens each, of 28 x 28 pixels.
    "size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 36},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "rescale_factor": 1 / 255,
    "resample": 3,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}

PROCESSOR_CONFIG = {
    "auto_map": {"AutoProcessor": "processing_qtsplus.Qwen2_5_VLQTSplusProcessor"},
    "processor_class": "Qwen2_5_VLQTSplusProcessor",
    "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", **_PIXELS},
    "video_processor": {
        "video_processor_type": "Qwen2VLVideoProcessor",
        **_PIXELS,
        "do_sample_frames": True,
        "fps": 2,
        "min_frames": 4,
        "max_frames": 256,
        "cap_pixels_per_frame": True,
        "max_video_tokens": 128000,
    },
}

# What the sentences are made of, by the field that a word stands for.
WORDS = {
    "colour": ["red", "green", "blue", "yellow", "purple", "orange", "black", "white", "grey", "pink", "brown"],
    "shape": ["circle", "square", "triangle", "star", "ring", "cross"],
    "thing": [
        "ball",
        "box",
        "car",
        "cup",
        "door",
        "bird",
        "dog",
        "cat",
        "tree",
        "house",
        "letter",
        "number",
        "person",
        "hand",
        "book",
    ],
    "action": [
        "moves",
        "appears",
        "vanishes",
        "turns",
        "stops",
        "jumps",
        "falls",
        "rises",
        "grows",
        "shrinks",
        "waits",
        "returns",
    ],
    "direction": ["left", "right", "up", "down", "forward", "backward"],
    "place": ["top", "bottom", "middle", "left corner", "right corner", "background", "front", "centre", "edge"],
    "number": [
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
    ],
    "order": ["first", "second", "third", "fourth", "fifth", "last", "next"],
    "letter": list("ABCD"),
    "digits": [str(number) for number in range(0, 100, 7)],
}
QUESTIONS = (
    "What colour is the {shape}?",
    "Which shape is {colour}?",
    "Where is the {colour} {shape} at {number} seconds?",
    "When does the {colour} {shape} appear?",
    "When does the {thing} vanish from the video?",
    "How many {shape}s are there in the video?",
    "How many times does the {colour} {thing} move to the {direction}?",
    "Which object appears {order}, the {colour} {shape} or the {thing}?",
    "In which direction does the {colour} {thing} move?",
    "Is there a {colour} {shape} in the {place} of the image?",
    "What happens after the {colour} {shape} vanishes?",
    "What happens before the {thing} appears?",
    "Does the {shape} stay longer than the {colour} {thing}?",
    "Who is holding the {colour} {thing}?",
    "Why does the {thing} stop near the {place}?",
    "Please describe the video in {number} sentences.",
    "Describe what the {colour} {shape} does between {number} and {number} seconds.",
)
STATEMENTS = (
    "The {colour} {shape} {action} {direction} in the {place}.",
    "A {colour} {thing} {action} after {number} seconds.",
    "There are {number} {colour} {shape}s and {number} {thing}s.",
    "The {order} object is a {colour} {shape}.",
    "The {thing} is {colour} and it {action} slowly, then quickly.",
    "It appears at the {place} and vanishes at the {place}.",
    "Yes, the {colour} {shape} {action} before the {thing}.",
    "No, there is no {colour} {thing} in this video.",
    "The answer is {letter}.",
    "Options: A. {colour} B. {shape} C. {thing} D. {direction}",
    "Answer with the letter of the option, {letter} or {letter}, and nothing else.",
    "Between {digits} s and {digits} s the frame shows a {thing} in the {place}.",
)
TURNS = ("user\n", "assistant\n", "system\nYou are a helpful assistant.", "\n\n")


def write_sentences(count: int = 6000) -> list[str]:
    """Writes `count` sentences about objects, colours, times, counts and order, and single words; always the same."""
    # Cycles of different lengths meet in ever new combinations; every use of a field takes its next word.
    fields = {name: itertools.cycle(values) for name, values in WORDS.items()}
    sentences = []
    for number, template in zip(range(count), itertools.cycle(QUESTIONS + STATEMENTS + TURNS)):
        while (start := template.find("{")) >= 0:
            stop = template.index("}", start)
            template = template[:start] + next(fields[template[start + 1 : stop]]) + template[stop + 1 :]
        if number % 11 == 0:
            next(fields["colour"]), next(fields["thing"])
        sentences.append(template)
    # An answer may be a word alone, which is then one token as it is inside a sentence.
    return sentences + [word for word in ("nothing", *itertools.chain(*WORDS.values())) for _ in range(10)]


def train_tokenizer(texts: Iterable[str], vocab_size: int = 2048) -> Tokenizer:
    """
    Trains a byte-level BPE that splits text as Qwen2's does.

    Args:
        texts: what to learn the merges from; the same texts give the same tokenizer.
        vocab_size: entries at most, with the 256 bytes and [`SPECIAL_TOKENS`], which come last.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def build_processor(
    folder: str | os.PathLike, vocab_size: int = 2048, texts: Iterable[str] | None = None
) -> Qwen2_5_VLQTSplusProcessor:
    """
    Writes tokenizer, chat template and processor of the tiny models into a folder, byte for byte the same each time.

    Args:
        folder: where to write; made where it is missing.
        vocab_size: entries of the tokenizer at most.
        texts: what the tokenizer learns from, or [`write_sentences`].

    Returns:
        The processor as loaded from there.
    """
    os.makedirs(folder, exist_ok=True)
    sentences = write_sentences() if texts is None else texts
    train_tokenizer(sentences, vocab_size).save(os.path.join(folder, "tokenizer.json"))
    files = {
        "tokenizer_config.json": json.dumps(TOKENIZER_CONFIG, indent=2) + "\n",
        "processor_config.json": json.dumps(PROCESSOR_CONFIG, indent=2) + "\n",
        "chat_template.jinja": CHAT_TEMPLATE,
    }
    for name, text in files.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
    # The code that the folder's `auto_map` names is this package's.
    return Qwen2_5_VLQTSplusProcessor.from_pretrained(folder, trust_remote_code=False)
