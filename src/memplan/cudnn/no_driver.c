/* What cuDNN's libraries look up in libcuda.so.1 before they load, on a machine without a driver: it says that there is no device. */
int cuInit(unsigned flags) { return 100; }
int cuDriverGetVersion(int *version) { *version = 0; return 100; }
int cuGetErrorString(int error, const char **text) { *text = "no driver"; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { return 100; }
int cuModuleLoadData(void **module, const void *image) { return 100; }
int cuModuleUnload(void *module) { return 100; }
int cuTensorMapEncodeIm2col(void) { return 100; }
int cuTensorMapEncodeTiled(void) { return 100; }
