"""What the checks of a pair of models share, ours and stock on the same weights."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def counted_flops(function) -> int:
    """Floating-point operations of a function's matrix products, attention's as such, as PyTorch counts them."""
    # PyTorch below 2.15 does not count the fused attention of a CPU.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def assert_one_model(models):
    """The same weights in memory, and the same logits where nothing is selected."""
    ours = dict(models["ours"].named_parameters())
    for name, parameter in models["stock"].named_parameters():
        assert parameter.data_ptr() == ours[name].data_ptr(), name
    ids = torch.randint(1, 500, (1, 20))
    with torch.no_grad():
        stock, own = models["stock"](input_ids=ids).logits, models["ours"](input_ids=ids).logits
    assert stock.std() > 0
    torch.testing.assert_close(own, stock)
