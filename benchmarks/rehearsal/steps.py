"""What is done, in order, and how each step shows that it was done."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from qtsplus.common.files import rewritten
from qtsplus.common.folders import read_json
from qtsplus.hub.checkpoint import STOCK, read_checkpoint
from qtsplus.hub.files import hub_configs
from qtsplus.hub.loading import load_config

from ..speed.cost import least_memory
from .films import FILM, QUESTION, RECORDS
from .tasks import NEW_TOKENS

RECIPES = Path(__file__).parents[2] / "recipes"
TEXT_TOKENS = 50  # of a prompt, about
_SELECTOR = "model.qtsplus."
_COMMANDS = "qtsplus.cli"


class StepError(RuntimeError):
    """A step failed, or did not do what it should."""


@dataclass(frozen=True)
class Scale:
    """
    A model and what it is shown.

    Args:
        variant: of `hub_configs`.
        weights: what they are, in words.
        shards: the largest size of a file of the stock model.
        gigabytes: of disk.
        frame_size: (width, height) of the films in pixels.
        seconds: of the film that is asked about, and of a clip.
        vocabulary: whether it is the published one.
        converted: further variants that are converted alone, and the disk in GB that each takes.
    """

    variant: str
    weights: str
    shards: str
    gigabytes: float
    frame_size: tuple[int, int]
    seconds: tuple[float, float]
    vocabulary: bool = False
    converted: tuple[tuple[str, float], ...] = ()


SCALES = {
    "3b": Scale(
        "qtsplus-3b",
        "a stock Qwen2.5-VL-3B of the published shape in bfloat16, with the published vocabulary",
        "4GB",
        25,
        (448, 252),
        (16, 8),
        True,
        (("qtsplus-7b", 40), ("qwen3.5-9b", 45)),
    ),
    "tiny": Scale("qtsplus-tiny", "a stock model as small as qtsplus-tiny", "1MB", 0.1, (112, 112), (4, 4)),
}


@dataclass(frozen=True)
class Place:
    """
    Where the run takes place, and with what.

    Args:
        folder: of models and films.
        wheel: with the vocabulary.
    """

    folder: Path
    scale: Scale
    wheel: Path | None

    def at(self, name: str) -> str:
        return str(self.folder / name)

    @property
    def config(self) -> Any:
        """The variant's."""
        return load_config(hub_configs() / self.scale.variant)


@dataclass(frozen=True)
class Found:
    """What a step has shown, in words; and the least memory by the cost model, in GB, where that has a figure."""

    checked: str
    least_gb: float | None = None


Check = Callable[[str, Mapping[str, Any]], Found]


@dataclass(frozen=True)
class Step:
    """
    Args:
        command: behind `python -m`.
        check: from its standard output and the entries of the steps before it to what it has shown.
        makes: folders that it writes.
        removes: folders that nobody needs any more.
        gigabytes: of disk, without which it is left out.
    """

    name: str
    command: list[str]
    check: Check
    makes: tuple[str, ...] = ()
    removes: tuple[str, ...] = ()
    gigabytes: float = 0.0


def all_steps(place: Place) -> list[Step]:
    """In their order."""
    return [*_using(place), *_training(place), *_others(place)]


def _task(name: str, **arguments: Any) -> list[str]:
    return ["benchmarks.rehearsal.tasks", name, json.dumps(arguments)]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


# --------------------------------------------------------------------------------------------------------------------
# A model is made and asked
# --------------------------------------------------------------------------------------------------------------------


def _using(place: Place) -> list[Step]:
    folder, model = str(place.folder), place.at("model")
    ask = [_COMMANDS, "ask", place.at(FILM), QUESTION, "--model", model, "--max-new-tokens", str(NEW_TOKENS), "--json"]
    everything = ("stock reads every token", "every token kept")
    return [
        *_converting(place, place.scale.variant, "stock", "model", place.scale.shards),
        Step("load", _task("load", folder=folder), _check_load),
        Step("ask", ask, lambda output, done: _check_answer(place, output)),
        Step("two questions", _task("two_questions", folder=folder), _check_two),
        Step(
            "ask by lm_attention",
            [*ask, "--selection", "lm_attention"],
            lambda output, done: _check_answer(place, output),
        ),
        Step(everything[0], _task("stock_logits", folder=folder), lambda output, done: _check_stock(output)),
        Step(
            everything[1],
            _task("every_token", folder=folder),
            lambda output, done: _check_equal(output, done[everything[0]]),
        ),
        Step(
            "calibrate",
            [_COMMANDS, "calibrate", model, place.at(RECORDS)],
            lambda output, done: _check_calibration(place),
        ),
    ]


