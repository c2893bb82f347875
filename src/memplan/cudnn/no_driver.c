/* What stands for libcuda.so.1 while cuDNN makes plans: there is no device, and modules and kernels are mere tickets, so that engines that are
   compiled when they are planned are offered, as on a card. No headers: arguments do not matter. */
static char ticket[64];
#define TICKET(f) int f(void **made) { *made = ticket; return 0; }
#define NOTHING(f) int f(void) { return 0; }
int cuInit(unsigned flags) { return 100; }
int cuDriverGetVersion(int *version) { *version = 99999; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "no driver"; return 0; }
int cuGetErrorName(int error, const char **text) { *text = "CUDA_ERROR_NO_DEVICE"; return 0; }
int cuDeviceGetCount(int *count) { *count = 0; return 0; }
int cuCtxGetLimit(unsigned long *limit, int kind) { *limit = 0; return 0; }
int cuKernelGetAttribute(int *value) { *value = 0; return 0; }
int cuFuncGetAttribute(int *value) { *value = 0; return 0; }
int cuLinkComplete(void *link, void **image, unsigned long *size) { *image = ticket; *size = sizeof ticket; return 0; }
int cuLinkCreate(unsigned count, void *options, void *values, void **made) { *made = ticket; return 0; }
int cuOccupancyMaxPotentialClusterSize(int *size) { *size = 8; return 0; }
TICKET(cuCtxGetCurrent) TICKET(cuDevicePrimaryCtxRetain) TICKET(cuKernelGetFunction) TICKET(cuLibraryGetKernel) TICKET(cuLibraryGetModule)
TICKET(cuLibraryLoadData) TICKET(cuLibraryLoadFromFile) TICKET(cuModuleGetFunction) TICKET(cuModuleLoad) TICKET(cuModuleLoadData) TICKET(cuModuleLoadDataEx)
NOTHING(cuCtxPopCurrent) NOTHING(cuCtxPushCurrent) NOTHING(cuCtxSetCurrent) NOTHING(cuFuncSetAttribute) NOTHING(cuKernelSetAttribute)
NOTHING(cuLaunchCooperativeKernel) NOTHING(cuLaunchKernel) NOTHING(cuLaunchKernelEx) NOTHING(cuLibraryUnload) NOTHING(cuLinkAddData)
NOTHING(cuLinkDestroy) NOTHING(cuModuleUnload) NOTHING(cuTensorMapEncodeIm2col) NOTHING(cuTensorMapEncodeTiled)
int cuDeviceGet(int *device, int number) { *device = number; return 101; }
int cuStreamGetCtx(void *stream, void **context) { *context = ticket; return 0; }
