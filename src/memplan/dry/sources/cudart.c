/* A CUDA runtime without a GPU: device memory is a reserved address range, launches do nothing, small copies are real.
   Only the public runtime API is implemented; libtorch_cuda is left as it is. */
#include "dry.h"
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <sys/mman.h>
#include <malloc.h>

#define OK cudaSuccess
#define EXPORT __attribute__((visibility("default")))
static const size_t UNIT = 2u << 20;

static dry_card card;
static void describe(void) {
    const char *text = getenv("MEMPLAN_DRY_CARD");
    int n = !text ? 0 : sscanf(text, "%d %d %d %zu %zu %d %d %d %d %d %d %d %d %d %127[^\n]", &card.major, &card.minor, &card.sms,
        &card.memory, &card.context, &card.l2, &card.optin_smem, &card.smem_per_sm, &card.threads_per_sm, &card.blocks_per_sm,
        &card.sm_khz, &card.mem_khz, &card.bus, &card.binary, card.name);
    if (n != 15) { fprintf(stderr, "[dry] MEMPLAN_DRY_CARD describes no card\n"); abort(); }
}
const dry_card *dry_gpu(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, describe);
    return &card;
}
/* torch's wheel has code for some architectures only: the process says which of them a card would run. */
EXPORT void memplan_dry_binary(int architecture) { dry_gpu(); card.binary = architecture; }

int dry_trace(void) {
    static int level = -1;
    if (level < 0) level = getenv("MEMPLAN_DRY_TRACE") ? atoi(getenv("MEMPLAN_DRY_TRACE")) : 0;
    return level;
}

int dry_missing(const char *name, int code) {
    static const char *seen[512];
    static int n;
    static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&guard);
    int new = n < 512;
    for (int i = 0; i < n; i++) if (!strcmp(seen[i], name)) new = 0;
    if (new) {
        seen[n++] = strdup(name);
        const char *path = getenv("MEMPLAN_DRY_LOG");
        FILE *log = path ? fopen(path, "a") : NULL;
        if (log) { fprintf(log, "%s\n", name); fclose(log); }
        if (dry_trace()) fprintf(stderr, "[dry] %s: not answered\n", name);
    }
    pthread_mutex_unlock(&guard);
    return code;
}

/* ---- memory: 2 MiB units of a range that the kernel backs with zero pages only where a small copy wrote ---- */
static char *base;
static uint32_t *span;                /* span[i] = units of the allocation that starts at unit i */
static unsigned char *taken;
static size_t units, used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void setup(void) {
    units = dry_gpu()->memory / UNIT;
    base = mmap((void *)0x7f0000000000 - 0x400000000000, units * UNIT + UNIT, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) { perror("[dry] mmap"); abort(); }
    base = (char *)(((uintptr_t)base + UNIT - 1) / UNIT * UNIT);
    span = calloc(units, sizeof *span);
    taken = calloc(units, 1);
}

int dry_is_device(const void *p) {
    return (uintptr_t)p - DRY_VMM < (16ull << 40) || (base && (char *)p >= base && (char *)p < base + units * UNIT);
}

EXPORT cudaError_t cudaMalloc(void **p, size_t size) {
    size_t need = (size + UNIT - 1) / UNIT, run = 0;
    *p = NULL;
    if (!size) return OK;
    pthread_mutex_lock(&lock);
    if (!base) setup();
    if ((used + need) * UNIT + dry_gpu()->context <= dry_gpu()->memory)
        for (size_t i = 0; i < units; i++) {
            run = taken[i] ? 0 : run + 1;
            if (run == need) {
                size_t at = i + 1 - need;
                memset(taken + at, 1, need);
                span[at] = need;
                used += need;
                *p = base + at * UNIT;
                break;
            }
        }
    pthread_mutex_unlock(&lock);
    if (dry_trace() > 1) fprintf(stderr, "[dry] cudaMalloc(%zu) = %p\n", size, *p);
    return *p ? OK : cudaErrorMemoryAllocation;
}

