/* A stand-in for libcuda.so.1: what Triton's launcher calls. Kernels are counted and do not run.
 * Loaded beside runtime.cpp, whose functions it calls. */
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NOT_SUPPORTED = 801, THREADS = 0, REGISTERS = 4 /* CUfunction_attribute */ };

extern void emulated_launch(const char *kernel) __attribute__((weak));
extern int cudaDeviceGetAttribute(int *, int, int) __attribute__((weak));

static int handle(void **out) { *out = (void *)16; return OK; }
static int launch(void *kernel) {
    if (emulated_launch) emulated_launch(kernel);
    return OK;
}

int cuInit(unsigned flags) { (void)flags; return OK; }
int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
int cuDeviceGetCount(int *count) { *count = 1; return OK; }
int cuDeviceGet(int *device, int index) { *device = index; return OK; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return cudaDeviceGetAttribute ? cudaDeviceGetAttribute(value, attribute, device) : NOT_SUPPORTED;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    (void)device;
    if (flags) *flags = 0;
    *active = 1;
    return OK;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; return handle(context); }
int cuCtxGetCurrent(void **context) { return handle(context); }
int cuCtxSetCurrent(void *context) { (void)context; return OK; }
int cuGetErrorString(int error, const char **text) { (void)error; *text = "error of the emulated driver"; return OK; }
int cuModuleLoadData(void **module, const void *image) { (void)image; return handle(module); }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)module;
    *function = strdup(name);
    return OK;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    (void)function;
    *value = attribute == REGISTERS ? 32 : attribute == THREADS ? 1024 : 0;
    return OK;
}
int cuFuncSetAttribute(void *function, int attribute, int value) { (void)function, (void)attribute, (void)value; return OK; }
int cuFuncSetCacheConfig(void *function, int config) { (void)function, (void)config; return OK; }
int cuPointerGetAttribute(void *data, int attribute, unsigned long pointer) {
    (void)attribute;
    *(unsigned long *)data = pointer;
    return OK;
}
int cuPointerGetAttributes(unsigned count, int *attributes, void **data, unsigned long pointer) {
    for (unsigned i = 0; i < count; i++) cuPointerGetAttribute(data[i], attributes[i], pointer);
    return OK;
}
int cuLaunchKernel(void *kernel) { return launch(kernel); }
int cuLaunchKernelEx(void *config, void *kernel, void **parameters, void **extra) {
    (void)config, (void)parameters, (void)extra;
    return launch(kernel);
}
int cuOccupancyMaxActiveClusters(int *count, void *function, void *config) {
    (void)function, (void)config;
    *count = 1;
    return OK;
}

#define UNSUPPORTED(name) int name(void) { return NOT_SUPPORTED; } /* linked, never called here */
UNSUPPORTED(cuCtxGetLimit) UNSUPPORTED(cuCtxSetLimit) UNSUPPORTED(cuLaunchCooperativeKernel)
UNSUPPORTED(cuLinkAddData_v2) UNSUPPORTED(cuLinkComplete) UNSUPPORTED(cuLinkCreate_v2) UNSUPPORTED(cuModuleLoad)
UNSUPPORTED(cuModuleLoadDataEx) UNSUPPORTED(cuModuleUnload)
UNSUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor) UNSUPPORTED(cuTensorMapEncodeIm2col)
UNSUPPORTED(cuTensorMapEncodeTiled)
