// The Python module `_native`: plans of calls, which compute arrays at addresses, and what XLA needs.
//
// An address is an integer, and 0 if there is no such array; in its place None is taken, and an object with a buffer, as
// NumPy's arrays are. The caller keeps the memory alive. Python's lock is free while a plan computes.
//
// A program of XLA holds the bytes of `xla_forward` or `xla_backward` as its only attribute, an array of int64, named as the
// caller likes; see xla.h. Its operands and results are those of the following that there are, in this order:
//
//     forward     x, scale, bias -> y, 1 / rho
//     backward    dy, h, 1 / rho, scale, bias, dh -> dx, dscale, dbias
//
// The plan has a dtype for scale and bias if there is one; the other choices are arguments. The backward pass reads no bias,
// but a program may hand it over.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include <array>
#include <cstring>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "call.h"
#include "pages.h"
#include "xla.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace rmsnorm;

namespace {

using Word = std::int64_t;

struct Address {
    Word value = 0;
};

}  // namespace

template <>
struct nanobind::detail::type_caster<Address> {
    NB_TYPE_CASTER(Address, const_name("int | typing_extensions.Buffer | None"))

    bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
        if (source.is_none()) return true;
        if (PyLong_Check(source.ptr())) {
            value.value = PyLong_AsLongLong(source.ptr());
        } else {
            Py_buffer view;
            if (PyObject_GetBuffer(source.ptr(), &view, PyBUF_STRIDES) == 0) {  // without a format, which bfloat16 lacks
                value.value = static_cast<Word>(reinterpret_cast<std::intptr_t>(view.buf));
                PyBuffer_Release(&view);
            }
        }
        if (!PyErr_Occurred()) return true;
        PyErr_Clear();
        return false;
    }
};

namespace {

using Name = std::optional<std::string_view>;

template <class Choice, std::size_t count>
Choice choice(const char* what, const std::array<std::string_view, count>& names, std::string_view name) {
    for (std::size_t i = 0; i < count; ++i)
        if (names[i] == name) return static_cast<Choice>(i);
    throw nb::value_error((std::string(what) + " may not be " + std::string(name)).c_str());
}

Format format(Name name) {
    constexpr std::array<std::string_view, 4> names{"", "float16", "bfloat16", "float32"};
    return name ? choice<Format>("a dtype", names, *name) : Format::none;
}

template <class T>
T* at(Word address) {
    return reinterpret_cast<T*>(static_cast<std::intptr_t>(address));
}

template <class T>
T* at(Address address) {
    return at<T>(address.value);
}

using Bytes = const std::byte;

Pool pool(Word threads, Word gomp_parallel) {
    return {threads, threads > 1 ? reinterpret_cast<GompParallel*>(gomp_parallel) : nullptr};
}

void check(bool has_memory) {
    if (!has_memory) throw std::bad_alloc();
}

class Plan {
    Call call;

    // `set` fills the arrays of an attribute. Its unused bytes are 0, so that equal calls have equal attributes.
    template <class Set>
    nb::bytes attribute(bool is_backward, Word threads, Set set) const {
        xla::Attribute result;
        std::memset(&result, 0, sizeof result);
        result.version = xla::attribute_version;
        result.threads = threads;
        result.is_backward = is_backward;
        std::memcpy(&result.call, &call, sizeof call);
        set(result);
        return nb::bytes(reinterpret_cast<const char*>(&result), sizeof result);
    }

    Word x_step() const { return call.width() * size_of(call.x); }

    // A result of the size of x, which the caller has just allocated.
    void advise(Address result, Format format) const {
        advise_huge_pages(at<std::byte>(result), call.rows * call.width() * size_of(format));
    }

public:
    Plan(Word rows, Word n, Word k, Word groups, Word step, double eps, double offset, std::string_view position, Name x,
         Name y, Name norm, Name product, Name scale, Name bias) {
        if (!kernels()) throw std::runtime_error("rmsnorm: no kernels for this processor");
        if (rows < 0 || n < 1 || k < 1 || k > n || groups < 1 || step < 1)
            throw nb::value_error("rows, n, k, groups or step are too few, or k is above n");
        std::memset(&call, 0, sizeof call);
        call.rows = rows, call.n = n, call.k = k, call.groups = groups, call.step = step;
        call.eps = eps, call.offset = offset;
        const std::array<std::string_view, 3> positions{"inside", "outside", "clamp"};
        call.position = choice<Position>("the position of eps", positions, position);
        call.x = format(x), call.y = format(y), call.norm = format(norm), call.product = format(product);
        call.scale = format(scale), call.bias = format(bias);
        if (call.x != call.y && call.x != Format::f32 && call.y != Format::f32)
            throw nb::value_error("x and y may not be float16 and bfloat16");
    }