def _converting(place: Place, variant: str, stock: str, model: str, shards: str, gigabytes: float = 0) -> list[Step]:
    wheel = None if place.wheel is None else str(place.wheel)
    behind = "" if variant == place.scale.variant else f" {variant}"
    return [
        Step(
            f"stock model{behind}",
            _task("stock", folder=place.at(stock), variant=variant, wheel=wheel, shards=shards),
            lambda output, done: _check_vocabulary(variant, output),
            makes=(stock,),
            gigabytes=gigabytes,
        ),
        Step(
            f"convert{behind}",
            [_COMMANDS, "convert", place.at(stock), "--out", place.at(model)],
            lambda output, done: _check_converted(place, variant, stock, model),
            makes=(model,),
            gigabytes=gigabytes / 2,
        ),
    ]


def _check_vocabulary(variant: str, output: str) -> Found:
    found, config = _last_line(output), read_json(hub_configs() / variant / "config.json")
    _require(found["special"] == config["special_token_ids"], f"special tokens {found['special']}")
    _require(found["user_turn"] == config["user_turn_token_ids"], f"a user's turn begins with {found['user_turn']}")
    text = config.get("frame_text_token_ids", found["less_than"])
    _require(found["less_than"] == text, f"'<' is {found['less_than']}")
    return Found(
        f"{found['parameters']:,} parameters in {found['shards']} file{'s' if found['shards'] > 1 else ''}; the ids of "
        f"user ({found['user_turn'][1]}), < ({found['less_than'][0]}) and the special tokens are those of {variant}"
    )


def _check_converted(place: Place, variant: str, stock: str, model: str) -> Found:
    same = _same_tensors(place.folder / stock, place.folder / model)
    made, config = (read_json(folder / "config.json") for folder in (place.folder / model, hub_configs() / variant))
    for name in ("user_turn_token_ids", "special_token_ids", "turn_end_token_id"):
        _require(made[name] == config[name], f"{name} is {made[name]}")
    return Found(f"{same} tensors byte for byte those of the stock model; a question's ids are those of {variant}")


def _same_tensors(one: Path, other: Path) -> int:
    """
    How many tensors are in both, beside the selector's.

    Raises:
        ValueError: one of them is missing or differs.
    """
    left, right = (_named(folder) for folder in (one, other))
    _require(set(left) == set(right), f"{sorted(set(left) ^ set(right))[:3]} are in one of {one.name} and {other.name}")
    differing = [
        name
        for name, tensor in left.items()
        if tensor.dtype != right[name].dtype or not torch.equal(tensor, right[name])
    ]
    _require(not differing, f"{differing[:3]} differ between {one.name} and {other.name}")
    return len(left)


def _named(folder: Path) -> dict[str, Any]:
    tensors = {rewritten(name, STOCK): tensor for name, tensor in read_checkpoint(folder).items()}
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(_SELECTOR)}


def _check_load(output: str, done: Mapping[str, Any]) -> Found:
    found = _last_line(output)
    _require(found["dtypes"] == ["bfloat16"], f"weights are {found['dtypes']}")
    return Found(f"{found['parameters']:,} parameters in bfloat16, {found['selector']:,} of them the selector's")


def _check_answer(place: Place, output: str) -> Found:
    found = _last_line(output)
    kept, total = found["kept_tokens"], found["visual_tokens"]
    _require(0 < kept < total, f"{kept} of {total} tokens kept")
    return Found(
        f"{kept:,} of {total:,} visual tokens of {found['seconds_of_video']:g} s of film kept",
        least_memory(place.config, total, kept + TEXT_TOKENS) / 1e9,
    )


def _check_two(output: str, done: Mapping[str, Any]) -> Found:
    found, first = _last_line(output), _last_line(done["ask"]["output"])
    _require(found["answers"][0] == first["answer"], f"{found['answers'][0]!r}, and before {first['answer']!r}")
    return Found(
        f"the film is encoded once, in {found['encode']:.0f} s; the first answer is word for word that of the step "
        f"before, the second comes after {found['seconds'][1]:.1f} s",
        done["ask"]["least_gb"],
    )


def _check_stock(output: str) -> Found:
    found = _last_line(output)
    return Found(f"the logits of {found['tokens']:,} tokens in {found['dtype']}, and {NEW_TOKENS} tokens of an answer")


def _check_equal(output: str, before: Mapping[str, Any]) -> Found:
    found, earlier = _last_line(output), _last_line(before["output"])
    _require(found["difference"] == 0, f"logits differ by up to {found['difference']}")
    for name in ("tokens", "dtype", "ids"):
        _require(found[name] == earlier[name], f"{name} {found[name]}, and before {earlier[name]}")
    return Found(f"the logits of {found['tokens']:,} tokens in {found['dtype']} differ by 0, the answers are the same")


def _check_calibration(place: Place) -> Found:
    selector = read_json(place.folder / "model" / "config.json")["qtsplus_config"]
    layer = selector["attention_layer"]
    _require(layer is not None, "no layer was written")
    return Found(f"layer {layer} and its heads are in the configuration")


def _last_line(output: str) -> dict[str, Any]:
    return json.loads(output.strip().splitlines()[-1])


