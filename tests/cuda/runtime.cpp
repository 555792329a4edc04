// A stand-in for the CUDA runtime, cuBLAS and the driver's virtual memory, for LD_PRELOAD under a CUDA build of torch
// where there is no GPU. Device memory is host memory that is reserved and only touched by copies; kernels do not run.
// Real are torch's dispatch, its checks on the host, its caching allocator, its streams and events. Counts launches,
// copies and waits.
//
// EMULATED_CUDA_GIB         memory of a device (80)
// EMULATED_CUDA_CAPABILITY  90 is sm_90 (90)
// EMULATED_CUDA_DEVICES     how many (1); CUDA_VISIBLE_DEVICES hides some
// EMULATED_CUDA_FAULT       old-driver: as where the driver is older than the build; no-kernels: as on a GPU that the
//                           build has no kernels for
// EMULATED_CUDA_COPY_LIMIT  larger copies, in bytes, are counted and not made: models of real size touch no memory
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
#define OK_CUDA(declaration) API cudaError_t declaration { return cudaSuccess; }

namespace {

constexpr size_t CONTEXT = 500ul << 20;  // bytes that a context takes of the device
constexpr size_t PAGE = 4096;

struct Counts { long launches, blas, to_host, to_device, on_device, memset, waits_stream, waits_event, waits_device; };

// Never destroyed: torch calls until the process is gone
struct State {
  std::recursive_mutex mutex;
  Counts counts{};
  std::unordered_map<std::string, long> launched;          // kernel -> launches
  std::unordered_map<const void *, std::string> kernels;   // by the address of the host's stub
  std::unordered_map<const void *, std::pair<char *, size_t>> variables;
  std::map<char *, std::pair<size_t, size_t>> blocks;      // device memory: bytes of host memory, bytes that count
  std::set<void *> pinned;
  size_t in_use = 0;
  long next_handle = 0x1000;
};
State &state() { static State *s = new State; return *s; }
using Lock = std::lock_guard<std::recursive_mutex>;
#define LOCKED State &s = state(); Lock lock(s.mutex)

thread_local int current_device;
thread_local cudaError_t last_error = cudaSuccess;
cudaError_t fail(cudaError_t error) { return last_error = error; }

long number(const char *name, long otherwise) { const char *v = getenv(name); return v ? atol(v) : otherwise; }
bool fault(const char *name) { const char *v = getenv("EMULATED_CUDA_FAULT"); return v && !strcmp(v, name); }
int capability() { return number("EMULATED_CUDA_CAPABILITY", 90); }
size_t total() {
  const char *v = getenv("EMULATED_CUDA_GIB");
  return (size_t)((v ? atof(v) : 80.0) * (1ul << 30));
}
int devices() {
  int have = number("EMULATED_CUDA_DEVICES", 1), visible = 0;
  const char *listed = getenv("CUDA_VISIBLE_DEVICES");
  if (!listed) return have;
  if (!*listed || *listed == '-') return 0;
  for (visible = 1; *listed; listed++) visible += *listed == ',';
  return std::min(visible, have);
}
size_t most_shared_memory() {  // that a block may ask for, bytes
  int c = capability();
  return (c == 75 ? 64 : c == 80 || c == 87 ? 163 : c >= 90 && c < 120 ? 227 : 99) << 10;
}

cudaError_t launch(const void *kernel, dim3 grid, dim3 block, size_t shared) {
  LOCKED;
  auto known = s.kernels.find(kernel);
  s.counts.launches++;
  s.launched[known == s.kernels.end() ? "?" : known->second]++;
  if (fault("no-kernels")) return fail(cudaErrorNoKernelImageForDevice);
  bool fits = grid.x && grid.y && grid.z && grid.y <= 65535 && grid.z <= 65535 && block.x && block.y && block.z &&
              block.x <= 1024 && block.y <= 1024 && block.z <= 64 && (size_t)block.x * block.y * block.z <= 1024;
  if (!fits) return fail(cudaErrorInvalidConfiguration);
  return shared > most_shared_memory() ? fail(cudaErrorInvalidValue) : cudaSuccess;
}

bool is_on_device(const void *pointer) {
  LOCKED;
  auto above = s.blocks.upper_bound((char *)pointer);
  return above != s.blocks.begin() && (--above, (char *)pointer < above->first + above->second.first);
}
cudaError_t copy(void *to, const void *from, size_t bytes) {
  bool down = is_on_device(to), up = is_on_device(from);
  LOCKED;
  (down && up ? s.counts.on_device : down ? s.counts.to_device : s.counts.to_host)++;
  if ((long)bytes <= number("EMULATED_CUDA_COPY_LIMIT", 1l << 62)) memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t fill(void *pointer, int value, size_t bytes) {
  LOCKED;
  s.counts.memset++;
  char *p = (char *)pointer, *first = (char *)(((size_t)p + PAGE - 1) / PAGE * PAGE);
  size_t whole = p + bytes > first ? (p + bytes - first) / PAGE * PAGE : 0;
  if (value == 0 && whole > 1 << 20) {  // pages that are given back read as zero, and take no memory
    memset(p, 0, first - p);
    madvise(first, whole, MADV_DONTNEED);
    memset(first + whole, 0, p + bytes - first - whole);
  } else {
    memset(p, value, bytes);
  }
  return cudaSuccess;
}
void *reserve(size_t bytes) {
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? NULL : p;
}
cudaError_t new_handle(void *handle) {
  LOCKED;
  *(long *)handle = s.next_handle += 16;
  return cudaSuccess;
}

}  // namespace

// for emulate.py
API Counts *emulated_counts() { return &state().counts; }
API void emulated_reset() { LOCKED; s.counts = {}; s.launched.clear(); }
API void emulated_launch(const char *kernel) { LOCKED; s.counts.launches++; s.launched[kernel]++; }  // of driver.c

// kernels, as nvcc registers them
API void **__cudaRegisterFatBinary(void *) { static void *handle[1]; return handle; }
API void __cudaRegisterFatBinaryEnd(void **) {}
API void __cudaUnregisterFatBinary(void **) {}
API void __cudaRegisterFunction(void **, const char *host, char *, const char *name, int, void *, void *, void *,
                                void *, int *) {
  LOCKED; s.kernels[host] = name;
}
API void __cudaRegisterVar(void **, char *host, char *, const char *, int, size_t size, int, int) {
  LOCKED; s.variables[host] = {(char *)calloc(1, size + 16), size};
}
API cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) {
  LOCKED;
  auto known = s.variables.find(symbol);
  *p = known == s.variables.end() ? calloc(1, PAGE) : known->second.first;
  return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset, cudaMemcpyKind) {
  LOCKED;
  auto known = s.variables.find(symbol);
  if (known != s.variables.end()) memcpy(known->second.first + offset, from, bytes);
  return cudaSuccess;
}
struct Configuration { dim3 grid, block; size_t shared; void *stream; };
static thread_local std::vector<Configuration> configurations;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  if (configurations.empty()) return cudaErrorInvalidConfiguration;
  Configuration c = configurations.back();
  configurations.pop_back();
  *grid = c.grid, *block = c.block, *shared = c.shared, *(void **)stream = c.stream;
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **, size_t shared, cudaStream_t) {
  return launch(f, g, b, shared);
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **, size_t shared, cudaStream_t) {
  return launch((const void *)k, g, b, shared);
}
API cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **, size_t shared, cudaStream_t) {
  return launch(f, g, b, shared);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **) {
  return launch(f, c->gridDim, c->blockDim, c->dynamicSmemBytes);
}
API cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) { *k = (cudaKernel_t)f; return cudaSuccess; }
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, const void *) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024, a->numRegs = 32, a->ptxVersion = a->binaryVersion = capability();
  a->maxDynamicSharedSizeBytes = most_shared_memory();
  return cudaSuccess;
}
static cudaError_t set_attribute(cudaFuncAttribute a, int value) {
  bool too_much = a == cudaFuncAttributeMaxDynamicSharedMemorySize && value > (int)most_shared_memory();
  return too_much ? fail(cudaErrorInvalidValue) : cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute a, int value) { return set_attribute(a, value); }