    void forward(Word threads, Word gomp_parallel, Address x, Word x_step, Address residual, Address scale, Address bias,
                 Address y, Address h, Address inverse_rms) const {
        const Forward arrays{
            at<Bytes>(x), x_step, at<Bytes>(residual), at<Bytes>(scale), at<Bytes>(bias),
            at<std::byte>(y), at<std::byte>(h), at<double>(inverse_rms),
        };
        advise(y, call.y), advise(h, call.x);
        check(rmsnorm::forward(call, arrays, pool(threads, gomp_parallel)));
    }

    void backward(Word threads, Word gomp_parallel, Address h, Word h_step, Address scale, Address inverse_rms, Address dy,
                  Address dh, Address dx, Address dscale, Address dbias) const {
        const Backward arrays{
            at<Bytes>(h), h_step, at<Bytes>(scale), at<const double>(inverse_rms), at<Bytes>(dy), at<Bytes>(dh),
            at<std::byte>(dx), at<std::byte>(dscale), at<std::byte>(dbias), nullptr,
        };
        advise(dx, call.x);
        check(rmsnorm::backward(call, arrays, pool(threads, gomp_parallel)));
    }

    nb::bytes xla_forward(Word threads) const {
        return attribute(false, threads, [&](xla::Attribute& result) {
            Word operands = 0, results = 0;
            auto& a = result.forward;
            a.x = at<Bytes>(++operands), a.x_step = x_step();
            if (call.scale != Format::none) a.scale = at<Bytes>(++operands);
            if (call.bias != Format::none) a.bias = at<Bytes>(++operands);
            a.y = at<std::byte>(--results), a.inverse_rms = at<double>(--results);
        });
    }

    nb::bytes xla_backward(Word threads, bool inverse_rms, bool bias, bool dh, bool dx, bool dscale, bool dbias) const {
        return attribute(true, threads, [&](xla::Attribute& result) {
            Word operands = 0, results = 0;
            auto& a = result.backward;
            a.dy = at<Bytes>(++operands);
            a.h = at<Bytes>(++operands), a.h_step = x_step();
            if (inverse_rms) a.inverse_rms = at<const double>(++operands);
            if (call.scale != Format::none) a.scale = at<Bytes>(++operands);
            if (bias) ++operands;
            if (dh) a.dh = at<Bytes>(++operands);
            if (dx) a.dx = at<std::byte>(--results);
            if (dscale) a.dscale = at<std::byte>(--results);
            if (dbias) a.dbias = at<std::byte>(--results);
        });
    }
};

}  // namespace

NB_MODULE(_native, module) {
    nb::set_leak_warnings(false);  // plans are kept until the process ends
    kernels();  // chooses them now, as a fork in the middle of the choice would leave it locked
    using unlocked = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<Plan>(module, "Plan", "What the kernels need for a call, apart from its arrays.")
        .def(nb::init<Word, Word, Word, Word, Word, double, double, std::string_view, Name, Name, Name, Name, Name, Name>(),
             nb::kw_only(), "rows"_a, "n"_a, "k"_a, "groups"_a, "step"_a, "eps"_a, "offset"_a, "position"_a, "x"_a, "y"_a,
             "norm"_a.none(), "product"_a.none(), "scale"_a.none(), "bias"_a.none())
        .def("forward", &Plan::forward, unlocked(), "threads"_a, "gomp_parallel"_a, "x"_a, "x_step"_a, "residual"_a.none(),
             "scale"_a.none(), "bias"_a.none(), "y"_a, "h"_a.none(), "inverse_rms"_a.none())
        .def("backward", &Plan::backward, unlocked(), "threads"_a, "gomp_parallel"_a, "h"_a, "h_step"_a, "scale"_a.none(),
             "inverse_rms"_a.none(), "dy"_a, "dh"_a.none(), "dx"_a.none(), "dscale"_a.none(), "dbias"_a.none())
        .def("xla_forward", &Plan::xla_forward, "threads"_a)
        .def("xla_backward", &Plan::xla_backward, "threads"_a, "inverse_rms"_a, "bias"_a, "dh"_a, "dx"_a, "dscale"_a,
             "dbias"_a);
    module.def("level", [] { return kernels() ? kernels()->level : nullptr; }, "None if there are no kernels.");
    module.def("xla_handler", [] {
        return nb::capsule(reinterpret_cast<void*>(xla::handle), "xla._CUSTOM_CALL_TARGET");
    });
}
