"""What lmms-eval finds behind the entry point `lmms_eval.models`."""

from lmms_eval.models.registry_v2 import ModelManifest

_HERE = __name__.rpartition(".")[0]


def manifests() -> list[ModelManifest]:
    """The model `qtsplus`, and a guard in front of the harness's own, which would leave a selector out in silence."""
    return [
        ModelManifest("qtsplus", chat_class_path=f"{_HERE}.model.QTSplus"),
        ModelManifest(
            "qwen2_5_vl",
            simple_class_path=f"{_HERE}.guard.Qwen2_5_VLSimple",
            chat_class_path=f"{_HERE}.guard.Qwen2_5_VL",
        ),
    ]
