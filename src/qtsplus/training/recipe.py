"""Recipes: a YAML file with a model, data and training section, and perhaps several stages that change them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, with_config
from typing_extensions import TypedDict

from ..common.validation import STRICT, build, parse_yaml, show
from ..data.media import AnyPath
from ..data.records import Text
from ..hub.files import hub_configs
from .arguments import QTSplusTrainingArguments
from .trainer import QTSplusTrainer

Fields = dict[str, Any]


@dataclass
class ModelArguments:
    """
    The `model` section.

    Args:
        variant: a folder of `hub_configs`, whose configuration is used, and whose `recipe.yaml` has what a recipe
            leaves open; the configuration of `weights` when absent.
        weights: a folder or Hub id with a QTSplus model, or with a stock model that gets a fresh selector; seeded
            random weights when absent.
        selector: fields of `qtsplus_config` to change.
        dtype: of the weights that are frozen; those that are trained are held in float32, which small learning rates
            need.
    """

    __pydantic_config__ = STRICT

    variant: Text | None = None
    weights: Text | None = None
    selector: Fields = field(default_factory=dict)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    def __post_init__(self) -> None:
        if self.variant is None and self.weights is None:
            raise ValueError("variant and weights are both missing; expected at least one of them.")


@dataclass
class DataArguments:
    """
    The `data` section.

    Args:
        train_files: sets of questions with answers in any format of [`iter_rows`]; mixed by shuffling, and one that is
            named twice counts twice.
        eval_files: the same for evaluation.
        media_root: the folder of their videos; beside each file when absent.
        model_max_length: most text tokens of an example.
        processor_kwargs: for every call of the processor, such as `{fps: 1, max_frames: 64}`.
        features: a folder in which the videos' features are kept, 50 to 400 MB for each clip of a real model. Each
            video is decoded and encoded once, before training; runs of the same tower may share a folder.
    """

    __pydantic_config__ = STRICT

    train_files: Annotated[list[str], Field(min_length=1)]
    eval_files: list[str] = field(default_factory=list)
    media_root: Text | None = None
    model_max_length: PositiveInt | None = None
    processor_kwargs: Fields = field(default_factory=dict)
    features: Text | None = None

    def __post_init__(self) -> None:
        # `null` takes back what the variant says.
        self.processor_kwargs = {name: value for name, value in self.processor_kwargs.items() if value is not None}


@dataclass
class Recipe:
    """A recipe, or the one of its stages that is called `stage`; `trainer_class` runs it."""

    model: ModelArguments
    data: DataArguments
    training: QTSplusTrainingArguments
    path: Path
    stage: str = ""
    trainer_class: type[QTSplusTrainer] = QTSplusTrainer

    @property
    def name(self) -> str:
        """What it is called in messages."""
        if self.stage:
            return f"{self.path.stem}, stage {self.stage}"
        return self.path.stem

    @property
    def output_dir(self) -> Path:
        return Path(str(self.training.output_dir))


@with_config(STRICT)
class Sections(TypedDict, total=False):
    """What a file says, or one of its stages changes."""

    model: Fields
    data: Fields
    training: Fields


@with_config(STRICT)
class File(Sections, total=False):
    """A recipe as YAML has it."""

    stages: dict[Text, Fields]


def load_stages(
    path: AnyPath,
    overrides: Sequence[str] = (),
    trainer_class: type[QTSplusTrainer] = QTSplusTrainer,
) -> list[Recipe]:
    """
    Reads a recipe.

    `stages` names what runs one after the other, with the fields in which each differs from the sections above. Every
    stage but the first starts from what the one before has written. The last one writes to `training.output_dir`, the
    others to folders of their names in it. `{variant}` in it stands for the variant's name, or for that of
    the first stage's weights.

    Args:
        overrides: such as `"training.max_steps=10"`, for every stage; the value is YAML, and fields of a mapping are
            added to those of the recipe.
        trainer_class: what is to run it; the `training` section has the fields of its arguments.

    Raises:
        ValueError: what is not YAML; an unknown section or field; a value of another type, or one that a section
            refuses.
    """
    content = parse_yaml(Path(path).read_bytes(), str(path))
    content = dict(build(f"{path}: ", File, content))
    stages = content.pop("stages", None) or {"": {}}
    last = list(stages)[-1]
    changes_of_all = [_parse_override(override) for override in overrides]
    recipes: list[Recipe] = []
    for stage, changes in stages.items():
        build(f"{path}: stages.{stage}.", Sections, changes)
        stated = reduce(_merge, [changes, *changes_of_all], content)
        of_variant = hub_configs() / str(stated.get("model", {}).get("variant")) / "recipe.yaml"
        defaults = parse_yaml(of_variant.read_bytes(), str(of_variant)) if of_variant.exists() else {}
        empty: Fields = {"model": {}, "data": {}, "training": {}}
        sections = _merge(_merge(empty, defaults), stated)
        if recipes:
            if recipes[-1].training.lora_rank:
                raise ValueError(
                    f"{path}: the stage before {stage} has a lora_rank; expected it in the last stage alone."
                )
            if "weights" in changes.get("model", {}):
                raise ValueError(f"{path}: stages.{stage}.model.weights is set; expected it in the first stage alone.")
            sections["model"]["weights"] = recipes[0].model.weights
        output_dir = _output_dir(path, sections)
        if recipes:
            sections["model"]["weights"] = str(recipes[-1].output_dir)
        if stage != last:
            output_dir /= stage
        sections["training"]["output_dir"] = str(output_dir)
        recipes.append(_build(path, sections, stage, trainer_class))
    return recipes


def _merge(base: Mapping, changes: Mapping) -> Fields:
    """`base` with the fields of `changes`, section by section."""
    merged = dict(base)
    for name, value in changes.items():
        before = merged.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            value = _merge(before, value)
        merged[name] = value
    return merged


def _parse_override(override: str) -> Fields:
    """The one field that an override names, in its section."""
    key, separator, text = override.partition("=")
    names = key.split(".")
    has_section = len(names) > 1 and names[0] in Sections.__annotations__
    if not separator or not has_section or "" in names:
        raise ValueError(f"{override!r}: expected SECTION.FIELD=VALUE in the section model, data or training.")
    value = parse_yaml(text, repr(override))
    for name in reversed(names):
        value = {name: value}
    return value


def _output_dir(path: AnyPath, sections: Fields) -> Path:
    """The folder that a recipe writes to, with the variant's name, or else that of the weights."""
    folder = sections["training"].get("output_dir")
    if not isinstance(folder, str) or not folder:
        raise ValueError(f"{path}: training.output_dir is {show(folder)}; expected the folder to write to.")
    model = sections["model"]
    weights = Path(str(model.get("weights")))
    variant = model.get("variant") or weights.name
    return Path(folder.replace("{variant}", str(variant)))


def _build(
    path: AnyPath,
    sections: Fields,
    stage: str,
    trainer_class: type[QTSplusTrainer],
) -> Recipe:
    model = build(f"{path}: model.", ModelArguments, sections["model"])
    data = build(f"{path}: data.", DataArguments, sections["data"])
    fields = sections["training"]
    heads = fields.get("relevance_heads", [])
    if fields.get("relevance_weight") and not isinstance(heads, list):
        raise ValueError(
            f"{path}, stage {stage}: training.relevance_heads is {show(heads)}; expected pairs of a layer and a head, "
            "which `qtsplus calibrate` prints."
        )
    training = build(f"{path}: training.", trainer_class.arguments_class, fields)
    return Recipe(model, data, training, Path(path), stage, trainer_class)
