/* The real cuDNN without a device: where torch names a handle, cuDNN gets a device-property descriptor made from JSON (cuDNN >= 9.8), so that
   heuristics, engines and workspace sizes are its own. Execution does nothing. Batch norm, RNN and the like ask through a handle: see below. */
#include "dry.h"
#include <cudnn.h>
#include <dlfcn.h>
#define EXPORT __attribute__((visibility("default")))
#define OK CUDNN_STATUS_SUCCESS

static void *real(const char *name) {
    static void *lib;
    if (!lib) lib = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_NOLOAD);
    if (!lib) lib = dlopen("libcudnn.so.9", RTLD_NOW);
    void *f = lib ? dlsym(lib, name) : NULL;
    if (!f) { fprintf(stderr, "[dry] %s is not in libcudnn\n", name); abort(); }
    return f;
}
#define REAL(f) static __typeof__(&f) go; if (!go) go = (__typeof__(&f))real(#f)

static cudnnStatus_t set(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t a, cudnnBackendAttributeType_t t, int64_t n, const void *v) {
    REAL(cudnnBackendSetAttribute);
    return go(d, a, t, n, v);
}

static cudnnBackendDescriptor_t device(void) {
    static cudnnBackendDescriptor_t prop;
    if (prop) return prop;
    const dry_card *c = dry_gpu();
    int sm = c->major * 100 + c->minor * 10;
    char json[2048];
    int n = snprintf(json, sizeof json,
        "{\"cudaDeviceId\":0,\"deviceName\":\"%s\",\"deviceVer\":%d,\"driverVer\":%d,\"isTccDriver\":0,\"l2CacheSize\":%d,\"maxCtasPerSM\":%d,"
        "\"maxRegistersPerSM\":65536,\"maxSharedMemoryPerBlock\":49152,\"maxSharedMemoryPerBlockOptin\":%d,\"maxThreadsPerBlock\":1024,"
        "\"maxThreadsPerSM\":%d,\"memClockRateKHz\":%d,\"memoryBusWidth\":%d,\"multiProcessorCount\":%d,\"pciDeviceID\":0,\"pciDeviceId\":0,\"regsPerBlock\":65536,"
        "\"reservedSharedMemoryPerBlock\":1024,\"smClockRateKHz\":%d,\"smCountOrigin\":0,\"supportCoopLaunch\":1,\"totalGlobalMem\":%zu,"
        "\"warpSize\":32,\"oversizedSharedMemoryPerBlock\":0,\"sharedMemoryLimit\":%d,\"smVersion\":%d,\"maxBlockSize\":[1024,1024,64],"
        "\"maxGridSize\":[2147483647,65535,65535]}",
        c->name, sm, CUDART_VERSION, c->l2, c->blocks_per_sm, c->optin_smem, c->threads_per_sm, c->mem_khz, c->bus, c->sms, c->sm_khz, c->memory,
        c->optin_smem, sm);
    REAL(cudnnBackendCreateDescriptor);
    static __typeof__(&cudnnBackendFinalize) finalize;
    finalize = real("cudnnBackendFinalize");
    int a = go(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &prop), b = set(prop, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, n + 1, json), e = finalize(prop);
    if (a || b || e) { char why[1024] = ""; ((void (*)(char *, size_t))real("cudnnGetLastErrorString"))(why, sizeof why); fprintf(stderr, "[dry] cuDNN device properties: %d %d %d %s\n", a, b, e, why); }
    return prop;
}

