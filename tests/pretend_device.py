"""
A pretend accelerator: the device "pretend" keeps its tensors in CPU memory and behaves like one that is far away.

- A tensor of one dimension or more never meets a tensor of the CPU, as on CUDA.
- Every place where a GPU would wait for the host is counted, with its line: `.item()`, `tolist`, `nonzero`, a boolean
  mask as an index, `unique`, `torch.equal`, a copy to the host. So are kernels.

`start()` registers the device for the whole process, and it cannot be taken back: use it in a process of its own.
PyTorch's interface for this is experimental (tried with 2.14). There are no streams, no pinned memory, no autocast and
no numerics of a GPU.
"""

import os
import sys
from collections import Counter

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

NAME = "pretend"
aten = torch.ops.aten

WAITING = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_consecutive,
    aten.unique_dim,
    aten.equal,
    aten.bincount,
}
COPYING = {aten._to_copy, aten.copy_, aten._copy_from}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
FACTORIES = (
    "arange",
    "arange.start",
    "arange.start_step",
    "empty.memory_format",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randint.low",
    "randn",
    "randperm",
    "scalar_tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
)


class Counts:
    """
    What has happened on the device since `reset`: waits by operator and line, the most values that were copied to the
    host at once, the number of kernels, and the dtypes of all tensors.
    """

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self.waits: Counter[str] = Counter()
        self.largest_copy = 0
        self.kernels = 0
        self.dtypes: set[torch.dtype] = set()

    def copy(self, source: Tensor) -> None:
        self.wait("to the host")
        self.largest_copy = max(self.largest_copy, source.numel())

    def wait(self, operator: str) -> None:
        self.waits[f"{operator} at {_caller()}"] += 1

    @property
    def total_waits(self) -> int:
        return sum(self.waits.values())


counts = Counts()


def _caller() -> str:
    """The innermost line of our package, or else of anything but PyTorch."""
    outside_torch = None
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        line = f"{os.path.basename(path)}:{frame.f_lineno}"
        if "qtsplus" in path and "site-packages" not in path:
            return line
        if outside_torch is None and "/torch/" not in path and path != __file__:
            outside_torch = line
        frame = frame.f_back
    return str(outside_torch)


class PretendTensor(Tensor):
    """A tensor of the device; `held` is its memory, a tensor of the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held):
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        tensor = Tensor._make_wrapper_subclass(cls, held.shape, device=torch.device(NAME, 0), **layout)
        tensor.held = held
        counts.dtypes.add(held.dtype)
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})

    def __repr__(self):
        return f"PretendTensor({self.held!r})"

    def tolist(self):
        counts.wait("tolist")
        return self.held.tolist()

    def numpy(self, *args, **kwargs):
        raise TypeError("can't convert a tensor of the device pretend to numpy. Use Tensor.cpu() first.")

    __array__ = numpy

    def new_tensor(self, data, *, dtype=None, device=None, requires_grad=False):
        made = torch.tensor(data, dtype=dtype or self.dtype, device="cpu")
        return made if device is not None and not _is_pretend(device) else PretendTensor(made)


def _is_pretend(device) -> bool:
    return device is not None and torch.device(device).type == NAME


def _on_host(tensor: Tensor) -> bool:
    """Of the CPU and no scalar: CUDA takes scalars of the CPU, and so do we."""
    return not isinstance(tensor, PretendTensor) and tensor.dim() > 0 and tensor.device.type != "meta"


def _check_devices(function, args, tensors) -> None:
    """Raises what CUDA raises where tensors of two devices meet. Indices may be on the host."""
    operator = function.overloadpacket
    mixed = any(isinstance(tensor, PretendTensor) for tensor in tensors) and any(map(_on_host, tensors))
    if not mixed or operator in COPYING:
        return
    if operator in INDEXING and isinstance(args[0], PretendTensor):
        return
    shapes = [tuple(tensor.shape) for tensor in tensors]
    raise RuntimeError(f"Expected all tensors to be on the same device, but found pretend and cpu: {function} {shapes}")


def _count(function, args, kwargs, tensors) -> None:
    operator = function.overloadpacket
    counts.kernels += 1
    if operator in WAITING or function is aten.repeat_interleave.Tensor:
        counts.wait(str(operator))
    if operator in INDEXING:
        dtypes = [index.dtype for index in args[1] if index is not None]
        if torch.bool in dtypes or torch.uint8 in dtypes:
            counts.wait("a mask as an index")
    if operator is aten._to_copy:
        source = args[0]
        target = kwargs.get("device")
        leaves = target is not None and not _is_pretend(target)
        if leaves and isinstance(source, PretendTensor):
            counts.copy(source)
    if operator is aten.copy_:
        target, source = args[:2]
        if _on_host(target) and isinstance(source, PretendTensor):
            counts.copy(source)


def _run(function, args, kwargs):
    """Runs an operator on the memory behind its tensors; the results are on the device unless it moves them away."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_device = [tensor for tensor in tensors if isinstance(tensor, PretendTensor)]
    _check_devices(function, args, tensors)
    _count(function, args, kwargs, tensors)
    target = kwargs.get("device")
    stays = bool(on_device) if target is None else _is_pretend(target)
    if function.overloadpacket is aten.copy_:
        stays = isinstance(args[0], PretendTensor)

    def held(value):
        return value.held if isinstance(value, PretendTensor) else value

    def wrapped(result):
        if not isinstance(result, Tensor):
            return result
        in_place = [tensor for tensor in tensors if held(tensor) is result]
        if in_place:
            return in_place[0]
        return PretendTensor(result) if stays else result

    host_kwargs = tree_map(held, dict(kwargs))
    if target is not None:
        host_kwargs["device"] = torch.device("cpu")
    if host_kwargs.get("pin_memory"):
        host_kwargs["pin_memory"] = False
    return tree_map(wrapped, function(*tree_map(held, args), **host_kwargs))


