"""Triton's interpreter in a quarter of its time.

It patches `triton.language` anew for every launch and once more for every function that a kernel
calls. Nothing is compiled beside it in a process, so once a function is enough, for good. It
computes for every sum and product of integers whether it overflows, but never looks at the answer.
It makes a table of numpy's types for every one that it looks up. It describes the shape of every
tensor anew, and compares the shapes of two word by word. And for every operation it works out anew
what type two operands have in common, and makes its numbers into tensors.
"""

import builtins
import functools
import inspect
import math
from typing import Any


def speed_up() -> None:
    import triton.runtime.interpreter as module

    interpreter: Any = module
    interpreter._LangPatchScope.restore = lambda scope: None
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)
    interpreter._patch_attr = _call_directly
    interpreter.TensorHandle.__post_init__ = lambda self: None  # it looks at what was computed
    interpreter.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
    np_dtype = interpreter._get_np_dtype
    of_scalar = functools.cache(np_dtype)  # pointers cannot be hashed
    interpreter._get_np_dtype = lambda type_: (
        np_dtype(type_) if type_.scalar.is_ptr() else of_scalar(type_.scalar)
    )
    _describe_shapes_once(interpreter)
    _promote_types_once(interpreter)


def _call_directly(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Without the wrapper that asks whether it is called in a kernel."""
    from triton.runtime.interpreter import interpreter_semantic

    function = inspect.unwrap(member)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, call)


def _describe_shapes_once(interpreter: Any) -> None:
    import triton.language.core as module

    core: Any = module
    check = core.validate_block_shape

    @functools.cache
    def described(*sizes: int) -> tuple[Any, Any, Any]:
        """Of a shape: numbers, constants, and the constant of how many numbers it holds."""
        check(sizes)
        constants = core.tuple([core.constexpr(size) for size in sizes])
        return core.tuple(sizes), constants, core.constexpr(math.prod(sizes))

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        if not shape:
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.sizes = builtins.tuple(getattr(size, "value", size) for size in shape)
        self.shape, _, numel = described(*self.sizes)
        self.numel = numel.value

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = type.sizes if type.is_block() else ()
        _, self.shape, self.numel = described(*sizes)

    broadcast = interpreter.TritonSemantic.broadcast_impl_value

    def broadcast_pair(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if getattr(lhs.type, "sizes", ()) == getattr(rhs.type, "sizes", ()):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    core.block_type.__init__ = init_type
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tensor.__init__ = init_tensor
    interpreter.TritonSemantic.broadcast_impl_value = broadcast_pair


def _promote_types_once(interpreter: Any) -> None:
    import triton.language.core as module

    core: Any = module
    have_one_name = core.dtype.__eq__
    core.dtype.__eq__ = lambda self, other: self is other or have_one_name(self, other)
    promote = interpreter.TritonSemantic.binary_op_type_checking_impl

    @functools.lru_cache(4096)
    def beside(
        semantic: Any, dtype: Any, sizes: tuple[int, ...], number: Any, kind: type, *rules: bool
    ) -> Any:
        """The number as an operand beside such a tensor; None if it changes the tensor's type."""
        tensor = semantic.tensor(None, core.block_type(dtype, sizes) if sizes else dtype)
        promoted, operand = promote(semantic, tensor, number, *rules)
        return operand if promoted is tensor else None

    def promote_pair(self: Any, lhs: Any, rhs: Any, *rules: bool) -> tuple[Any, Any]:
        divides = len(rules) == 4 and rules[3]
        if isinstance(lhs, core.tensor) and type(lhs.dtype) is core.dtype and not divides:
            if isinstance(rhs, core.tensor) and lhs.dtype is rhs.dtype:
                return interpreter.TritonSemantic.broadcast_impl_value(self, lhs, rhs)
            if isinstance(rhs, int | float):
                sizes = getattr(lhs.type, "sizes", ())
                operand = beside(self, lhs.dtype, sizes, rhs, type(rhs), *rules)
                if operand is not None:
                    return lhs, operand
        return promote(self, lhs, rhs, *rules)

    interpreter.TritonSemantic.binary_op_type_checking_impl = promote_pair
