// Answers what PyTorch asks of a CUDA device as if there were one, so that a build for processors
// alone can trace tensors on "cuda" that hold no data, backwards too. `cuda_trace.py` compiles it and
// loads it before torch.
#include <ATen/SDPBackend.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

static Device gpu() { return Device(DeviceType::CUDA, 0); }
static Stream queue() { return Stream(Stream::DEFAULT, gpu()); }

// What is done before and after each operation: with one device and one stream there is nothing to
// switch.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return gpu(); }
  Device getDevice() const override { return gpu(); }
  Stream getStream(Device) const noexcept override { return queue(); }
  Stream getDefaultStream(Device) const override { return queue(); }
  Stream getNewStream(Device, int) const override { return queue(); }
  Stream exchangeStream(Stream) const noexcept override { return queue(); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

namespace at {
// What is there: one device. The registry finds the class by its name.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

// Which kernel attends. In PyTorch's build for CUDA flash attention takes half precision without a
// mask, the memory-efficient kernel the rest. Without an answer the trace would show a dozen
// operations where the device gets one.
static int64_t kernel(const Tensor& query, const Tensor&, const Tensor&,
                      const std::optional<Tensor>& mask, double, bool, std::optional<double>,
                      bool) {
  const bool half = query.scalar_type() == kBFloat16 || query.scalar_type() == kHalf;
  return static_cast<int64_t>(half && !mask ? SDPBackend::flash_attention
                                            : SDPBackend::efficient_attention);
}
static const bool told = (native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&kernel), true);
}  // namespace at