# --------------------------------------------------------------------------------------------------------------------
# It is trained, saved and loaded
# --------------------------------------------------------------------------------------------------------------------


def _training(place: Place) -> list[Step]:
    folder = str(place.folder)
    stock = [
        f"model.variant={place.scale.variant}",
        f"model.weights={place.at('stock')}",
        "training.relevance_heads=[[0, 0]]",
    ]
    stages = _train(place, RECIPES / "qtsplus-3b.yaml", "trained", stock)
    return [
        Step(
            "plan of the training",
            [*stages, "--dry-run"],
            lambda output, done: Found(f"both stages are planned: {' and '.join(_planned(output))}"),
            removes=("model",),
        ),
        Step(
            "train, a step of both stages",
            stages,
            lambda output, done: _check_trained(place, done["plan of the training"]["output"]),
            makes=("trained",),
        ),
        Step(
            "LoRA",
            _train(place, _lora_recipe(place), "lora"),
            lambda output, done: _check_adapters(place),
            makes=("lora",),
            removes=("stock", "trained/relevance"),
        ),
        Step(
            "merge LoRA and save",
            _task("merge_and_save", folder=folder),
            lambda output, done: Found("the adapters are merged, and the model and its processor saved"),
            makes=("saved",),
        ),
        Step(
            "load again",
            _task("load_again", folder=folder),
            lambda output, done: _check_equal(output, done["merge LoRA and save"]),
            removes=("trained",),
        ),
    ]


def _train(place: Place, recipe: Path, out: str, overrides: Sequence[str] = ()) -> list[str]:
    """One optimizer step of a recipe's every stage, from features that are kept on disk."""
    fields = [
        *overrides,
        f"data.train_files=[{place.at(RECORDS)}]",
        f"data.features={place.at('features')}",
        "data.processor_kwargs.fps=1",
        f"training.output_dir={place.at(out)}",
        "training.gradient_accumulation_steps=1",
        "training.max_steps=1",
        "training.warmup_steps=0",
        "training.save_strategy=no",
        "training.logging_steps=1",
        "training.dataloader_num_workers=0",
        "training.report_to=none",
        "training.use_cpu=true",
    ]
    return [_COMMANDS, "train", str(recipe), *(part for field in fields for part in ("--set", field))]


def _lora_recipe(place: Place) -> Path:
    """A recipe of one stage, which goes on with what was trained."""
    path = place.folder / "lora.yaml"
    model = {"weights": place.at("trained"), "dtype": "bfloat16"}
    training = {
        **{"lora_rank": 8, "learning_rate": 1e-4, "bf16": True, "gradient_checkpointing": True},
        "per_device_train_batch_size": 1,
    }
    data = {"train_files": [place.at(RECORDS)]}
    path.write_text(json.dumps({"model": model, "data": data, "training": training}), encoding="utf-8")
    return path


def _planned(output: str) -> list[str]:
    """The memory of each stage, as the plan says it."""
    return re.findall(r"([\d.]+ [kMG]B) of memory", output)


def _check_trained(place: Place, plan: str) -> Found:
    first, second = place.folder / "trained" / "relevance", place.folder / "trained"
    same = _same_tensors(place.folder / "stock", first), _same_tensors(first, second)
    logs = f"{_step_log(first)}, then {_step_log(second)}"
    units = {"kB": 1e-6, "MB": 1e-3, "GB": 1.0}
    sizes = [float(number) * units[unit] for number, unit in map(str.split, _planned(plan))]
    return Found(f"{logs}; {same[0]} and {same[1]} frozen tensors are byte for byte what they were", max(sizes))


def _check_adapters(place: Place) -> Found:
    adapters = load_file(place.folder / "lora" / "adapter_model.safetensors")
    moved = [name for name, tensor in adapters.items() if "lora_B" in name and tensor.any()]
    _require(bool(moved), "no adapter has moved")
    return Found(f"{_step_log(place.folder / 'lora')}; {len(moved)} adapters have moved")


def _step_log(folder: Path) -> str:
    """What the one step logged."""
    history = read_json(folder / "trainer_state.json")["log_history"]
    (entry,) = (entry for entry in history if "grad_norm" in entry)
    loss, norm = entry["loss"], entry["grad_norm"]
    _require(math.isfinite(loss) and 0 < norm < math.inf, f"loss {loss}, norm of the gradient {norm}")
    return f"loss {loss:.3g}, norm of the gradient {norm:.3g}"


# --------------------------------------------------------------------------------------------------------------------
# Other models
# --------------------------------------------------------------------------------------------------------------------


def _others(place: Place) -> list[Step]:
    """Larger ones are converted alone; nothing is loaded."""
    gone = ("saved", "stock-other", "other")
    made = []
    for variant, gigabytes in place.scale.converted:
        one, other = _converting(place, variant, "stock-other", "other", "5GB", gigabytes)
        made += [replace(one, removes=gone), other]
    return made
