"""Loads what a recipe names: a QTSplus model, or a stock model with a fresh selector."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.initialization import no_init_weights

from ..hub.backbones import OURS, backbone_of
from ..hub.checkpoint import read_checkpoint
from ..hub.convert import fresh_selector
from ..hub.files import hub_configs, require_variant
from ..hub.loading import (
    adopt_tokenizer,
    find_device,
    load_config,
    load_generation_config,
    processor_of,
    stored_config,
)
from ..model.fields_qtsplus import QTSplusConfig
from ..model.methods_qtsplus import add_method


def make_config(
    variant: str | None,
    weights: str | None,
    selector: Mapping | None = None,
):
    """
    The configuration of a variant, a folder of `hub_configs`; without one that of weights, a folder or Hub id. With
    fields of `qtsplus_config` to change; a `ValueError` for one that cannot be so.
    """
    source = str(weights if variant is None else require_variant(variant))
    kind = model_type(source)
    if kind.endswith(OURS):
        config = load_config(source)
    else:
        stock = AutoConfig.from_pretrained(source)
        config = backbone_of(kind).config(**stock.to_dict())
    changes = dict(selector or {})
    add_method(changes.get("selection"))
    config.qtsplus_config = QTSplusConfig(**config.qtsplus_config.to_dict() | changes)
    return config


def make_model(
    variant: str | None,
    weights: str | None,
    selector: Mapping | None = None,
    dtype: str = "float32",
    seed: int = 0,
):
    """
    The model of [`make_config`], with its weights, or with random ones; the global random state is left as it was. A
    `ValueError` for weights that are not there, cut off, or do not fit the configuration.
    """
    config = make_config(variant, weights, selector)
    if weights is not None:
        require_weights(weights, config.model_type)
    backbone = backbone_of(config.model_type)
    if weights is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            # The dtype is that of parameters: `model.to` would round the frequencies of the positions too.
            model = backbone.model._from_config(config, dtype=dtype)
        model.generation_config = load_generation_config(hub_configs() / str(variant)) or model.generation_config
        return model
    if model_type(weights).endswith(OURS):
        return backbone.model.from_pretrained(weights, config=config, dtype=dtype)
    # The weights are a stock model's: a fresh selector is added.
    base = backbone.stock_model.from_pretrained(weights, dtype=dtype)
    tensors = base.state_dict()
    tensors.update(fresh_selector(config, base.dtype, seed))
    with no_init_weights():
        model = backbone.model._from_config(config, dtype=base.dtype)
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    if missing or unexpected:
        raise ValueError(f"{weights} does not fit the configuration: {(missing + unexpected)[0]} is not in both.")
    model.tie_weights()
    model.generation_config = base.generation_config
    return model


def load_either(
    weights: str,
    device: str | None = None,
    dtype: str = "auto",
    selector: Mapping | None = None,
) -> tuple[Any, Any]:
    """
    A stock model or a QTSplus model, in a folder or on the Hub, with its processor; with the `dtype` "auto" in that of
    the checkpoint. A `ValueError` for no such model, or one of an unknown backbone. `selector` has fields of
    `qtsplus_config` to change; a stock model without them gets no re-encoder.
    """
    where = find_device(device)
    if selector is None and not model_type(weights).endswith(OURS):
        selector = {"reencode_layers": 0}
    model = make_model(None, weights, selector, dtype).to(where).eval()
    processor = make_processor(None, weights, model.config)
    adopt_tokenizer(model.config, processor)
    return model, processor


def require_weights(weights: str, expected: str) -> None:
    """Raises `ValueError` for weights of another type of model, of an adapter, or that are cut off."""
    kind = model_type(weights)
    stock = expected.removesuffix(OURS)
    if kind.removesuffix(OURS) != stock:
        raise ValueError(
            f"{weights} holds a model of type {kind!r}; expected {expected!r}, or its stock model {stock!r}."
        )
    if Path(weights).is_dir():
        read_checkpoint(Path(weights))  # raises what is cut off; the files of a Hub repository are checked on their way


def make_processor(variant: str | None, weights: str | None, config):
    """The processor of the weights, or of a variant that carries one."""
    return processor_of(require_variant(str(variant)) if weights is None else weights, config)


def model_type(weights: str) -> str:
    """The `model_type` in a folder's or Hub repository's config.json; raises as `loading.stored_config`."""
    return str(stored_config(weights).get("model_type", ""))
