"""Tensors that are no plain strided memory: which, why, and what to call instead. Their pointers are never touched."""

from __future__ import annotations

from hostward._torch import torch
from hostward.errors import LeafError

# Subclasses by name: the modules that define them are not imported for their sake.
_SUBCLASSES = {
    "DTensor": (
        "it is this process's shard of a distributed tensor",
        "x.full_tensor() for all of it, x.to_local() for this shard",
    ),
    "FakeTensor": ("it has a shape but no values", "call it outside of FakeTensorMode, on the real tensor"),
    "NestedTensor": ("its rows differ in length", "x.unbind(), or torch.nested.to_padded_tensor(x, padding)"),
    "MaskedTensor": ("NumPy's arrays carry no mask", "x.get_data() and x.get_mask()"),
    "FunctionalTensor": ("it stands for a tensor inside a trace", "call it outside of the traced function"),
}


NO_MEMORY = ("a tensor without memory of its own", "it stands for zeros, or for a tensor inside a trace", "x.clone()")
FREED = (
    "a tensor whose memory has been taken away",
    "its storage was resized: sharded parameters are, while nobody needs them whole",
    "gather it first, or convert it before its storage is resized",
)


def mode_refusal() -> LeafError | None:
    """Return the error for a call made while torch only pretends to compute, or ``None``."""
    if torch._C._functorch.maybe_current_level() is not None:
        why, do = "every operation in here is being transformed, the copy too", "call it outside of the function"
        return refused("a tensor inside a function that torch.func transforms (vmap, grad, ...)", why, do)
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return refused("a tensor inside of FakeTensorMode", "nothing in there has values", "call it outside")
    return None


def refused(got: str, why: str, do: str) -> LeafError:
    """Return the error for a tensor that cannot move."""
    return LeafError("this tensor cannot become an array as it is", got=got, why=why, do=do)


def tensor_refusal(x: torch.Tensor) -> LeafError | None:
    """Return the error for a tensor that cannot move, or ``None`` for one with plain memory behind it."""
    found = _reason(x)
    return None if found is None else refused(*found)


def _reason(x: torch.Tensor) -> tuple[str, str, str] | None:
    kind = type(x)
    if isinstance(x, torch.nn.parameter.UninitializedParameter | torch.nn.parameter.UninitializedBuffer):
        return kind.__name__, "a lazy parameter has no shape yet", "run the module once first"
    if kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        why, do = _SUBCLASSES.get(
            kind.__name__,
            ("a subclass that redefines what its operations do may keep its values anywhere", "take its plain tensor"),
        )
        return f"a {kind.__name__}", why, do
    if x.is_nested:
        return "a nested tensor", *_SUBCLASSES["NestedTensor"]
    if x.layout is not torch.strided:
        name = str(x.layout).removeprefix("torch.")
        if "sparse" in name:
            parts = "x.indices() and x.values()" if name == "sparse_coo" else "x.values() and its index tensors"
            return f"a {name} tensor", "NumPy has no sparse arrays", f"x.to_dense(), or move {parts}"
        return f"a tensor of layout {name}", "its memory has no strides", "x.to_dense()"
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return (
            "a tensor inside torch.func (vmap, grad, ...)",
            "it stands for many values, or for one under a transform",
            "return it from the transformed function and convert the result",
        )
    if x.device.type == "meta":
        return "a meta tensor", "it has a shape but no values", "load or compute the values first"
    if not torch._C._has_storage(x):
        return NO_MEMORY
    return None