API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute a, int value, int) {
  return set_attribute(a, value);
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *, int, size_t) {
  *n = 2;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *, int, size_t, unsigned) {
  *n = 2;
  return cudaSuccess;
}

// devices
API cudaError_t cudaGetDeviceCount(int *count) {
  *count = fault("old-driver") ? 0 : devices();
  return *count ? cudaSuccess : fail(fault("old-driver") ? cudaErrorInsufficientDriver : cudaErrorNoDevice);
}
API cudaError_t cudaGetDevice(int *device) { *device = current_device; return cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices()) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int *version) { *version = fault("old-driver") ? 12020 : 13000; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return cudaSuccess; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
  if (device < 0 || device >= devices()) return fail(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "Emulated sm_%d", capability());
  unsigned char uuid[16] = {0xaa, 0xaa, 0xaa, 0xaa, 0, 0, 0x11, 0x11, 0x22, 0x22, 0x33, 0x33, 0x33, 0x33, 0x33, 0x33};
  if (device == 1) memset(uuid, 0xbb, 4);  // as tests/stub_nvml.c has them
  memcpy(&p->uuid, uuid, sizeof uuid);
  p->major = capability() / 10, p->minor = capability() % 10, p->multiProcessorCount = 132, p->warpSize = 32;
  p->totalGlobalMem = total(), p->totalConstMem = 65536, p->l2CacheSize = 50 << 20, p->textureAlignment = 512;
  p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = most_shared_memory();
  p->sharedMemPerMultiprocessor = most_shared_memory() + 1024, p->maxBlocksPerMultiProcessor = 32;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536, p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048, p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->streamPrioritiesSupported = p->unifiedAddressing = p->cooperativeLaunch = p->concurrentKernels = 1;
  p->memoryPoolsSupported = p->canMapHostMemory = p->managedMemory = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr a, int device) {
  cudaDeviceProp p;
  if (cudaError_t error = cudaGetDeviceProperties(&p, device)) return error;
  const std::map<int, int> values = {
      {cudaDevAttrComputeCapabilityMajor, p.major}, {cudaDevAttrComputeCapabilityMinor, p.minor},
      {cudaDevAttrMultiProcessorCount, p.multiProcessorCount}, {cudaDevAttrWarpSize, p.warpSize},
      {cudaDevAttrMaxSharedMemoryPerBlock, (int)p.sharedMemPerBlock},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, (int)p.sharedMemPerBlockOptin},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, (int)p.sharedMemPerMultiprocessor},
      {cudaDevAttrMaxThreadsPerBlock, p.maxThreadsPerBlock}, {cudaDevAttrMaxGridDimX, p.maxGridSize[0]},
      {cudaDevAttrMaxThreadsPerMultiProcessor, p.maxThreadsPerMultiProcessor}, {cudaDevAttrMaxGridDimY, p.maxGridSize[1]},
      {cudaDevAttrMaxGridDimZ, p.maxGridSize[2]}, {cudaDevAttrL2CacheSize, p.l2CacheSize},
      {cudaDevAttrMaxRegistersPerBlock, p.regsPerBlock}, {cudaDevAttrTextureAlignment, (int)p.textureAlignment},
      {cudaDevAttrCooperativeLaunch, 1}};
  auto known = values.find(a);
  *value = known == values.end() ? 0 : known->second;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) {
  if (least) *least = 0;
  if (most) *most = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) { *can = 0; return cudaSuccess; }
