/* libdry.so is also libcuda.so.1 (its SONAME), so that what asks for the driver by that name finds one. To the CUDA runtimes inside cuBLAS, cuDNN and
   so on it is a driver without a device (cuInit: 100); torch gets the few functions that it asks for by name, Triton and cuDNN's compiled engines
   modules that are mere tickets. No header here: library.py fills in the rest of cuda.h. */
#define _GNU_SOURCE
#include "dry.h"
#include <sys/mman.h>
#define EXPORT __attribute__((visibility("default")))
typedef unsigned long long ptr;
extern int cudaDeviceGetAttribute(int *, int, int), cudaMalloc(void **, size_t), cudaFree(void *), cudaMemGetInfo(size_t *, size_t *);

EXPORT int cuInit(unsigned f) { return 100; }
EXPORT int cuDriverGetVersion(int *v) { extern int dry_cuda_version; *v = dry_cuda_version; return 0; }
EXPORT int cuGetErrorString(int e, const char **s) { *s = "not emulated (dry run)"; return 0; }
EXPORT int cuGetErrorName(int e, const char **s) { *s = "CUDA_ERROR_NOT_SUPPORTED"; return 0; }
EXPORT int cuCtxGetCurrent(void **c) { *c = (void *)0x10; return 0; }
EXPORT int cuCtxGetDevice(int *d) { *d = 0; return 0; }
EXPORT int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *active) { *f = 0; *active = 1; return 0; }
EXPORT int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)0x10; return 0; }
EXPORT int cuDeviceGet(int *d, int n) { *d = n; return n ? 101 : 0; }
EXPORT int cuDeviceGetCount(int *n) { *n = 1; return 0; }
EXPORT int cuDeviceGetAttribute(int *v, int a, int d) { return cudaDeviceGetAttribute(v, a, d); }   /* both enumerations have the same numbers */
EXPORT int cuFuncGetAttribute(int *v, int a, void *f) { *v = a == 0 ? 1024 : a == 4 ? 32 : a == 5 || a == 6 ? dry_gpu()->binary : 0; return 0; }
EXPORT int cuPointerGetAttribute(void *out, int a, ptr p) {
    if (a == 2 || a == 3 || a == 4) { if (!dry_is_device((void *)p) && a == 2) return 1; if (a == 2) *(unsigned *)out = 2; else *(ptr *)out = p; return 0; }
    return 1;
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int block, size_t smem) {
    extern int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *, void *, int, size_t);
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, f, block, smem);
}

/* expandable segments: addresses are reserved apart, physical memory is only counted */
static char *vmm;
static size_t physical;
EXPORT int cuMemAddressReserve(ptr *p, size_t size, size_t align, ptr at, unsigned long long flags) {
    size = (size + (2u << 20) - 1) >> 21 << 21;
    if (!vmm) vmm = (char *)DRY_VMM;
    char *got = mmap(vmm, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got != vmm) return 2;
    *p = (ptr)vmm; vmm += size;
    return 0;
}
EXPORT int cuMemCreate(unsigned long long *h, size_t size, const void *prop, unsigned long long flags) {
    size_t avail, total;
    cudaMemGetInfo(&avail, &total);
    if (physical + size > avail) return 2;
    physical += size; *h = (unsigned long long)calloc(1, 64); *(size_t *)*h = size;
    return 0;
}
EXPORT int cuMemRelease(unsigned long long h) { physical -= *(size_t *)h; free((void *)h); return 0; }
EXPORT int cuMemGetAllocationGranularity(size_t *g, const void *prop, int option) { *g = 2u << 20; return 0; }

/* modules and kernels are tickets */
#define TICKET(f) EXPORT int f(void **p) { *p = calloc(1, 64); return 0; }
#define NOTHING(f) EXPORT int f(void) { return 0; }
TICKET(cuModuleLoad) TICKET(cuModuleLoadData) TICKET(cuModuleLoadDataEx) TICKET(cuModuleLoadFatBinary) TICKET(cuModuleGetFunction) TICKET(cuLibraryLoadData) TICKET(cuLibraryGetKernel)
TICKET(cuKernelGetFunction) TICKET(cuLibraryGetModule)
NOTHING(cuModuleUnload) NOTHING(cuLibraryUnload) NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig) NOTHING(cuKernelSetAttribute) NOTHING(cuLaunchKernel)
NOTHING(cuLaunchKernelEx) NOTHING(cuLaunchCooperativeKernel) NOTHING(cuTensorMapEncodeTiled) NOTHING(cuTensorMapEncodeIm2col) NOTHING(cuCtxSetCurrent) NOTHING(cuCtxPushCurrent_v2)
NOTHING(cuCtxSynchronize) NOTHING(cuStreamSynchronize) NOTHING(cuMemMap) NOTHING(cuMemUnmap) NOTHING(cuMemSetAccess) NOTHING(cuMemAddressFree) NOTHING(cuMemsetD32Async)

/* torch looks functions up by name; the log of the driver is one that stays empty */
EXPORT int cuLogsRegisterCallback(void *callback, void *data, void **handle) { if (handle) *handle = NULL; return 0; }
static char asked[8][96];
#define REFUSE(n) static int refuse##n(void) { return dry_missing(asked[n], 801); }
REFUSE(0) REFUSE(1) REFUSE(2) REFUSE(3) REFUSE(4) REFUSE(5) REFUSE(6) REFUSE(7)
static void *refused(const char *name) {
    static void *all[] = {refuse0, refuse1, refuse2, refuse3, refuse4, refuse5, refuse6, refuse7};
    static int n;
    int at = n < 7 ? n++ : 7;   /* the last one stands for all after it */
    snprintf(asked[at], sizeof asked[at], "refused: %s, which torch looked up in the driver", name);
    return all[at];
}
void *dry_driver(const char *name) {
#define GIVE(f) if (!strcmp(name, #f)) return (void *)f
    GIVE(cuInit); GIVE(cuDriverGetVersion); GIVE(cuGetErrorString); GIVE(cuGetErrorName); GIVE(cuCtxGetCurrent); GIVE(cuCtxSetCurrent);
    GIVE(cuDevicePrimaryCtxGetState); GIVE(cuDeviceGet); GIVE(cuDeviceGetAttribute); GIVE(cuMemAddressReserve); GIVE(cuMemCreate); GIVE(cuMemRelease);
    GIVE(cuMemGetAllocationGranularity); GIVE(cuMemMap); GIVE(cuMemUnmap); GIVE(cuMemSetAccess); GIVE(cuMemAddressFree); GIVE(cuMemsetD32Async);
    GIVE(cuCtxGetDevice); GIVE(cuPointerGetAttribute); GIVE(cuLogsRegisterCallback);
    return refused(name);
}
