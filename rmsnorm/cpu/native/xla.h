// The handler of XLA's foreign function interface, the calls it understands, and the few C structures of the interface that
// it uses, as xla/ffi/api/c_api.h names them.
//
// A call has one attribute, an array of 64-bit words: the bytes of an `Attribute`. Where the arrays are is not known before
// the call, so that each pointer in it is a number: 0, there is no such array; i, operand i - 1; -i, result i - 1.
#pragma once

#include <type_traits>

#include "call.h"

namespace rmsnorm::xla {

struct Attribute {
    std::int64_t version;  // attribute_version
    std::int64_t threads;  // how many may work on the call
    std::int64_t is_backward;
    Call call;
    union {
        Forward forward;
        Backward backward;
    };
};
// A program that was saved, and so its attributes, may be run by a later version of this library. Whoever changes the
// structures of call.h adds one.
constexpr std::int64_t attribute_version = 4;
static_assert(std::is_trivially_copyable_v<Attribute> && sizeof(Attribute) % sizeof(std::int64_t) == 0);

// The first and the last version of the interface that were compared with the structures below, those of jaxlib 0.6.1 and
// 0.12.0: what is here has stayed at its place.
constexpr int major_version = 0, first_minor_version = 1, last_minor_version = 5;

struct Error;
struct Context;

struct Extension {
    std::size_t struct_size;
    int type;  // 1: of the metadata
    Extension* next;
};
struct Version {
    std::size_t struct_size;
    Extension* extension_start;
    int major_version, minor_version;
};
struct Metadata {
    std::size_t struct_size;
    Version api_version;
};
struct MetadataExtension {
    Extension extension_base;
    Metadata* metadata;
};
struct Buffer {
    std::size_t struct_size;
    Extension* extension_start;
    int dtype;
    void* data;
};
struct Array {
    int dtype;
    std::size_t size;
    void* data;
};
struct Buffers {
    std::size_t struct_size;
    Extension* extension_start;
    std::int64_t size;
    int* types;
    Buffer** buffers;
};
struct Attributes {
    std::size_t struct_size;
    Extension* extension_start;
    std::int64_t size;
    int* types;
    void** names;
    Array** attrs;
};
struct ErrorCreate {
    std::size_t struct_size;
    Extension* extension_start;
    const char* message;
    int errc;
};
struct ErrorDestroy {
    std::size_t struct_size;
    Extension* extension_start;
    Error* error;
};
struct Schedule {
    std::size_t struct_size;
    Extension* extension_start;
    Context* ctx;
    void (*task)(void*);
    void* data;
};
struct ThreadCount {
    std::size_t struct_size;
    Extension* extension_start;
    Context* ctx;
    std::int64_t* num_threads;
};
struct Api {
    std::size_t struct_size;
    Extension* extension_start;
    Version api_version;
    const void* internal_api;
    Error* (*error_create)(ErrorCreate*);
    void* error_get_message;
    void (*error_destroy)(ErrorDestroy*);
    void* other_functions[8];
    Error* (*thread_pool_schedule)(Schedule*);
    Error* (*thread_pool_num_threads)(ThreadCount*);
};
struct CallFrame {
    std::size_t struct_size;
    Extension* extension_start;
    const Api* api;
    Context* ctx;
    int stage;
    Buffers args, rets;
    Attributes attrs;
};

Error* handle(CallFrame* frame);

}  // namespace rmsnorm::xla
