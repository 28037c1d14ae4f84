"""Initialising, loading and saving. A checkpoint that lacks weights is refused; what is saved or pushed is a whole Hub
repository, which loads with `trust_remote_code=True` and has a model card.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, ModelCardData
from transformers import initialization as init
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import cached_file, logging

from .selector_qtsplus import QTSplusSelector

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
    files = sorted(path for path in Path(folder).glob("[!.]*") if path.is_file())
    operations: list[Any] = [
        *(CommitOperationDelete(path) for path in sorted(set(delete) - {path.name for path in files})),
        *(CommitOperationAdd(path.name, path) for path in files),
    ]
    return api.create_commit(repo_id, operations, commit_message=message, **commit)


class QTSplusPreTrainedMixin:
    """
    Initialises the selector, refuses checkpoints that would leave a part of the model random, and saves a model with a
    head as a Hub repository: with the whole `auto_map`, its code, and the names it loads by.
    """

    config: Any
    can_generate: Any

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, QTSplusSelector):
            # A fresh re-encoder and a fresh layer over the question change nothing, so that they do not wreck a
            # trained language model.
            layers: Any = [*module.reencode_layers, *module.question_layers]
            for layer in layers:
                for weight in (layer.o_proj.weight, layer.ffn[-1].weight, layer.ffn[-1].bias):
                    init.zeros_(weight)
            init.zeros_(module.rho_history)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info=False, **kwargs):
        """
        As stock, but a checkpoint that lacks weights is an error.

        Raises:
            ValueError: weights are missing, as in a checkpoint of the base model, or have other names.
        """
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(
                f"{pretrained_model_name_or_path} lacks {len(missing)} of the weights of {cls.__name__} ({missing[0]}, "
                "...), which would stay random. If it is a base checkpoint without a selector, make a QTSplus model of "
                "it first: qtsplus convert."
            )
        for module in model.modules():
            if isinstance(module, QTSplusSelector):
                module.freeze_unused()
        return (model, info) if output_loading_info else model

    def set_attn_implementation(self, attn_implementation, *args, **kwargs):
        """As stock; the selector, whose attention is its own, is left out."""
        if isinstance(attn_implementation, str):
            parts = [name for name in self.config.sub_configs if name != "qtsplus_config"]
            attn_implementation = {"": attn_implementation, **dict.fromkeys(parts, attn_implementation)}
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

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
        paths = [path for path in (self._origin_file(name, token) for name in _PROCESSOR_FILES) if path is not None]
        for path in paths:
            shutil.copyfile(path, folder / path.name)
        if "processor_config.json" not in {path.name for path in paths}:
            logger.warning(
                "The model was not loaded from a folder or repository with a processor, so none goes along: "
                "push it too, with processor.push_to_hub."
            )

    def known_front_matter(self, token: bool | str | None = None) -> dict[str, Any]:
        """Licence and base model of the card that the model was loaded with; its results may be of other weights."""
        card = self._origin_file("README.md", token)
        fields = {} if card is None else ModelCard.load(card).data.to_dict()
        return {name: fields[name] for name in _KEPT_FRONT_MATTER if name in fields}

    def _origin_file(self, name: str, token: bool | str | None) -> Path | None:
        """A file of the folder or Hub repository that the model was loaded from, if there is one."""
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


# --- The model card (README.md) of a Hub repository ---

SECTIONS = ("weights", "training_data", "hyperparameters", "recipe", "results", "limits")

_BODY = """\
# {name}

{backbone} with **QTSplus**, a query-aware selector of visual tokens. It stands between the vision encoder and the
language model: it scores every visual token of a video against the question, decides how many to keep, keeps those in
order and hands a short prompt to the language model.

{weights}

## Use

The repository carries its own code; it needs `torch`, `torchvision`, `transformers>=5.17` and `av`.

```python
from transformers import AutoModelForImageTextToText, AutoProcessor

repository = "{repository}"
model = AutoModelForImageTextToText.from_pretrained(repository, trust_remote_code=True, dtype="auto")
processor = AutoProcessor.from_pretrained(repository, trust_remote_code=True)

content = [{{"type": "video", "video": "video.mp4"}}, {{"type": "text", "text": "What happens in the end?"}}]
inputs = processor.apply_chat_template(
    [{{"role": "user", "content": content}}],
    tokenize=True,
    add_generation_prompt=True,
    return_dict=True,
    return_tensors="pt",
    processor_kwargs={{"fps": 2}},
)
output = model.generate(**inputs.to(model.device), max_new_tokens=64)
print(processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)[0])
```

