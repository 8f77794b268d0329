// A device guard and hooks that make torch accept the device type `cuda` without a GPU.
//
// torch asks the device guard of a tensor's device type for devices, streams and events, and autograd starts a thread
// for every device that a guard counts (torch/csrc/autograd/engine.cpp). A CPU build has no guard for CUDA, and that of
// a build for CUDA asks the driver, so that backward through tensors on `cuda` fails. This guard counts one device, on which nothing ever runs: tensors on it
// must be fake. Events are complete at once, and there is one stream.
//
// The library must be loaded before torch is imported, because torch reads the hooks when it is initialized.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

const Device kDevice(DeviceType::CUDA, 0);

struct SimulatedGuard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return kDevice; }
  Device exchangeDevice(Device) const override { return kDevice; }
  DeviceIndex deviceCount() const noexcept override { return 1; }

  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, kDevice); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }

  void record(void**, const Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, SimulatedGuard)

}  // namespace

// Replaces the guard of a build for CUDA, which registers its own when it is loaded.
extern "C" void install_simulated_guard() {
  c10::impl::DeviceGuardImplRegistrar(DeviceType::CUDA, new SimulatedGuard());
}

namespace at {

// torch looks the hooks up by this name (aten/src/ATen/detail/CUDAHooksInterface.cpp).
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  // The random numbers of fake tensors are never drawn, but torch wants a generator of their device.
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<CPUGeneratorImpl>(); }
};

// Preferred to the hooks of a build for CUDA, which have the same name.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)

}  // namespace at

namespace c10d {
namespace {

// DistributedDataParallel's reducer times its first steps by events of the device; here no time passes.
struct SimulatedTimer final : Timer {
  explicit SimulatedTimer(c10::Device) {}
  void record(Event) override {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(TimerRegistry, c10::kCUDA, c10::REGISTRY_PREFERRED, SimulatedTimer)

}  // namespace
}  // namespace c10d
