/* A small libnvidia-ml.so.1 for tests: the entry points that pynvml calls, two GPUs, a MIG instance on the second.
 *
 * STUB_NVML_USED_FILE  a file read at every call: bytes in use on each device
 * STUB_NVML_PROCESSES  "pid:bytes,pid:bytes", the compute processes on each device
 *
 * Behind them those that a CUDA build of torch looks up (tests/cuda).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

typedef struct { const char *uuid, *name; unsigned long long total; } Device;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;

static Device devices[] = {
    {"GPU-aaaaaaaa-0000-1111-2222-333333333333", "Stub A", 80ULL << 30},
    {"GPU-bbbbbbbb-0000-1111-2222-333333333333", "Stub B", 40ULL << 30},
    {"MIG-cccccccc-0000-1111-2222-333333333333", "Stub B MIG 1g", 5ULL << 30},
};

static unsigned long long used_bytes(void) {
    const char *path = getenv("STUB_NVML_USED_FILE");
    char text[32] = "1073741824";
    FILE *file = path ? fopen(path, "r") : NULL;
    if (file) {
        if (!fgets(text, sizeof text, file)) text[0] = 0;
        fclose(file);
    }
    return strtoull(text, NULL, 10);
}

static int copy(const char *from, char *to, unsigned size) {
    if (strlen(from) >= size) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return OK;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return OK;
}

int nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(int code) {
    (void)code;
    return "stub error";
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 2;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    if (index > 1) return INVALID_ARGUMENT;
    *device = &devices[index];
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *count) {
    if (device != &devices[1]) return NOT_SUPPORTED;
    *count = 7;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **mig) {
    if (device != &devices[1] || index != 3) return NOT_FOUND; /* the other slots are unused */
    *mig = &devices[2];
    return OK;
}

int nvmlDeviceGetName(Device *device, char *name, unsigned size) { return copy(device->name, name, size); }

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned size) { return copy(device->uuid, uuid, size); }

int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    *memory = (Memory){device->total, device->total - used_bytes(), used_bytes()};
    return OK;
}

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *utilization) {
    if (device == &devices[2]) return NOT_SUPPORTED;
    *utilization = (Utilization){37, 12};
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, Process *processes) {
    const char *text = getenv("STUB_NVML_PROCESSES");
    unsigned room = processes ? *count : 0, found = 0, pid;
    int length;
    long long bytes;
    (void)device;
    while (text && sscanf(text, "%u:%lld%n", &pid, &bytes, &length) == 2) {
        if (found < room) processes[found] = (Process){pid, (unsigned long long)bytes, ~0u, ~0u};
        found++;
        text += length + (text[length] == ',');
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : OK;
}

/* torch */
int nvmlInit_v2(void) { return OK; }

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, Device **device) {
    (void)bus;
    *device = &devices[0];
    return OK;
}

int nvmlSystemGetDriverVersion(char *version, unsigned size) { return copy("580.00", version, size); }

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses(Device *device, unsigned *count, void *processes) {
    (void)device, (void)processes;
    *count = 0;
    return OK;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }

int nvmlDeviceGetGpuFabricInfoV(Device *device, unsigned char *info) {
    (void)device;
    memset(info + 4, 0, 28); /* behind the version: no cluster, no clique, no fabric */
    return OK;
}