EXPORT cudaError_t cudaFree(void *p) {
    if (!p) return OK;
    if (!dry_is_device(p)) return cudaErrorInvalidValue;
    pthread_mutex_lock(&lock);
    size_t at = ((char *)p - base) / UNIT, n = span[at];
    memset(taken + at, 0, n);
    span[at] = 0;
    used -= n;
    madvise(p, n * UNIT, MADV_DONTNEED);
    pthread_mutex_unlock(&lock);
    return OK;
}
EXPORT cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return cudaMalloc(p, n); }
EXPORT cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return cudaFree(p); }
EXPORT cudaError_t cudaMemGetInfo(size_t *avail, size_t *total) {
    *total = dry_gpu()->memory;
    *avail = *total - dry_gpu()->context - used * UNIT;
    return OK;
}

#define HOSTS 65536
static struct { char *p; size_t n; } hosts[HOSTS];
static int nhosts;
EXPORT cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags) {
    if (posix_memalign(p, 4096, n ? n : 1)) return cudaErrorMemoryAllocation;
    pthread_mutex_lock(&lock);
    if (nhosts < HOSTS) { hosts[nhosts].p = *p; hosts[nhosts++].n = n; }
    pthread_mutex_unlock(&lock);
    return OK;
}
EXPORT cudaError_t cudaFreeHost(void *p) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < nhosts; i++) if (hosts[i].p == p) hosts[i] = hosts[--nhosts];
    pthread_mutex_unlock(&lock);
    free(p);
    return OK;
}
EXPORT cudaError_t cudaHostRegister(void *p, size_t n, unsigned f) { return OK; }
EXPORT cudaError_t cudaHostUnregister(void *p) { return OK; }
EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    a->type = cudaMemoryTypeUnregistered;
    if (dry_is_device(p)) { a->type = cudaMemoryTypeDevice; a->devicePointer = (void *)p; return OK; }
    a->device = -1;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < nhosts; i++)
        if ((char *)p >= hosts[i].p && (char *)p < hosts[i].p + hosts[i].n) {
            a->type = cudaMemoryTypeHost; a->device = 0; a->hostPointer = a->devicePointer = (void *)p;
        }
    pthread_mutex_unlock(&lock);
    return OK;
}

/* Copies up to 1 MiB are made, so that labels, scalars and offsets that the host reads back are right; larger ones to the card are dropped,
   larger ones to the host give zeros. What a kernel would have computed reads as zero. */
static cudaError_t copy(void *d, const void *s, size_t n) {
    static size_t KEEP = -1;
    if (KEEP == (size_t)-1) KEEP = getenv("MEMPLAN_DRY_KEEP") ? strtoull(getenv("MEMPLAN_DRY_KEEP"), 0, 0) : 1u << 20;
    if (dry_trace() > 2) fprintf(stderr, "[dry] copy %p <- %p %zu\n", d, s, n);
    if (n <= KEEP || (!dry_is_device(d) && !dry_is_device(s))) memmove(d, s, n);
    else if (!dry_is_device(d)) memset(d, 0, n);
    return OK;
}
EXPORT cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) { return copy(d, s, n); }
EXPORT cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t st) { return copy(d, s, n); }
EXPORT cudaError_t cudaMemcpyPeerAsync(void *d, int dd, const void *s, int sd, size_t n, cudaStream_t st) { return copy(d, s, n); }
EXPORT cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, enum cudaMemcpyKind k, cudaStream_t st) {
    for (size_t i = 0; i < h; i++) copy((char *)d + i * dp, (const char *)s + i * sp, w);
    return OK;
}
EXPORT cudaError_t cudaMemcpyToSymbol(const void *sym, const void *s, size_t n, size_t o, enum cudaMemcpyKind k) { return OK; }
EXPORT cudaError_t cudaMemset(void *d, int v, size_t n) { if (n <= 4096) memset(d, v, n); return OK; }
EXPORT cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t s) { return cudaMemset(d, v, n); }
EXPORT cudaError_t cudaGetSymbolAddress(void **p, const void *sym) {
    static void *pool;
    if (!pool) cudaMalloc(&pool, UNIT);
    *p = pool;
    return OK;
}

