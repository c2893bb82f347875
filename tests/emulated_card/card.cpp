// A stand-in for a CUDA card on a machine without one: tensors say that they are on "cuda:0", lie in host memory, and
// are computed by the CPU's kernels. For a build of torch that has no CUDA kernels of its own.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/unfold_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

constexpr auto kCard = c10::DeviceType::CUDA;
const c10::Device card(kCard, 0);

// -- memory: events of the allocator, which the tests hand to memplan's own simulator

std::mutex lock;
std::unordered_map<void*, int64_t> sizes;
std::vector<std::pair<int64_t, int64_t>> events;  // address, bytes; negative where it is freed

void freed(void* pointer) {
  if (pointer == nullptr) return;
  std::lock_guard<std::mutex> held(lock);
  events.emplace_back(reinterpret_cast<int64_t>(pointer), -sizes[pointer]);
  sizes.erase(pointer);
  std::free(pointer);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &freed, card};
    void* pointer = nullptr;
    TORCH_CHECK(posix_memalign(&pointer, 512, bytes) == 0, "no host memory is left for the stand-in of a card");
    std::lock_guard<std::mutex> held(lock);
    sizes[pointer] = static_cast<int64_t>(bytes);
    events.emplace_back(reinterpret_cast<int64_t>(pointer), static_cast<int64_t>(bytes));
    return {pointer, pointer, &freed, card};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &freed; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
};

Memory memory;
REGISTER_ALLOCATOR(kCard, &memory)

// -- one device, one stream, nothing that is asynchronous

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCard; }
  c10::Device exchangeDevice(c10::Device) const override { return card; }
  c10::Device getDevice() const override { return card; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, card); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, card); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// -- pinned memory: torch's own caching allocator of it, over plain pages of the host

struct Event {};

struct PinnedMemory final : at::CachingHostAllocatorImpl<c10::Stream, Event> {
  bool owns(const void* pointer) {
    std::lock_guard<std::mutex> held(blocks_lock_);
    auto* place = static_cast<const char*>(pointer);
    for (auto& [start, size] : sizes_) {
      if (place >= start && place < start + size) return true;
    }
    return false;
  }

 private:
  void allocate_host_memory(size_t size, void** pointer) override {
    TORCH_CHECK(posix_memalign(pointer, 4096, size) == 0, "no host memory is left for pinned blocks");
    std::memset(*pointer, 0, size);  // pages of pinned memory are there from the beginning
    std::lock_guard<std::mutex> held(blocks_lock_);
    sizes_[static_cast<const char*>(*pointer)] = size;
  }
  void free_block(at::HostBlock<c10::Stream>* block) override {
    std::lock_guard<std::mutex> held(blocks_lock_);
    sizes_.erase(static_cast<const char*>(block->ptr_));
    std::free(block->ptr_);
  }
  void record_stream(std::optional<std::vector<Event>>& events, c10::Stream) override { events->emplace_back(); }
  bool query_event(Event&) override { return true; }

  std::mutex blocks_lock_;
  std::unordered_map<const char*, size_t> sizes_;
};

DECLARE_HOST_ALLOCATOR(PinnedAllocator, PinnedMemory, free_pinned, pinned)
REGISTER_HOST_ALLOCATOR(kCard, &pinned)

// -- what torch asks about CUDA

struct CUDAHooks final : at::CUDAHooksInterface {  // torch looks for this very name
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* pointer) const override { return pinned.impl_->owns(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
};
at::RegistererCUDAHooksRegistry hooks(
    "CUDAHooks", at::CUDAHooksRegistry(), at::RegistererCUDAHooksRegistry::DefaultCreator<CUDAHooks>);

// -- tensors

const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic_symint(size, &memory, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_symint_generic(size, stride, &memory, kKeys, c10::dtype_or_default(dtype));
}

// The same memory, seen as the CPU's. Whoever takes it keeps the card's tensor alive meanwhile.
at::Tensor here(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_cuda()) return tensor;
  auto whole = at::from_blob(
      tensor.storage().mutable_data(), {static_cast<int64_t>(tensor.storage().nbytes() / tensor.element_size())},
      at::TensorOptions().dtype(tensor.dtype()));
  auto* impl = whole.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return whole;
}

