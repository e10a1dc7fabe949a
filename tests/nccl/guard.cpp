// What a build of torch for CPUs lacks to keep track of tensors on a GPU: which GPU is the current one. The tensors are
// pretended, so nothing is done with it.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace {

constexpr c10::DeviceIndex kGpus = 16;
thread_local c10::DeviceIndex current = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    if (device.has_index()) setDevice(device);
    return before;
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return c10::Stream(c10::Stream::DEFAULT, stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kGpus; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

namespace at {

struct Hooks final : CUDAHooksInterface {
  Hooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kGpus; }
  int getNumGPUs() const override { return kGpus; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = current;
    if (device >= 0) current = device;
    return before;
  }
  bool isPinnedPtr(const void*) const override { return true; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
};

REGISTER_CUDA_HOOKS(Hooks);

namespace {

// torch looks for hooks once. Where this library comes later, as in a process that was forked with torch in it, the ones
// that say "no GPU" are there already: they have no members, so they become these by their table of functions alone.
const bool kIsLate = [] {
  static Hooks hooks{CUDAHooksArgs{}};
  auto& found = const_cast<CUDAHooksInterface&>(detail::getCUDAHooks());
  *reinterpret_cast<void**>(&found) = *reinterpret_cast<void**>(&hooks);
  return true;
}();

}  // namespace

}  // namespace at

namespace c10d {

// DDP times its steps.
struct PretendedTimer final : Timer {
  explicit PretendedTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, PretendedTimer)

}  // namespace c10d
