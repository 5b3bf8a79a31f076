"""Views: the caller's KV memory, seen token by token, without a copy.

``dense`` wraps tensors ``[heads, tokens, dim]`` per layer; ``paged`` wraps the page pools of a
serving engine. Index 0 is always token 0. A view owns nothing and is cheap to make.

Writes happen in inference mode, so that both ordinary tensors and tensors made under
``torch.inference_mode()`` can be filled, and no autograd history is recorded.
"""

from tierkv.views.memory import check
from tierkv.views.raw import over, spanning
from tierkv.views.tensors import DenseView, Order, PagedView, dense, paged

__all__ = ["DenseView", "Order", "PagedView", "check", "dense", "over", "paged", "spanning"]
