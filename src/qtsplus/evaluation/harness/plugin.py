"""What lmms-eval finds behind the entry point `lmms_eval.models`."""

from lmms_eval.models.registry_v2 import ModelManifest


def manifests() -> list[ModelManifest]:
    """The model `qtsplus`."""
    return [ModelManifest("qtsplus", chat_class_path=f"{__name__.rpartition('.')[0]}.model.QTSplus")]
