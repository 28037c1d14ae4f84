"""Assembles complete Hub repositories (weights, configuration, processor, the code that runs them, a card)."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from huggingface_hub.utils import validate_repo_id

from ..common.folders import check_own, whole_folder
from ..model.generation_qtsplus import auto_map, code_of
from .backbones import backbone_of
from .card import ORIGIN, card_data, matching_variant, model_card
from .checkpoint import check_weights, on_meta, read_checkpoint, weight_files
from .files import hub_configs, variants
from .loading import load_config, load_generation_config, load_processor

# The line of the card's usage that names the repository.
_CARD_REPOSITORY = re.compile(r'^repository = ".*"$', re.MULTILINE)


def assemble_folder(
    source: str | Path,
    folder: str | Path,
    *,
    repository: str | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Path:
    """
    Writes a folder that was saved (by `save_pretrained`, a Trainer, `qtsplus convert`) as a complete Hub repository.

    The weights are checked by name and shape, and copied. A README.md of the source stays, apart from the repository
    that its usage names.

    Args:
        source: a folder, or the name of a variant of `hub_configs` that comes with weights.
        folder: the target, see [`whole_folder`].
        repository: the id "org/name" under which the card's usage loads it; "org/" and the folder's name when absent.

    Raises:
        ValueError: another kind of model, a folder without weights, or weights that do not fit; no repository's id.
        FileExistsError: the folder holds other files.
    """
    bundled = not Path(source).is_dir() and source in variants()
    source = hub_configs() / source if bundled else Path(source).resolve()
    folder = check_own(folder, source)
    if not source.is_dir():
        raise ValueError(f"{source} is neither a folder nor a variant; the variants are {', '.join(variants())}.")
    config = load_config(source)
    stored = read_checkpoint(source)
    model = on_meta(config)
    tensors = check_weights(stored, config, source)
    processor = load_processor(source)
    if repository is None:
        repository = f"org/{folder.name}"
    elif repository.count("/") != 1:
        raise ValueError(f"{repository!r} is no repository's id; expected ORG/NAME.")
    else:
        validate_repo_id(repository)
    card = None
    about = {}
    readme = source / "README.md"
    if readme.is_file():
        card = _CARD_REPOSITORY.sub(f'repository = "{repository}"', readme.read_text(encoding="utf-8"))
    elif bundled:
        about = card_data(source.name)
    else:
        about = card_data(matching_variant(config), *ORIGIN)
        say(f"{source} has no README.md: the card is a new one. Check or add the licence and base model.")
    with whole_folder(folder) as staging:
        if stored.keys() != tensors.keys():
            save_torch_state_dict(tensors, staging)
        else:
            for path in weight_files(source):
                shutil.copyfile(path, staging / path.name)
        model.generation_config = load_generation_config(source) or model.generation_config
        model.generation_config.save_pretrained(staging)
        write_repository(staging, model, processor, repository, about, card)
    return folder


def write_repository(
    folder: Path,
    model,
    processor: Any | None,
    repository: str,
    about: dict,
    card: str | None = None,
) -> None:
    """
    Writes all but the weights and the generation configuration, for a model on any device. The card is made from
    `about`, see [`model_card`]; or it is given as a whole.
    """
    backbone = backbone_of(model.config.model_type)
    for path in code_of(backbone.model.__module__):
        shutil.copyfile(path, folder / path.name)
    if processor is not None:
        processor.save_pretrained(folder)  # with its code
    if card is None:
        card = model_card(model, repository, about)
    (folder / "README.md").write_text(card, encoding="utf-8")
    model.config.architectures = [type(model).__name__]
    model.config.auto_map = auto_map(backbone.model)
    model.config.save_pretrained(folder)