class _FromHost(TorchFunctionMode):
    """`torch.tensor` and `torch.as_tensor`, and lists as indices, make their tensors on the host and send them."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        source = args[0] if args else None
        is_on_device = isinstance(source, PretendTensor)
        device = kwargs.get("device")
        if function in (torch.tensor, torch.as_tensor) and _is_pretend(device):
            if is_on_device:
                dtype = kwargs.get("dtype") or source.dtype
                return source.to(dtype)
            values = tree_map(self._on_host, source)
            kwargs["device"] = None
            return PretendTensor(function(values, **kwargs))
        if function is torch.as_tensor and is_on_device and device is None:
            dtype = kwargs.get("dtype") or source.dtype
            return source.to(dtype)
        if function is Tensor.__getitem__ and is_on_device:
            index = args[1]
            if not isinstance(index, tuple):
                index = (index,)
            return function(source, tuple(map(self._sent, index)))
        return function(*args, **kwargs)

    @staticmethod
    def _on_host(value):
        if isinstance(value, PretendTensor):
            return value.tolist()
        return value

    @staticmethod
    def _sent(index):
        if isinstance(index, list):
            return PretendTensor(torch.tensor(index))
        return index


class _Module(backend_registration._DummyBackendModule):
    """What PyTorch asks of `torch.pretend`."""

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16, torch.float32]

    def is_autocast_enabled(self):
        return False

    def synchronize(self, *_):
        pass

    def get_rng_state(self, *_):
        return torch.get_rng_state()

    def set_rng_state(self, state, *_):
        torch.set_rng_state(state)


_libraries = []  # PyTorch forgets what a library registered when the library is freed


def start() -> None:
    """Registers the device, for the rest of the process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(lambda function, *args, **kwargs: _run(function, args, kwargs), "PrivateUse1")
    factories = torch.library.Library("aten", "IMPL")
    for name in FACTORIES:
        packet, _, overload = name.partition(".")
        function = getattr(getattr(aten, packet), overload or "default")

        def make(*args, function=function, **kwargs):
            return _run(function, args, kwargs)

        factories.impl(name, make, "PrivateUse1")
    # As on CUDA, products of 16 bits may be added in float32.
    host = torch.library.Library("aten", "IMPL")
    host.impl("mm.dtype", lambda left, right, dtype: left.to(dtype) @ right.to(dtype), "CPU")
    _libraries.extend([everything, factories, host])
    _FromHost().__enter__()


def to_device(module: torch.nn.Module) -> torch.nn.Module:
    """Moves parameters and buffers in place, as `module.to` does; shared parameters stay shared."""
    moved: dict[int, Tensor] = {}
    for part in module.modules():
        for store in (part._parameters, part._buffers):
            for name, value in store.items():
                if value is None:
                    continue
                if id(value) not in moved:
                    tensor = PretendTensor(value.detach().clone())
                    is_parameter = isinstance(value, torch.nn.Parameter)
                    moved[id(value)] = torch.nn.Parameter(tensor, value.requires_grad) if is_parameter else tensor
                store[name] = moved[id(value)]
    return module


def inputs_to_device(inputs: dict) -> dict:
    return {name: value.to(NAME) if torch.is_tensor(value) else value for name, value in inputs.items()}
