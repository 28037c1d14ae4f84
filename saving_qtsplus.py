"""Saving: `save_pretrained` and `push_to_hub` write folders that load with `trust_remote_code=True`."""

import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import cached_file, logging

from .card_qtsplus import model_card

logger = logging.get_logger(__name__)

# AutoModel too gives the class with the head, as published video models do.
MODEL_AUTO_CLASSES = ("AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
# The processor's files, and the code that runs it.
_PROCESSOR_FILES = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json"),
    *("added_tokens.json", "processing_qtsplus.py", "video_qtsplus.py", "decoding_qtsplus.py"),
)
_KEPT_FRONT_MATTER = ("license", "license_name", "license_link", "base_model", "base_model_relation", "language")


def auto_map(model_class: Any) -> dict[str, str]:
    """The whole `auto_map` of a config.json, for a class with a head."""
    config_class = model_class.config_class
    target = f"{model_class.__module__.rpartition('.')[2]}.{model_class.__name__}"
    config_target = f"{config_class.__module__.rpartition('.')[2]}.{config_class.__name__}"
    return {"AutoConfig": config_target, **dict.fromkeys(MODEL_AUTO_CLASSES, target)}


def code_of(module_name: str) -> list[Path]:
    """The Python file of a module and of all that it imports from beside it, sorted."""
    entry = Path(str(sys.modules[module_name].__file__))
    return sorted({entry, *map(Path, get_relative_import_files(entry))})


def commit_folder(
    api: HfApi, folder: str | Path, repo_id: str, message: str, delete: Iterable[str] = (), **commit: Any
) -> Any:
    """
    Uploads the files of a folder in one commit, so that a repository never holds a half of them.

    Args:
        delete: paths in the repository that the same commit removes.
        commit: further arguments of `HfApi.create_commit`.
    """
    files = sorted(path for path in Path(folder).iterdir() if path.is_file())
    operations: list[Any] = [
        *(CommitOperationDelete(path) for path in sorted(set(delete) - {path.name for path in files})),
        *(CommitOperationAdd(path.name, path) for path in files),
    ]
    return api.create_commit(repo_id, operations, commit_message=message, **commit)


class QTSplusSavingMixin:
    """Saves a model with a head as a Hub repository: with the whole `auto_map`, its code, and the names it loads by."""

    config: Any
    can_generate: Any

    def save_pretrained(self, save_directory, *args, push_to_hub: bool = False, **kwargs):
        """
        As stock, with the code that runs the model beside its weights.

        Args:
            push_to_hub: upload as [`push_to_hub`] does, to `repo_id` or else to a repository named as the folder.
        """
        names = ("repo_id", "commit_message", "private", "create_pr", "revision")
        pushing = {name: kwargs.pop(name) for name in names if push_to_hub and name in kwargs}
        # The default goes back to the names of a stock checkpoint where one was loaded, and that does not load again.
        kwargs["save_original_format"] = False
        if self.can_generate() and kwargs.get("is_main_process", True):
            # A class that somebody derived elsewhere is saved as the one of ours that it derives from.
            ours = next(parent for parent in type(self).__mro__ if "modeling_qtsplus" in parent.__module__)
            self.config.auto_map = auto_map(ours)
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            for path in code_of(ours.__module__):
                shutil.copyfile(path, Path(save_directory, path.name))
        super().save_pretrained(save_directory, *args, **kwargs)
        if push_to_hub:
            self.push_to_hub(pushing.pop("repo_id", Path(save_directory).name), token=kwargs.get("token"), **pushing)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "5GB",
        tags: list[str] | None = None,
    ) -> Any:
        """
        Uploads what `qtsplus publish` does, in one commit: weights, code, card, and the processor's files from where
        the model was loaded. A model that was loaded from nowhere needs `processor.push_to_hub` as well.
        """
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            self._copy_processor(folder, token)
            about = {**self.known_front_matter(token), **({"tags": tags} if tags else {})}
            (folder / "README.md").write_text(model_card(self, repo_id, about), encoding="utf-8")
            if revision is not None and not revision.startswith("refs/pr"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            return commit_folder(
                api,
                folder,
                repo_id,
                commit_message or "Upload model",
                commit_description=commit_description,
                revision=revision,
                create_pr=create_pr,
            )

    def _copy_processor(self, folder: Path, token: bool | str | None) -> None:
        found = [path for path in (self._origin_file(name, token) for name in _PROCESSOR_FILES) if path is not None]
        for path in found:
            shutil.copyfile(path, folder / path.name)
        if "processor_config.json" not in {path.name for path in found}:
            logger.warning(
                "The model was not loaded from a folder or repository with a processor, so none goes along: "
                "push it too, with processor.push_to_hub."
            )

    def known_front_matter(self, token: bool | str | None = None) -> dict[str, Any]:
        """Licence and base model of the card that the model was loaded with; its results may be of other weights."""
        card = self._origin_file("README.md", token)
        told = {} if card is None else ModelCard.load(card).data.to_dict()
        return {name: told[name] for name in _KEPT_FRONT_MATTER if name in told}

    def _origin_file(self, name: str, token: bool | str | None) -> Path | None:
        """A file of the folder or Hub repository that the model was loaded from, where there is such a one."""
        origin = self.config._name_or_path
        if not origin:
            return None
        path = cached_file(
            origin,
            name,
            revision=getattr(self.config, "_commit_hash", None),
            token=token,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return None if path is None else Path(path)


__all__ = ["QTSplusSavingMixin"]