OK_CUDA(cudaDeviceEnablePeerAccess(int, unsigned))
API cudaError_t cudaDeviceSynchronize() { LOCKED; s.counts.waits_device++; return cudaSuccess; }
API cudaError_t cudaGetLastError() { cudaError_t e = last_error; last_error = cudaSuccess; return e; }
API cudaError_t cudaPeekAtLastError() { return last_error; }

// memory
API cudaError_t cudaMalloc(void **p, size_t bytes) {
  LOCKED;
  size_t host = (bytes + PAGE - 1) / PAGE * PAGE;
  if (s.in_use + bytes + CONTEXT > total() || !(*p = reserve(host))) return fail(cudaErrorMemoryAllocation);
  s.blocks[(char *)*p] = {host, bytes};
  s.in_use += bytes;
  return cudaSuccess;
}
API cudaError_t cudaFree(void *p) {
  if (!p) return cudaSuccess;
  LOCKED;
  auto block = s.blocks.find((char *)p);
  if (block == s.blocks.end()) return fail(cudaErrorInvalidValue);
  s.in_use -= block->second.second;
  munmap(p, block->second.first);
  s.blocks.erase(block);
  return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t *free, size_t *all) {
  LOCKED;
  *all = total();
  *free = *all - CONTEXT - s.in_use;
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
  state().counts.waits_stream++;
  return copy(to, from, bytes);
}
API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return copy(to, from, bytes);
}
API cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t) {
  return copy(to, from, bytes);
}
API cudaError_t cudaMemset(void *p, int value, size_t bytes) { return fill(p, value, bytes); }
API cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t) { return fill(p, value, bytes); }
API cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned) {
  LOCKED;
  *p = reserve(bytes);
  s.pinned.insert(*p);
  return cudaSuccess;
}
API cudaError_t cudaFreeHost(void *p) { LOCKED; s.pinned.erase(p); return cudaSuccess; }
OK_CUDA(cudaHostRegister(void *, size_t, unsigned))
OK_CUDA(cudaHostUnregister(void *))
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *p) {
  LOCKED;
  memset(a, 0, sizeof *a);
  bool pinned = s.pinned.count((void *)p);
  a->type = is_on_device(p) ? cudaMemoryTypeDevice : pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->devicePointer = a->hostPointer = (void *)p;
  return cudaSuccess;
}

