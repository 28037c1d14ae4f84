"""`on_cpu.py train RECIPE` is `qtsplus train RECIPE` for `accelerate launch` on a machine without a GPU.

accelerate shards with FSDP on accelerators alone: here it takes processes on the CPU for those of GPUs.
"""

import os

from accelerate import PartialState
from accelerate.utils import DistributedType

from qtsplus.cli import app

prepare_process = PartialState.__init__


def prepare_as_gpu(self: PartialState, *args, **kwargs) -> None:
    prepare_process(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU and "ACCELERATE_USE_FSDP" in os.environ:
        self.distributed_type = DistributedType.MULTI_GPU


if __name__ == "__main__":
    PartialState.__init__ = prepare_as_gpu
    app()
