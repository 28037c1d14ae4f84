"""What lmms-eval finds behind the entry point `lmms_eval.models`."""

from lmms_eval.models.registry_v2 import ModelManifest

_HERE = __name__.rpartition(".")[0]


def manifests() -> list[ModelManifest]:
    """
    The model `qtsplus`, and a guard in front of the harness's own `qwen2_5_vl`.

    That class would load a QTSplus folder as plain Qwen2.5-VL, leave its selector out without an error, and score
    another model than the one that was named.
    """
    return [
        ModelManifest("qtsplus", chat_class_path=f"{_HERE}.model.QTSplus"),
        ModelManifest(
            "qwen2_5_vl",
            simple_class_path=f"{_HERE}.guard.Qwen2_5_VLSimple",
            chat_class_path=f"{_HERE}.guard.Qwen2_5_VL",
        ),
    ]
