// What XLA calls, without Python. It shares out the rows over XLA's own threads.
#include "xla.h"

#include <algorithm>
#include <cstring>

#include "call.h"

namespace rmsnorm::xla {
namespace {

constexpr int resource_exhausted = 8, failed_precondition = 9;  // of XLA_FFI_Error_Code
constexpr int metadata_extension = 1, type_of_array = 1;        // XLA_FFI_Extension_Metadata, XLA_FFI_AttrType_ARRAY

Error* error(const CallFrame& frame, const char* message, int code) {
    ErrorCreate create{offsetof(ErrorCreate, errc) + sizeof create.errc, nullptr, message, code};
    return frame.api->error_create(&create);
}

// Whether there is no error. If there is one, it is deleted.
bool succeeds(const CallFrame& frame, Error* error) {
    if (!error) return true;
    ErrorDestroy destroy{sizeof destroy, nullptr, error};
    frame.api->error_destroy(&destroy);
    return false;
}

bool schedule(void* context, Task* task, void* argument) {
    const auto& frame = *static_cast<const CallFrame*>(context);
    Schedule call{sizeof call, nullptr, frame.ctx, task, argument};
    return succeeds(frame, frame.api->thread_pool_schedule(&call));
}

Pool pool_of(CallFrame& frame, std::int64_t wanted) {
    std::int64_t most = 1;  // if XLA has no thread pool
    ThreadCount call{sizeof call, nullptr, frame.ctx, &most};
    if (wanted > 1 && !succeeds(frame, frame.api->thread_pool_num_threads(&call))) most = 1;
    return {std::min(wanted, most), nullptr, schedule, &frame};
}

// Replaces what an attribute says of arrays by their addresses. False if there is no such operand or result.
template <class... Pointers>
bool find(const CallFrame& frame, Pointers&... pointers) {
    const auto find_one = [&](auto& pointer) {
        const auto place = reinterpret_cast<std::intptr_t>(pointer);
        const auto& buffers = place > 0 ? frame.args : frame.rets;
        const auto count = place > 0 ? place : -place;
        if (count > buffers.size) return false;
        if (count) pointer = static_cast<std::remove_reference_t<decltype(pointer)>>(buffers.buffers[count - 1]->data);
        return true;
    };
    return (find_one(pointers) && ...);
}

}  // namespace

Error* handle(CallFrame* frame) {
    if (const auto* extension = frame->extension_start; extension && extension->type == metadata_extension) {
        auto& version = reinterpret_cast<const MetadataExtension*>(extension)->metadata->api_version;
        version.major_version = major_version;  // XLA asks before the first call, and refuses what it does not serve
        // That is its own version, as a later XLA may no longer serve the first. One of the first version has no table here.
        version.minor_version =
            frame->api ? std::min(frame->api->api_version.minor_version, last_minor_version) : first_minor_version;
        return nullptr;
    }
    Attribute attribute;
    const auto* words = frame->attrs.size == 1 && frame->attrs.types[0] == type_of_array ? frame->attrs.attrs[0] : nullptr;
    const bool fits = words && words->size * sizeof(std::int64_t) == sizeof attribute;
    if (fits) std::memcpy(&attribute, words->data, sizeof attribute);
    if (!fits || attribute.version != attribute_version)
        return error(*frame, "rmsnorm: another version of rmsnorm made this program; trace it here", failed_precondition);
    if (!kernels()) return error(*frame, "rmsnorm: no kernels for this processor", failed_precondition);
    const auto pool = pool_of(*frame, attribute.threads);
    bool is_found, succeeded;
    if (attribute.is_backward) {
        auto& a = attribute.backward;
        is_found = find(*frame, a.h, a.scale, a.inverse_rms, a.dy, a.dh, a.dx, a.dscale, a.dbias);
        succeeded = is_found && backward(attribute.call, a, pool);
    } else {
        auto& a = attribute.forward;
        is_found = find(*frame, a.x, a.residual, a.scale, a.bias, a.y, a.h, a.inverse_rms);
        succeeded = is_found && forward(attribute.call, a, pool);
    }
    if (!is_found) return error(*frame, "rmsnorm: the call lacks an operand or a result", failed_precondition);
    return succeeded ? nullptr : error(*frame, "rmsnorm: no memory for the gains and sums of a call", resource_exhausted);
}

}  // namespace rmsnorm::xla