`model.generate(..., retention=0.1)` keeps a tenth of the visual tokens, `max_visual_tokens=2000` at most 2,000; without
either the model decides from the question. With `return_dict_in_generate=True` the output's `qtsplus` says which tokens
were kept (`kept_indices`), how relevant each was (`relevance`) and which fraction was aimed at (`rho`).

`trust_remote_code=True` runs the Python files of this repository; pin them with `revision=` and a commit's hash.

## The model

| | |
|---|---|
| parameters | {parameters:,}, of these {selector_parameters:,} in the selector |
| language model | {layers} layers, width {width} |
| fraction of tokens kept | {rho_min:g} to {rho_max:g}, decided per question |
| most tokens kept per sample | {n_max:,} |
| selector | {scoring_layers} scoring, {reencode_layers} re-encoding layers; gate `{gate}`; positions `{position_ids}` |
| words of the question | `{query_states}` |

## Training

{training}

## Results

{results}

## Limits

{limits}
"""

_NO_TRAINING = "Nothing is recorded about the training of these weights."
_NO_RESULTS = "None were measured for these weights."
_LIMITS = (
    "What the selector drops, the language model never sees: an answer can miss what the video shows, most of all "
    "where the question does not name what it is about. Only video tokens compete; images pass through whole. The base "
    "model's own limits and biases remain."
)


def model_card(model: Any, repository: str, about: Mapping[str, Any] | None = None) -> str:
    """
    The text of a repository's README.md, with its YAML front matter.

    Args:
        model: its configuration and size are written down; it may be on the meta device.
        repository: the repository's id, such as `"org/QTSplus-3B"`, for the usage that is shown.
        about: what is known of the weights. `weights`, `training_data`, `hyperparameters` (a mapping), `recipe`,
            `results` and `limits` go into the text; everything else (`license`, `base_model`, ...) is front matter.
    """
    about = dict(about or {})
    sections = {section: about.pop(section, None) for section in SECTIONS}
    if "base_model" in about:
        about.setdefault("base_model_relation", "finetune")
    tags = dict.fromkeys(["custom_code", "qtsplus", "video", "token-selection", *about.pop("tags", [])])
    front_matter = ModelCardData(
        library_name="transformers", pipeline_tag="video-text-to-text", tags=list(tags), **about
    ).to_yaml()
    config = model.config
    body = _BODY.format(
        name=repository.rpartition("/")[2],
        backbone=model.backbone_name,
        repository=repository,
        weights=sections["weights"] or _describe_weights(about.get("base_model")),
        parameters=_count_parameters(model),
        selector_parameters=_count_parameters(model.model.qtsplus),
        layers=config.text_config.num_hidden_layers,
        width=config.text_config.hidden_size,
        training=_describe_training(sections),
        results=sections["results"] or _NO_RESULTS,
        limits=sections["limits"] or _LIMITS,
        **config.qtsplus_config.to_dict(),
    )
    return f"---\n{front_matter.strip()}\n---\n\n{body}"


def _count_parameters(module: Any) -> int:
    """Of a module, whole too where DeepSpeed has left this process a part of them."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())


def _describe_weights(base_model: str | None) -> str:
    if base_model is not None:
        return f"The weights derive from [{base_model}](https://huggingface.co/{base_model})."
    return "The weights carry the licence of the model that they derive from."


def _describe_training(sections: Mapping[str, Any]) -> str:
    parts = [sections["training_data"]] if sections["training_data"] else []
    if sections["recipe"]:
        parts.append(f"Recipe: `{sections['recipe']}`.")
    if sections["hyperparameters"]:
        rows = [f"| {name} | {value} |" for name, value in sections["hyperparameters"].items()]
        parts.append("\n".join(["| hyperparameter | |", "|---|---|", *rows]))
    return "\n\n".join(parts) or _NO_TRAINING
