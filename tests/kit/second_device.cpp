// A device beside the CPU, whose memory is the CPU's: operations are computed by torch's own functions for the CPU.
//
// As with a GPU, torch refuses operations on tensors of both devices, NumPy and the CPU's kernels may not read the
// tensors, and backward passes run in a thread of their own.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

void release(void* memory) { std::free(memory); }

struct DeviceAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        void* memory = size ? std::malloc(size) : nullptr;
        return {memory, memory, &release, c10::Device(kDevice, 0)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

DeviceAllocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator);

// One stream, in which everything is done when a call returns.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<kDevice> {
    c10::Device getDevice() const override { return c10::Device(kDevice, 0); }
    c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
    c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
    c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
    c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
    c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
    void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
        *event = &allocator;
    }
    void block(void*, const c10::Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    bool queryStream(const c10::Stream&) const override { return true; }
    void synchronizeEvent(void*) const override {}
    void synchronizeStream(const c10::Stream&) const override {}
    void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void grow(const c10::Storage& storage, size_t size) {
    auto* bytes = storage.unsafeGetStorageImpl();
    auto larger = allocator.allocate(size);
    if (bytes->nbytes()) std::memcpy(larger.get(), bytes->data(), std::min(size, bytes->nbytes()));
    bytes->set_data_ptr(std::move(larger));
    bytes->set_nbytes(size);
}

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
    void setCurrentDevice(c10::DeviceIndex) const override {}
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override { grow(storage, size); }
};

Hooks hooks;
const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// The tensor's memory as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& tensor) {
    if (tensor.device().is_cpu()) return tensor;
    auto bytes = at::from_blob(tensor.storage().mutable_data(), {int64_t(tensor.storage().nbytes())}, at::kByte);
    auto same = at::empty({0}, tensor.options().device(at::kCPU));
    same.set_(bytes.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
    same._set_conj(tensor.is_conj());
    same._set_neg(tensor.is_neg());
    return same;
}

using Sizes = c10::SymIntArrayRef;

at::Tensor empty(
    Sizes size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
    return at::detail::empty_generic(
        C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
        c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    Sizes size, Sizes stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>) {
    return at::detail::empty_strided_generic(
        C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
        c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
    on_cpu(to).copy_(on_cpu(from));
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

const at::Tensor& resize(const at::Tensor& tensor, Sizes size, std::optional<at::MemoryFormat> format) {
    auto* of = tensor.unsafeGetTensorImpl();
    of->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
    if (format && *format != at::MemoryFormat::Preserve) of->empty_tensor_restride(*format);
    size_t needed = (of->numel() + of->storage_offset()) * of->dtype().itemsize();
    if (of->unsafe_storage().nbytes() < needed) grow(of->unsafe_storage(), needed);
    return tensor;
}

at::Tensor& set_whole(at::Tensor& tensor, at::Storage storage) {
    int64_t count = storage.nbytes() / tensor.dtype().itemsize();
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous({count});
    return tensor;
}

at::Tensor& set_part(at::Tensor& tensor, at::Storage storage, c10::SymInt offset, Sizes size, Sizes stride) {
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
        C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
    return tensor;
}

at::Tensor& set_as(at::Tensor& tensor, const at::Tensor& source) {
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
    return tensor;
}

at::Tensor as_strided(const at::Tensor& tensor, Sizes size, Sizes stride, std::optional<c10::SymInt> offset) {
    auto place = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
    return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), place);
}

at::Tensor view(const at::Tensor& tensor, Sizes size) { return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size)); }

at::Tensor reshape_alias(const at::Tensor& tensor, Sizes size, Sizes stride) {
    return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) { return at::_local_scalar_dense(on_cpu(tensor)); }

// Operations that share or make memory; all others copy to the CPU and back.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", empty);
    library.impl("empty_strided", empty_strided);
    library.impl("_copy_from", copy_from);
    library.impl("_copy_from_and_resize", copy_from_and_resize);
    library.impl("_local_scalar_dense", local_scalar_dense);
    library.impl("resize_", resize);
    library.impl("set_.source_Storage", set_whole);
    library.impl("set_.source_Storage_storage_offset", set_part);
    library.impl("set_.source_Tensor", set_as);
    library.impl("as_strided", as_strided);
    library.impl("view", view);
    library.impl("_reshape_alias", reshape_alias);
    library.impl("unfold", at::native::unfold);
    library.impl("view_as_real", at::native::view_as_real);
    library.impl("view_as_complex", at::native::view_as_complex);
}

void by_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
}

}  // namespace