/* ---- the device ---- */
EXPORT cudaError_t cudaGetDeviceCount(int *n) { *n = 1; return OK; }
EXPORT cudaError_t cudaGetDevice(int *d) { *d = 0; return OK; }
EXPORT cudaError_t cudaSetDevice(int d) { return d == 0 ? OK : cudaErrorInvalidDevice; }
EXPORT cudaError_t cudaDeviceSynchronize(void) { return OK; }
EXPORT cudaError_t cudaDriverGetVersion(int *v) { *v = CUDART_VERSION; return OK; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; return OK; }
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return OK; }
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:01:00.0"); return OK; }
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *lo, int *hi) { *lo = 0; *hi = -5; return OK; }

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    const dry_card *c = dry_gpu();
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", c->name);
    memcpy(&p->uuid, "memplan dry run ", 16);
    p->totalGlobalMem = c->memory; p->sharedMemPerBlock = 49152; p->regsPerBlock = 65536; p->warpSize = 32; p->memPitch = 2147483647;
    p->maxThreadsPerBlock = 1024; p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535; p->totalConstMem = 65536;
    p->major = c->major; p->minor = c->minor; p->textureAlignment = 512; p->texturePitchAlignment = 32;
    p->multiProcessorCount = c->sms; p->canMapHostMemory = 1; p->surfaceAlignment = 512; p->concurrentKernels = 1; p->ECCEnabled = 1;
    p->pciBusID = 1; p->asyncEngineCount = 3; p->unifiedAddressing = 1; p->memoryBusWidth = c->bus; p->l2CacheSize = c->l2;
    p->persistingL2CacheMaxSize = c->l2 / 4 * 3; p->maxThreadsPerMultiProcessor = c->threads_per_sm; p->streamPrioritiesSupported = 1;
    p->globalL1CacheSupported = p->localL1CacheSupported = 1; p->sharedMemPerMultiprocessor = c->smem_per_sm;
    p->regsPerMultiprocessor = 65536; p->managedMemory = 1; p->hostNativeAtomicSupported = 0; p->concurrentManagedAccess = 1;
    p->computePreemptionSupported = 1; p->canUseHostPointerForRegisteredMem = 1; p->cooperativeLaunch = 1;
    p->sharedMemPerBlockOptin = c->optin_smem; p->maxBlocksPerMultiProcessor = c->blocks_per_sm;
    p->accessPolicyMaxWindowSize = 134213632; p->reservedSharedMemPerBlock = 1024; p->hostRegisterSupported = 1;
    p->memoryPoolsSupported = 1; p->ipcEventSupported = 1; p->clusterLaunch = c->major >= 9;
#if CUDART_VERSION >= 13000
    p->hostNumaId = -1;
#else
    p->clockRate = c->sm_khz; p->memoryClockRate = c->mem_khz;
#endif
    return OK;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int device) {
    const dry_card *c = dry_gpu();
    switch ((int)a) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *v = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *v = 64; break;
    case cudaDevAttrMaxGridDimX: *v = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *v = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break;
    case cudaDevAttrTotalConstantMemory: *v = 65536; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *v = 65536; break;
    case cudaDevAttrClockRate: *v = c->sm_khz; break;
    case cudaDevAttrMemoryClockRate: *v = c->mem_khz; break;
    case cudaDevAttrGlobalMemoryBusWidth: *v = c->bus; break;
    case cudaDevAttrMultiProcessorCount: *v = c->sms; break;
    case cudaDevAttrL2CacheSize: *v = c->l2; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = c->threads_per_sm; break;
    case cudaDevAttrComputeCapabilityMajor: *v = c->major; break;
    case cudaDevAttrComputeCapabilityMinor: *v = c->minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = c->smem_per_sm; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = c->optin_smem; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *v = c->blocks_per_sm; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *v = 1024; break;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrConcurrentKernels: case cudaDevAttrCooperativeLaunch: case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrManagedMemory: case cudaDevAttrConcurrentManagedAccess: case cudaDevAttrStreamPrioritiesSupported: *v = 1; break;
    default: *v = 0; if (dry_trace()) fprintf(stderr, "[dry] device attribute %d: 0\n", (int)a);
    }
    return OK;
}

