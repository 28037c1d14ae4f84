"""Recipes: a YAML file with a model, data and training section, and perhaps several stages that change them."""

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..common.validation import STRICT, build, parse_yaml, show
from ..data.records import Text
from ..hub.files import hub_configs, require_variant
from .arguments import QTSplusTrainingArguments
from .dataset import check_frame_settings
from .trainer import QTSplusTrainer


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
        attn_implementation: as for `from_pretrained`.
    """

    __pydantic_config__ = STRICT

    variant: Text | None = None
    weights: Text | None = None
    selector: dict[str, Any] = field(default_factory=dict)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    attn_implementation: Text | None = None

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

    train_files: list[str]
    eval_files: list[str] = field(default_factory=list)
    media_root: Text | None = None
    model_max_length: int | None = None
    processor_kwargs: dict[str, Any] = field(default_factory=dict)
    features: Text | None = None

    def __post_init__(self) -> None:
        if not self.train_files:
            raise ValueError("train_files is empty; expected the files to train on.")
        if self.model_max_length is not None and self.model_max_length < 1:
            raise ValueError(f"model_max_length is {self.model_max_length}; expected at least 1.")
        self.processor_kwargs = {name: value for name, value in self.processor_kwargs.items() if value is not None}
        check_frame_settings(self.processor_kwargs)


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


_SECTIONS = ("model", "data", "training")
Sections = dict[str, dict[str, Any]]


def load_stages(
    path: str | os.PathLike, overrides: Sequence[str] = (), trainer_class: type[QTSplusTrainer] = QTSplusTrainer
) -> list[Recipe]:
    """
    Reads a recipe.

    `stages` names what runs one after the other, with the fields in which each differs from the sections above. Every
    stage but the first starts from what the one before has written. The last one writes to `training.output_dir`, the
    others to folders of their names in it. `{variant}` in a folder stands for the variant's name.

    Args:
        overrides: such as `"training.max_steps=10"`, for every stage; the value is YAML.
        trainer_class: what is to run it; the `training` section has the fields of its arguments.

    Raises:
        ValueError: what is not YAML; an unknown section or field; a value of another type, or one that a section
            refuses.
    """
    sections, stages = _read(path)
    last = list(stages)[-1]
    recipes: list[Recipe] = []
    for stage, changes in stages.items():
        merged = _merge(sections, changes)
        for override in overrides:
            _apply(override, merged)
        defaults = _variant_defaults(merged["model"].get("variant"))
        merged = _merge(defaults, merged)
        if recipes:
            merged["model"]["weights"] = str(recipes[-1].output_dir)
        _name_variant(merged)
        if stage != last:
            _name_stage(merged, stage)
        recipes.append(_build(path, merged, stage, trainer_class))
    return recipes


def _read(path: str | os.PathLike) -> tuple[Sections, dict[str, Sections]]:
    """The sections of a file, and the changes of each stage by its name; without stages there is one, named ""."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ValueError(f"There is no file {str(path)!r}; expected a recipe in YAML.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file; expected a recipe in YAML.") from error
    content = parse_yaml(text, str(path))
    stages = None
    if isinstance(content, dict):
        stages = content.pop("stages", None)
    sections = _sections(path, content)
    if stages is None:
        return sections, {"": {}}
    named = isinstance(stages, dict) and all(isinstance(name, str) and name for name in stages)
    if not named or not stages:
        raise ValueError(f"{path}: stages is {show(stages)}; expected sections by the name of each stage.")
    changes = {}
    for name, section in stages.items():
        changes[name] = _sections(f"{path}: {name}", section)
    return sections, changes


def _sections(where: str | os.PathLike, content) -> Sections:
    if not isinstance(content, dict) or not set(content) <= set(_SECTIONS):
        raise ValueError(f"{where}: expected the sections {', '.join(_SECTIONS)}.")
    for name, section in content.items():
        if section is not None and not isinstance(section, dict):
            raise ValueError(f"{where}: the section {name!r} is {show(section)}; expected fields with values.")
    return {name: dict(content.get(name) or {}) for name in _SECTIONS}


def _variant_defaults(variant: object) -> Sections:
    """What a recipe leaves to its variant."""
    if not isinstance(variant, str) or not variant.strip():
        return {}
    path = hub_configs() / variant / "recipe.yaml"
    if not path.exists():
        return {}
    require_variant(variant)
    text = path.read_text(encoding="utf-8")
    return parse_yaml(text, str(path))


def _merge(base: Mapping, changes: Mapping) -> dict:
    """`base` with the fields of `changes`, section by section; nothing is shared with either."""
    merged = copy.deepcopy(dict(base))
    for key, value in changes.items():
        before = merged.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            merged[key] = _merge(before, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _apply(override: str, sections: Sections) -> None:
    """Sets the one field that an override names."""
    key, separator, value = override.partition("=")
    section, *parents = key.split(".")
    if not separator or not parents or section not in sections or not all(parents):
        known = ", ".join(_SECTIONS)
        raise ValueError(f"{override!r}: expected SECTION.FIELD=VALUE with one of the sections {known}.")
    last = parents.pop()
    target = sections[section]
    for parent in parents:
        target = target.setdefault(parent, {})
        if not isinstance(target, dict):
            raise ValueError(f"{override!r}: {parent} is {show(target)}, which has no fields.")
    target[last] = parse_yaml(value, repr(override))


def _name_variant(sections: Sections) -> None:
    """Puts the variant's name, or else that of the weights, into the folders that a recipe writes to."""
    model = sections["model"]
    variant = model.get("variant")
    if not variant:
        variant = Path(str(model.get("weights"))).name
    for section, name in (("training", "output_dir"), ("data", "features")):
        folder = sections[section].get(name)
        if isinstance(folder, str):
            sections[section][name] = folder.replace("{variant}", str(variant))


def _name_stage(sections: Sections, stage: str) -> None:
    """Gives a stage before the last a folder of its own."""
    folder = sections["training"].get("output_dir")
    if isinstance(folder, str) and folder.strip():
        sections["training"]["output_dir"] = str(Path(folder) / stage)


def _build(
    path: str | os.PathLike,
    sections: Sections,
    stage: str,
    trainer_class: type[QTSplusTrainer],
) -> Recipe:
    arguments_class = trainer_class.arguments_class
    model = build(f"{path}: model.", ModelArguments, sections["model"])
    data = build(f"{path}: data.", DataArguments, sections["data"])
    training = build(f"{path}: training.", arguments_class, sections["training"])
    output_dir = sections["training"].get("output_dir", training.output_dir)
    if not str(output_dir or "").strip():
        raise ValueError(f"{path}: training.output_dir is empty; expected the folder to write to.")
    evaluates = training.eval_strategy != "no" or training.load_best_model_at_end
    if evaluates and not data.eval_files:
        raise ValueError(f"{path}: training asks for evaluation, but data.eval_files is empty: name files there.")
    return Recipe(model, data, training, Path(path), stage, trainer_class)
