"""The C structures of XLA's foreign function interface, and its functions, in compiled code (xla/ffi/api/c_api.h, 0.3).

A structure is read as a vector of 64-bit words, and a field by the number of its word. Structures that are fields, such
as ``args``, lie inside the structure that contains them. XLA refuses a handler of a version that it does not serve.

    XLA_FFI_CallFrame           struct_size, extension_start, api, ctx, stage,
                                args    {struct_size, extension_start, size, types, args},
                                rets    {struct_size, extension_start, size, types, rets},
                                attrs   {struct_size, extension_start, size, types, names, attrs}, future
    XLA_FFI_Buffer              struct_size, extension_start, dtype, data, rank, dims: what args and rets point to
    XLA_FFI_Array               dtype, size, data: what attrs points to
    XLA_FFI_Api                 struct_size, extension_start, api_version {three words}, internal_api, functions
    XLA_FFI_Metadata_Extension  extension_base {struct_size, type, next}, metadata
    XLA_FFI_Metadata            struct_size, api_version {struct_size, extension_start, major and minor version}, ...

Each function takes the address of a structure: struct_size, extension_start, and up to three words of its own.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from rmsnorm.cpu.formats import view

EXHAUSTED, PRECONDITION = 8, 9  # XLA_FFI_Error_Code_RESOURCE_EXHAUSTED and _FAILED_PRECONDITION
_VERSION: Final = 3 << 32  # 0.3: major_version in the lower 32 bits, minor_version in the upper

_FRAME_EXTENSION, _FRAME_API, _FRAME_CTX, _FRAME_ARGS, _FRAME_RETS, _FRAME_ATTRS = 1, 2, 3, 9, 14, 20
_FRAME_WORDS: Final = _FRAME_ATTRS + 1
_BUFFER_DATA: Final = 3
_ARRAY_SIZE, _ARRAY_DATA = 1, 2
_EXTENSION_METADATA: Final = 3
_METADATA_VERSION: Final = 3
_ERROR_CREATE, _ERROR_DESTROY, _THREADPOOL_SCHEDULE, _THREADPOOL_NUM_THREADS = 6, 8, 17, 18  # words of XLA_FFI_Api


@njit
def words(address: int, count: int) -> Any:
    return view(address, count, np.int64(0))


@njit
def call_frame(address: int) -> Any:
    return words(address, _FRAME_WORDS)


@njit
def asks_for_version(frame: Any) -> bool:
    """Whether XLA calls to ask for the version of the interface, which is then its answer. This is the first call."""
    if frame[_FRAME_EXTENSION] == 0:
        return False
    metadata = words(frame[_FRAME_EXTENSION], _EXTENSION_METADATA + 1)[_EXTENSION_METADATA]
    words(metadata, _METADATA_VERSION + 1)[_METADATA_VERSION] = _VERSION
    return True


@njit
def attribute(frame: Any) -> Any:
    """The only attribute of the call, an array of words."""
    array = words(words(frame[_FRAME_ATTRS], 1)[0], _ARRAY_DATA + 1)
    return words(array[_ARRAY_DATA], array[_ARRAY_SIZE])


@njit
def data(frame: Any, is_operand: bool, index: int) -> int:
    """The address of the numbers of an operand or a result."""
    buffers = words(frame[_FRAME_ARGS] if is_operand else frame[_FRAME_RETS], index + 1)
    return words(buffers[index], _BUFFER_DATA + 1)[_BUFFER_DATA]


@njit
def thread_count(frame: Any) -> int:
    """How many threads XLA has; 1 if it has no thread pool."""
    count = np.ones(1, np.int64)
    _ignore(frame, _call_api(frame, _THREADPOOL_NUM_THREADS, 32, frame[_FRAME_CTX], count.ctypes.data, 0))
    return count[0]


@njit
def schedule(frame: Any, task: int, argument: int) -> bool:
    """Lets a thread of XLA call the task with an argument. Returns whether XLA accepts it."""
    return _ignore(frame, _call_api(frame, _THREADPOOL_SCHEDULE, 40, frame[_FRAME_CTX], task, argument))


@njit
def error(frame: Any, message: int, code: int) -> int:
    """A new error, which a handler returns to XLA."""
    return _call_api(frame, _ERROR_CREATE, 28, message, code, 0)


@njit
def _ignore(frame: Any, error: int) -> bool:
    """Deletes an error, if there is one. Returns whether there is none."""
    if error:
        _call_api(frame, _ERROR_DESTROY, 24, error, 0, 0)
    return error == 0


@njit
def _call_api(frame: Any, function: int, size: int, first: int, second: int, third: int) -> int:
    """Calls a function of XLA_FFI_Api with a structure of ``size`` bytes. Returns what it returns."""
    structure = np.zeros(5, np.int64)
    structure[0], structure[2], structure[3], structure[4] = size, first, second, third
    result = call_c(words(frame[_FRAME_API], function + 1)[function], structure.ctypes.data)
    return result + 0 * structure.size  # this keeps the structure alive until here


@intrinsic
def call_c(_: Any, function: Any, argument: Any) -> Any:
    """Calls the C function at an address with one pointer. Returns what it returns."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        return builder.call(builder.inttoptr(args[0], ir.FunctionType(word, [word]).as_pointer()), [args[1]])

    return types.int64(types.int64, types.int64), generate