// streams and events: all is done at once
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned, int) { return new_handle(s); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned) { return new_handle(s); }
OK_CUDA(cudaStreamDestroy(cudaStream_t))
API cudaError_t cudaStreamSynchronize(cudaStream_t) { LOCKED; s.counts.waits_stream++; return cudaSuccess; }
OK_CUDA(cudaStreamQuery(cudaStream_t))
OK_CUDA(cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned))
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *s) {
  *s = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *s, unsigned long long *, cudaGraph_t *,
                                         const cudaGraphNode_t **, const cudaGraphEdgeData **, size_t *) {
  if (s) *s = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
OK_CUDA(cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *))
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) { return new_handle(e); }
API cudaError_t cudaEventCreate(cudaEvent_t *e) { return new_handle(e); }
OK_CUDA(cudaEventDestroy(cudaEvent_t))
OK_CUDA(cudaEventRecord(cudaEvent_t, cudaStream_t))
OK_CUDA(cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned))
OK_CUDA(cudaEventQuery(cudaEvent_t))
API cudaError_t cudaEventSynchronize(cudaEvent_t) { LOCKED; s.counts.waits_event++; return cudaSuccess; }
API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;
  return cudaSuccess;
}

// the driver's functions that torch looks up by name: a context, and virtual memory (expandable segments)
static CUresult get_current(CUcontext *context) { *context = (CUcontext)0x10; return CUDA_SUCCESS; }
static CUresult primary_state(CUdevice, unsigned *flags, int *active) { *flags = 0, *active = 1; return CUDA_SUCCESS; }
static CUresult device_get(CUdevice *device, int index) { *device = index; return CUDA_SUCCESS; }
static CUresult device_attribute(int *value, CUdevice_attribute a, CUdevice device) {
  return (CUresult)cudaDeviceGetAttribute(value, (cudaDeviceAttr)a, device);
}
static CUresult error_string(CUresult, const char **text) { *text = "error of the emulated driver"; return CUDA_SUCCESS; }
static CUresult reserve_addresses(CUdeviceptr *p, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  LOCKED;
  if (!(*p = (CUdeviceptr)reserve(bytes))) return CUDA_ERROR_OUT_OF_MEMORY;
  s.blocks[(char *)*p] = {bytes, 0};
  return CUDA_SUCCESS;
}
static CUresult free_addresses(CUdeviceptr p, size_t) { return (CUresult)cudaFree((void *)p); }
static CUresult create(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *,
                       unsigned long long) {
  LOCKED;
  if (s.in_use + bytes + CONTEXT > total()) return CUDA_ERROR_OUT_OF_MEMORY;
  s.in_use += bytes;
  *handle = bytes;  // all that is to be known of it
  return CUDA_SUCCESS;
}
static CUresult release(CUmemGenericAllocationHandle handle) { LOCKED; s.in_use -= handle; return CUDA_SUCCESS; }
static CUresult unmap(CUdeviceptr p, size_t bytes) {
  madvise((void *)p, bytes, MADV_DONTNEED);
  return CUDA_SUCCESS;
}
static CUresult granularity(size_t *bytes, const CUmemAllocationProp *, CUmemAllocationGranularity_flags) {
  *bytes = 2 << 20;
  return CUDA_SUCCESS;
}
static CUresult nothing() { return CUDA_SUCCESS; }
static CUresult unsupported() { return CUDA_ERROR_NOT_SUPPORTED; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult *result) {
  static const std::map<std::string, void *> known = {
      {"cuCtxGetCurrent", (void *)get_current}, {"cuCtxSetCurrent", (void *)nothing},
      {"cuDevicePrimaryCtxGetState", (void *)primary_state}, {"cuDeviceGet", (void *)device_get},
      {"cuDeviceGetAttribute", (void *)device_attribute}, {"cuGetErrorString", (void *)error_string},
      {"cuMemAddressReserve", (void *)reserve_addresses}, {"cuMemAddressFree", (void *)free_addresses},
      {"cuMemCreate", (void *)create}, {"cuMemRelease", (void *)release}, {"cuMemMap", (void *)nothing},
      {"cuMemUnmap", (void *)unmap}, {"cuMemSetAccess", (void *)nothing},
      {"cuMemGetAllocationGranularity", (void *)granularity}};
  auto found = known.find(name);
  *function = found == known.end() ? (void *)unsupported : found->second;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// cuBLAS: products are counted, the rest does nothing
#define OK_BLAS(name) API int name() { return 0; }
#define PRODUCT(name) API int name() { LOCKED; s.counts.blas++; s.launched[#name]++; return 0; }
#define MADE(name) API int name(void **handle) { *handle = calloc(1, 64); return 0; }
MADE(cublasCreate_v2) MADE(cublasLtCreate) MADE(cublasLtMatmulDescCreate) MADE(cublasLtMatmulPreferenceCreate)
MADE(cublasLtMatrixLayoutCreate)
OK_BLAS(cublasDestroy_v2) OK_BLAS(cublasLtDestroy) OK_BLAS(cublasSetStream_v2) OK_BLAS(cublasSetWorkspace_v2)
OK_BLAS(cublasSetMathMode) OK_BLAS(cublasSetPointerMode_v2) OK_BLAS(cublasSetSmCountTarget)
OK_BLAS(cublasLtMatmulDescDestroy) OK_BLAS(cublasLtMatmulDescSetAttribute) OK_BLAS(cublasLtMatmulPreferenceDestroy)
OK_BLAS(cublasLtMatmulPreferenceSetAttribute) OK_BLAS(cublasLtMatrixLayoutDestroy)
OK_BLAS(cublasLtMatrixLayoutSetAttribute)
API int cublasGetMathMode(void *, int *mode) { *mode = 0; return 0; }
API int cublasGetPointerMode_v2(void *, int *mode) { *mode = 0; return 0; }
API size_t cublasLtGetVersion() { return 130101; }
API int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int, void *results,
                                       int *found) {
  memset(results, 0, 128);
  *found = 1;
  return 0;
}
PRODUCT(cublasGemmEx) PRODUCT(cublasGemmStridedBatchedEx) PRODUCT(cublasSgemm_v2) PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemmStridedBatched) PRODUCT(cublasSgemmBatched) PRODUCT(cublasSgemv_v2) PRODUCT(cublasSdot_v2)
PRODUCT(cublasDgemm_v2) PRODUCT(cublasDgemmStridedBatched) PRODUCT(cublasDgemmBatched) PRODUCT(cublasDgemv_v2)
PRODUCT(cublasDdot_v2) PRODUCT(cublasDotEx) PRODUCT(cublasLtMatmul) PRODUCT(cublasStrsm_v2) PRODUCT(cublasDtrsm_v2)
PRODUCT(cublasStrsmBatched) PRODUCT(cublasDtrsmBatched)
