"""Trains the tiny model in a process of its own: `train_tiny.py OUT SETTINGS`, with SETTINGS as JSON.

Writes `log.json` and `weights.safetensors` to OUT. With `kill_at` the process dies, as by `kill -9`, after that step.
"""

import json
import os
import signal
import sys
from pathlib import Path

from safetensors.torch import save_file
from transformers import TrainerCallback

from qtsplus.training.running import last_checkpoint
from training_examples import make_trainer, steps


class Kill(TrainerCallback):
    def __init__(self, step: int | None):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    out = Path(sys.argv[1])
    settings = json.loads(sys.argv[2])
    kill = Kill(settings.pop("kill_at", None))
    resumes = settings.pop("resume", False)
    trainer = make_trainer(out, **settings)
    trainer.add_callback(kill)
    trainer.train(resume_from_checkpoint=str(last_checkpoint(out)) if resumes else None)
    if trainer.is_world_process_zero():
        (out / "log.json").write_text(json.dumps(steps(trainer)))
        state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        save_file(state, out / "weights.safetensors")
    trainer.accelerator.wait_for_everyone()
    os._exit(0)  # the threads of gloo now and then abort a process that takes itself down in order


if __name__ == "__main__":
    main()