EXPORT cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t a, cudnnBackendAttributeType_t t, int64_t n, const void *v) {
    cudnnBackendDescriptor_t p = device();
    switch ((int)a) {
    case CUDNN_ATTR_OPERATIONGRAPH_HANDLE: return OK;
    case CUDNN_ATTR_EXECUTION_PLAN_HANDLE:
        return set(d, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &p);
    case CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH: set(d, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &p); break;
    case CUDNN_ATTR_ENGINE_OPERATION_GRAPH: set(d, CUDNN_ATTR_ENGINE_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &p); break;
    }
    cudnnStatus_t e = set(d, a, t, n, v);
    if (e && dry_trace()) fprintf(stderr, "[dry] cudnnBackendSetAttribute %d: %d\n", (int)a, (int)e);
    return e;
}
EXPORT cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t d) {
    REAL(cudnnBackendFinalize);
    cudnnStatus_t e = go(d);
    if (e && dry_trace() > 1) {
        static void (*say)(char *, size_t);
        char why[512] = "";
        if (!say) say = real("cudnnGetLastErrorString");
        say(why, sizeof why);
        fprintf(stderr, "[dry] cudnnBackendFinalize: %d %s\n", (int)e, why);
    }
    return e;
}
EXPORT cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const d, cudnnBackendAttributeName_t a, cudnnBackendAttributeType_t t, int64_t n, int64_t *got, void *v) {
    REAL(cudnnBackendGetAttribute);
    cudnnStatus_t e = go(d, a, t, n, got, v);
    if (a == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)
        dry_missing("assumed: cuDNN's plans for a described card; on a real one their workspaces differed for some convolutions", 0);
    if (dry_trace() && a == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE) fprintf(stderr, "[dry] cuDNN plan: workspace %lld\n", e ? -1LL : *(long long *)v);
    return e;
}
EXPORT cudnnStatus_t cudnnBackendExecute(cudnnHandle_t h, cudnnBackendDescriptor_t p, cudnnBackendDescriptor_t v) { return OK; }

EXPORT cudnnStatus_t cudnnCreate(cudnnHandle_t *h) { *h = calloc(1, 4096); return OK; }
EXPORT cudnnStatus_t cudnnDestroy(cudnnHandle_t h) { free(h); return OK; }
EXPORT cudnnStatus_t cudnnSetStream(cudnnHandle_t h, cudaStream_t s) { *(void **)h = s; return OK; }
EXPORT cudnnStatus_t cudnnGetStream(cudnnHandle_t h, cudaStream_t *s) { *s = *(void **)h; return OK; }

/* Batch norm: sizes are asked through a handle, so not from the real library. 0 but for the persistent kernel of channels last, whose workspace is
   to the byte what a real H100 took for six shapes (goldens/, cuDNN 9.19): see trace/semantics/cuda/cudnn.py. Other cards and versions: assumed. */
static cudnnStatus_t batch_norm(cudnnBatchNormMode_t mode, const cudnnTensorDescriptor_t x, int backward, size_t *size) {
    if (mode != CUDNN_BATCHNORM_SPATIAL_PERSISTENT) {
        dry_missing("assumed: 0 bytes of workspace of cuDNN batch norm, as a real H100 took for contiguous data", 0);
        *size = 0;
        return OK;
    }
    dry_missing("assumed: the workspace of cuDNN batch norm for channels last is as on a real H100 with cuDNN 9.19", 0);
    cudnnDataType_t type;
    int dims = 0, sizes[8] = {0}, strides[8];
    REAL(cudnnGetTensorNdDescriptor);
    cudnnStatus_t e = go(x, 8, &type, &dims, sizes, strides);
    if (e) return e;
    size_t rows = sizes[0], channels = sizes[1], counters = 4 * ((channels + 63) / 64);
    for (int i = 2; i < dims; i++) rows *= sizes[i];
    *size = backward ? (rows + 95) / 96 * 8 * channels + counters + 1056 : (rows + 63) / 64 * (8 * channels + counters) + counters + 1072;
    return OK;
}
EXPORT cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t z, const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t s, const cudnnActivationDescriptor_t a, size_t *size) { return batch_norm(m, x, 0, size); }
EXPORT cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t dy, const cudnnTensorDescriptor_t dz, const cudnnTensorDescriptor_t dx, const cudnnTensorDescriptor_t s,
    const cudnnActivationDescriptor_t a, size_t *size) { return batch_norm(m, x, 1, size); }
EXPORT cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o,
    const cudnnActivationDescriptor_t a, const cudnnTensorDescriptor_t x, size_t *size) { dry_missing("assumed: 0 bytes of reserve of cuDNN batch norm, as on a real H100", 0); *size = 0; return OK; }
