"""`qtsplus convert` and `qtsplus publish`: checkpoints and Hub repositories."""

from pathlib import Path
from typing import Annotated

import typer

from .console import note, notes, wrote
from .models import split_revision
from .options import command

Out = Annotated[Path, typer.Option(help="The folder to write.", show_default=False)]


@command
def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder, or a Hub id, also as ORG/NAME@COMMIT. A stock model such as Qwen2.5-VL gets a new selector."
            " A reference QTSplus becomes one of ours.",
            show_default=False,
        ),
    ],
    out: Out,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Set a field of a new selector, such as n_max=512. May be repeated. selection=lm_attention chooses by "
            "the language model's own attention, without training.",
        ),
    ] = None,
    processor: Annotated[
        str | None, typer.Option(help="Take the processor from this folder or Hub id, if the source has none.")
    ] = None,
) -> None:
    """Make a QTSplus model of a stock model or of a reference checkpoint."""
    source, revision = split_revision(source)
    with notes.status("Converting"):
        from ..common.validation import parse_yaml
        from ..hub import convert as conversion

        selector = {}
        for setting in settings or ():
            name, _, value = setting.partition("=")
            if not name or not value or name in selector:
                raise ValueError(f"--set is {setting!r}; expected NAME=VALUE, once for each name, such as n_max=512.")
            selector[name] = parse_yaml(value, f"--set {setting}")
        folder = conversion.convert(
            source,
            out,
            selector=selector or None,
            processor=processor,
            revision=revision,
            say=note,
        )
    wrote(folder)


@command
def publish(
    model: Annotated[
        str, typer.Argument(help="A folder with weights, or a variant's name such as qtsplus-tiny.", show_default=False)
    ],
    to: Out,
    repo: Annotated[str | None, typer.Option(help="The Hub repository ORG/NAME, which the card's usage names.")] = None,
) -> None:
    """
    Assemble a complete Hub repository: weights, configuration, processor, code, model card.

    `hf upload ORG/NAME FOLDER` puts it on the Hub.
    """
    from ..hub import publish as publishing

    wrote(publishing.assemble_folder(model, to, repository=repo, say=note).resolve())
