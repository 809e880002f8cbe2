"""The C structures of XLA's foreign function interface, and its functions, in compiled code (xla/ffi/api/c_api.h, 0.3).

A structure is read by its address, and a field by the number of its 64-bit word. Structures that are fields, such
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

from rmsnorm.cpu.formats import inlined
from rmsnorm.cpu.system import call_c, new_words, set_word, word

EXHAUSTED, PRECONDITION = 8, 9  # XLA_FFI_Error_Code_RESOURCE_EXHAUSTED and _FAILED_PRECONDITION
_VERSION: Final = 3 << 32  # 0.3: major_version in the lower 32 bits, minor_version in the upper

_FRAME_EXTENSION, _FRAME_API, _FRAME_CTX, _FRAME_ARGS, _FRAME_RETS, _FRAME_ATTRS = 1, 2, 3, 9, 14, 20
_BUFFER_DATA: Final = 3
_ARRAY_DATA: Final = 2
_EXTENSION_METADATA: Final = 3
_METADATA_VERSION: Final = 3
_ERROR_CREATE, _ERROR_DESTROY, _THREADPOOL_SCHEDULE, _THREADPOOL_NUM_THREADS = 6, 8, 17, 18  # words of XLA_FFI_Api


@inlined
def asks_for_version(frame: int) -> bool:
    """Whether XLA calls to ask for the version of the interface, which is then its answer. This is the first call."""
    extension = word(frame, _FRAME_EXTENSION)
    if extension:
        set_word(word(extension, _EXTENSION_METADATA), _METADATA_VERSION, _VERSION)
    return extension != 0


@inlined
def attribute(frame: int) -> int:
    """The address of the numbers of the only attribute of the call, an array of words."""
    return word(word(word(frame, _FRAME_ATTRS), 0), _ARRAY_DATA)


@inlined
def data(frame: int, is_operand: bool, index: int) -> int:
    """The address of the numbers of an operand or a result."""
    return word(word(word(frame, _FRAME_ARGS if is_operand else _FRAME_RETS), index), _BUFFER_DATA)


@inlined
def thread_count(frame: int) -> int:
    """How many threads XLA has; 1 if it has no thread pool."""
    count = new_words()
    set_word(count, 0, 1)
    _succeeds(frame, _call_api(frame, _THREADPOOL_NUM_THREADS, 32, word(frame, _FRAME_CTX), count, 0))
    return word(count, 0)


@inlined
def schedule(frame: int, task: int, argument: int) -> bool:
    """Lets a thread of XLA call the task with an argument. Returns whether XLA accepts it."""
    return _succeeds(frame, _call_api(frame, _THREADPOOL_SCHEDULE, 40, word(frame, _FRAME_CTX), task, argument))


@inlined
def error(frame: int, message: int, code: int) -> int:
    """A new error, which a handler returns to XLA."""
    return _call_api(frame, _ERROR_CREATE, 28, message, code, 0)


@inlined
def _succeeds(frame: int, error: int) -> bool:
    """Whether there is no error. If there is one, it is deleted."""
    if error:
        _call_api(frame, _ERROR_DESTROY, 24, error, 0, 0)
    return error == 0


@inlined
def _call_api(frame: int, function: int, size: int, first: int, second: int, third: int) -> Any:
    """Calls a function of XLA_FFI_Api with a structure of ``size`` bytes. Returns what it returns."""
    structure = new_words()
    set_word(structure, 0, size)
    set_word(structure, 1, 0)
    set_word(structure, 2, first)
    set_word(structure, 3, second)
    set_word(structure, 4, third)
    return call_c(word(word(frame, _FRAME_API), function), structure)
