"""Triton's interpreter in half of its time.

It patches `triton.language` anew for every launch and once more for every function that a kernel
calls. Nothing is compiled beside it in a process, so once a function is enough, for good. It
computes for every sum and product of integers whether it overflows, but never looks at the answer.
And it makes a table of numpy's types for every one that it looks up.
"""

import functools
from typing import Any


def speed_up() -> None:
    import triton.runtime.interpreter as module

    interpreter: Any = module
    interpreter._LangPatchScope.restore = lambda scope: None
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)
    interpreter.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
    np_dtype = interpreter._get_np_dtype
    of_scalar = functools.cache(np_dtype)  # pointers cannot be hashed
    interpreter._get_np_dtype = lambda type_: (
        np_dtype(type_) if type_.scalar.is_ptr() else of_scalar(type_.scalar)
    )