at::Tensor there(const at::Tensor& tensor) {
  at::Tensor made = at::detail::empty_strided_generic(tensor.sizes(), tensor.strides(), &memory, kKeys, tensor.scalar_type());
  here(made).copy_(tensor);
  return made;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
  here(self).copy_(here(source));
  return self;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  here(target).copy_(here(source));
  return target;
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  int64_t count = 1;
  for (auto one : sizes) count *= one;
  size_t needed = (count + self.storage_offset()) * self.element_size();
  if (count && needed > self.storage().nbytes()) {
    auto data = memory.allocate(needed);
    if (self.storage().nbytes()) std::memcpy(data.get(), self.storage().data(), self.storage().nbytes());
    self.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    self.storage().unsafeGetStorageImpl()->set_nbytes(needed);
  }
  impl->set_sizes_contiguous(sizes);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_part(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  c10::SymInt count(static_cast<int64_t>(source.nbytes() / self.element_size()));
  return set_part(self, std::move(source), 0, {count}, {c10::SymInt(1)});
}

// As a real card's: what is drawn goes to other elements than with bernoulli_, and to others again in float64.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  const auto x = here(input);
  if (train.has_value() && !*train) return {there(x.clone()), there(at::ones_like(x, x.options().dtype(at::kBool)))};
  auto drawn = at::empty({x.numel()}, x.options().dtype(at::kBool)).bernoulli_(1 - p);
  if (x.scalar_type() != at::kDouble) drawn = drawn.flip(0);
  const auto mask = drawn.view(x.sizes());
  double scale = p == 1 ? 0.0 : 1 / (1 - p);
  if (x.scalar_type() != at::kDouble && p != 1) scale = 1.0f / static_cast<float>(1 - p);  // as Dropout.cu computes it
  return {there(x.mul(mask).mul_(scale)), there(mask)};
}

at::Scalar local_scalar(const at::Tensor& self) { return here(self).item(); }

// -- everything else: the CPU's kernel on the same memory

// Whether an op is to give it a size: out= of an op that is told nothing.
bool is_to_be_sized(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_cuda() && tensor.storage().nbytes() == 0 && tensor.numel() == 0;
}

void by_the_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const auto first = stack->size() - count;
  std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  for (size_t at = 0; at < count; ++at) {
    auto& value = (*stack)[first + at];
    if (value.isTensor()) {
      const auto tensor = value.toTensor();
      value = is_to_be_sized(tensor) ? at::empty({0}, at::TensorOptions().dtype(tensor.dtype())) : here(tensor);
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& one : value.toTensorVector()) list.push_back(here(one));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector())
        list.push_back(one.has_value() ? std::optional<at::Tensor>(here(*one)) : std::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      value = c10::Device(c10::kCPU);
    }
  }
  op.callBoxed(stack);
  const auto& results = schema.returns();
  const auto begin = stack->size() - results.size();
  for (size_t at = 0; at < results.size(); ++at) {
    auto& value = (*stack)[begin + at];
    const auto* alias = results[at].alias_info();
    if (alias != nullptr && alias->isWrite()) {  // what was written into is what was handed in
      for (size_t from = 0; from < count; ++from) {
        const auto* mine = schema.arguments()[from].alias_info();
        if (mine == nullptr || mine->beforeSets() != alias->beforeSets()) continue;
        if (given[from].isTensor() && is_to_be_sized(given[from].toTensor())) {
          const auto target = given[from].toTensor();
          const auto found = value.toTensor();
          target.resize_(found.sizes());
          target.unsafeGetTensorImpl()->set_sizes_and_strides(found.sizes(), found.strides());
          here(target).copy_(found);
        }
        value = given[from];
      }
      continue;
    }
    TORCH_CHECK(alias == nullptr, "the stand-in of a card does not know the view ", op.schema().name());
    if (value.isTensor() && value.toTensor().defined()) {
      value = there(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& one : value.toTensorVector()) list.push_back(there(one));
      value = list;
    }
  }
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Storage_storage_offset", &set_part);
  m.impl("native_dropout", &native_dropout);
  m.impl("_local_scalar_dense", &local_scalar);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>()); }

}  // namespace

// Writes events from the one numbered ``first`` on as pairs of an address and bytes, negative where memory was freed;
// at most so many. Returns how many there are in all.
extern "C" int64_t card_events(int64_t first, int64_t* into, int64_t most) {
  std::lock_guard<std::mutex> held(lock);
  const auto count = static_cast<int64_t>(events.size());
  for (int64_t at = first; at < std::min(count, first + most); ++at) {
    *into++ = events[at].first;
    *into++ = events[at].second;
  }
  return count;
}

extern "C" int64_t pinned_bytes() { return pinned.get_stats().allocated_bytes.peak; }