/* ---- kernels: registered, asked about, launched into nothing ---- */
EXPORT void **__cudaRegisterFatBinary(void *fat) { static void *h; return &h; }
EXPORT void __cudaRegisterFatBinaryEnd(void **h) {}
EXPORT void __cudaUnregisterFatBinary(void **h) {}
EXPORT char __cudaInitModule(void **h) { return 1; }
EXPORT void __cudaRegisterFunction(void **h, const char *fun, char *dev, const char *name, int limit, void *t, void *b, void *bd, void *gd, int *w) {}
EXPORT void __cudaRegisterVar(void **h, char *var, char *addr, const char *name, int ext, size_t size, int constant, int global) {}

typedef struct { dim3 grid, block; size_t smem; void *stream; } launch;
static __thread launch calls[16];
static __thread int depth;
EXPORT unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t smem, struct CUstream_st *s) {
    if (depth < 16) calls[depth++] = (launch){g, b, smem, s};
    return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *smem, void *s) {
    if (!depth) return cudaErrorMissingConfiguration;
    launch *l = &calls[--depth];
    *g = l->grid; *b = l->block; *smem = l->smem; *(void **)s = l->stream;
    return OK;
}
static __thread cudaError_t last;
static cudaError_t launched(dim3 g, dim3 b, size_t smem) {   /* what a card refuses, this one refuses too: host code reacts to it */
    int bad = !g.x || !g.y || !g.z || !b.x || !b.y || !b.z || (size_t)b.x * b.y * b.z > 1024 || g.y > 65535 || g.z > 65535 || g.x > 2147483647u;
    last = bad ? cudaErrorInvalidConfiguration : smem > (size_t)dry_gpu()->optin_smem ? cudaErrorInvalidValue : last;
    return bad ? cudaErrorInvalidConfiguration : smem > (size_t)dry_gpu()->optin_smem ? cudaErrorInvalidValue : OK;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) { *k = (cudaKernel_t)f; return OK; }
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t smem, cudaStream_t s) { return launched(g, b, smem); }
EXPORT cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t smem, cudaStream_t s) { return launched(g, b, smem); }
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { return launched(c->gridDim, c->blockDim, c->dynamicSmemBytes); }
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **a, size_t smem, cudaStream_t s) { return launched(g, b, smem); }
EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024; a->numRegs = 32; a->ptxVersion = a->binaryVersion = dry_gpu()->binary;
    a->maxDynamicSharedSizeBytes = 49152; a->preferredShmemCarveout = -1;
    return OK;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) {
    return a == cudaFuncAttributeMaxDynamicSharedMemorySize && v > dry_gpu()->optin_smem ? cudaErrorInvalidValue : OK;
}
EXPORT cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t k, enum cudaFuncAttribute a, int v, int d) { return cudaFuncSetAttribute(k, a, v); }
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block, size_t smem, unsigned flags) {
    const dry_card *c = dry_gpu();
    int t = (block + 31) / 32 * 32, by_smem = smem ? (int)(c->smem_per_sm / (smem + 1024)) : c->blocks_per_sm, by_regs = 65536 / (32 * t);
    *n = c->threads_per_sm / t;
    if (*n > by_regs) *n = by_regs;
    if (*n > by_smem) *n = by_smem;
    if (*n > c->blocks_per_sm) *n = c->blocks_per_sm;
    return OK;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t smem) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, block, smem, 0);
}

