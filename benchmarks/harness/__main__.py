"""`python -m benchmarks.harness`: the command of lmms-eval, which then knows the model `qtsplus`."""

from lmms_eval.__main__ import cli_evaluate
from lmms_eval.models import MODEL_REGISTRY_V2
from lmms_eval.models.registry_v2 import ModelManifest

if __name__ == "__main__":
    MODEL_REGISTRY_V2.register_manifest(ModelManifest("qtsplus", chat_class_path="benchmarks.harness.model.QTSplus"))
    cli_evaluate()