/* ---- streams and events: all done at once ---- */
static void *ticket(void) { return calloc(1, 64); }
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *s) { *s = ticket(); return OK; }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { *s = ticket(); return OK; }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { *s = ticket(); return OK; }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t s) { free(s); return OK; }
EXPORT cudaError_t cudaStreamQuery(cudaStream_t s) { return OK; }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t s) { return OK; }
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { return OK; }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { *p = 0; return OK; }
/* graphs: what is captured is forgotten; only the state counts */
static cudaStream_t capturing;
static unsigned long long captures;
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m) { capturing = s; captures++; return OK; }
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) { capturing = 0; *g = ticket(); return OK; }
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long f) { *e = ticket(); return OK; }
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long f) { *e = ticket(); return OK; }
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n) { *n = 1; return OK; }
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) { return OK; }
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t g) { free(g); return OK; }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) { free(e); return OK; }
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) { *c = capturing && s == capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone; return OK; }
static cudaError_t capture_info(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id, cudaGraph_t *g, size_t *n) {
    cudaStreamIsCapturing(s, c);
    if (id) *id = captures;
    if (g) *g = (cudaGraph_t)0x20;
    if (n) *n = 0;
    return OK;
}
#undef cudaStreamGetCaptureInfo
#if CUDART_VERSION >= 13000
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id, cudaGraph_t *g,
                                            const cudaGraphNode_t **d, const cudaGraphEdgeData **e, size_t *n) { return capture_info(s, c, id, g, n); }
#else
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id) { return capture_info(s, c, id, 0, 0); }
EXPORT cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id, cudaGraph_t *g,
                                               const cudaGraphNode_t **d, size_t *n) { return capture_info(s, c, id, g, n); }
EXPORT cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id, cudaGraph_t *g,
                                               const cudaGraphNode_t **d, const cudaGraphEdgeData **e, size_t *n) { return capture_info(s, c, id, g, n); }
#endif
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) {
    static __thread enum cudaStreamCaptureMode mode;
    enum cudaStreamCaptureMode was = mode;
    mode = *m; *m = was;
    return OK;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *data, unsigned flags) { f(s, OK, data); return OK; }
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) { f(data); return OK; }
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = ticket(); return OK; }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { *e = ticket(); return OK; }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return OK; }
EXPORT cudaError_t cudaEventQuery(cudaEvent_t e) { return OK; }
EXPORT cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return OK; }
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { return OK; }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t e) { return OK; }
EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 0; return OK; }

/* ---- errors ---- */
EXPORT cudaError_t cudaGetLastError(void) { cudaError_t e = last; last = OK; return e; }
EXPORT cudaError_t cudaPeekAtLastError(void) { return last; }
EXPORT const char *cudaGetErrorString(cudaError_t e) { return e == OK ? "no error" : e == cudaErrorMemoryAllocation ? "out of memory" : "not emulated (dry run)"; }
EXPORT const char *cudaGetErrorName(cudaError_t e) { return e == OK ? "cudaSuccess" : e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorNotSupported"; }
EXPORT cudaError_t cudaProfilerStart(void) { return OK; }
EXPORT cudaError_t cudaProfilerStop(void) { return OK; }
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned v, unsigned long long flags, enum cudaDriverEntryPointQueryResult *st) {
    extern void *dry_driver(const char *);
    *f = dry_driver(name);
    if (st) *st = *f ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    if (!*f) return cudaErrorSymbolNotFound;
    return OK;
}
#undef cudaGetDriverEntryPoint
EXPORT cudaError_t cudaGetDriverEntryPoint(const char *name, void **f, unsigned long long flags, enum cudaDriverEntryPointQueryResult *st) {
    return cudaGetDriverEntryPointByVersion(name, f, CUDART_VERSION, flags, st);
}
int dry_cuda_version = CUDART_VERSION;
